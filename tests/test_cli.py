"""The command line: what it prints, what it returns, and how it refuses."""

import json

import pytest

from specdec_lite import cli


@pytest.fixture
def run(capsys):
    """run("demo", "--json") -> (exit code, stdout, stderr)."""

    def call(*arguments):
        try:
            code = cli.main(arguments)
        except SystemExit as stop:  # argparse
            code = stop.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


SHORT = ("--max-new-tokens", "24")


def test_demo_reports_identity_acceptance_and_both_speedups(run):
    code, out, _ = run("demo", "--json", *SHORT)
    report = json.loads(out)
    assert code == 0
    assert {"pair", "identical", "alpha", "tokens_per_round", "speedup", "predicted_speedup"} <= report.keys()
    assert report["pair"] == "tiny"
    assert report["identical"] is True
    assert 0 < report["alpha"] <= 1
    assert 1 <= report["tokens_per_round"] <= report["K"] + 1
    assert report["new_tokens"] == 24


def test_demo_works_without_colour_and_without_a_terminal(run):
    code, out, _ = run("demo", *SHORT)
    assert code == 0
    assert "\033" not in out
    assert "token for token" in out
    assert cli.PROMPTS["story"] in out


def test_demo_shows_origins_in_colour_on_a_terminal(run, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    _, out, _ = run("demo", *SHORT)
    assert cli.COLOURS["accepted"] in out


def test_demo_says_when_the_two_texts_differ(run, monkeypatch):
    real = cli.autoregressive

    def wrong(*arguments, **options):
        result = real(*arguments, **options)
        result.tokens[-1] ^= 1
        return result

    monkeypatch.setattr(cli, "autoregressive", wrong)
    code, out, _ = run("demo", *SHORT)
    assert code == 1
    assert "differ" in out


def test_sampled_demo_does_not_claim_identity(run):
    code, out, _ = run("demo", "--json", "--temperature", "1", *SHORT)
    assert code == 0
    assert json.loads(out)["identical"] is None


def test_demo_with_plain_decoding_or_no_tokens_divides_by_nothing(run):
    for options in (("--K", "0"), ("--max-new-tokens", "0")):
        code, out, err = run("demo", "--json", "--max-new-tokens", "8", *options)
        assert code == 0, err
        assert json.loads(out)["alpha"] is None


def test_generate_streams_the_text_that_json_reports(run):
    arguments = ("generate", "--seed", "3", *SHORT)
    _, text, _ = run(*arguments)
    _, report, _ = run(*arguments, "--json")
    assert text == json.loads(report)["text"] + "\n"


def test_generate_ends_at_a_stop_string(run):
    _, out, _ = run("generate", "--json", "--stop", " the", "--max-new-tokens", "200")
    report = json.loads(out)
    assert report["finish_reason"] == "stop"
    assert report["text"].count(" the") == 1


@pytest.fixture
def quick_bench(run, tmp_path):
    """quick_bench(*arguments): a small run with its results in a folder of the test: (code, out, err, results file)."""
    results = tmp_path / "run.jsonl"
    small = ("--K", "1", "3", "--repeats", "1", "--max-new-tokens", "8", "--out", str(results))
    return lambda *arguments: (*run("bench", *small, *arguments), results)


def test_bench_reports_a_row_per_K_and_a_verdict(quick_bench):
    code, out, err, _ = quick_bench("--json", "--prompts", "Once upon a time", "The king said")
    report = json.loads(out)
    assert code == 0, err
    assert [row["K"] for row in report["rows"]] == [1, 3]
    row_keys = {"alpha", "tokens_per_round", "speedup", "speedup_low", "speedup_high", "predicted_speedup"}
    assert all(row_keys <= row.keys() for row in report["rows"])
    assert {"c", "v", "best_k_measured", "best_k_predicted", "verdict"} <= report.keys()
    assert report["hf_plain_ratio"] > 0
    assert 0 < report["rows"][1]["hf_acceptance_rate"] <= 1


def test_bench_prints_a_table_and_leaves_a_report_with_a_picture(run, quick_bench):
    code, out, err, results = quick_bench("--no-hugging-face", "--prompts", "Once upon a time")
    assert code == 0
    assert "predicted" in out
    assert "speculat" in out.splitlines()[-1] or "too close" in out.splitlines()[-1]
    assert all(str(results.with_suffix(ending)) in err for ending in (".jsonl", ".md", ".png"))
    page = results.with_suffix(".md").read_text(encoding="utf-8")
    assert f"--out {results}" in page
    assert results.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    results.with_suffix(".md").unlink()
    code, again, _ = run("report", str(results))
    assert (code, again) == (0, out)
    assert results.with_suffix(".md").read_text(encoding="utf-8") == page


def test_bench_writes_a_new_file_here_when_none_is_named(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run("bench", "--K", "1", "--repeats", "1", "--max-new-tokens", "4", "--no-hugging-face", "--prompts", "The king")
    assert sorted(path.suffix for path in tmp_path.glob("specdec-bench-tiny-*")) == [".jsonl", ".md", ".png"]


def test_bench_does_not_mix_two_runs_in_one_file(quick_bench):
    quick_bench("--no-hugging-face", "--prompts", "Once upon a time")
    code, out, err, _ = quick_bench("--no-hugging-face", "--prompts", "The king")
    assert (code, out) == (2, "")
    assert "holds another run: its prompts" in err
    assert len(err.strip().splitlines()) == 1


def test_methods_gives_a_row_for_every_way_to_draft_and_report_gives_it_again(run, tmp_path):
    results = tmp_path / "all.jsonl"
    small = ("--repeats", "1", "--max-new-tokens", "8", "--prompts", "Once upon a time")
    code, out, err = run("methods", *small, "--out", str(results))
    assert code == 0, err
    for method in ("plain decoding", "draft model", "SpecInfer", "n-gram", "early exit", "Medusa", "EAGLE"):
        assert method in out
    code, again, err = run("report", str(results))
    assert (code, again) == (0, out)
    assert str(results.with_suffix(".md")) in err
    code, rows, _ = run("report", "--json", str(results))
    assert json.loads(rows)[0]["name"] == "plain decoding"


def test_auto_is_a_draft_length(run):
    code, out, _ = run("generate", "--K", "auto", "--json", "--temperature", "0", *SHORT)
    fixed = run("generate", "--json", "--temperature", "0", *SHORT)[1]
    assert code == 0 and json.loads(out)["text"] == json.loads(fixed)["text"]
    code, _, err = run("generate", "--K", "many", *SHORT)
    assert code == 2 and "many" in err


CHECK = ("check", "--prompts", "Once upon a time", "--max-new-tokens", "8")


def test_check_passes_a_lossless_engine(run):
    code, out, err = run(*CHECK, "--json", "--engine", "batch", "--draws", "420")
    report = json.loads(out)
    assert code == report["exit_code"] == 0, err
    assert report["verdict"].startswith("lossless")
    assert all({"name", "passed", "detail", "p_value", "optional"} == row.keys() for row in report["rows"])
    assert report["p_value"] >= report["false_alarm"]


def test_check_prints_a_line_per_row_and_cannot_tell_without_draws(run):
    code, out, err = run(*CHECK, "--draws", "0")
    assert code == 2
    assert err == ""
    assert "PASS  greedy" in out
    assert out.splitlines()[-1].startswith("could not tell: law")


@pytest.fixture
def engine_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def zeros(prompt, *, max_new_tokens, sampling, seed):\n    return [0] * max_new_tokens\n"
        "def broken(prompt, **options):\n    raise RuntimeError('out of pages')\n"
    )
    return file


def test_check_rejects_an_engine_that_is_not_lossless(run, engine_file):
    code, out, _ = run(*CHECK, "--engine", f"{engine_file}:zeros", "--draws", "200")
    assert code == 1
    assert "FAIL  greedy" in out
    assert "FAIL  law" in out
    assert out.splitlines()[-1].startswith("not lossless: greedy")


def test_check_tells_in_one_line_what_an_engine_raised_and_keeps_the_rows(run, engine_file):
    code, out, err = run(*CHECK, "--engine", f"{engine_file}:broken")
    assert code == 2
    assert err == "specdec: broken raised RuntimeError on prompt 1: out of pages\n"
    assert "PASS  tokenizers" in out


def test_doctor_lists_rows_and_passes_where_the_course_can_run(run):
    code, out, _ = run("doctor")
    assert code == 0
    assert "OK    pair tiny" in out
    _, out, _ = run("doctor", "--json")
    assert all({"name", "ok", "detail", "optional"} == row.keys() for row in json.loads(out))


def test_doctor_fails_when_the_embedded_pair_is_missing(run, monkeypatch, tmp_path):
    monkeypatch.setattr("specdec_lite.doctor.WEIGHTS", tmp_path)
    code, out, _ = run("doctor")
    assert code == 1
    assert "FAIL  pair tiny" in out


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (("generate", "--temperature", "-1"), "temperature is -1.0"),
        (("generate", "--top-p", "0"), "top_p is 0.0"),
        (("generate", "--top-k", "-3"), "top_k is -3"),
        (("generate", "--K", "-2"), "K is -2"),
        (("demo", "--K", "-2"), "K is -2"),
        (("demo", "--K", "2000"), "give a smaller K"),
        (("generate", "--max-new-tokens", "-1"), "max_new_tokens is -1"),
        (("generate", "--prompt", ""), "prompt is empty"),
        (("generate", "--prompt", "a b c d " * 500), "shorten"),
        (("generate", "--stop", ""), "empty stop string"),
        (("generate", "--pair", "gpt3"), "unknown pair"),
        (("generate", "--device", "tpu"), "available: cpu"),
        (("generate", "--dtype", "int8"), "float32"),
        (("generate", "--target", "somewhere"), "both target= and draft="),
        (("bench", "--K", "0"), "at least one K >= 1"),
        (("bench", "--repeats", "0"), "one repeat"),
        (("bench", "--alpha", "1.2", "--pair", "random:gpt2-xl"), "alpha is 1.2"),
        (("bench", "--K", "-1"), "K is -1"),
        (("check", "--engine", "vllm"), "unknown engine 'vllm'"),
        (("check", "--draws", "-1"), "draws is -1"),
        (("check", "--K", "0"), "nothing would be drafted"),
        (("check", "--temperature", "0"), "temperature is 0"),
        (("report", "nowhere.jsonl"), "there is no results file nowhere.jsonl"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(run, arguments, hint):
    code, out, err = run(*arguments)
    assert code == 2
    assert hint in err
    assert len(err.strip().splitlines()) == 1
    assert out == "" or "Once upon" not in out


def test_an_unknown_command_is_refused(run):
    code, _, err = run("dmeo")
    assert code == 2
    assert "invalid choice" in err
