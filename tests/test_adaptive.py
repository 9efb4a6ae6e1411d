"""A draft length that changes from round to round, and a draft that stops when it is unsure: both stay exact."""

from itertools import product
from math import prod

import pytest
import torch

from specdec_lite import GREEDY, Sampling, autoregressive, load_pair, speculative
from specdec_lite.adaptive import EXPLORE_EVERY, AutoK, FixedK, TimedK, line, policy_of
from specdec_lite.decoding import decode
from specdec_lite.drafters import Draft
from specdec_lite.drafters.model import ModelDrafter
from specdec_lite.randomness import TorchRandomness, enumerate_outcomes
from specdec_lite.record import Round
from specdec_lite.table import TableModel
from specdec_lite.theory import best_K
from specdec_lite.verify import verify, verify_block

PROMPT = [1, 0]


def output_law(p, drafter, n, new_policy, sampling=Sampling(), verify=verify):
    """The exact law of n tokens of the shipped loop; each branch begins with a policy of its own."""
    target = TableModel(p)

    def play(randomness):
        options = {"max_new_tokens": n, "K": new_policy(), "sampling": sampling, "verify": verify}
        rounds = decode(target, drafter, PROMPT, randomness=randomness, **options)
        return tuple(token for round in rounds for token in round.tokens)

    return enumerate_outcomes(play)


def departure(law, p, n, sampling=Sampling()):
    """The largest difference from the law of n tokens drawn one by one from the table."""
    rows = sampling.probs(p.log())
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    texts = product(range(len(p)), repeat=n)
    chances = {text: prod(rows[a, b].item() for a, b in zip((PROMPT[-1], *text), text, strict=False)) for text in texts}
    return max(abs(law.get(text, 0) - chance) for text, chance in chances.items())


def made_round(accepted, drafted, seconds=1.0):
    """A round that accepted so many of its draft tokens, and rejected the next one if there was one."""
    last = "bonus" if accepted == drafted else "recovered"
    return Round((0,) * drafted, (0,) * (accepted + 1), ("accepted",) * accepted + (last,), seconds, 0.0, 0.0)


# The draft that stops


@pytest.mark.parametrize("rule", [verify, verify_block])
@pytest.mark.parametrize("confidence", [0.2, 0.4, 0.6, 1.0])
@pytest.mark.parametrize(("vocab", "K", "n"), [(2, 2, 4), (2, 3, 4), (3, 2, 3), (3, 3, 2)])
def test_a_draft_that_stops_when_unsure_is_lossless(vocab, K, n, confidence, rule, random_table):
    p, q = random_table(vocab, vocab, seed=1), random_table(vocab, vocab, seed=2)
    law = output_law(p, ModelDrafter(TableModel(q), vocab, confidence), n, lambda: K, verify=rule)
    assert departure(law, p, n) < 1e-12


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.6), Sampling(1.5, top_k=2)])
def test_it_is_lossless_at_every_temperature(sampling, random_table):
    p, q = random_table(3, 3, seed=1), random_table(3, 3, seed=2)
    law = output_law(p, ModelDrafter(TableModel(q), 3, confidence=0.4), 3, lambda: 3, sampling)
    assert departure(law, p, 3, sampling) < 1e-12


class Dropping(ModelDrafter):
    """The slip: the token of which the draft was unsure is taken out of the draft."""

    def propose(self, context, K, sampling, randomness):
        draft = super().propose(context, K, sampling, randomness)
        unsure = draft.probs[-1, draft.tokens[-1]] < self.confidence
        end = len(draft.tokens) - int(unsure)
        return Draft(draft.tokens[:end], draft.probs[:end])


@pytest.mark.parametrize("K", [1, 2, 3])
def test_dropping_the_unsure_token_is_caught(K, random_table):
    p, q = random_table(3, 3, seed=1), random_table(3, 3, seed=2)
    assert departure(output_law(p, Dropping(TableModel(q), 3, 0.4), 2, lambda: K), p, 2) > 1e-2


def test_dropping_gives_the_law_worked_out_by_hand():
    p, q = (torch.tensor([a, 1 - a], dtype=torch.float64) for a in (0.7, 0.6))
    law = output_law(p, Dropping(TableModel(q), 2, confidence=0.5), 2, lambda: 1)
    first = law[0, 0] + law[0, 1]
    # The other token is dropped whenever it is drawn, and p decides: 0.6 + 0.4 x 0.7.
    assert first == pytest.approx(0.88, abs=1e-12)


def drafted(model, K, sampling=Sampling(), **options):
    drafter = ModelDrafter(model, model.vocab_size, **options)
    drafter.start(10)

    def play(randomness):
        drafter.cache.rollback(0)
        return tuple(drafter.propose(torch.tensor([0]), K, sampling, randomness).tokens.tolist())

    return enumerate_outcomes(play)


def test_the_token_that_ends_the_draft_is_its_last():
    law = drafted(TableModel(torch.tensor([0.7, 0.3], dtype=torch.float64)), 3, confidence=0.5)
    assert law == pytest.approx({(1,): 0.3, (0, 1): 0.21, (0, 0, 1): 0.147, (0, 0, 0): 0.343})


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.5), Sampling(top_k=1)])
def test_confidence_is_the_drafts_own_softmax_whatever_the_sampling(sampling):
    model = TableModel(torch.tensor([0.6, 0.4], dtype=torch.float64))
    assert {len(tokens) for tokens in drafted(model, 3, sampling, confidence=0.61)} == {1}
    assert 3 in {len(tokens) for tokens in drafted(model, 3, sampling, confidence=0.59)}


def test_without_a_threshold_nothing_stops_early(random_table):
    assert {len(tokens) for tokens in drafted(TableModel(random_table(3, 3, seed=3)), 3)} == {3}


@pytest.mark.parametrize("confidence", [-0.1, 1.1, float("nan")])
def test_a_confidence_that_is_no_probability_is_refused(confidence):
    with pytest.raises(ValueError, match="it is a probability"):
        ModelDrafter(TableModel(torch.ones(2) / 2), 2, confidence)


# The draft length


@pytest.mark.parametrize("new_policy", [lambda: AutoK(0.3), lambda: AutoK(0.05, largest=3), lambda: AutoK(2.0)])
@pytest.mark.parametrize(("vocab", "n"), [(2, 4), (3, 3)])
def test_a_length_chosen_from_earlier_rounds_is_lossless(vocab, n, new_policy, random_table):
    p, q = random_table(vocab, vocab, seed=4), random_table(vocab, vocab, seed=5)
    law = output_law(p, ModelDrafter(TableModel(q), vocab), n, new_policy)
    assert departure(law, p, n) < 1e-12


class Hasty(AutoK):
    """Forgets within a round what it saw before: it drafts one token after a rejection, else three."""

    def learn(self, round):
        self.last = round

    def choose(self):
        return 3 if not hasattr(self, "last") or not self.last.rejected else 1


def test_a_policy_that_jumps_is_lossless_too(random_table):
    p, q = random_table(2, 2, seed=6), random_table(2, 2, seed=7)
    assert departure(output_law(p, ModelDrafter(TableModel(q), 2), 4, lambda: Hasty(0.1)), p, 4) < 1e-12


def test_alpha_is_counted_over_tried_tokens_and_forgets():
    policy = AutoK(0.1)
    for _ in range(200):
        policy.learn(made_round(accepted=3, drafted=4))
    assert policy.alpha == pytest.approx(3 / 4, abs=1e-3)  # three accepted, one rejected: four trials
    for _ in range(200):
        policy.learn(made_round(accepted=0, drafted=4))
    assert policy.alpha < 0.05
    before = policy.alpha
    policy.learn(made_round(accepted=0, drafted=0))  # nothing was tried, nothing is learned
    assert policy.alpha == pytest.approx(before)


@pytest.mark.parametrize(("accepted", "tried_each_round"), [(4, 4), (2, 3), (0, 1)])
def test_the_choice_is_that_of_theory(accepted, tried_each_round):
    policy = AutoK(c=0.2, v=lambda n: 1 + 0.05 * n, overhead=0.1)
    for _ in range(300):
        policy.learn(made_round(accepted, drafted=4))
    alpha = accepted / tried_each_round
    expected = best_K(alpha, 0.2, lambda n: 1 + 0.05 * n, 0.1, largest=8).K
    assert policy.best() == expected
    assert {0: 0, 4: 8}.get(accepted, expected) == expected


def test_plain_decoding_is_left_again_when_the_draft_gets_better():
    policy, chosen = AutoK(c=0.3), []
    for good in [False] * 100 + [True] * 400:
        chosen.append(K := policy.choose())
        policy.learn(made_round(K if good else 0, K))
    assert chosen[60:100].count(0) == 40 - chosen[60:100].count(1)  # plain, but for one token now and then
    assert 1 <= chosen[60:100].count(1) <= 40 // EXPLORE_EVERY + 1
    assert chosen[-1] == 8


def play(policy, rounds, seconds_of, alpha=1.0):
    """What a policy chooses when each round of K tokens accepts a share alpha of them and takes seconds_of(K, i)."""
    chosen = []
    for i in range(rounds):
        chosen.append(K := policy.choose())
        policy.learn(made_round(int(alpha * K), K, seconds_of(K, i)))
    return chosen


def test_costs_are_read_off_the_rounds_even_when_one_in_nine_is_disturbed():
    policy = TimedK()
    play(policy, 200, lambda K, i: (5.0 if i % 9 == 0 else 1.0) * (0.01 + 0.004 * K))
    assert policy.c == pytest.approx(0.4, rel=0.05)


def test_a_dear_draft_is_used_little_and_a_cheap_one_much():
    dear = play(TimedK(), 200, lambda K, i: 0.01 + 0.02 * K, alpha=0.5)
    cheap = play(TimedK(), 200, lambda K, i: 0.01 + 0.0001 * K)
    assert sorted(dear)[100] == 0
    assert sorted(cheap)[100] == 8


def test_the_first_round_is_not_timed_as_it_reads_the_prompt():
    policy = TimedK()
    play(policy, 3, lambda K, i: 1000.0 if i == 0 else 0.01 + 0.001 * K)
    assert policy.c == pytest.approx(0.1)


def test_all_lengths_are_tried_out_at_the_start_and_one_now_and_then():
    chosen = play(TimedK(largest=8), 200, lambda K, i: 0.01 + 0.0001 * K)
    assert sorted(chosen[1:6]) == [0, 1, 2, 4, 8]
    assert set(chosen[16::EXPLORE_EVERY]) == {0, 1, 2, 4, 8}


def test_the_line_is_the_median_one():
    x = torch.arange(8.0).numpy()
    y = 2 + 3 * x
    y[[1, 6]] = 100
    assert line(x, y) == pytest.approx((2, 3))


def test_what_K_means():
    assert [policy_of(2).choose() for _ in range(3)] == [2, 2, 2]
    assert isinstance(policy_of(0), FixedK)
    assert isinstance(policy_of("auto"), TimedK)
    policy = AutoK(0.1)
    assert policy_of(policy) is policy


@pytest.mark.parametrize("K", ["many", -1, 2.5, None])
def test_a_K_that_is_none_is_refused(K):
    with pytest.raises(ValueError, match="K is"):
        policy_of(K)


@pytest.mark.parametrize(
    "options",
    [{"c": -0.1}, {"c": 0.1, "largest": 0}, {"c": 0.1, "overhead": -2.0}, {"c": 0.1, "v": {2: 1.1}.__getitem__}],
)
def test_costs_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match=r"c is|largest is|v is"):
        AutoK(**options)


def test_auto_writes_the_targets_greedy_text_and_a_given_cost_repeats_a_sampled_one():
    pair = load_pair("tiny")
    options = {"max_new_tokens": 48, "eos_token_id": []}
    plain = autoregressive(pair, "Once upon a time", sampling=GREEDY, **options)
    assert speculative(pair, "Once upon a time", K="auto", sampling=GREEDY, **options).tokens == plain.tokens
    once, again = (speculative(pair, "Once upon a time", K=AutoK(0.2), seed=3, **options) for _ in range(2))
    assert once.tokens == again.tokens
    assert len({len(round.draft_tokens) for round in once.rounds}) > 1


@pytest.mark.parametrize("K", [-1, 1.5, None])
def test_a_policy_that_chooses_nonsense_is_an_error_that_says_what_K_may_be(K, random_table):
    class Nonsense:
        def choose(self):
            return K

        def learn(self, round): ...

    model = TableModel(random_table(3, seed=1))
    rounds = decode(
        model, ModelDrafter(model, 3), [0], max_new_tokens=4, K=Nonsense(), sampling=Sampling(),
        randomness=TorchRandomness.seeded(0),
    )  # fmt: skip
    with pytest.raises(ValueError, match="it must be a whole number"):
        next(rounds)
