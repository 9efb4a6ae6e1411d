"""The benchmark: what it measures, what it writes down, and how it goes on after a kill. Never an absolute time."""

import json

import pytest
import torch

from specdec_lite.bench import assumed_acceptance, bench, own_record
from specdec_lite.costs import measure_costs
from specdec_lite.engines import EngineError, HuggingFace
from specdec_lite.gpt2 import GPT2, GPT2Config
from specdec_lite.pairs import Pair
from specdec_lite.randomness import TorchRandomness, enumerate_outcomes
from specdec_lite.record import Result, Round
from specdec_lite.report import summarise
from specdec_lite.results import VERSION, Results, read_results
from specdec_lite.table import TableModel
from specdec_lite.timing import interleaved

SHORT = {"prompts": [[0], [1]], "max_new_tokens": 12, "repeats": 2, "hugging_face": False}


@pytest.fixture(scope="module")
def small_pair():
    models = [GPT2.random(GPT2Config(60, 64, 32, layers, 2), seed=layers) for layers in (2, 1)]
    for model in models:  # larger weights, so that the argmax is no near-tie
        for parameter in model.parameters():
            parameter.data.mul_(8)
    return Pair("small", *models, tokenizer=None)


@pytest.fixture
def table_pair():
    laws = torch.tensor([[0.6, 0.3, 0.1], [0.3, 0.6, 0.1]], dtype=torch.float64)
    return Pair("table", TableModel(laws[0]), TableModel(laws[1]), tokenizer=None)


def result_of(rounds):
    result = Result([1])
    for seconds, drafted, accepted, origin in rounds:
        origins = ("accepted",) * accepted + (origin,)
        result.add(Round((0,) * drafted, (0,) * (accepted + 1), origins, seconds, 0.25, 0.0))
    return result


def test_a_run_leaves_out_the_first_round_because_it_holds_the_prefill():
    record = own_record(result_of([(9.0, 2, 2, "bonus"), (1.0, 2, 1, "recovered"), (2.0, 2, 0, "recovered")]))
    assert (record["seconds"], record["tokens"]) == (3.5, 3)
    assert (record["first_seconds"], record["first_tokens"]) == (9.25, 3)
    assert (record["draft_seconds"], record["target_seconds"]) == (3.0, 0.5)


def test_a_position_was_tried_where_all_before_it_were_accepted():
    record = own_record(result_of([(1, 3, 3, "bonus"), (1, 3, 1, "recovered"), (1, 3, 0, "recovered")]))
    assert record["tried"] == [3, 2, 1]
    assert record["accepted"] == [2, 1, 1]


def test_bench_takes_table_models_and_token_prompts(table_pair):
    report = bench(table_pair, [2], prompts=[[0], [1]], max_new_tokens=60, repeats=2, hugging_face=False)
    (row,) = report.rows
    assert report.hf_plain_ratio is None
    assert abs(row.alpha - 0.7) < 0.15  # sum min(p, q) = 0.7; about 150 trials
    assert row.alpha_low <= row.alpha <= row.alpha_high
    assert row.speedup_low <= row.speedup <= row.speedup_high
    assert report.best_k_measured == report.best_k_predicted == 2


@pytest.mark.parametrize("bad", [{"Ks": []}, {"Ks": [0]}, {"repeats": 0}, {"prompts": []}, {"max_new_tokens": 1}])
def test_bench_refuses_bad_input_before_any_work(bad):
    with pytest.raises(ValueError, match="at least one K"):
        bench(None, **({"Ks": [2], "prompts": [[0]]} | bad))


def test_bench_refuses_a_K_that_is_given_twice(table_pair):
    with pytest.raises(ValueError, match="twice"):
        bench(table_pair, [2, 2], **SHORT)


@pytest.mark.parametrize(("bad", "says"), [({"Ks": [-1]}, "whole number"), ({"alpha": 1.5}, r"\[0, 1\]")])
def test_bench_names_a_K_or_an_alpha_that_cannot_be(table_pair, bad, says):
    with pytest.raises(ValueError, match=says):
        bench(table_pair, **({"Ks": [2]} | SHORT | bad))


def test_a_killed_run_goes_on_where_it_was_and_runs_its_broken_block_again(table_pair, tmp_path):
    path = tmp_path / "run.jsonl"
    whole = bench(table_pair, [1, 2], path=path, **SHORT)
    lines = path.read_text().splitlines()
    runs = [i for i, line in enumerate(lines) if json.loads(line)["kind"] == "run"]
    assert len(runs) == 2 * 2 * 3  # prompts x repeats x (plain, K = 1, K = 2)
    kept = lines[: runs[4] + 1]  # one block, and two runs of the next ...
    path.write_text("\n".join(kept) + "\n" + lines[runs[5]][:20])  # ... and a line that was cut short
    calls = []
    again = bench(table_pair, [1, 2], path=path, progress=lambda *what: calls.append(what), **SHORT)
    after = [r for r in read_results(path) if r["kind"] == "run"]
    assert [json.dumps(r) for r in read_results(path)[: len(kept)]] == kept
    assert len(after) == 5 + 9  # the first block was not measured again; the broken one was, as a whole
    assert calls[-1][:2] == (12, 12)
    assert [row.alpha for row in again.rows] == [row.alpha for row in whole.rows]  # the same seeds, so the same tokens
    assert again.t1_milliseconds == whole.t1_milliseconds  # single passes were measured in the first session


def test_a_finished_file_is_not_measured_again(table_pair, tmp_path):
    path = tmp_path / "run.jsonl"
    first = bench(table_pair, [1], path=path, **SHORT)
    second = bench(table_pair, [1], path=path, **SHORT)
    assert first == second
    assert len([r for r in read_results(path) if r["kind"] == "run"]) == 2 * 2 * 2


def test_a_file_of_other_settings_is_refused_and_kept(table_pair, tmp_path):
    path = tmp_path / "run.jsonl"
    bench(table_pair, [1], path=path, **SHORT)
    before = path.read_text()
    with pytest.raises(ValueError, match="max_new_tokens is 12, and now it is 13"):
        bench(table_pair, [1], path=path, **(SHORT | {"max_new_tokens": 13}))
    assert path.read_text() == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (json.dumps({"kind": "settings", "version": VERSION + 1}), f"version {VERSION + 1}"),
        (json.dumps({"kind": "run"}), "does not begin with its settings"),
        ("a letter\nto the editor\n", "line 1 is no JSON"),
        ('{"kind": "settings", "ver', "line 1 is no JSON"),
        (json.dumps({"kind": "settings", "version": VERSION}) + "\n[1]\n", "line 2 is no record"),
    ],
)
def test_a_file_that_is_no_results_file_is_refused_by_name(tmp_path, text, says):
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=says):
        Results({}, path)
    assert path.read_text() == text


def test_records_are_on_disk_as_soon_as_they_come(tmp_path):
    results = Results({"pair": "p"}, tmp_path / "new folder" / "run.jsonl")
    results.append("run", seconds=1.5)
    assert read_results(results.path) == results.records
    assert results.of("run") == [{"kind": "run", "seconds": 1.5}]


def test_an_engine_that_fails_on_the_way_is_named_and_what_came_before_is_kept(small_pair, tmp_path, monkeypatch):
    calls = iter(range(100))

    def failing(self, *arguments, **options):
        if next(calls) == 3:  # after the warm-up of both, and one run
            raise RuntimeError("out of tokens")
        return [0] * 12

    monkeypatch.setattr(HuggingFace, "generate", failing)
    path = tmp_path / "run.jsonl"
    with pytest.raises(EngineError, match="hugging face with K = . failed on prompt .: out of tokens; .*run.jsonl"):
        bench(small_pair, [1], path=path, **(SHORT | {"hugging_face": True}))
    assert [r for r in read_results(path) if r["kind"] == "run"]


def test_with_an_assumed_alpha_that_is_what_is_accepted(table_pair):
    report = bench(table_pair, [3], alpha=1.0, **SHORT)
    assert report.rows[0].acceptance_rate == 1.0
    assert report.rows[0].alpha == 1.0
    assert "(assumed)" in report.verdict
    rule = assumed_acceptance(0.25)
    p = q = torch.full((3, 2), 0.5, dtype=torch.float64)
    law = enumerate_outcomes(lambda randomness: rule(torch.tensor([0, 1]), q[:2], p, randomness).accepted)
    assert law == {0: 0.75, 1: 0.25 * 0.75, 2: 0.25**2}
    assert int(rule(torch.tensor([0, 1]), q[:2], p, TorchRandomness.seeded(0)).accepted) in law


def test_random_weights_never_get_a_measured_alpha(small_pair):
    random = Pair("random:small", small_pair.target, small_pair.draft, None, random_weights=True)
    report = bench(random, [2], **SHORT)
    assert report.settings["alpha"] == report.rows[0].alpha == 0.8


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        ({"Ks": [40], "max_new_tokens": 42}, "leave room for 30: give a smaller K"),
        ({"max_new_tokens": 64}, "1 tokens and 64 are to follow"),
        ({"Ks": [1, 11]}, "max_new_tokens 13 or more"),
        ({"path": "run.md"}, "must end in .jsonl"),  # the report would take its place
    ],
)
def test_what_cannot_be_measured_is_refused_before_any_file_is_made(tmp_path, monkeypatch, bad, says):
    monkeypatch.chdir(tmp_path)
    target, draft = (GPT2.random(GPT2Config(60, positions, 32, 1, 2)) for positions in (64, 31))
    with pytest.raises(ValueError, match=says):
        bench(Pair("short", target, draft, None), **({"Ks": [2], "path": "run.jsonl"} | SHORT | bad))
    assert not list(tmp_path.iterdir())


def test_the_first_costs_count_where_two_sessions_wrote_theirs(table_pair, tmp_path):
    path = tmp_path / "run.jsonl"
    report = bench(table_pair, [1], path=path, **SHORT)
    records = read_results(path)
    costs = next(r for r in records if r["kind"] == "costs")
    assert summarise([*records, costs | {"t1": 9.0}]).t1_milliseconds == report.t1_milliseconds
    with pytest.raises(ValueError, match="lack the costs"):
        summarise([r for r in records if r is not costs])


def test_costs_are_relative_to_one_target_pass(small_pair):
    costs = measure_costs(small_pair, [1, 3], longest=6, context=8, budget=0.1)
    assert costs.v[1] == 1.0
    assert set(costs.v) == {1, 2, 3, 4, 5, 6}
    assert set(costs.drafting) == {1, 3}
    assert min(costs.t1, costs.c, costs.prefill) > 0


def test_costs_fit_into_a_short_context():
    models = [GPT2.random(GPT2Config(60, positions, 32, 1, 2)) for positions in (12, 8)]
    costs = measure_costs(Pair("short", *models, None), [4], longest=16, budget=0.1)
    assert max(costs.v) == 11
    assert costs.context == 1


def test_works_are_timed_in_turn_in_changing_order_and_warm_up_is_not_counted():
    calls = []
    seconds = interleaved(
        {name: lambda name=name: calls.append(name) for name in "abc"}, device=torch.device("cpu"), repeats=6, warmup=2
    )
    turns = [calls[i : i + 3] for i in range(0, len(calls), 3)]
    assert [sorted(turn) for turn in turns] == [["a", "b", "c"]] * 8
    assert len({tuple(turn) for turn in turns}) > 1
    assert all(len(times) == 6 for times in seconds.values())
