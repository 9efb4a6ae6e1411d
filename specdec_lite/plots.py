"""Figures of the course: one palette, one way to show a figure, and functions that only draw.

A role keeps its colour in every figure, and differs from the others in hatch and marker as well, so that nothing rests
on colour alone. The colours are Okabe and Ito's, which stay apart for colour-blind readers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML, display
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from .record import Result
from .text import TextStream, decode_text


@dataclass(frozen=True)
class Look:
    """How a role is drawn."""

    colour: str
    hatch: str
    marker: str
    sign: str  # for text without colour: put before and after


PALETTE = {
    "draft": Look("#E69F00", "//", "s", ""),
    "target": Look("#0072B2", "", "o", ""),
    "accepted": Look("#009E73", "", "^", ""),
    "recovered": Look("#D55E00", "xx", "X", "*"),
    "bonus": Look("#56B4E9", "..", "D", "+"),
    "rejected": Look("#999999", "\\\\", "v", "~"),
}
WIDTH, HEIGHT = 6.4, 3.2  # inches: every figure of the course fits a laptop's notebook column


def figure(columns: int = 1, height: float = HEIGHT, width: float = WIDTH):
    """(figure, axes) in the course's style; ``axes`` is an array when there are several columns."""
    fig, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained")
    for axis in np.atleast_1d(axes):
        axis.spines[["top", "right"]].set_visible(False)
    return fig, axes


def show(fig: Figure, *, alt: str) -> None:
    """Display a figure with a text for those who cannot see it: what it shows, and what to learn from it."""
    display(fig, metadata={"image/png": {"alt": alt}})
    display(HTML(f'<p class="figure-text"><small><b>In words:</b> {escape(alt)}</small></p>'))
    plt.close(fig)


def table(rows: Sequence[Sequence[object]], header: Sequence[str], *, measured: bool = False) -> None:
    """Print the numbers behind a figure, in aligned columns.

    measured: the numbers are times of this machine. Each line then begins with ``timing: ``, which tells the test of
    the notebooks not to compare it.
    """
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        line = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        print(f"timing: {line}" if measured else line)


def overlap_figure(p, q, names: Sequence[str] | None = None) -> Figure:
    """Two bars for each token, q and p: the part they share, and what one of them has on top of it.

    The shared parts add up to alpha. What p has on top of q is the residual before it is normalised.
    """
    p, q = (np.asarray(law, dtype=float) for law in (p, q))
    names = names or [chr(ord("A") + token) for token in range(len(p))]
    shared = np.minimum(p, q)
    at_q, at_p = np.arange(len(p)) - 0.2, np.arange(len(p)) + 0.2
    fig, axis = figure()

    def stack(role: str, label: str, at, heights, bottom) -> None:
        look = PALETTE[role]
        axis.bar(at, heights, 0.36, bottom, label=label, color=look.colour, hatch=look.hatch, edgecolor="black")

    stack("accepted", "in both: accepted", [*at_q, *at_p], [*shared, *shared], 0)
    stack("rejected", "only in q: rejected", at_q, q - shared, shared)
    stack("recovered", "only in p: recovered", at_p, p - shared, shared)
    axis.set_xticks([*at_q, *at_p], [f"{law}({name})" for law in "qp" for name in names])
    axis.set(ylim=(0, 1), ylabel="probability", title=f"q and p share alpha = {shared.sum():.2f}")
    fig.legend(frameon=False, loc="outside lower center", ncols=3)
    return fig


def pieces(result: Result, tokenizer) -> list[list[tuple[str, str]]]:
    """For each round the (text, origin) of its tokens; bytes of an unfinished character show with the last of them."""
    stream, left = TextStream(tokenizer), len(result.tokens)
    rounds: list[list[tuple[str, str]]] = []
    for round in result.rounds:
        rounds.append([])
        for token, origin in zip(round.tokens, round.origins, strict=True):
            left -= 1
            piece = stream.push([token], final=left == 0) if tokenizer else f" {token}"
            look = PALETTE[origin]
            word = piece.strip(" ").replace("\n", "↵")
            signed = piece[: len(piece) - len(piece.lstrip(" "))] + look.sign + word + look.sign
            rounds[-1].append((signed if word else piece, origin))
    return rounds


def marked_text(result: Result, tokenizer=None) -> str:
    """The output without colour: rounds parted by ``|``, tokens signed by origin, +bonus+ and *recovered*."""
    return "|".join("".join(text for text, _ in round) for round in pieces(result, tokenizer))


def coloured_html(result: Result, tokenizer=None) -> str:
    """The output with each token coloured, underlined and signed by origin: for ``IPython.display.HTML``."""
    lines = {"accepted": "solid", "recovered": "double", "bonus": "dotted"}

    def span(text: str, origin: str) -> str:
        colour = PALETTE[origin].colour
        style = f"background:{colour}33;border-bottom:3px {lines[origin]} {colour}"
        return f'<span title="{origin}" style="{style}">{escape(text)}</span>'

    legend = " ".join(span(f"{PALETTE[origin].sign}{origin}{PALETTE[origin].sign}", origin) for origin in lines)
    rounds = "|".join("".join(span(*piece) for piece in round) for round in pieces(result, tokenizer))
    return f'<p>{legend}</p><p style="white-space:pre-wrap;line-height:1.8">{rounds}</p>'


def roofline_figure(ns: Sequence[int], ceilings: Mapping[str, Sequence[float]], ridges: Mapping[str, float]) -> Figure:
    """Tokens a second against tokens per pass, a line for each machine, marked at its ridge.

    ceilings: for each machine the most it can do at each of ``ns``. ridges: the n at which its memory and its
    arithmetic take equally long.
    """
    fig, axis = figure()
    styles = zip(("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1))), "osD^v", strict=True)
    for (name, ceiling), (line, marker) in zip(ceilings.items(), styles, strict=False):
        (drawn,) = axis.plot(ns, ceiling, color=PALETTE["target"].colour, linestyle=line, label=name)
        at_ridge = np.interp(ridges[name], ns, ceiling)
        axis.plot(ridges[name], at_ridge, marker, color=drawn.get_color())
        drawn.set(marker=marker, markevery=[0])
    axis.set(xscale="log", yscale="log", xlabel="tokens per pass, n", ylabel="tokens per second, at most")
    fig.legend(loc="outside right upper", frameon=False, fontsize="small")
    return fig


def pass_cost_figure(v: Mapping[int, float], ridge: float) -> Figure:
    """Measured v(n) between its two limits: nothing but weights counts (1), nothing is shared (n).

    ridge: the n from which a roofline expects the cost to rise.
    """
    ns = sorted(v)
    fine = np.geomspace(ns[0], ns[-1], 200)
    fig, axis = figure()
    axis.plot(fine, fine, "--", color=PALETTE["rejected"].colour, label="n passes over 1 token")
    axis.plot(fine, np.maximum(1, fine / ridge), ":", color="black", label="roofline of this machine")
    look = PALETTE["target"]
    axis.plot(ns, [v[n] for n in ns], marker=look.marker, color=look.colour, label="measured")
    axis.set(xscale="log", yscale="log", xlabel="tokens per pass, n", ylabel="cost in passes over 1 token, v(n)")
    axis.set_xticks(ns, [str(n) for n in ns])
    axis.yaxis.set_major_formatter("{x:g}")
    axis.legend(frameon=False)
    return fig


def cache_timeline(rounds: Sequence[Mapping[str, tuple[int, int, int]]], committed: Sequence[int]) -> Figure:
    """What each round did to the two caches: bars for what was kept, what was rolled back, and what is missing.

    rounds: for each round, under "target" and "draft", how many tokens the cache held before it, at its longest, and
    after the rollback. committed: how long the sequence was after each round. Its last token is in neither cache yet.
    """
    fig, axis = figure(height=0.6 + 0.5 * len(rounds))
    for y, (caches, length) in enumerate(zip(rounds, committed, strict=True)):
        for role, at in (("target", y - 0.2), ("draft", y + 0.2)):
            before, reached, after = caches[role]
            look = PALETTE[role]
            bars: list[tuple[int, int, dict[str, object]]] = [
                (0, before, {"color": to_rgba(look.colour, 0.25), "label": f"{role}: from before"}),
                (before, after, {"color": look.colour, "hatch": look.hatch, "label": f"{role}: kept"}),
                (after, reached, {"color": "white", "hatch": PALETTE["rejected"].hatch, "label": "rolled back"}),
                (after, length - 1, {"fill": False, "linestyle": "--", "linewidth": 1.6, "label": "missing"}),
            ]
            for left, right, style in bars:
                if right > left:
                    outline: dict[str, object] = {"edgecolor": "black", "linewidth": 0.8}
                    axis.barh(at, right - left, 0.36, left=left, **(outline | style))
        axis.plot([length, length], [y - 0.45, y + 0.45], color="black", linewidth=2.5, label="committed up to here")
    axis.set_yticks(range(len(rounds)), [f"round {y + 1}" for y in range(len(rounds))])
    axis.invert_yaxis()
    axis.set(xlabel="position in the sequence", xlim=(0, None))
    axis.locator_params(axis="x", integer=True)
    handles = dict(zip(*reversed(axis.get_legend_handles_labels()), strict=True))
    fig.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False, fontsize="small")
    return fig


def rounds_figure(result: Result, tokenizer, first: int = 0, count: int = 6) -> Figure:
    """A row for each round: every draft token, accepted or rejected, and then the token that the target added."""
    rounds = result.rounds[first : first + count]
    longest = max(len(round.draft_tokens) for round in rounds) + 1
    fig, axis = figure(height=0.5 + 0.42 * len(rounds), width=1.15 * longest + 1)
    for y, round in enumerate(rounds):
        rejected = round.draft_tokens[round.accepted :]
        boxes = [(token, "accepted") for token in round.draft_tokens[: round.accepted]]
        boxes += [(token, "rejected") for token in rejected]
        boxes += [
            (token, origin) for token, origin in zip(round.tokens, round.origins, strict=True) if origin != "accepted"
        ]
        for x, (token, role) in enumerate(boxes):
            look = PALETTE[role]
            left = x if role in ("accepted", "rejected") else longest - 1
            axis.barh(y, 0.94, left=left, height=0.8, color=look.colour, alpha=0.3, hatch=look.hatch, edgecolor="black")
            axis.barh(y, 0.86, left=left + 0.04, height=0.5, color="white", alpha=0.8)
            text = decode_text(tokenizer, [token]).replace("\n", "↵").replace("$", r"\$")
            label = f"{look.sign}{text.strip()}{look.sign}" if text.strip() else repr(text)
            axis.text(left + 0.47, y, label, ha="center", va="center", fontsize=9)
    axis.set_yticks(range(len(rounds)), [f"round {first + y + 1}" for y in range(len(rounds))])
    axis.set_xticks(np.arange(longest) + 0.47, [*(f"draft {i + 1}" for i in range(longest - 1)), "target adds"])
    axis.tick_params(length=0)
    axis.invert_yaxis()
    axis.spines[:].set_visible(False)
    handles = [
        Patch(
            facecolor=to_rgba(PALETTE[role].colour, 0.3),
            hatch=PALETTE[role].hatch,
            edgecolor="black",
            label=f"{PALETTE[role].sign}{role}{PALETTE[role].sign}",
        )
        for role in ("accepted", "rejected", "recovered", "bonus")
    ]
    fig.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return fig


def benchmark_figure(report) -> Figure:
    """Two panels from a ``report.Report``: speedup against K, measured and predicted; and v(n), with K c beside it."""
    fig, (left, right) = figure(columns=2, width=9.6)
    Ks = [row.K for row in report.rows]
    measured = [row.speedup for row in report.rows]
    errors = np.abs([[row.speedup_low, row.speedup_high] for row in report.rows] - np.array(measured)[:, None]).T
    bonus, target, draft = PALETTE["bonus"], PALETTE["target"], PALETTE["draft"]
    left.axhline(1, color="black", linewidth=0.8, linestyle="--")
    left.annotate("plain decoding", (Ks[0], 0.98), ha="left", va="top", fontsize="small")
    left.plot(Ks, [row.textbook_speedup for row in report.rows], ":", color="grey", label="textbook, E / (1 + K c)")
    left.plot(Ks, [row.predicted_speedup for row in report.rows], "-", color=target.colour, label="predicted")
    left.errorbar(
        Ks, measured, errors, fmt=bonus.marker, color=bonus.colour, ecolor="black", markeredgecolor="black",
        capsize=3, label="measured, 95% interval",
    )  # fmt: skip
    left.set(xlabel="tokens drafted per round, K", ylabel="speedup", ylim=(0, None), xticks=Ks)
    left.set_title(f"{report.settings['pair']}, temperature {report.settings['sampling']['temperature']:g}")
    left.legend(frameon=False, loc="lower center", fontsize="small")
    ns = sorted(report.v)
    right.plot(ns, [report.v[n] for n in ns], marker=target.marker, color=target.colour, label="target: n tokens, v(n)")
    right.plot(
        list(report.drafting), list(report.drafting.values()), marker=draft.marker, color=draft.colour,
        linestyle="--", label="draft: K tokens, K c",
    )  # fmt: skip
    right.set(xlabel="tokens, n or K", ylabel="cost in target passes over 1 token", ylim=(0, None))
    right.set_title(f"t(1) = {report.t1_milliseconds:.3g} ms, c = {report.c:.2f}")
    right.legend(frameon=False, fontsize="small")
    return fig
