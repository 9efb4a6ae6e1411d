"""EAGLE: draft in feature space. One layer guesses the target's next feature; the target's own head makes tokens of it.

Why features: the target's work is in them, and from one position to the next they are more regular than tokens. Why the
token ahead: a feature does not say which token was then drawn, and what follows depends on it. So the layer reads the
feature of one position together with the token of the next. Li et al. (2024), "EAGLE", 2401.15077, section 3.1.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from ..distributions import Sampling
from ..gpt2 import GPT2, Block, GPT2Config, KVCache, next_slots
from ..randomness import Randomness
from ..tree import Tree, check_candidates
from . import Draft
from .eagle_tree import Chain, DynamicTree, Shape, StaticTree
from .observe import OnTarget
from .trained import load_trained, save_trained, shipped


class EagleLayer(nn.Module):
    """(feature at position t, token t + 1) -> a guess of the feature at position t + 1.

    One layer of the target's kind with a key-value cache of its own, in which slot t holds the pair of position t.
    Embedding and output head are the target's: used, but neither learned nor stored.
    """

    def __init__(self, config: GPT2Config):
        super().__init__()
        self.config = replace(config, layers=1)
        self.joined = nn.Linear(2 * config.width, config.width)
        self.block = Block(config)

    def new_cache(self, capacity: int, rows: int = 1) -> KVCache:
        weight = self.joined.weight
        return KVCache(self.config, rows, capacity, weight.device, weight.dtype)

    def forward(
        self,
        features: Float[Tensor, "rows n width"],
        embedded: Float[Tensor, "rows n width"],
        cache: KVCache,
        mask: Bool[Tensor, "rows 1 n end"] | None = None,
    ) -> Float[Tensor, "rows n width"]:
        """Append n pairs to the cache; ``embedded`` is ``embed`` of the tokens one position ahead of the features."""
        slots = next_slots(cache, features.shape[1], None, mask, cache.keys[0].dtype)
        x = self.joined(torch.cat([features, embedded], -1))
        guesses = self.block(x, cache.keys[0], cache.values[0], slots)
        cache.lengths = [length + features.shape[1] for length in cache.lengths]
        return guesses

    def save(self, path: Path, target: GPT2) -> None:
        save_trained(path, self, target, "eagle")

    @classmethod
    def load(cls, target: GPT2, path: Path | None = None) -> "EagleLayer":
        """The layer that was trained for ``target`` (default: the shipped one, for the embedded target).

        Raises ``ValueError`` when the file is missing, cut short, or belongs to another target.
        """
        _, weights = load_trained(path or shipped("eagle"), "eagle", target)
        layer = cls(target.config).to(target.device, target.dtype)
        layer.load_state_dict(weights)
        return layer.eval().requires_grad_(False)


def embed(target: GPT2, tokens: Int[Tensor, "*n"], positions: Int[Tensor, "*n"]) -> Float[Tensor, "*n width"]:
    """What the target's first layer reads for these tokens at these positions."""
    return target.token_embedding(tokens) + target.position_embedding(positions)


class Growth:
    """A draft on its way: its pairs are fed behind those of the text, all of one depth in one pass of the layer."""

    def __init__(self, target: GPT2, layer: EagleLayer, cache: KVCache, root: Float[Tensor, "1 width"]):
        self.target, self.layer, self.cache = target, layer, cache
        self.text = self.last_position = cache.length  # pair t ends in token t + 1
        self.guesses = root
        self.visible = torch.zeros(1, 0, dtype=torch.bool, device=root.device)

    @property
    def logits(self) -> Float[Tensor, "m vocab"]:
        """What may follow each of the m tokens fed last (at first: the last committed token)."""
        return self.target.logits(self.guesses)

    def feed(self, parents: Int[Tensor, " m"], tokens: Int[Tensor, " m"]) -> None:
        """Go one deeper with these m tokens; ``parents[i]`` is the row, among those fed last, that token i follows."""
        self.last_position += 1
        own = torch.eye(len(tokens), dtype=torch.bool, device=tokens.device)
        self.visible = torch.cat([self.visible[parents], own], 1)  # the nodes fed so far that are on the way here
        mask = torch.cat([self.visible.new_ones(len(tokens), self.text), self.visible], 1)
        embedded = embed(self.target, tokens, torch.full_like(tokens, self.last_position))
        self.guesses = self.layer(self.guesses[parents][None], embedded[None], self.cache, mask[None, None])[0]


class EagleDrafter(OnTarget):
    """Drafts with ``layer``, which was trained for ``target``.

    shape: what to draft. ``None``: a chain, drawn from the layer's law. A ``Tree`` or a ``DynamicTree``: the likeliest
    tokens, which are chosen, so each is a point mass (q reported for a token that was *not drawn* biases the output).

    Nothing is drafted in the first round, when the target has not read the prompt yet. Raises ``ValueError`` for a
    shape with more children of one node than the vocabulary has tokens, and from ``observe`` for another target.
    """

    def __init__(self, target: GPT2, layer: EagleLayer, shape: Tree | DynamicTree | None = None):
        super().__init__(target)
        self.layer = layer
        self.shape: Shape = Chain() if shape is None else StaticTree(shape) if isinstance(shape, Tree) else shape
        check_candidates(self.shape.widest, target.vocab_size)
        self.name = f"EAGLE {self.shape.name}"
        if shape is not None:
            self.nodes = self.shape.nodes

    def start(self, capacity: int) -> None:
        self.cache = self.layer.new_cache(capacity + self.shape.fed)
        self.features = self.layer.joined.weight.new_zeros(0, self.layer.config.width)  # not yet fed

    def limit(self, length: int) -> int:
        # The deepest token that is fed is the last but one, and needs a position.
        return max(0, self.target.context - length + 1)

    def propose(self, context: Int[Tensor, " length"], K: int, sampling: Sampling, randomness: Randomness) -> Draft:
        if not len(self.features):
            return Draft(context[:0], None)
        growth = Growth(self.target, self.layer, self.cache, self.catch_up(context))
        draft = self.shape.grow(growth, K, sampling, randomness)
        self.cache.rollback(len(context) - 1)  # what follows came from guesses; the true features are on their way
        return draft

    def commit(self, length: int, kept: Sequence[int]) -> None:
        self.features = torch.cat([self.features, self.observed.committed(kept)])

    def catch_up(self, context: Int[Tensor, " length"]) -> Float[Tensor, "1 width"]:
        """Feed the true features with the tokens after them; the guess of the feature at the last token."""
        positions = torch.arange(self.cache.length + 1, len(context), device=context.device)
        embedded = embed(self.target, context[self.cache.length + 1 :], positions)
        guesses = self.layer(self.features[None], embedded[None], self.cache)[0]
        self.features = self.features[:0]
        return guesses[-1:]
