"""The same pair in another form: the weights it has, in a layout or in passes that run faster somewhere."""

from dataclasses import replace

from .models import LanguageModel
from .packed import PackedGPT2
from .pairs import Pair
from .static import STATIC_MODES, StaticGPT2

MODES = ("packed", *STATIC_MODES)


def accelerate(pair: Pair, mode: str) -> Pair:
    """``pair`` with both models in another form; the tokenizer is shared, the name says which form it is.

    mode: ``"packed"`` (``packed.py``): for large models in float32 on a CPU. ``"compile"``, ``"graphs"``,
    ``"compile+graphs"`` and ``"eager"`` (``static.py``): passes of fixed shape, for a GPU.
    Raises ``ValueError`` for an unknown mode, and where the form does not fit the models or the device.
    """
    if mode not in MODES:
        raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(MODES)}")

    def form(model: LanguageModel) -> LanguageModel:
        return PackedGPT2(model) if mode == "packed" else StaticGPT2(model, mode)

    return replace(pair, name=f"{pair.name} ({mode})", target=form(pair.target), draft=form(pair.draft))
