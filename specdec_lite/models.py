"""What the rest of the library asks of a language model: tokens in, logits out, and a cache that has a length."""

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class Cache(Protocol):
    """What a model remembers of the tokens it was fed."""

    @property
    def length(self) -> int:
        """Tokens it holds."""

    def rollback(self, length: int) -> None:
        """Forget back to ``length`` tokens; ``ValueError`` when it holds fewer."""

    def keep(self, length: int, nodes: Sequence[int]) -> None:
        """Keep ``length`` tokens and, of those behind them, the ones at ``nodes``: an accepted path through a tree."""


class LanguageModel(Protocol):
    """Everything that can be a target or a draft."""

    name: str
    vocab_size: int  # of the logits; may be padded beyond the tokenizer's
    context: int  # the most tokens it can hold; a very large number where nothing limits it

    @property
    def device(self) -> torch.device: ...

    def new_cache(self, capacity: int, rows: int = 1) -> Cache:
        """An empty cache for up to ``capacity`` tokens in each of ``rows`` sequences."""

    def __call__(
        self,
        tokens: Int[Tensor, "rows n"],
        cache: Any,
        last: int | None = None,
        *,
        positions: Int[Tensor, "rows n"] | None = None,
        mask: Bool[Tensor, "rows 1 n end"] | None = None,
    ) -> Float[Tensor, "rows n_last vocab"]:
        """Append the n tokens to a cache that ``new_cache`` gave; logits at the last ``last`` positions (None: all).

        positions, mask: of the tokens of a tree, and which of all ``end`` tokens each of them sees. Without them the
        tokens are a plain continuation. Runs without gradients.
        """


def additive(visible: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """0 where visible, -inf elsewhere. Made once, for all layers: attention would else do it in each of them."""
    return torch.zeros_like(visible, dtype=dtype).masked_fill_(~visible, -math.inf)
