"""The distribution that tokens are drawn from, against Hugging Face's processors; residual and overlap by hand."""

import math
from fractions import Fraction as F

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from specdec_lite.distributions import GREEDY, Sampling, overlap, residual


def hugging_face_probs(logits, temperature, top_k, top_p):
    """What ``generate`` samples from: the processors in its order, those that are off left out."""
    processors = []
    if temperature != 1:
        processors.append(TemperatureLogitsWarper(temperature))
    if top_k:
        processors.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        processors.append(TopPLogitsWarper(top_p))
    for processor in processors:
        logits = processor(None, logits)
    return logits.softmax(-1)


TEMPERATURES, TOP_KS, TOP_PS = [0.5, 1.0, 1.7], [None, 0, 1, 3, 50], [0.05, 0.6, 0.9, 1.0]


@pytest.mark.parametrize("top_p", TOP_PS)
@pytest.mark.parametrize("top_k", TOP_KS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_probs_are_those_of_hugging_face(temperature, top_k, top_p):
    logits = 3 * torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
    ours = Sampling(temperature, top_k, top_p).probs(logits)
    expected = hugging_face_probs(logits, temperature, top_k, top_p)
    assert torch.equal(ours > 0, expected > 0)
    torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("top_p", TOP_PS)
@pytest.mark.parametrize("top_k", TOP_KS)
def test_ties_are_cut_as_hugging_face_cuts_them(top_k, top_p):
    logits = torch.tensor(
        [[2.0, 2.0, 1.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0], [0.0, 3.0, 3.0, 0.0, 3.0, 0.0]]
    )
    torch.testing.assert_close(Sampling(1.0, top_k, top_p).probs(logits), hugging_face_probs(logits, 1.0, top_k, top_p))


def test_top_k_keeps_every_token_that_ties_with_the_kth():
    assert Sampling(top_k=2).probs(torch.tensor([0.0, 5.0, 1.0, 1.0])).gt(0).tolist() == [False, True, True, True]


@pytest.mark.parametrize(
    ("top_p", "kept"), [(1e-9, {1}), (0.01, {1}), (0.59, {1}), (0.61, {1, 2}), (0.89, {1, 2}), (0.91, {0, 1, 2})]
)
def test_top_p_keeps_the_fewest_tokens_that_reach_the_mass(top_p, kept):
    probs = Sampling(top_p=top_p).probs(torch.tensor([0.1, 0.6, 0.3]).log())
    assert {token for token in range(3) if probs[token] > 0} == kept
    assert float(probs.sum()) == pytest.approx(1)


@pytest.mark.parametrize(("top_p", "kept"), [(0.25, 1), (0.26, 2), (0.5, 2), (0.75, 3), (0.76, 4)])
def test_a_mass_that_is_reached_exactly_is_enough(top_p, kept):
    assert int(Sampling(top_p=top_p).probs(torch.zeros(4)).gt(0).sum()) == kept


def test_top_k_comes_before_top_p():
    # Of [.4, .35, .25], top-k 2 leaves [.533, .467, 0], and top-p .5 of that one token. The other way round, two stay.
    logits = torch.tensor([0.40, 0.35, 0.25]).log()
    assert Sampling(top_k=2, top_p=0.5).probs(logits).tolist() == [1, 0, 0]


def test_temperature_divides_logits():
    torch.testing.assert_close(Sampling(0.5).probs(torch.tensor([0.6, 0.3, 0.1]).log()), torch.tensor([36, 9, 1]) / 46)


def test_temperature_zero_is_one_hot_on_the_lowest_of_the_tied_ids():
    logits = torch.tensor([[0.0, 7.0, 7.0, 1.0], [2.0, 2.0, 2.0, 2.0], [-math.inf, -4.0, -math.inf, -5.0]])
    assert GREEDY.probs(logits).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0]]


@pytest.mark.parametrize(("top_k", "top_p"), [(1, 1.0), (3, 0.5), (None, 0.1)])
def test_truncation_changes_nothing_at_temperature_zero(top_k, top_p):
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(1))
    assert torch.equal(Sampling(0.0, top_k, top_p).probs(logits), GREEDY.probs(logits))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 5, 0.9), GREEDY])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_logits_are_worked_on_in_float32(sampling, dtype):
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(2)).to(dtype)
    probs = sampling.probs(logits)
    assert probs.dtype == torch.float32
    assert torch.equal(probs, sampling.probs(logits.float()))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 5, 0.9), GREEDY])
def test_float64_logits_stay_float64_and_every_row_sums_to_one(sampling):
    probs = sampling.probs(torch.randn(2, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(3)))
    assert probs.dtype == torch.float64
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 3, dtype=torch.float64), rtol=0, atol=1e-14)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 2, 0.9), Sampling(top_p=0.5), GREEDY])
def test_the_logits_given_are_left_as_they_were(sampling):
    logits = torch.tensor([[1.0, 3.0, 2.0], [0.0, 0.0, -1.0]])
    before = logits.clone()
    sampling.probs(logits)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.7, 2, 0.9), Sampling(top_p=0.5), GREEDY])
def test_a_nan_logit_is_not_hidden(sampling):
    assert sampling.probs(torch.tensor([1.0, math.nan, 2.0])).isnan().any()


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("temperature", -1, "0 .* or more"),
        ("temperature", math.nan, "0 .* or more"),
        ("temperature", math.inf, "0 .* or more"),
        ("top_k", -1, "1 or more"),
        ("top_k", 2.5, "1 or more"),
        ("top_p", 0, r"\(0, 1\]"),
        ("top_p", 1.1, r"\(0, 1\]"),
        ("top_p", math.nan, r"\(0, 1\]"),
        ("top_p", -0.5, r"\(0, 1\]"),
    ],
)
def test_a_value_out_of_range_is_refused_with_the_value_and_the_range(name, value, allowed):
    with pytest.raises(ValueError, match=f"{name} is {value};.*{allowed}"):
        Sampling(**{name: value})


def test_residual_is_what_p_has_more_than_q_normalised():
    p, q = torch.tensor([0.5, 0.375, 0.125]), torch.tensor([0.125, 0.125, 0.75])
    torch.testing.assert_close(residual(p, q), torch.tensor([0.6, 0.4, 0.0]))
    torch.testing.assert_close(overlap(p, q), torch.tensor(0.375))


def test_residual_and_overlap_are_exact_in_fractions():
    p, q = np.array([F(1, 2), F(3, 8), F(1, 8)]), np.array([F(1, 8), F(1, 8), F(3, 4)])
    assert residual(p, q).tolist() == [F(3, 5), F(2, 5), 0]
    assert overlap(p, q) == F(3, 8)


def test_where_p_equals_q_the_residual_is_p_and_the_overlap_is_one():
    for p in (torch.tensor([0.2, 0.8]), np.array([F(1, 5), F(4, 5)]), torch.tensor([0.0, 1.0])):
        assert residual(p, p).tolist() == p.tolist()
        assert overlap(p, p) == 1


def test_the_fallback_is_decided_row_by_row():
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    q = torch.tensor([[0.5, 0.5], [0.9, 0.1]])
    torch.testing.assert_close(residual(p, q), torch.tensor([[0.5, 0.5], [0.0, 1.0]]))
    torch.testing.assert_close(overlap(p, q), torch.tensor([1.0, 0.6]))


def test_the_residual_of_a_point_mass_is_p_without_that_token():
    p, q = np.array([F(1, 2), F(3, 10), F(1, 5)]), np.array([F(1), F(0), F(0)])
    assert residual(p, q).tolist() == [0, F(3, 5), F(2, 5)]
    assert overlap(p, q) == F(1, 2)


def test_disjoint_distributions_do_not_overlap_and_leave_p_whole():
    p, q = torch.tensor([0.0, 0.25, 0.75]), torch.tensor([1.0, 0.0, 0.0])
    assert residual(p, q).tolist() == p.tolist()
    assert overlap(p, q) == 0


def test_overlap_is_one_minus_the_total_variation(random_table):
    p, q = random_table(50, 6, seed=1), random_table(50, 6, seed=2)
    torch.testing.assert_close(overlap(p, q), 1 - (p - q).abs().sum(-1) / 2)
    torch.testing.assert_close(overlap(p, q), torch.minimum(p, q).sum(-1))
