"""Every rule of the gallery is wrong in the way it says: the laws are computed by enumeration and checked by hand."""

from itertools import product

import pytest
import torch

from specdec_lite.gallery import WRONG_RULES, first_token_law, output_law
from specdec_lite.randomness import TorchRandomness
from specdec_lite.verify import Verification, verify

P, Q = [0.6, 0.3, 0.1], [0.3, 0.6, 0.1]

FINGERPRINTS = {
    "softmaxed_residual": [0.421, 0.390, 0.190],
    "no_residual": [0.48, 0.39, 0.13],
    "greedy_draft": [0.5, 0.5, 0],
    "partial_residual": [0.557, 0.3, 0.143],
    "first_unverified": [0.3, 0.6, 0.1],
    "colder_draft": [0.587, 0.391, 0.022],
}
FIRST_TOKEN_IS_RIGHT = {"bonus_from_draft", "one_uniform", "shifted_residual"}


def test_the_right_rule_gives_p():
    assert first_token_law(verify, P, Q).tolist() == pytest.approx(P, abs=1e-15)


@pytest.mark.parametrize("name", FINGERPRINTS)
@pytest.mark.parametrize("K", [1, 2, 3])
def test_the_fingerprint_of_each_fault_is_as_published(name, K):
    assert first_token_law(WRONG_RULES[name], P, Q, K).tolist() == pytest.approx(FINGERPRINTS[name], abs=5.1e-4)


@pytest.mark.parametrize("name", WRONG_RULES)
def test_the_first_token_gives_the_fault_away_unless_it_sits_later(name):
    gap = (first_token_law(WRONG_RULES[name], P, Q, K=2) - torch.tensor(P)).abs().sum() / 2
    assert (gap < 1e-7) if name in FIRST_TOKEN_IS_RIGHT else (gap > 0.01)


@pytest.mark.parametrize("name", WRONG_RULES)
def test_the_law_of_a_whole_round_gives_every_fault_away(name, random_table):
    p, q = random_table(3, 3, seed=1), random_table(2, 3, seed=2)
    assert total_variation(WRONG_RULES[name], p, q) > 0.01
    assert total_variation(verify, p, q) < 1e-15


def total_variation(rule, p, q):
    law = output_law(rule, p, q)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    right = {(a, b, c): float(p[0, a] * p[1, b] * p[2, c]) for a, b, c in product(range(3), repeat=3)}
    return sum(abs(law.get(tokens, 0) - chance) for tokens, chance in right.items()) / 2


@pytest.mark.parametrize("name", WRONG_RULES)
def test_without_a_draft_only_what_needs_no_draft_goes_wrong(name):
    law = first_token_law(WRONG_RULES[name], P, Q, K=0).tolist()
    assert law == pytest.approx([1, 0, 0] if name == "argmax_match" else P, abs=1e-15)


@pytest.mark.parametrize("name", WRONG_RULES)
def test_every_rule_takes_the_arguments_of_the_right_one(name, random_table):
    p = random_table(4, 5, seed=3)
    for draft_probs in (random_table(3, 5, seed=4), None):
        for seed in range(20):
            outcome = WRONG_RULES[name].verify(torch.tensor([0, 4, 2]), draft_probs, p, TorchRandomness.seeded(seed))
            assert isinstance(outcome, Verification)
            assert 0 <= int(outcome.accepted) <= outcome.drafted == 3
            assert 0 <= int(outcome.next_token) < 5


@pytest.mark.parametrize("name", WRONG_RULES)
def test_every_rule_says_what_it_is(name):
    rule = WRONG_RULES[name]
    assert rule.name == name
    assert rule.title
    assert len(rule.why.split()) > 20
    assert rule.why != verify.__doc__


def test_partial_residual_is_right_for_a_point_mass():
    # As its description says: this is how the slip gets written.
    law = first_token_law(lambda d, q, p, r: WRONG_RULES["partial_residual"].verify(d, None, p, r), P, [0, 1, 0])
    assert law.tolist() == pytest.approx(P)
