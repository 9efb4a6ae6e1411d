"""The roofline gives the published figures of four GPUs, and what is measured here goes through the same formulas."""

import math

import pytest
import torch

from specdec_lite import roofline
from specdec_lite.gpt2 import SIZES
from specdec_lite.roofline import DEVICES, Device, this_machine
from specdec_lite.theory import batch_break_even, best_K, expected_tokens_per_round

SIMPLE = Device("simple", bandwidth=100.0, peak=1000.0)  # one-byte weights: from 5 tokens on, arithmetic takes longer


@pytest.mark.parametrize(
    ("name", "tokens", "milliseconds"),
    [("T4", 203, 9.7), ("A100", 153, 1.53), ("H100", 295, 0.93), ("H200", 206, 0.65)],
)
def test_critical_tokens_and_one_read_of_gpt2_xl_in_float16(name, tokens, milliseconds):
    device = DEVICES[name]
    assert device.name == name
    assert round(device.critical_tokens(2)) == tokens
    digits = len(str(milliseconds).split(".")[1])
    assert round(1000 * device.seconds_per_pass(SIZES["gpt2-xl"].parameters, 2), digits) == milliseconds


def test_a_pass_takes_the_longer_of_fetching_and_computing():
    assert SIMPLE.critical_tokens(1) == 5
    assert [SIMPLE.seconds_per_pass(200, 1, tokens) for tokens in (1, 5, 10)] == [2, 2, 4]
    assert SIMPLE.seconds_per_pass(200, 2) == 4  # twice the bytes, twice the time, twice the critical tokens
    assert SIMPLE.critical_tokens(2) == 10


def test_v_is_flat_up_to_the_critical_tokens_and_rises_in_proportion_from_there():
    assert [SIMPLE.v(n, 1) for n in (1, 4, 5, 10, 20)] == [1, 1, 1, 2, 4]
    assert SIMPLE.v(2, 1, batch=4) == pytest.approx(8 / 5)  # 8 tokens against 4, which were still free
    assert SIMPLE.v(3, 1, batch=10) == 3  # nothing is free any more


def test_on_a_gpu_one_sequence_is_verified_for_free():
    device = DEVICES["A100"]
    assert best_K(0.8, 0.05, v=lambda n: device.v(n, 2)) == best_K(0.8, 0.05)


@pytest.mark.parametrize(("alpha", "K", "c"), [(0.8, 4, 0.05), (0.6, 2, 0.1), (0.9, 8, 0.02)])
def test_the_batch_break_even_is_where_the_roofline_says_so(alpha, K, c):
    device = DEVICES["H100"]
    E = expected_tokens_per_round(alpha, K)

    def speedup(batch):
        return E / (device.v(K + 1, 2, batch) + K * c)

    even = batch_break_even(alpha, K, c, device.critical_tokens(2))
    assert speedup(even) == pytest.approx(1)
    assert speedup(even * 0.99) > 1 > speedup(even * 1.01)
    assert all(speedup(batch) < 1 for batch in (device.critical_tokens(2), 1000))


def test_a_device_without_speed_is_refused():
    with pytest.raises(ValueError, match="above 0"):
        Device("broken", bandwidth=0.0, peak=1e12)


def test_this_machine_measured_has_positive_figures_and_obeys_the_same_formulas(global_generators):
    before = global_generators.state()
    device = this_machine(repeats=3)
    assert global_generators.state() == before
    for figure in (device.bandwidth, device.peak, device.critical_tokens(4), device.seconds_per_pass(10**6, 4)):
        assert math.isfinite(figure) and figure > 0
    assert device.critical_tokens(4) == pytest.approx(device.peak * 4 / (2 * device.bandwidth))
    vs = [device.v(n, 4) for n in range(1, 200)]
    assert vs[0] == 1 and vs == sorted(vs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_figures_are_bytes_and_operations_over_the_median_second(dtype, monkeypatch):
    def fake(works, *, device, repeats):
        assert [work().dtype for work in works.values()] == [dtype, dtype]
        return {"fetch": [9.0, 0.5, 0.1], "compute": [0.25, 0.1, 7.0]}

    monkeypatch.setattr(roofline, "interleaved", fake)
    device = this_machine(dtype)
    assert (device.bandwidth, device.peak) == (2**28 / 0.5, 2 * 1024**3 / 0.25)
