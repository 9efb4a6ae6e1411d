"""From records to numbers: every figure of a report follows from what was written down."""

from dataclasses import asdict

import pytest

from specdec_lite.costs import Costs
from specdec_lite.report import Row, by_position, summarise, verdict
from specdec_lite.results import Results
from specdec_lite.writeup import as_markdown, as_text, write_report

COSTS = Costs(
    t1=0.001,
    v={n: 1 + 0.1 * (n - 1) for n in range(1, 10)},
    drafting={K: 0.1 * K for K in range(1, 9)},
    prefill=3.0,
    context=64,
)
SETTINGS = {
    "pair": "small", "Ks": [2], "prompts": [[1], [2]], "max_new_tokens": 8, "sampling": {"temperature": 1.0},
    "repeats": 1, "seed": 0, "hugging_face": True, "alpha": None, "device": "cpu", "device_name": "a processor",
    "dtype": "float32", "threads": 2, "torch": "2", "transformers": "5",
}  # fmt: skip


def counts(rounds, tokens, drafted, accepted, rejections):
    return {
        "rounds": rounds, "tokens": tokens, "drafted": drafted, "accepted": accepted, "rejections": rejections,
    }  # fmt: skip


def own(K, prompt, seconds, parts, numbers, repeat=0):
    draft, target, other = parts
    return {
        "repeat": repeat, "prompt": prompt, "engine": "own", "K": K, "first_seconds": 1.0, "first_tokens": 1,
        "seconds": seconds, "tokens": 4, "draft_seconds": draft, "target_seconds": target, "other_seconds": other,
        "counts": counts(*numbers), "tried": [2, 1], "accepted": [1, 1],
    }  # fmt: skip


@pytest.fixture
def results():
    """Two prompts; in milliseconds of t(1) = 1: plain takes 4 rounds for 4 tokens, K = 2 takes 2 rounds."""
    results = Results(SETTINGS)
    results.append("session", command="specdec bench --pair small", begun="", load_average=0.0)
    results.append("costs", **asdict(COSTS))
    for prompt in (0, 1):
        results.append("run", **own(0, prompt, 0.0048, (0, 0.004, 0.0008), (5, 5, 0, 0, 0)))
        results.append("run", **own(2, prompt, 0.0032, (0.0004, 0.0024, 0.0004), (3, 5, 6, 3, 2)))
        hf = {"repeat": 0, "prompt": prompt, "engine": "hugging face"}
        results.append("run", **hf, K=0, seconds=2.0, tokens=5, drafted=0, accepted=0)
        results.append("run", **hf, K=2, seconds=4.0, tokens=5, drafted=10, accepted=4)
    return results


def test_a_row_holds_ratios_pooled_rates_and_the_prediction(results):
    report = summarise(results.records)
    (row,) = report.rows
    assert row.speedup == row.speedup_low == row.speedup_high == pytest.approx(1.5)
    assert row.alpha == row.alpha_low == row.alpha_high == pytest.approx(3 / 5)  # 3 accepted, 2 rejections
    assert row.acceptance_rate == pytest.approx(3 / 6)
    assert row.tokens_per_round == pytest.approx(5 / 3)
    assert row.expected_tokens_per_round == pytest.approx(1 + 0.6 + 0.36)
    assert row.textbook_speedup == pytest.approx(1.96 / (1 + 2 * 0.1))
    # other: 0.2 of t(1) in a plain round, 0.2 in a speculative one
    assert row.predicted_speedup == pytest.approx(1.96 * 1.2 / (1.2 + 2 * 0.1 + 0.2))
    assert row.loop == pytest.approx({"draft": 0.2, "target": 1.2, "other": 0.2})
    assert report.plain_tokens_per_second == pytest.approx(4 / 0.0048)


def test_hugging_face_is_compared_with_the_prefill_on_both_sides(results):
    report = summarise(results.records)
    assert report.hf_plain_ratio == pytest.approx((2.0 / 5) / (1.0048 / 5))
    assert report.rows[0].hf_assisted_ratio == pytest.approx((4.0 / 5) / (1.0032 / 5))
    assert report.rows[0].hf_acceptance_rate == pytest.approx(0.4)


def test_seconds_per_token_are_medians_over_repeats(results):
    for repeat, seconds in ((1, 0.0048), (2, 1000.0)):
        for prompt in (0, 1):
            results.append("run", **own(0, prompt, seconds, (0, 0.004, 0.0008), (5, 5, 0, 0, 0), repeat))
            results.append("run", **own(2, prompt, 0.0032, (0, 0.0024, 0.0004), (3, 5, 6, 3, 2), repeat))
            hf = {"repeat": repeat, "prompt": prompt, "engine": "hugging face", "drafted": 0, "accepted": 0}
            results.append("run", **hf, K=0, seconds=2.0, tokens=5)
            results.append("run", **hf, K=2, seconds=4.0, tokens=5)
    assert summarise(results.records).rows[0].speedup == pytest.approx(1.5)


def test_an_incomplete_block_counts_for_nothing(results):
    before = summarise(results.records)
    results.append("run", **own(0, 0, 100.0, (0, 1, 1), (5, 5, 0, 0, 0), repeat=1))
    assert summarise(results.records) == before


def test_a_block_that_was_run_again_counts_once_and_as_it_was_last(results):
    results.append("run", **own(2, 0, 0.0016, (0.0004, 0.001, 0.0002), (3, 5, 6, 3, 2)))
    assert summarise(results.records).rows[0].speedup == pytest.approx(2 * 0.0048 / (0.0016 + 0.0032))


def test_without_a_complete_block_the_error_says_how_to_go_on(results):
    with pytest.raises(ValueError, match="run the same command again"):
        summarise(results.records[:4])


def test_acceptance_by_position_is_conditional_and_pooled():
    runs = [{"tried": [4, 2, 1], "accepted": [2, 1, 1]}, {"tried": [4], "accepted": [3]}]
    assert by_position(runs) == [5 / 8, 1 / 2, 1.0]


def row_with(speedup, low, high, K=4):
    return Row(K, 0.5, 0.4, 0.6, 1.9, 1.9, 0.3, 100.0, speedup, low, high, 1.0, 1.2, {}, None, None)


def test_the_verdict_names_K_or_the_reason_or_says_that_it_cannot_tell():
    assert "speculate with K = 4: 1.50x" in verdict(row_with(1.5, 1.4, 1.6), COSTS)
    assert "do not speculate" in verdict(row_with(0.9, 0.85, 0.95), COSTS)
    assert "1.90 tokens per round, and a round costs as much as 1.80" in verdict(row_with(0.9, 0.85, 0.95), COSTS)
    assert "too close to call" in verdict(row_with(1.02, 0.97, 1.07), COSTS)
    assert verdict(row_with(1.5, 1.4, 1.6), COSTS, assumed=0.8).startswith("if a draft token is accepted with chance")


def test_the_report_is_made_again_from_its_file_alone(results, tmp_path):
    kept = Results(SETTINGS, tmp_path / "run.jsonl")
    for record in results.records[1:]:
        kept.append(record["kind"], **{key: value for key, value in record.items() if key != "kind"})
    report, page, picture = write_report(kept.path)
    assert report == summarise(results.records)
    assert picture.read_bytes().startswith(b"\x89PNG")
    text = page.read_text(encoding="utf-8")
    assert "specdec bench --pair small" in text
    assert f"]({picture.name})" in text
    assert "assumed" not in text
    assert "| 2 | 0.60 | 1.67 |" in text


def test_an_assumed_alpha_is_said_to_be_one(results):
    records = [results.records[0] | {"alpha": 0.8}, *results.records[1:]]
    report = summarise(records)
    for text in (as_text(report), as_markdown(report, "picture.png")):
        assert "alpha = 0.8 was assumed, not measured" in text
