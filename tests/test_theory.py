"""The formulas give the published figures, and agree with counting."""

import math

import numpy as np
import pytest

from specdec_lite.theory import (
    BestK,
    accepted_over_drafted,
    alpha_mle,
    batch_break_even,
    best_K,
    break_even_alpha,
    cost_at_low_load,
    cost_at_saturation,
    cost_per_token,
    energy_per_token,
    expected_tokens_per_round,
    one_more_pays,
    predicted_speedup,
    simulate_rounds,
    variance_of_tokens_per_round,
    work_factor,
)

# Leviathan et al. (2023), Table 1: alpha, gamma (our K), operations, speed. Its caption says c = c_hat = 0: a draft
# that takes no time and makes no operations.
LEVIATHAN_TABLE_1 = [
    (0.6, 2, 1.53, 1.96),
    (0.7, 3, 1.58, 2.53),
    (0.8, 2, 1.23, 2.44),
    (0.8, 5, 1.63, 3.69),
    (0.9, 2, 1.11, 2.71),
    (0.9, 10, 1.60, 6.86),
]
# The best K, and its speedup, when verification is free: a row for each alpha, a column for each c.
CS = (0.02, 0.05, 0.08, 0.125, 0.25, 0.5)
BEST_K = {
    0.5: [(4, 1.79), (3, 1.63), None, (2, 1.40), (1, 1.20), (0, 1.00)],
    0.6: [(6, 2.17), (4, 1.92), (3, 1.75), (3, 1.58), (2, 1.31), (1, 1.07)],
    0.7: [(8, 2.76), (6, 2.35), (5, 2.10), (4, 1.85), (2, 1.46), (1, 1.13)],
    0.8: [(11, 3.82), (8, 3.09), (6, 2.67), (5, 2.27), (3, 1.69), (2, 1.22)],
    0.9: [(19, 6.37), (13, 4.67), (11, 3.82), (9, 3.07), (6, 2.09), (3, 1.38)],
}
CELLS = [(a, c, *cell) for a, row in BEST_K.items() for c, cell in zip(CS, row, strict=True) if cell]
ALPHAS = (0.0, 0.3, 0.8, 0.99, 1.0)


@pytest.mark.parametrize(("alpha", "K", "operations", "speed"), LEVIATHAN_TABLE_1)
def test_work_and_speed_with_a_free_draft_are_leviathans_table_1(alpha, K, operations, speed):
    assert round(work_factor(alpha, K, c_ops=0), 2) == operations
    assert round(predicted_speedup(alpha, K, c=0), 2) == speed


@pytest.mark.parametrize(("alpha", "factor"), [(0.8, 1.55), (0.6, 2.26)])
def test_work_factor_at_K_4_with_a_draft_of_a_twentieth(alpha, factor):
    assert round(work_factor(alpha, 4, c_ops=0.05), 2) == factor


def test_work_factor_is_never_below_1():
    assert all(work_factor(alpha, K, c_ops) >= 1 for alpha in ALPHAS for K in range(6) for c_ops in (0, 0.1))


@pytest.mark.parametrize(("alpha", "tokens"), [(0.7, 2.77), (0.9, 4.10)])
def test_tokens_per_round_at_K_4(alpha, tokens):
    assert round(expected_tokens_per_round(alpha, 4), 2) == tokens


def test_tokens_per_round_equals_the_closed_form_and_has_its_limits():
    for alpha in (0.0, 0.3, 0.99):
        for K in range(6):
            assert expected_tokens_per_round(alpha, K) == pytest.approx((1 - alpha ** (K + 1)) / (1 - alpha))
    assert expected_tokens_per_round(1.0, 7) == 8
    assert expected_tokens_per_round(0.5, 0) == 1


def law_of_tokens(alpha, K):
    """P(N = 1), ..., P(N = K + 1), written down without a formula: n - 1 acceptances, then a rejection unless at K."""
    return [alpha ** (n - 1) * (1 - alpha if n <= K else 1) for n in range(1, K + 2)]


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("K", range(6))
def test_mean_and_variance_are_those_of_the_law(alpha, K):
    law = law_of_tokens(alpha, K)
    mean = sum(n * p for n, p in enumerate(law, 1))
    assert expected_tokens_per_round(alpha, K) == pytest.approx(mean)
    variance = sum((n - mean) ** 2 * p for n, p in enumerate(law, 1))
    assert variance_of_tokens_per_round(alpha, K) == pytest.approx(variance, abs=1e-12)


def test_alpha_8_tenths_K_4_needs_about_570_rounds_for_two_percent():
    E, sd = expected_tokens_per_round(0.8, 4), math.sqrt(variance_of_tokens_per_round(0.8, 4))
    assert (round(E, 2), round(sd, 2)) == (3.36, 1.60)
    assert (sd / (0.02 * E)) ** 2 == pytest.approx(570, abs=5)


@pytest.mark.parametrize(("K", "share"), [(1, 0.80), (2, 0.72), (4, 0.59), (8, 0.42)])
def test_the_accepted_share_falls_with_K_at_alpha_8_tenths(K, share):
    assert round(accepted_over_drafted(0.8, K), 2) == share
    assert accepted_over_drafted(0.8, K) == pytest.approx(0.8 * (1 - 0.8**K) / (K * (1 - 0.8)))


@pytest.mark.parametrize(("alpha", "c", "K", "speedup"), CELLS)
def test_best_K_and_its_speedup_with_free_verification(alpha, c, K, speedup):
    best = best_K(alpha, c)
    assert (best.K, round(best.speedup, 2)) == (K, speedup)


@pytest.mark.parametrize(("slope", "speedup"), [(0, 3.09), (0.05, 2.47), (0.1, 2.11), (0.25, 1.55), (0.5, 1.16)])
def test_the_best_speedup_when_every_further_token_costs_a_share_of_a_pass(slope, speedup):
    assert round(best_K(0.8, 0.05, v=lambda n: 1 + slope * (n - 1)).speedup, 2) == speedup


def test_best_K_knows_plain_decoding_overhead_and_its_limit():
    assert best_K(0.3, 0.5) == BestK(0, 1.0)
    assert best_K(1.0, 0.1, largest=10).K == 10
    assert best_K(0.8, 0.1, overhead=0.5).speedup == pytest.approx(
        max(predicted_speedup(0.8, K, 0.1, overhead=0.5) for K in range(1, 20))
    )
    assert best_K(0.8, 0.1, overhead=9) == BestK(0, 1.0)


def test_best_K_asks_a_measured_curve_only_for_the_passes_that_it_would_make():
    measured = dict.fromkeys(range(2, 6), 1.0)
    assert best_K(0.9, 0.01, v=measured.__getitem__, largest=4).K == 4


def test_one_more_pays_up_to_the_best_K_and_never_after_it():
    for alpha in (0.3, 0.5, 0.8, 0.9):
        for c in (0.02, 0.1, 0.25, 0.6):
            assert [K for K in range(40) if one_more_pays(alpha, K, c)] == list(range(best_K(alpha, c).K))


def test_some_K_pays_exactly_if_alpha_is_above_c_and_then_by_what_leviathans_corollary_3_9_says():
    for alpha in (0.1, 0.5, 0.7):
        for c in (0.05, 0.3, 0.5, 0.8):
            assert one_more_pays(alpha, 0, c) == (best_K(alpha, c).K > 0) == (alpha > c)
            if alpha > c:
                assert best_K(alpha, c).speedup >= (1 + alpha) / (1 + c) - 1e-12


def test_break_even_alpha_is_where_the_speedup_reaches_1():
    for K, c, v, overhead in [(1, 0.3, 1.0, 0.0), (4, 0.1, 1.5, 0.2), (4, 0.25, 2.0, 0.0)]:
        alpha = break_even_alpha(K, c, v, overhead)
        assert predicted_speedup(alpha, K, c, v, overhead) == pytest.approx(1)
        assert predicted_speedup(alpha - 1e-6, K, c, v, overhead) < 1 <= predicted_speedup(alpha, K, c, v, overhead)
    assert break_even_alpha(1, 0.3) == pytest.approx(0.3)  # (1 + alpha) / (1 + c) = 1
    assert break_even_alpha(4, 0.0) == 0.0
    assert break_even_alpha(1, 0.5, v=1.5) == pytest.approx(1.0)
    assert break_even_alpha(4, 1.1) is None


def test_batch_break_even_by_hand():
    # E = 1.8 and K c = 0.2: the verification may take 1.6 steps. Two tokens a sequence fill 100 critical tokens at 50.
    assert batch_break_even(0.8, 1, 0.2, critical_tokens=100) == pytest.approx(80)
    assert batch_break_even(1.0, 4, 0.0, critical_tokens=100) == 100
    # E = 1.3 against 1 + 0.5, and E = 1.42 against 1 + 2: it would not pay for one sequence either.
    assert batch_break_even(0.3, 1, 0.5, 100) == batch_break_even(0.3, 4, 0.5, 100) == 0


def test_a_dear_verification_and_overhead_lower_the_speedup():
    assert predicted_speedup(0.8, 4, c=0.05) == pytest.approx(3.3616 / 1.2)
    assert predicted_speedup(0.8, 4, c=0.05, v=1.5, overhead=0.1) == pytest.approx(3.3616 / 1.8)


def test_cost_is_divided_by_the_speedup_at_low_load_and_multiplied_by_the_work_at_saturation():
    plain = cost_per_token(seconds_per_token=1 / 1000, price_per_hour=3.6)
    assert plain == pytest.approx(1.0)  # an hour writes 3.6 million tokens for 3.6
    assert cost_at_low_load(plain, predicted_speedup(0.8, 4, 0.05)) == pytest.approx(1.2 / 3.3616)
    assert cost_at_saturation(plain, work_factor(0.8, 4, 0.05)) == pytest.approx(5.2 / 3.3616)


def test_energy_is_power_times_time():
    assert energy_per_token(seconds_per_token=0.02, watts=70) == pytest.approx(1.4)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("K", [0, 1, 4])
def test_simulated_rounds_have_the_mean_and_the_variance_of_the_formulas(alpha, K):
    rounds = 20_000
    tokens = simulate_rounds(alpha, K, rounds, seed=K) + 1
    assert tokens.shape == (rounds,) and tokens.min() >= 1 and tokens.max() <= K + 1
    E, variance = expected_tokens_per_round(alpha, K), variance_of_tokens_per_round(alpha, K)
    law = law_of_tokens(alpha, K)
    fourth_moment = sum((n - E) ** 4 * p for n, p in enumerate(law, 1))
    # Four standard errors: sqrt(Var / R) of the mean, and sqrt((m4 - Var^2) / R) of the mean squared distance from E.
    # The sample's variance is that less the square of the mean's own error. 1e-12: rounding.
    error = math.sqrt(variance / rounds)
    assert abs(tokens.mean() - E) <= 4 * error + 1e-12
    error_of_variance = math.sqrt(max(0, fourth_moment - variance**2) / rounds)
    assert abs(tokens.var() - variance) <= 4 * error_of_variance + (4 * error) ** 2 + 1e-12
    if K:
        assert abs((tokens - 1).mean() / K - accepted_over_drafted(alpha, K)) <= 4 * error / K + 1e-12


def beta_moment(alpha, correlation, k):
    """E[X^k] of a beta law with this mean and intra-class correlation: the chance that a round's first k all pass."""
    size = (1 - correlation) / correlation  # a + b
    log = math.lgamma(alpha * size + k) - math.lgamma(alpha * size) + math.lgamma(size) - math.lgamma(size + k)
    return math.exp(log)


@pytest.mark.parametrize("correlation", [0.1, 0.5, 0.9])
def test_correlated_rounds_keep_alpha_at_the_first_position_and_yield_more_than_the_formula(correlation):
    alpha, K, rounds = 0.7, 4, 20_000
    accepted = simulate_rounds(alpha, K, rounds, correlation=correlation)
    for k in range(1, K + 1):  # among them the first position (k = 1: alpha) and the correlation (k = 2)
        expected = beta_moment(alpha, correlation, k)
        assert abs((accepted >= k).mean() - expected) < 4 * math.sqrt(expected * (1 - expected) / rounds)
    assert beta_moment(alpha, correlation, 1) == pytest.approx(alpha)
    E = 1 + sum(beta_moment(alpha, correlation, k) for k in range(1, K + 1))
    assert expected_tokens_per_round(alpha, K) < E  # by convexity: the mean of alpha^k is above the mean's power
    assert accepted.mean() + 1 - 4 * accepted.std() / math.sqrt(rounds) > expected_tokens_per_round(alpha, K)


def test_with_correlation_the_chance_rises_with_the_position_so_pooled_trials_overstate_the_first():
    accepted = simulate_rounds(0.7, 4, 20_000, correlation=0.3)
    chances = [(accepted > i).sum() / (accepted >= i).sum() for i in range(4)]
    assert chances == sorted(chances)
    assert alpha_mle(int(accepted.sum()), int((accepted < 4).sum())) > 0.75


def test_a_simulation_repeats_with_its_seed_and_leaves_the_global_generators_alone(global_generators):
    before = global_generators.state()
    one, again, other = (simulate_rounds(0.5, 3, 50, seed=seed) for seed in (1, 1, 2))
    assert (one == again).all() and (one != other).any()
    assert global_generators.state() == before


@pytest.mark.parametrize("K", [1, 2, 4, 8])
def test_alpha_by_maximum_likelihood_does_not_fall_with_K(K):
    accepted = simulate_rounds(0.8, K, 20_000)
    trials = accepted.sum() + (accepted < K).sum()
    error = np.sqrt(0.8 * 0.2 / trials)
    assert abs(alpha_mle(int(accepted.sum()), int((accepted < K).sum())) - 0.8) < 4 * error


def test_alpha_of_nothing_is_none():
    assert alpha_mle(0, 0) is None


TAKES_ALPHA_AND_K = [
    expected_tokens_per_round,
    variance_of_tokens_per_round,
    accepted_over_drafted,
    lambda alpha, K: predicted_speedup(alpha, K, 0.1),
    lambda alpha, K: one_more_pays(alpha, K, 0.1),
    lambda alpha, K: work_factor(alpha, K, 0.1),
    lambda alpha, K: batch_break_even(alpha, K, 0.1, 200),
    lambda alpha, K: simulate_rounds(alpha, K, 3),
]


@pytest.mark.parametrize("formula", TAKES_ALPHA_AND_K)
@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_alpha_outside_0_to_1_is_refused(formula, alpha):
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        formula(alpha, 4)


@pytest.mark.parametrize("formula", [*TAKES_ALPHA_AND_K, lambda alpha, K: break_even_alpha(K, 0.1)])
@pytest.mark.parametrize("K", [-1, 2.5])
def test_K_must_be_a_whole_number(formula, K):
    with pytest.raises(ValueError, match="whole number"):
        formula(0.5, K)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: best_K(1.5, 0.1, largest=0), r"\[0, 1\]"),
        (lambda: best_K(0.5, 0.1, largest=-1), "whole number"),
        (lambda: predicted_speedup(0.5, 4, -0.1), "c must be 0 or more"),
        (lambda: predicted_speedup(0.5, 4, float("nan")), "c must be 0 or more"),
        (lambda: predicted_speedup(0.5, 4, 0.0, v=0.0), "a round above 0"),
        (lambda: accepted_over_drafted(0.5, 0), "K is 0"),
        (lambda: simulate_rounds(0.5, 4, 3, correlation=1.0), r"\[0, 1\)"),
        (lambda: simulate_rounds(0.5, 4, 3, correlation=-0.1), r"\[0, 1\)"),
    ],
)
def test_other_bad_input_is_refused_in_a_line(call, message):
    with pytest.raises(ValueError, match=message) as error:
        call()
    assert "\n" not in str(error.value)
