"""A report to be read: as lines for a terminal, and as Markdown with a picture beside the results file."""

from pathlib import Path
from typing import Any

from .plots import benchmark_figure
from .report import Report, summarise
from .results import read_results


def number(value: float | None, unit: str = "", digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


COLUMNS = {
    "K": lambda row: str(row.K),
    "alpha": lambda row: f"{row.alpha:.2f}",
    "E": lambda row: f"{row.tokens_per_round:.2f}",
    "tokens/s": lambda row: (
        f"{row.tokens_per_second:.0f}" if row.tokens_per_second >= 10 else f"{row.tokens_per_second:.2f}"
    ),
    "measured": lambda row: f"{row.speedup:.2f}x",
    "95% interval": lambda row: f"{row.speedup_low:.2f}-{row.speedup_high:.2f}",
    "predicted": lambda row: f"{row.predicted_speedup:.2f}x",
    "textbook": lambda row: f"{row.textbook_speedup:.2f}x",
    "over HF assisted": lambda row: number(row.hf_assisted_ratio, "x"),
}


def main_table(report: Report) -> list[list[str]]:
    """A header and a row per K, as text."""
    return [list(COLUMNS), *([cell(row) for cell in COLUMNS.values()] for row in report.rows)]


def gap_table(report: Report) -> list[list[str]]:
    """What separates prediction and measurement: each part of a round outside of the loop, and in it, over t(1)."""
    rows = [["K", "E by formula", "E counted", "draft", "in the loop", "target", "in the loop", "other, in the loop"]]
    plain = report.plain_loop
    rows.append(["0", "1.00", "1.00", "0.00", "0.00", "1.00", number(plain["target"]), number(plain["other"])])
    for row in report.rows:
        rows.append(
            [
                *(str(row.K), number(row.expected_tokens_per_round), number(row.tokens_per_round)),
                *(number(report.drafting[row.K]), number(row.loop["draft"])),
                *(number(report.v[row.K + 1]), number(row.loop["target"]), number(row.loop["other"])),
            ]
        )
    return rows


def head_lines(report: Report) -> list[str]:
    """The run in words: what, on what, and the costs of single passes."""
    s: dict[str, Any] = report.settings
    shown = [n for n in (2, 3, 4, 5, 6, 8, 12, 16) if n in report.v]
    lines = [
        f"{s['pair']} on {s['device']} ({s['device_name']}), {s['dtype']}, {s['threads']} threads, torch {s['torch']}",
        f"temperature {s['sampling']['temperature']:g}, {len(s['prompts'])} prompts x {s['repeats']} repeats "
        f"x {s['max_new_tokens']} tokens",
        f"t(1) = {report.t1_milliseconds:.2f} ms, c = {report.c:.3f}, prefill = {report.prefill:.1f}, "
        + ", ".join(f"v({n}) = {report.v[n]:.2f}" for n in shown),
        f"plain decoding {report.plain_tokens_per_second:.3g} tokens/s"
        + (f", {report.hf_plain_ratio:.2f}x Hugging Face generate" if report.hf_plain_ratio else ""),
    ]
    if s["alpha"] is not None:
        lines.append(f"alpha = {s['alpha']:g} was assumed, not measured: acceptances were drawn with this chance")
    return lines


def aligned(table: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table]


def markdown_table(table: list[list[str]]) -> list[str]:
    header, *rows = (f"| {' | '.join(row)} |" for row in table)
    return [header, "|" + "---:|" * len(table[0]), *rows]


def as_text(report: Report) -> str:
    """For a terminal."""
    return "\n".join([*head_lines(report), "", *aligned(main_table(report)), "", report.verdict])


def as_markdown(report: Report, picture: str) -> str:
    """The whole report; ``picture``: the name of the figure's file."""
    positions = ", ".join(f"{rate:.2f}" for rate in report.acceptance_by_position)
    best = report.best
    return "\n".join(
        [
            f"# {report.settings['pair']}: speculative decoding, measured and predicted",
            "",
            f"**{report.verdict[0].upper()}{report.verdict[1:]}.**",
            "",
            *(f"- {line}" for line in head_lines(report)),
            f"- best K: {report.best_k_measured} measured, {report.best_k_predicted} predicted; "
            f"at K = {best.K} measured / predicted = {best.speedup / best.predicted_speedup:.2f}",
            "",
            *markdown_table(main_table(report)),
            "",
            "E: tokens per round, counted. Measured: over plain decoding of the same run. Predicted: from alpha, the",
            "costs of single passes and the rest of a round. Textbook: E / (1 + K c), as if verification were free.",
            "",
            f"![Measured and predicted speedup against K, and the cost of a pass over n tokens]({picture})",
            "",
            "## What separates prediction and measurement",
            "",
            "Each part of a round in units of t(1): measured outside of the loop, and found inside it.",
            "",
            *markdown_table(gap_table(report)),
            "",
            f"Acceptance by draft position, of the drafts that were verified there (largest K): {positions}.",
            "If these are level, the acceptances are as the formula assumes them to be.",
            "",
            "## Repeat it",
            "",
            *([f"    {command}" for command in report.commands] or ["From Python: `specdec_lite.bench.bench`."]),
            "",
        ]
    )


def write_report(results_file: str | Path) -> tuple[Report, Path, Path]:
    """Make the report of a results file and put it beside it: (report, its Markdown file, its picture)."""
    source = Path(results_file)
    report = summarise(read_results(source))
    page, picture = source.with_suffix(".md"), source.with_suffix(".png")
    benchmark_figure(report).savefig(picture, dpi=150)
    page.write_text(as_markdown(report, picture.name), encoding="utf-8", newline="\n")
    return report, page, picture
