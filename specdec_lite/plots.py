"""Figures of the course: one palette, one way to show a figure, and functions that only draw.

A role keeps its colour in every figure, and differs from the others in hatch and marker as well, so that nothing rests
on colour alone. The colours are Okabe and Ito's, which stay apart for colour-blind readers.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

import matplotlib.pyplot as plt
import numpy as np
from IPython.display import HTML, display
from matplotlib.figure import Figure

from .record import Result


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
    "accepted": Look("#009E73", "", "o", ""),
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


def table(rows: Sequence[Sequence[object]], header: Sequence[str]) -> None:
    """Print the numbers behind a figure, in aligned columns."""
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
