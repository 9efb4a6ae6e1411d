"""The benchmark: what it counts, and how it turns counts into a verdict. Never an absolute time."""

import numpy as np
import pytest
import torch

from specdec_lite.bench import Costs, Row, Run, bench, make_row, measure_costs, per_token, verdict, wall
from specdec_lite.distributions import GREEDY, Sampling
from specdec_lite.engines import HuggingFace, transformers_model
from specdec_lite.gpt2 import GPT2, GPT2Config
from specdec_lite.pairs import Pair
from specdec_lite.record import Result, Round
from specdec_lite.table import TableModel
from specdec_lite.timing import interleaved

COSTS = Costs(t1=0.001, v={n: 1 + 0.1 * (n - 1) for n in range(1, 10)}, c=0.1)


@pytest.fixture(scope="module")
def small_pair():
    models = [GPT2.random(GPT2Config(60, 64, 32, layers, 2), seed=layers) for layers in (2, 1)]
    for model in models:  # larger weights, so that the argmax is no near-tie
        for parameter in model.parameters():
            parameter.data.mul_(8)
    return Pair("small", *models, tokenizer=None)


def result_of(rounds):
    result = Result([1])
    for seconds, drafted, accepted, origin in rounds:
        origins = ("accepted",) * accepted + (origin,)
        result.add(Round((0,) * drafted, (0,) * (accepted + 1), origins, seconds, 0.0, 0.0))
    return result


def test_a_run_leaves_out_the_first_round_because_it_holds_the_prefill():
    run = Run.of(result_of([(9.0, 2, 2, "bonus"), (1.0, 2, 1, "recovered"), (2.0, 2, 0, "recovered")]))
    assert (run.seconds, run.tokens) == (3.0, 3)
    assert wall([[run]]) == pytest.approx(12.0 / 6)


def test_seconds_per_token_are_medians_over_repeats():
    runs = [[Run(seconds, 2, None) for seconds in (2.0, 4.0, 100.0)], [Run(6.0, 3, None)]]
    assert per_token(runs).tolist() == [2.0, 2.0]


def test_a_row_holds_ratios_and_pooled_rates():
    plain = [[Run(4.0, 4, result_of([(1, 0, 0, "bonus")] * 5))], [Run(4.0, 4, None)]]
    fast = [
        [Run(2.0, 4, result_of([(1.0, 2, 2, "bonus"), (1.0, 2, 0, "recovered")]))],
        [Run(2.0, 4, result_of([(1.0, 2, 1, "recovered")]))],
    ]
    row = make_row(2, {0: plain, 2: fast}, COSTS)
    assert row.speedup == row.speedup_low == row.speedup_high == 2.0
    assert row.alpha == pytest.approx(3 / 5)  # 3 accepted, 2 rejections
    assert row.acceptance_rate == pytest.approx(3 / 6)
    assert row.tokens_per_round == pytest.approx(6 / 3)
    assert row.predicted_speedup == pytest.approx((1 + 0.6 + 0.36) / (1.2 + 2 * 0.1))


def row_with(speedup, low, high, K=4):
    return Row(K, 0.5, 1.9, 0.3, 100.0, speedup, low, high, 1.0)


def test_the_verdict_names_K_or_the_reason_or_says_that_it_cannot_tell():
    assert "speculate with K = 4: 1.50x" in verdict(row_with(1.5, 1.4, 1.6), COSTS)
    assert "do not speculate" in verdict(row_with(0.9, 0.85, 0.95), COSTS)
    assert "1.90 tokens per round, and a round costs as much as 1.80" in verdict(row_with(0.9, 0.85, 0.95), COSTS)
    assert "too close to call" in verdict(row_with(1.02, 0.97, 1.07), COSTS)


def test_bench_takes_table_models_and_token_prompts():
    laws = torch.tensor([[0.6, 0.3, 0.1], [0.3, 0.6, 0.1]], dtype=torch.float64)
    pair = Pair("table", TableModel(laws[0]), TableModel(laws[1]), tokenizer=None)
    report = bench(pair, [2], prompts=[[0], [1]], max_new_tokens=60, repeats=2, hugging_face=False)
    (row,) = report.rows
    assert report.hf_plain_ratio is None
    assert abs(row.alpha - 0.7) < 0.15  # sum min(p, q) = 0.7; about 150 trials
    assert row.speedup_low <= row.speedup <= row.speedup_high


@pytest.mark.parametrize("bad", [{"Ks": []}, {"Ks": [0]}, {"repeats": 0}, {"prompts": []}, {"max_new_tokens": 1}])
def test_bench_refuses_bad_input_before_any_work(bad):
    with pytest.raises(ValueError, match="at least one K"):
        bench(None, **({"Ks": [2], "prompts": [[0]]} | bad))


def test_costs_are_relative_to_one_target_pass(small_pair):
    costs = measure_costs(small_pair, 3, context=8, repeats=3)
    assert costs.v[1] == 1.0
    assert set(costs.v) == {1, 2, 3}
    assert costs.t1 > 0
    assert costs.c > 0


def test_works_are_timed_in_turn_in_changing_order_and_warm_up_is_not_counted():
    calls = []
    seconds = interleaved(
        {name: lambda name=name: calls.append(name) for name in "abc"}, device=torch.device("cpu"), repeats=6, warmup=2
    )
    turns = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert [sorted(turn) for turn in turns] == [["a", "b", "c"]] * 8
    assert len({tuple(turn) for turn in turns}) > 1
    assert all(len(times) == 6 for times in seconds.values())


def test_hugging_face_generate_gives_the_same_greedy_tokens_plain_and_assisted(small_pair):
    from specdec_lite.decoding import autoregressive

    prompt, options = [3, 1, 4], {"max_new_tokens": 20, "sampling": GREEDY}
    ours = autoregressive(small_pair, prompt, **options).tokens
    for K in (0, 3):
        assert HuggingFace(small_pair, K).generate(prompt, seed=0, **options) == ours


def test_hugging_face_drafts_exactly_K_tokens_per_round(small_pair, monkeypatch):
    from transformers.generation import candidate_generator

    drafted = []
    real = candidate_generator.AssistedCandidateGenerator.get_candidates

    def counting(self, input_ids, *arguments, **options):
        candidates = real(self, input_ids, *arguments, **options)
        if input_ids.shape[1] + 3 + 1 < 33:  # room for a whole round before the length limit
            drafted.append(candidates[0].shape[1] - input_ids.shape[1])
        return candidates

    monkeypatch.setattr(candidate_generator.AssistedCandidateGenerator, "get_candidates", counting)
    HuggingFace(small_pair, 3).generate([3, 1, 4], max_new_tokens=30, sampling=GREEDY, seed=0)
    assert set(drafted) == {3}


def test_hugging_face_sampling_repeats_with_a_seed_and_leaves_the_global_generator_alone(small_pair):
    engine = HuggingFace(small_pair)
    before = torch.get_rng_state()
    first, second, other = (
        engine.generate([3], max_new_tokens=20, sampling=Sampling(1.0), seed=seed) for seed in (0, 0, 1)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert first == second != other


def test_the_transformers_twin_has_the_same_logits(small_pair):
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        theirs = transformers_model(small_pair.target)(tokens).logits
    ours = small_pair.target(tokens, small_pair.target.new_cache(10))
    np.testing.assert_allclose(ours.numpy(), theirs.numpy(), atol=1e-4)


def test_a_model_without_a_twin_is_refused_by_name():
    with pytest.raises(TypeError, match="my table"):
        transformers_model(TableModel(torch.tensor([0.5, 0.5]), name="my table"))
