"""For drafters that live on the target: the target runs as it would, and what it saw on the way is kept for them."""

from collections.abc import Sequence
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor, cat

from ..gpt2 import GPT2, KVCache
from ..models import LanguageModel


class Observed:
    """``target``, with the features and the cache of its last pass in reach.

    cache: the target's own. features: ``GPT2.hidden`` for every token that was fed: what the output head reads.
    Raises ``ValueError`` for a target that is no GPT-2 of this library, which alone shows its features.
    """

    cache: KVCache
    features: Float[Tensor, "n width"]

    def __init__(self, target: LanguageModel):
        if not isinstance(target, GPT2):
            raise ValueError(
                f"{target.name} does not show its features: this drafter needs a target of this library's GPT2 class"
            )
        self.target = target
        self.name, self.vocab_size, self.context = target.name, target.vocab_size, target.context
        self.device = target.device

    def new_cache(self, capacity: int, rows: int = 1) -> KVCache:
        self.cache = self.target.new_cache(capacity, rows)
        return self.cache

    def __call__(
        self, tokens: Int[Tensor, "1 n"], cache: KVCache, last: int | None = None, **tree: Any
    ) -> Float[Tensor, "1 n_last vocab"]:
        hidden = self.target.hidden(tokens, cache, **tree)
        self.features = hidden[0]
        self.drafted = 0 if last is None else last - 1  # the loop reads a row for each draft token and one more
        return self.target.last_logits(hidden, last)

    def committed(self, kept: Sequence[int]) -> Float[Tensor, "m width"]:
        """Of the last pass the features that count: of the text before the draft, then of the tokens that stay."""
        text = len(self.features) - self.drafted
        return cat([self.features[:text], self.features[text:][list(kept)]])


class OnTarget:
    """A drafter that lives on one target: in ``observed`` it has what that target saw."""

    def __init__(self, target: GPT2):
        self.target = target

    def observe(self, target: LanguageModel) -> Observed:
        """Raises ``ValueError`` when it is not the target that this drafter was made for."""
        if target is not self.target:
            raise ValueError(
                f"this drafter was made for {self.target.name}: make one for {target.name}, this object in this form"
            )
        self.observed = Observed(target)
        return self.observed


class FromNewestFeature(OnTarget):
    """A drafter that needs nothing but the feature of the last token that the target has read."""

    def start(self, capacity: int) -> None:
        self.feature: Float[Tensor, " width"] | None = None

    def limit(self, length: int) -> int:
        return self.target.context  # it reads one feature, however long the text is

    def commit(self, length: int, kept: Sequence[int]) -> None:
        self.feature = self.observed.committed(kept)[-1]  # of position length - 2
