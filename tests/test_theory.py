"""The formulas give the published figures, and agree with counting."""

import random

import pytest

from specdec_lite.theory import alpha_mle, expected_tokens_per_round, predicted_speedup

# Leviathan et al. (2023), Table 1: alpha, gamma (our K), speedup with a draft that costs nothing.
LEVIATHAN_TABLE_1 = [(0.6, 2, 1.96), (0.7, 3, 2.53), (0.8, 2, 2.44), (0.8, 5, 3.69), (0.9, 2, 2.71), (0.9, 10, 6.86)]


@pytest.mark.parametrize(("alpha", "K", "published"), LEVIATHAN_TABLE_1)
def test_speedup_with_a_free_draft_is_leviathans_table_1(alpha, K, published):
    assert round(predicted_speedup(alpha, K, c=0), 2) == published


@pytest.mark.parametrize(("alpha", "tokens"), [(0.7, 2.77), (0.9, 4.10)])
def test_tokens_per_round_at_K_4(alpha, tokens):
    assert round(expected_tokens_per_round(alpha, 4), 2) == tokens


def test_tokens_per_round_equals_the_closed_form_and_has_its_limits():
    for alpha in (0.0, 0.3, 0.99):
        for K in range(6):
            assert expected_tokens_per_round(alpha, K) == pytest.approx((1 - alpha ** (K + 1)) / (1 - alpha))
    assert expected_tokens_per_round(1.0, 7) == 8
    assert expected_tokens_per_round(0.5, 0) == 1


def test_a_dear_verification_and_overhead_lower_the_speedup():
    assert predicted_speedup(0.8, 4, c=0.05) == pytest.approx(3.3616 / 1.2)
    assert predicted_speedup(0.8, 4, c=0.05, v=1.5, overhead=0.1) == pytest.approx(3.3616 / 1.8)


def test_alpha_by_maximum_likelihood_does_not_fall_with_K_where_the_plain_rate_does():
    chance, rounds = random.Random(0), 20_000
    for K, plain_rate in ((1, 0.80), (2, 0.72), (4, 0.59), (8, 0.42)):
        accepted = rejections = 0
        for _ in range(rounds):
            for _ in range(K):
                if chance.random() >= 0.8:
                    rejections += 1
                    break
                accepted += 1
        assert alpha_mle(accepted, rejections) == pytest.approx(0.8, abs=0.01)
        assert accepted / (rounds * K) == pytest.approx(plain_rate, abs=0.01)


def test_alpha_of_nothing_is_none():
    assert alpha_mle(0, 0) is None


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_alpha_outside_0_to_1_is_refused(alpha):
    with pytest.raises(ValueError, match=r"\[0, 1\]"):
        expected_tokens_per_round(alpha, 4)


@pytest.mark.parametrize("K", [-1, 2.5])
def test_K_must_be_a_whole_number(K):
    with pytest.raises(ValueError, match="whole number"):
        expected_tokens_per_round(0.5, K)
