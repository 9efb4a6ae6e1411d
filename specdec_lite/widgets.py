"""Sliders around the figures of ``plots``: core ipywidgets, and every figure can also be drawn without them."""

from collections.abc import Callable, Sequence

import ipywidgets as widgets
import numpy as np
from IPython.display import display
from matplotlib.figure import Figure

from . import plots


def overlap_sliders(p: Sequence[float], q: Sequence[float]) -> None:
    """``plots.overlap_figure`` with a slider for each token's weight in p and in q (each law is made to sum to 1)."""
    laws = {"p": weight_sliders("p", p), "q": weight_sliders("q", q)}

    def draw(**weights: int) -> None:
        p, q = (normalised([weights[slider.description] for slider in laws[law]]) for law in ("p", "q"))
        alt = f"Bars of q and p for each token. They share {np.minimum(p, q).sum():.2f} of their area."
        plots.show(plots.overlap_figure(p, q), alt=alt)

    live = widgets.interactive_output(draw, {slider.description: slider for law in laws.values() for slider in law})
    show_live(widgets.VBox([widgets.HBox([widgets.VBox(law) for law in laws.values()]), live]))


def weight_sliders(law: str, probs: Sequence[float]) -> list[widgets.IntSlider]:
    names = [f"{law}({chr(ord('A') + token)})" for token in range(len(probs))]
    return [
        widgets.IntSlider(round(100 * float(prob)), 0, 100, description=name, continuous_update=False)
        for name, prob in zip(names, probs, strict=True)
    ]


def normalised(weights: Sequence[float]) -> np.ndarray:
    """Weights as a law; equal chances when all of them are 0."""
    total = sum(weights)
    return np.array([weight / total if total else 1 / len(weights) for weight in weights])


def show_live(widget: widgets.Widget) -> None:
    """Display a widget; where nothing runs (GitHub, a printout) a sentence stands in its place."""
    bundle = widget._repr_mimebundle_()
    display(bundle | {"text/plain": "(Sliders appear here when the notebook is running.)"}, raw=True)


def figure_sliders(draw: Callable[..., tuple[Figure, str]], **ranges: tuple[float, float, float, float]) -> None:
    """A figure with a slider for each argument of ``draw``, a function that returns a figure and its alt text.

    ranges: for each argument where its slider starts, its least and its largest value, and the step. Whole numbers
    throughout make a slider of whole numbers.
    """
    sliders: dict[str, widgets.Widget] = {}
    for name, (start, least, largest, step) in ranges.items():
        whole = all(isinstance(number, int) for number in (start, least, largest, step))
        kind = widgets.IntSlider if whole else widgets.FloatSlider
        sliders[name] = kind(start, min=least, max=largest, step=step, description=name, continuous_update=False)

    def show(**values: float) -> None:
        fig, alt = draw(**values)
        plots.show(fig, alt=alt)

    show_live(widgets.VBox([*sliders.values(), widgets.interactive_output(show, sliders)]))
