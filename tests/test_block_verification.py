"""Block verification: the target's law exactly, and never fewer accepted tokens than the standard rule."""

from itertools import product

import pytest
import torch

from specdec_lite.decoding import decode
from specdec_lite.distributions import Sampling
from specdec_lite.drafters.model import ModelDrafter
from specdec_lite.gallery import output_law
from specdec_lite.randomness import enumerate_outcomes
from specdec_lite.table import TableModel
from specdec_lite.verify import verify, verify_block

SHAPES = [(1, 2), (1, 4), (2, 2), (2, 3), (3, 2), (4, 2), (3, 3)]  # K, vocabulary


def expected_accepted(rule, p, q):
    def play(randomness):
        draft = [int(randomness.categorical(row)) for row in q]
        return int(rule(torch.tensor(draft), q, p, randomness).accepted)

    return sum(accepted * chance for accepted, chance in enumerate_outcomes(play).items())


def worst(law, expected):
    assert abs(sum(law.values()) - 1) < 1e-12
    return max(abs(law.get(tokens, 0) - expected(tokens)) for tokens in set(law) | set(expected.support))


class Product:
    """The law of independent tokens with the rows of p."""

    def __init__(self, p):
        self.p, self.support = p, list(product(range(p.shape[1]), repeat=len(p)))

    def __call__(self, tokens):
        return float(torch.stack([self.p[i, token] for i, token in enumerate(tokens)]).prod())


@pytest.mark.parametrize(("K", "vocab"), SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_block_verification_is_lossless_for_every_K(random_table, K, vocab, seed):
    p, q = random_table(K + 1, vocab, seed=seed), random_table(K, vocab, seed=100 + seed)
    assert worst(output_law(verify_block, p, q), Product(p)) < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_it_is_lossless_where_laws_depend_on_what_was_written(random_table, seed):
    target, draft = (TableModel(random_table(3, 3, seed=s)) for s in (seed, 50 + seed))

    def law(K):
        def run(randomness):
            drafter = ModelDrafter(draft, 3) if K else None
            rounds = decode(
                target, drafter, [0], max_new_tokens=3, K=K, sampling=Sampling(), randomness=randomness,
                verify=verify_block,
            )  # fmt: skip
            return tuple(token for round in rounds for token in round.tokens)

        return enumerate_outcomes(run)

    plain, block = law(0), law(2)
    assert max(abs(block.get(tokens, 0) - plain[tokens]) for tokens in plain) < 1e-12


@pytest.mark.parametrize(("K", "vocab"), SHAPES)
@pytest.mark.parametrize("seed", range(4))
def test_it_accepts_at_least_as_much_as_the_standard_rule(random_table, K, vocab, seed):
    p, q = random_table(K + 1, vocab, seed=seed), random_table(K, vocab, seed=100 + seed)
    block, standard = expected_accepted(verify_block, p, q), expected_accepted(verify, p, q)
    assert block >= standard - 1e-12
    if K == 1:
        assert block == pytest.approx(standard, abs=1e-12)


def test_it_accepts_more_where_the_standard_rule_gives_up_too_early():
    p = torch.tensor([[0.5, 0.5], [0.9, 0.1], [0.5, 0.5]], dtype=torch.float64)
    q = torch.tensor([[0.9, 0.1], [0.5, 0.5]], dtype=torch.float64)
    # Token 0 is drafted too often; what follows it, 0 again, is drafted too rarely. One makes up for the other.
    assert expected_accepted(verify_block, p, q) > expected_accepted(verify, p, q) + 0.01


@pytest.mark.parametrize("token", [0, 1])
def test_where_p_equals_q_everything_is_accepted(token):
    p = torch.tensor([[0.3, 0.7], [0.6, 0.4], [0.2, 0.8]], dtype=torch.float64)
    outcomes = enumerate_outcomes(lambda chance: verify_block(torch.tensor([token, 0]), p[:2], p, chance).accepted)
    assert {int(accepted) for accepted in outcomes} == {2}


@pytest.mark.parametrize(("draft", "rows", "output"), [
    ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]), ([1, 2, 3], [1, 5, 3, 4], [1, 5]), ([1, 2, 3], [5, 2, 3, 4], [5]),
])  # fmt: skip
def test_greedy_it_is_the_standard_rule(draft, rows, output):
    p = torch.eye(6, dtype=torch.float64)[rows]
    for rule, q in product((verify, verify_block), (None, p[:3] * 0 + torch.eye(6, dtype=torch.float64)[draft])):
        ((accepted, token),) = enumerate_outcomes(
            lambda chance, rule=rule, q=q: (
                int((outcome := rule(torch.tensor(draft), q, p, chance)).accepted), int(outcome.next_token)
            )
        )  # fmt: skip
        assert [*draft[:accepted], token] == output


def test_a_point_mass_draft_is_lossless_too():
    p = torch.tensor([[0.6, 0.4], [0.3, 0.7], [0.5, 0.5]], dtype=torch.float64)

    def play(chance):
        outcome = verify_block(torch.tensor([1, 0]), None, p, chance)
        tokens = [*[1, 0][: int(outcome.accepted)], int(outcome.next_token)]
        tokens += [int(chance.categorical(row)) for row in p[len(tokens) :]]
        return tuple(tokens)

    assert worst(enumerate_outcomes(play), Product(p)) < 1e-12
