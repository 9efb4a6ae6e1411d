"""Which tokens EAGLE drafts: a chain, a tree of fixed shape, or a tree that grows where the layer is confident.

Each shape is given a draft on its way. It reads the logits after the nodes that were fed last, picks their children,
and feeds those that shall have children themselves. All nodes of one depth are one pass of the layer.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..distributions import Sampling
from ..randomness import Randomness
from ..tree import ROOT, Tree
from . import Draft


class Growing(Protocol):
    """What a shape needs of the drafter (``eagle.Growth``)."""

    @property
    def logits(self) -> Float[Tensor, "m vocab"]:
        """What may follow each of the m tokens that were fed last (at first: the last committed token)."""

    def feed(self, parents: Int[Tensor, " m"], tokens: Int[Tensor, " m"]) -> None:
        """Go one deeper with these m tokens; ``parents[i]`` is the row, among those fed last, that token i follows."""


class Shape(Protocol):
    """Decides which tokens are drafted.

    nodes: the most tokens of one draft. fed: the most that are fed for it. widest: the most children of one node.
    """

    @property
    def name(self) -> str: ...
    @property
    def nodes(self) -> int: ...
    @property
    def fed(self) -> int: ...
    @property
    def widest(self) -> int: ...

    def grow(self, growth: Growing, K: int, sampling: Sampling, randomness: Randomness) -> Draft:
        """A draft of at most depth K."""


class Chain:
    """One token after the other, each drawn from the layer's law, which is reported: any rule of ``verify`` fits."""

    name = "chain"
    nodes = fed = 0  # its tokens have room where the text will go on
    widest = 1

    def grow(self, growth: Growing, K: int, sampling: Sampling, randomness: Randomness) -> Draft:
        tokens, probs = [], []
        while True:
            probs.append(sampling.probs(growth.logits[0]))
            tokens.append(torch.as_tensor(randomness.categorical(probs[-1]), device=probs[-1].device).view(1))
            if len(tokens) == K:
                return Draft(torch.cat(tokens), torch.stack(probs))
            growth.feed(torch.zeros_like(tokens[-1]), tokens[-1])


@dataclass(frozen=True)
class StaticTree:
    """The same tree every time: the children of a node are the tokens most likely after it, the likeliest first."""

    tree: Tree
    name: ClassVar[str] = "static tree"

    @property
    def nodes(self) -> int:
        return len(self.tree)

    @property
    def fed(self) -> int:
        return sum(map(bool, self.tree.children[1:]))  # those that have children

    @property
    def widest(self) -> int:
        return max(map(len, self.tree.children))

    def grow(self, growth: Growing, K: int, sampling: Sampling, randomness: Randomness) -> Draft:
        tree = self.tree.pruned(K)
        tokens, level = torch.zeros(len(tree), dtype=torch.long), [ROOT]
        while level:
            families = [tree.children[node + 1] for node in level]
            ranked = growth.logits.topk(max(map(len, families))).indices
            tokens = tokens.to(ranked.device)
            for family, best in zip(families, ranked, strict=True):
                tokens[list(family)] = best[: len(family)]
            rows = {child: row for row, family in enumerate(families) for child in family if tree.children[child + 1]}
            level = list(rows)
            if level:
                growth.feed(torch.tensor(list(rows.values())).to(ranked.device), tokens[level])
        return Draft(tokens, None, tree)


@dataclass(frozen=True)
class DynamicTree:
    """A tree that spends its nodes where the layer is confident. Li et al. (2024), "EAGLE-2", 2406.16858, section 4.

    A node's confidence is the product of the layer's probabilities on the way to it: about the chance that it is
    accepted, as the layer is well calibrated. At each depth the ``width`` most confident nodes are given their
    ``width`` likeliest children; of all nodes together the ``nodes`` most confident are the draft. They form a tree,
    because no node is more confident than its parent.

    depth: of the deepest nodes. Raises ``ValueError`` unless all three are at least 1.
    """

    nodes: int
    width: int
    depth: int
    name: ClassVar[str] = "dynamic tree"

    def __post_init__(self) -> None:
        if min(self.nodes, self.width, self.depth) < 1:
            raise ValueError(f"{self}: nodes, width and depth must each be 1 or more")

    @property
    def fed(self) -> int:
        return self.width * (self.depth - 1)

    @property
    def widest(self) -> int:
        return self.width

    def grow(self, growth: Growing, K: int, sampling: Sampling, randomness: Randomness) -> Draft:
        logits = growth.logits
        tokens = parents = torch.empty(0, dtype=torch.long, device=logits.device)
        confidence = logits.new_empty(0)
        frontier, reached = parents.new_full((1,), ROOT), logits.new_zeros(1)  # nodes fed last, their log confidence
        for depth in range(1, min(K, self.depth) + 1):
            best = growth.logits.log_softmax(-1).clamp(max=0).topk(self.width)  # rounding must not raise a confidence
            first = len(tokens)
            tokens = torch.cat([tokens, best.indices.flatten()])
            parents = torch.cat([parents, frontier.repeat_interleave(self.width)])
            confidence = torch.cat([confidence, (reached[:, None] + best.values).flatten()])
            if depth < min(K, self.depth):
                chosen = most_confident(confidence[first:], self.width)
                growth.feed(chosen // self.width, tokens[first:][chosen])
                frontier, reached = first + chosen, confidence[first:][chosen]
        return cut_out(tokens, parents, most_confident(confidence, self.nodes))


def most_confident(confidence: Float[Tensor, " n"], count: int) -> Int[Tensor, " kept"]:
    """The places of the ``count`` largest, in ascending order. Of equals the first ones: a parent before its child."""
    known = confidence.nan_to_num(nan=-math.inf)  # NaN would sort first, without its parents
    return known.sort(descending=True, stable=True).indices[:count].sort().values


def cut_out(tokens: Int[Tensor, " n"], parents: Int[Tensor, " n"], kept: Int[Tensor, " m"]) -> Draft:
    """The nodes ``kept`` of a tree as a tree of their own, of chosen tokens."""
    new = {ROOT: ROOT} | {node: i for i, node in enumerate(kept.tolist())}
    return Draft(tokens[kept], None, Tree(tuple(new[parent] for parent in parents[kept].tolist())))
