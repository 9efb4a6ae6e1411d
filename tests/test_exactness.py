"""Losslessness, proved on small tables: the shipped loop with the shipped rule gives exactly the target's law.

Every sequence of random choices that the decoding loop can make is followed, and the law of the first n output tokens
is compared with the product of the target's own laws, to 1e-12. Covered, with |V| the vocabulary:

    |V|   K and how many tokens are looked at (n)               whole output of n tokens: K (n)
    2     0 (4)   1 (4)   2 (4)   3 (3, and 4 once)   4 (2)     0 to 4 (3)
    3     0 (3)   1 (3)   2 (2)   3 (1)               4 (1)     1 to 3 (2)
    4     0 (2)   1 (2)   2 (1)   3 (1)               4 (1)

    tables:    one law; a law per last token; a law per position and last token; laws with zeros in them
    sampling:  temperature 1, below and above 1, 0; top-k; top-p; all together
    drafts:    another model; the target itself; one that never agrees; a chosen token (a point mass)

n of K + 1 or more includes the bonus token, and n of 2 or more includes rounds after a rejection. In the second column
the output ends at n, so that the loop shortens the last drafts. The same comparison rejects every rule of the gallery
of wrong rules, and accepts right rules that are not the shipped one.
"""

import math
from itertools import product

import pytest
import torch

from specdec_lite.decoding import decode
from specdec_lite.distributions import GREEDY, Sampling, one_hot
from specdec_lite.drafters.model import ModelDrafter
from specdec_lite.gallery import WRONG_RULES, WrongRule, first_token_law
from specdec_lite.randomness import enumerate_outcomes
from specdec_lite.table import TableModel
from specdec_lite.verify import Verification, verify

PROMPT = (1, 0)


def output_law(target_table, drafter, n, K, sampling=Sampling(), verify=verify, max_new_tokens=None, stop=None):
    """The exact law of the first n tokens of the shipped loop.

    Without max_new_tokens the output is long enough for every round that is looked at to draft all K tokens.
    """
    target = TableModel(target_table)

    def play(randomness):
        tokens = ()
        for round in decode(
            target,
            drafter if K else None,
            PROMPT,
            max_new_tokens=max_new_tokens or n + K,
            K=K,
            sampling=sampling,
            randomness=randomness,
            ends=lambda output: output[-1] == stop,
            verify=verify,
        ):
            tokens += round.tokens
            if len(tokens) >= n:
                break
        return tokens[:n]

    return enumerate_outcomes(play)


def target_law(table, n, sampling=Sampling(), stop=None):
    """The law of n tokens drawn one by one from the target, ending at ``stop``: by hand, from the table."""
    vocab = table.shape[-1]

    def next_probs(tokens):
        law = table
        if table.ndim == 3:
            law = law[min(len(tokens) - 1, len(table) - 1)]
        if table.ndim >= 2:
            law = law[tokens[-1]]
        return sampling.probs(law.log()).numpy()

    law = {}
    for tokens in product(range(vocab), repeat=n):
        if stop in tokens:
            tokens = tokens[: tokens.index(stop) + 1]
        law[tokens] = math.prod(next_probs(PROMPT + tokens[:i])[tokens[i]] for i in range(len(tokens)))
    return law


def distance(law, expected):
    """The largest difference of any probability; both laws must be whole."""
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert sum(expected.values()) == pytest.approx(1, abs=1e-12)
    return max(abs(law.get(tokens, 0) - expected.get(tokens, 0)) for tokens in law.keys() | expected.keys())


def model_drafter(table):
    return ModelDrafter(TableModel(table), table.shape[-1])


LOOKED_AT = {
    (2, 0): 4, (2, 1): 4, (2, 2): 4, (2, 3): 3, (2, 4): 2,
    (3, 0): 3, (3, 1): 3, (3, 2): 2, (3, 3): 1, (3, 4): 1,
    (4, 0): 2, (4, 1): 2, (4, 2): 1, (4, 3): 1, (4, 4): 1,
}  # fmt: skip

TABLES = {
    "one_law": lambda vocab: (vocab,),
    "by_last_token": lambda vocab: (vocab, vocab),
    "by_position": lambda vocab: (5, vocab, vocab),
}


@pytest.fixture
def tables(random_table):
    """tables(kind, vocab, seed): laws of target and draft; with zeros in different places where the seed is odd."""

    def make(kind, vocab, seed):
        pair = [random_table(*TABLES[kind](vocab), seed=10 * seed + which) for which in (1, 2)]
        if seed % 2:
            pair = [with_zeros(table, which) for which, table in enumerate(pair)]
        return pair

    return make


def with_zeros(table, offset):
    """Without one token in every second law (a different one for another offset)."""
    laws = table.reshape(-1, table.shape[-1]).clone()
    for i in range(offset, len(laws), 2):
        laws[i, (i // 2 + offset) % table.shape[-1]] = 0
    return (laws / laws.sum(-1, keepdim=True)).reshape(table.shape)


@pytest.mark.parametrize(
    ("kind", "seed", "sampling"),
    [
        ("one_law", 0, Sampling()),
        ("by_last_token", 2, Sampling()),
        ("by_last_token", 1, Sampling()),
        ("by_position", 3, Sampling(temperature=0.6)),
        ("by_position", 4, Sampling(temperature=1.7, top_k=2)),
        ("by_last_token", 6, Sampling(top_p=0.75)),
        ("by_position", 8, Sampling(temperature=0.8, top_k=3, top_p=0.9)),
        ("by_position", 10, GREEDY),
    ],
    ids=lambda value: str(value) if not isinstance(value, Sampling) else f"T{value.temperature}",
)
@pytest.mark.parametrize(("vocab", "K"), LOOKED_AT)
def test_the_loop_has_exactly_the_law_of_the_target(vocab, K, kind, seed, sampling, tables):
    p, q = tables(kind, vocab, seed)
    n = LOOKED_AT[vocab, K]
    law = output_law(p, model_drafter(q), n, K, sampling)
    assert distance(law, target_law(p, n, sampling)) < 1e-12


def test_three_draft_tokens_and_the_bonus_after_them(tables):
    p, q = tables("by_position", 2, 12)
    assert distance(output_law(p, model_drafter(q), 4, K=3), target_law(p, 4)) < 1e-12


@pytest.mark.parametrize(("vocab", "K", "n"), [(2, K, 3) for K in range(5)] + [(3, 1, 2), (3, 2, 2), (3, 3, 2)])
def test_an_output_of_limited_length_has_the_law_of_the_target(vocab, K, n, tables):
    p, q = tables("by_position", vocab, 14)
    assert distance(output_law(p, model_drafter(q), n, K, max_new_tokens=n), target_law(p, n)) < 1e-12


@pytest.mark.parametrize("K", [1, 2, 3])
def test_a_stop_does_not_bend_the_law(K, tables):
    p, q = tables("by_last_token", 2, 16)
    law = output_law(p, model_drafter(q), 3, K, max_new_tokens=3, stop=1)
    assert set(law) == {(1,), (0, 1), (0, 0, 1), (0, 0, 0)}
    assert distance(law, target_law(p, 3, stop=1)) < 1e-12


@pytest.mark.parametrize("draft", ["the target itself", "never agrees"])
@pytest.mark.parametrize("K", [1, 2])
def test_the_law_does_not_depend_on_how_good_the_draft_is(draft, K, random_table):
    p = random_table(3, 3, seed=20)
    p[:, 2] = 0
    p /= p.sum(-1, keepdim=True)
    q = p if draft == "the target itself" else torch.tensor([0.0, 0, 1], dtype=torch.float64)
    assert distance(output_law(p, model_drafter(q), 3, K), target_law(p, 3)) < 1e-12


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 2, 0.9), GREEDY])
@pytest.mark.parametrize("chosen", [[0], [2, 1], [1, 1, 0]])
def test_a_chosen_draft_is_as_good_as_a_drawn_one(chosen, sampling, tables, fixed_draft):
    p, _ = tables("by_position", 3, 18)
    law = output_law(p, fixed_draft(chosen), 3, len(chosen), sampling)
    assert distance(law, target_law(p, 3, sampling)) < 1e-12


def test_a_draft_whose_context_runs_out_keeps_the_law(tables):
    p, q = tables("by_last_token", 2, 22)
    drafter = ModelDrafter(TableModel(q, context=3), 2)
    assert distance(output_law(p, drafter, 4, K=3), target_law(p, 4)) < 1e-12


def gap(rule, random_table):
    """The largest departure from the target's law that a rule shows on a small grid, in the shipped loop."""
    found = 0
    for seed, vocab, K, n in [(1, 3, 1, 2), (2, 3, 2, 2), (3, 2, 2, 3)]:
        p, q = random_table(vocab, vocab, seed=30 + seed), random_table(vocab, vocab, seed=40 + seed)
        law = output_law(p, rule.wrap(model_drafter(q)), n, K, verify=rule.verify)
        found = max(found, distance(law, target_law(p, n)))
    return found


@pytest.mark.parametrize("name", WRONG_RULES)
def test_every_rule_of_the_gallery_is_caught(name, random_table):
    assert gap(WRONG_RULES[name], random_table) > 1e-3


@pytest.mark.parametrize("name", WRONG_RULES)
def test_the_loop_leads_to_the_law_that_the_gallery_gives(name, random_table):
    p, q, rule = random_table(3, seed=50), random_table(3, seed=51), WRONG_RULES[name]
    law = output_law(p, rule.wrap(model_drafter(q)), 1, K=2, verify=rule.verify)
    expected = first_token_law(rule, p, q, K=2).tolist()
    assert [law.get((token,), 0) for token in range(3)] == pytest.approx(expected, abs=1e-12)


def match_the_targets_own_sample(d, q, p, randomness):
    """Also exact: keep a draft token when the target draws the same one. Accepts less: sum p q instead of sum min."""
    for n, token in enumerate(d.tolist()):
        drawn = randomness.categorical(p[n])
        if drawn != token:
            return Verification(n, drawn, len(d))
    return Verification(len(d), randomness.categorical(p[len(d)]), len(d))


def treat_drawn_tokens_as_chosen(d, q, p, randomness):
    """Also exact: a draft token that was drawn is verified as if it had been chosen; accepts less."""
    return verify(d, None, p, randomness)


def report_q_one_percent_low(d, q, p, randomness):
    """The shipped rule, told a q a little below its value: a mutation that is small, and wrong."""
    return verify(d, q * (1 - 1e-2), p, randomness)


RIGHT_RULES = [verify, match_the_targets_own_sample, treat_drawn_tokens_as_chosen]


@pytest.mark.parametrize("rule", RIGHT_RULES)
def test_rules_that_are_right_are_not_rejected(rule, random_table):
    assert gap(WrongRule("right", "", rule), random_table) < 1e-12


def test_a_bias_of_one_percent_in_q_is_seen(random_table):
    assert gap(WrongRule("mutation", "", report_q_one_percent_low), random_table) > 1e-3


def test_right_rules_differ_in_what_they_accept():
    p, q = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64), torch.tensor([0.3, 0.6, 0.1], dtype=torch.float64)

    def accepted(rule):
        def play(randomness):
            draft = torch.tensor([randomness.categorical(q)])
            return int(rule(draft, q[None], p.expand(2, 3), randomness).accepted)

        return enumerate_outcomes(play)[1]

    assert [accepted(rule) for rule in RIGHT_RULES] == pytest.approx([0.7, 0.37, 0.37])


def test_one_hot_laws_are_followed_to_the_letter(tables):
    """Greedy decoding has one outcome, of probability exactly 1: the argmax after each token."""
    p, q = tables("by_position", 4, 24)
    law = output_law(p, model_drafter(q), 5, K=3, sampling=GREEDY)
    assert list(law.values()) == [1]
    assert law == {tokens: 1 for tokens, chance in target_law(p, 5, GREEDY).items() if chance}
    assert torch.equal(GREEDY.probs(p), one_hot(p.argmax(-1), like=p))
