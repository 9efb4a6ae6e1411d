"""Three estimates of alpha agree where alpha is known, count what they should, and know how sure they are."""

import math

import numpy as np
import pytest
import torch

from specdec_lite import theory
from specdec_lite.alpha import Estimate, accepted_over_drafted, by_position, from_rounds, overlap_on_text
from specdec_lite.decoding import autoregressive, speculative
from specdec_lite.distributions import GREEDY, Sampling, overlap
from specdec_lite.gpt2 import GPT2, GPT2Config
from specdec_lite.pairs import Pair
from specdec_lite.record import Result, Round, Statistics
from specdec_lite.table import TableModel

P, Q = torch.tensor([0.6, 0.3, 0.1]), torch.tensor([0.3, 0.6, 0.1])  # sum min(p, q) = 0.7
SEEDS = 300
# The standard deviation of 300 values is itself uncertain by 1 / sqrt(600) = 4%: four times that is 16%.
CALIBRATED = pytest.approx(1, abs=0.16)


def run_of(rounds, K):
    """A run whose rounds drafted K tokens each; rounds: pairs (accepted, whether a stop cut the round after them)."""
    result = Result([0])
    for accepted, cut in rounds:
        last = () if cut else ("bonus" if accepted == K else "recovered",)
        origins = ("accepted",) * accepted + last
        result.add(Round((0,) * K, (0,) * len(origins), origins, 0.0, 0.0, 0.0))
    return result


def simulated_run(alpha, K, rounds, seed):
    return run_of([(int(n), False) for n in theory.simulate_rounds(alpha, K, rounds, seed=seed)], K)


def shifted(law, vocab):
    """The law after each token: ``law``, moved on by the token. So each context has a law of its own, and one alpha."""
    return torch.stack([law.roll(token) for token in range(vocab)])


@pytest.fixture
def known(pair_of):
    """A pair with alpha = 0.7 after every token."""
    return pair_of(TableModel(shifted(P, 3)), TableModel(shifted(Q, 3), name="draft"))


@pytest.fixture(scope="module")
def runs():
    """K -> ten runs of the pair with alpha = 0.7."""
    pair = Pair("known", TableModel(shifted(P, 3)), TableModel(shifted(Q, 3), name="draft"), None)
    return {K: [speculative(pair, [0], K=K, max_new_tokens=150, seed=seed) for seed in range(10)] for K in (1, 4)}


def within_four_standard_errors(estimate, truth):
    return abs(estimate.value - truth) <= 4 * estimate.standard_error


def test_the_overlap_is_alpha_itself_where_every_context_has_the_same(known):
    estimate = overlap_on_text(known, [0, 1, 2, 2, 1, 0, 0])
    assert estimate.value == pytest.approx(0.7)
    assert estimate.standard_error == pytest.approx(0, abs=1e-9)
    assert estimate.trials == 7


@pytest.mark.parametrize("K", [1, 4])
def test_counts_of_real_runs_agree_with_the_known_alpha(runs, K):
    assert within_four_standard_errors(from_rounds(runs[K]), 0.7)
    assert within_four_standard_errors(accepted_over_drafted(runs[K]), theory.accepted_over_drafted(0.7, K))
    assert all(within_four_standard_errors(estimate, 0.7) for estimate in by_position(runs[K]))
    assert len(by_position(runs[K])) == K


def test_accepted_over_drafted_falls_with_K_where_the_others_stay(runs):
    rates = {K: accepted_over_drafted(runs[K]) for K in runs}
    assert rates[4].interval[1] < rates[1].interval[0]
    assert rates[4].interval[1] < min(each.interval[0] for each in (from_rounds(runs[4]), *by_position(runs[4])))


def test_maximum_likelihood_is_the_alpha_of_the_record(runs):
    assert from_rounds(runs[4]).value == pytest.approx(Statistics.pooled(runs[4]).alpha)
    assert from_rounds(runs[4][:1]).value == pytest.approx(runs[4][0].alpha)
    assert accepted_over_drafted(runs[4]).value == pytest.approx(Statistics.pooled(runs[4]).acceptance_rate)


def test_each_count_by_hand():
    # All three accepted; one accepted, one rejected; one rejected; two accepted, then a stop.
    results = [run_of([(3, False), (1, False)], K=3), run_of([(0, False), (2, True)], K=3)]
    assert (from_rounds(results).value, from_rounds(results).trials) == (6 / 8, 8)
    assert (accepted_over_drafted(results).value, accepted_over_drafted(results).trials) == (6 / 12, 12)
    assert [(each.value, each.trials) for each in by_position(results)] == [(3 / 4, 4), (2 / 3, 3), (1.0, 1)]


def test_one_run_with_one_draft_token_has_the_textbook_standard_error():
    result = run_of([(1, False)] * 15 + [(0, False)] * 5, K=1)
    for estimate in (from_rounds([result]), accepted_over_drafted([result]), by_position([result])[0]):
        assert estimate.standard_error == pytest.approx(math.sqrt(0.75 * 0.25 / 19))


def test_runs_that_differ_widen_the_standard_error_and_runs_that_agree_by_luck_do_not_narrow_it():
    def run(accepted):
        return run_of([(1, False)] * accepted + [(0, False)] * (20 - accepted), K=1)

    by_round = math.sqrt(0.5 * 0.5 / 39)
    assert from_rounds([run(18), run(2)]).standard_error == pytest.approx(0.4)  # rates 0.9 and 0.1, two runs
    assert from_rounds([run(10), run(10)]).standard_error == pytest.approx(by_round)


def spread_over_claimed(estimates):
    """How far the values lie apart, over what the estimates say of themselves (root mean square)."""
    claimed = math.sqrt(np.mean([estimate.standard_error**2 for estimate in estimates]))
    return np.std([estimate.value for estimate in estimates]) / claimed


@pytest.mark.parametrize("estimator", [from_rounds, accepted_over_drafted, lambda results: by_position(results)[1]])
def test_the_standard_error_from_one_run_is_the_spread_over_repeated_runs(estimator):
    estimates = [estimator([simulated_run(0.7, 4, 60, seed)]) for seed in range(SEEDS)]
    assert spread_over_claimed(estimates) == CALIBRATED


def test_the_standard_error_from_runs_of_unequal_difficulty_is_their_spread():
    hardness = np.random.default_rng(0)
    estimates = [
        from_rounds([simulated_run(alpha, 4, 20, 1000 * seed + i) for i, alpha in enumerate(hardness.beta(7, 3, 20))])
        for seed in range(SEEDS)
    ]
    assert spread_over_claimed(estimates) == CALIBRATED


def test_two_runs_of_equal_difficulty_claim_too_much_error_rather_than_too_little():
    estimates = [from_rounds([simulated_run(0.7, 4, 30, 2 * seed + i) for i in (0, 1)]) for seed in range(SEEDS)]
    # The larger of two errors, one of them from two numbers z and -z: E max(1, z^2) = 1.48, the root of which is 1.22.
    assert spread_over_claimed(estimates) == pytest.approx(1 / 1.22, abs=0.13)


STICKY = torch.eye(4) * 0.6 + torch.full((4, 4), 0.1)  # a token is followed by itself with chance 0.7
DRAFT = torch.stack([torch.eye(4)[token] * share + (1 - share) / 4 for token, share in enumerate((0, 0.3, 0.6, 0.9))])


def sticky_texts(count, length):
    chance = np.random.default_rng(0)
    texts = [chance.integers(4, size=count)]  # every token is equally frequent in the long run
    for _ in range(length - 1):
        texts.append(np.where(chance.random(count) < 0.6, texts[-1], chance.integers(4, size=count)))
    return np.stack(texts, axis=1)


def test_the_standard_error_of_the_overlap_counts_that_neighbouring_tokens_are_alike(pair_of):
    pair = pair_of(TableModel(STICKY), TableModel(DRAFT))
    alpha = float(overlap(STICKY, DRAFT).mean())
    estimates = [overlap_on_text(pair, text) for text in sticky_texts(SEEDS, length=400)]
    values = [estimate.value for estimate in estimates]
    assert abs(np.mean(values) - alpha) < 4 * np.std(values) / math.sqrt(SEEDS)
    # 20 blocks of 20 tokens see nearly all of the correlation. Taken one by one, tokens would claim half the error.
    assert spread_over_claimed(estimates) == CALIBRATED


def test_overlap_and_counts_agree_on_a_pair_whose_alpha_depends_on_the_context(pair_of, random_table):
    pair = pair_of(TableModel(random_table(3, 3, seed=0)), TableModel(random_table(3, 3, seed=1)))
    results = [speculative(pair, [0], K=1, max_new_tokens=200, seed=seed) for seed in range(10)]
    text = [token for result in results for token in result.tokens]
    read, counted = overlap_on_text(pair, text), from_rounds(results)
    error = math.hypot(read.standard_error, counted.standard_error)
    assert abs(read.value - counted.value) < 4 * error
    assert read.standard_error < counted.standard_error / 2  # no luck in it


def test_a_text_is_read_in_windows_that_fit_both_contexts_each_with_a_fresh_cache(random_table, spy_on):
    tables = random_table(3, 3, 3, seed=2), random_table(3, 3, 3, seed=3)  # laws that depend on the position
    models = [spy_on(TableModel(table, context=limit)) for table, limit in zip(tables, (7, 5), strict=True)]
    text = [0, 1, 2, 0, 2, 1, 1, 0, 2, 2, 0, 1]
    estimate = overlap_on_text(Pair("short", *models, None), text)
    for model in models:
        assert model.fed == [(0, text[:5]), (0, text[5:10]), (0, text[10:])]
    rows = [tuple(table[min(i % 5, 2), token] for table in tables) for i, token in enumerate(text)]
    assert estimate.value == pytest.approx(np.mean([float(overlap(p, q)) for p, q in rows]))
    assert estimate.trials == 12


def test_a_long_window_is_read_in_pieces_that_remember_what_came_before(monkeypatch):
    models = [GPT2.random(GPT2Config(11, 64, 16, 1, 2), seed=seed) for seed in (0, 1)]
    for model in models:
        for parameter in model.parameters():
            parameter.data.mul_(8)
    pair, text = Pair("small", *models, None), [int(token) for token in torch.arange(50) ** 2 % 11]
    at_once = overlap_on_text(pair, text)
    monkeypatch.setattr("specdec_lite.alpha.PIECE", 7)
    in_pieces = overlap_on_text(pair, text)
    assert in_pieces.value == pytest.approx(at_once.value, abs=1e-6)
    assert in_pieces.standard_error == pytest.approx(at_once.standard_error, rel=1e-3)


def test_half_precision_logits_give_the_overlap_of_float32_probabilities():
    models = [GPT2.random(GPT2Config(11, 64, 16, 1, 2), seed=seed, dtype=torch.bfloat16) for seed in (0, 1)]
    text = list(range(11))
    laws = [model(torch.tensor([text]), model.new_cache(11))[0].float().softmax(-1) for model in models]
    estimate = overlap_on_text(Pair("half", *models, None), text)
    assert estimate.value == pytest.approx(float(overlap(*laws).double().mean()), abs=1e-6)


def test_the_overlap_is_that_of_the_sampling_it_is_asked_for(known):
    cooler = [law**2 / (law**2).sum() for law in (P, Q)]
    assert overlap_on_text(known, [0, 1], Sampling(temperature=0.5)).value == pytest.approx(float(overlap(*cooler)))
    assert overlap_on_text(known, [0, 1], GREEDY).value == 0  # they disagree on the most likely token


def test_a_draft_with_padded_or_missing_ids_is_read_as_the_drafter_reads_it(pair_of):
    target = TableModel(P.expand(3, 3))
    padded = TableModel(torch.tensor([0.2, 0.4, 0.1, 0.3]).expand(4, 4))  # without the padding [2, 4, 1] / 7
    fewer = TableModel(torch.tensor([0.5, 0.5]).expand(2, 2))
    expected = 2 / 7 + 0.3 + 0.1
    assert overlap_on_text(pair_of(target, padded), [0, 2]).value == pytest.approx(expected)
    assert overlap_on_text(pair_of(target, fewer), [0, 2]).value == pytest.approx(0.5 + 0.3)


def test_identical_models_have_alpha_1(pair_of):
    model = GPT2.random(GPT2Config(11, 64, 16, 1, 2))
    estimate = overlap_on_text(pair_of(model, model), list(range(11)))
    assert estimate.value == pytest.approx(1) and estimate.value <= 1


def test_an_interval_is_95_percent_wide_and_stays_in_0_to_1():
    assert Estimate(0.5, 0.1, 100).interval == pytest.approx((0.304, 0.696))
    assert Estimate(0.95, 0.1, 10).interval == pytest.approx((0.754, 1.0))


def test_trials_that_all_went_one_way_still_leave_a_doubt():
    always = from_rounds([run_of([(1, False)] * 60, K=1)])
    assert (always.value, always.interval) == (1.0, pytest.approx((0.95, 1.0)))
    never = from_rounds([run_of([(0, False)] * 60, K=1)])
    assert (never.value, never.interval) == (0.0, pytest.approx((0.0, 0.05)))


def test_a_single_round_knows_nothing_of_its_error():
    estimate = from_rounds([run_of([(2, False)], K=4)])
    assert (estimate.value, estimate.standard_error, estimate.interval) == (2 / 3, math.inf, (0.0, 1.0))


def test_rounds_without_a_draft_token_count_for_nothing(known):
    plain = autoregressive(known, [0], max_new_tokens=5, seed=0)
    drafted = run_of([(1, False), (0, False), (1, False)], K=1)
    assert from_rounds([drafted, plain]) == from_rounds([drafted])
    assert by_position([plain]) == by_position([Result([0])]) == []
    for estimator in (from_rounds, accepted_over_drafted):
        with pytest.raises(ValueError, match="K = 1 or more"):
            estimator([plain])


def test_bad_texts_are_refused(known, pair_of):
    with pytest.raises(ValueError, match="empty"):
        overlap_on_text(known, [])
    with pytest.raises(ValueError, match="token id 3"):
        overlap_on_text(known, [0, 3])


def test_random_weights_give_no_alpha(known):
    known.random_weights = True
    with pytest.raises(ValueError, match="random weights"):
        overlap_on_text(known, [0, 1])


def test_nan_logits_are_an_error_that_names_the_model(known):
    known.draft.log_table[:] = math.nan
    with pytest.raises(FloatingPointError, match="draft gave NaN logits"):
        overlap_on_text(known, [0, 1])
