"""Token trees: several guesses for each position, verified in one pass of the target.

A draft need not be a chain. In a tree a token has siblings, and each of them its own children. The target reads all
nodes at once, because the topology mask lets a node see the text before the tree and its own ancestors, and nothing
else. Then the tree is walked from the root: children are tried in turn, and a child that fails is subtracted from p.
Miao et al. (2024), "SpecInfer", 2305.09781.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .distributions import residual
from .randomness import Randomness

ROOT = -1  # the last committed token: every tree hangs on it, and no tree holds it


@dataclass(frozen=True)
class Tree:
    """The shape of a draft: ``parents[i]`` is the node that node i follows, or ``ROOT``.

    Parents come before their children. Raises ``ValueError`` that names the node for a cycle or an orphan.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "parents", tuple(int(parent) for parent in self.parents))
        for node, parent in enumerate(self.parents):
            if not ROOT <= parent < len(self.parents):
                raise ValueError(
                    f"node {node} is an orphan: its parent {parent} is neither a node nor the root, {ROOT}"
                )
            if parent >= node:
                raise ValueError(
                    f"node {node} has parent {parent}, which does not come before it: "
                    "a tree has no cycles, and lists parents before their children"
                )

    def __len__(self) -> int:
        return len(self.parents)

    @classmethod
    def chain(cls, length: int) -> "Tree":
        """The tree with one branch."""
        return cls(tuple(range(-1, length - 1)))

    @classmethod
    def branching(cls, widths: Sequence[int]) -> "Tree":
        """Every node of depth d has ``widths[d]`` children; the root has depth 0. (3, 2) has 3 + 6 nodes."""
        if any(width < 1 for width in widths):
            raise ValueError(f"widths are {tuple(widths)}; every level needs at least 1 child for each node")
        parents: list[int] = []
        level = [ROOT]
        for width in widths:
            first = len(parents)
            parents += [node for node in level for _ in range(width)]
            level = list(range(first, len(parents)))
        return cls(tuple(parents))

    @classmethod
    def paths(cls, paths: Iterable[Sequence[int]]) -> "Tree":
        """Medusa's notation: a node is the ranks on its way from the root; (0, 1) is the root's first child's second.

        Nodes come out by depth, then by ranks. Raises ``ValueError`` when a node's parent or an earlier sibling is
        missing.
        """
        nodes = sorted({tuple(path) for path in paths}, key=lambda path: (len(path), path))
        index = {(): ROOT} | {path: i for i, path in enumerate(nodes)}
        for path in nodes:
            earlier = (*path[:-1], path[-1] - 1) if path and path[-1] else path[:-1]
            if not path or earlier not in index:
                raise ValueError(f"{path} is an orphan: the tree lacks {earlier}, its parent or its sibling before it")
        return cls(tuple(index[path[:-1]] for path in nodes))

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Of each node; children of the root have depth 1. A node's position is that of the root plus its depth."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def depth(self) -> int:
        return max(self.depths, default=0)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """``children[0]`` are the root's, ``children[i + 1]`` those of node i, each in the order of their trials."""
        children: list[list[int]] = [[] for _ in range(len(self) + 1)]
        for node, parent in enumerate(self.parents):
            children[parent + 1].append(node)
        return tuple(map(tuple, children))

    @cached_property
    def visible(self) -> Bool[Tensor, "nodes nodes"]:
        """The topology mask: node i sees node j when j is i itself or one of its ancestors."""
        visible = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents):
            if parent != ROOT:
                visible[node] |= visible[parent]
        return visible

    def path_to(self, node: int) -> tuple[int, ...]:
        """The nodes on the way from the root to ``node``, which is the last of them."""
        return () if node == ROOT else (*self.path_to(self.parents[node]), node)

    def pruned(self, depth: int) -> "Tree":
        """The nodes down to ``depth``; they keep their order, so the indices of those that stay may change."""
        keep = [node for node in range(len(self)) if self.depths[node] <= depth]
        new = {ROOT: ROOT} | {node: i for i, node in enumerate(keep)}
        return Tree(tuple(new[self.parents[node]] for node in keep))

    def topology(self, cached: int, length: int, device: torch.device) -> dict[str, Tensor]:
        """What a model has to be told of a pass over this tree behind ``length`` tokens of text.

        The pass feeds what its cache lacks, which holds ``cached`` of all these tokens: text and nodes in their order.
        positions: ``Int[1, n]``. mask: ``Bool[1, 1, n, end]``; a token of the text sees what came before it, a node
        sees the text and its ancestors.
        """
        depths = torch.tensor(self.depths, dtype=torch.long)
        positions = torch.cat([torch.arange(length), length - 1 + depths])[cached:]
        mask = torch.ones(len(positions), length + len(self), dtype=torch.bool).tril(cached)
        mask[max(length - cached, 0) :, length:] = self.visible[max(cached - length, 0) :]
        return {"positions": positions[None].to(device), "mask": mask[None, None].to(device)}


@dataclass(frozen=True)
class TreeVerification:
    """path: the accepted nodes, from the root down. next_token: the token after them. complete: no child was left to
    try there, so ``next_token`` is a bonus; otherwise all of them were rejected, and it is recovered."""

    path: tuple[int, ...]
    next_token: int | Int[Tensor, ""]
    complete: bool

    @property
    def accepted(self) -> int:
        return len(self.path)


def verify_tree(
    tree: Tree,
    draft_tokens: Int[Tensor, " n"],
    draft_probs: Float[Tensor, "n vocab"] | None,
    target_probs: Float[Tensor, "n+1 vocab"],
    randomness: Randomness,
) -> TreeVerification:
    """Walk down from the root: at each node its children are tried in turn, as if each were a draft of its own.

    A child x that was drawn from q is accepted with probability min(1, p(x)/q(x)). When it is rejected, what is still
    to be drawn has the law residual(p, q), and that is p for the next child. The output's law is p whatever the q are,
    as long as each is what its token was really drawn from, *given the siblings before it*. For children drawn with
    replacement it is the draft's law; for children drawn without, the same law less their earlier siblings,
    renormalised. Miao et al. (2024), "SpecInfer", Algorithm 2.

    draft_probs: row i is that q for node i (``None``: the drafter did not draw but chose; every q is one-hot).
    target_probs: row 0 is p after the root, row i + 1 after node i.
    """
    step = chosen_child if draft_probs is None else drawn_child
    path: list[int] = []
    row = 0
    while True:
        candidates = tree.children[row]
        child, token = step(candidates, draft_tokens, draft_probs, target_probs[row], randomness)
        if child is None:
            return TreeVerification(tuple(path), token, complete=not candidates)
        path.append(child)
        row = child + 1


Step = tuple[int | None, int | Int[Tensor, ""]]  # the accepted child, or None and the token drawn instead


def drawn_child(candidates: Sequence[int], draft_tokens, draft_probs, p, randomness: Randomness) -> Step:
    """Recursive rejection at one node."""
    for child in candidates:
        token, q = draft_tokens[child], draft_probs[child]
        if int(randomness.first_failure((p[token] / q[token]).view(1))):
            return child, token
        p = residual(p, q)
    return None, randomness.categorical(p)


def chosen_child(candidates: Sequence[int], draft_tokens, draft_probs, p, randomness: Randomness) -> Step:
    """The same with one draw when every q is one-hot.

    A chosen token x is then accepted with probability p(x), and a rejection takes x out of p. To try one after the
    other like that is to draw from p once and to look whether the token is among the candidates.
    """
    token = randomness.categorical(p)
    if candidates:
        chosen = int(token)
        for child in candidates:
            if int(draft_tokens[child]) == chosen:
                return child, token
    return None, token


VerifyTree = Callable[
    [Tree, Int[Tensor, " n"], Float[Tensor, "n vocab"] | None, Float[Tensor, "n+1 vocab"], Randomness],
    TreeVerification,
]


def merge(tree: Tree, tokens: Sequence[int], other: Tree, other_tokens: Sequence[int]) -> tuple[Tree, list[int]]:
    """Two trees as one, the other's nodes behind those of the first; and for each of the other's nodes its home.

    Under one parent the first tree's children are tried first. A node of the other that repeats one of their tokens
    stays as a leaf: its trial counts, as its q has still to be subtracted. But its home, where its children hang, is
    the node that it repeats: of the two only that one can be accepted. (When it fails, p has no more of this token.)
    """
    parents = list(tree.parents)
    home: list[int] = []
    known: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(parents, tokens, strict=True)):
        known.setdefault((parent, int(token)), node)  # of nodes that repeat each other the first
    for parent, token in zip(other.parents, other_tokens, strict=True):
        under = ROOT if parent == ROOT else home[parent]
        home.append(known.setdefault((under, int(token)), len(parents)))
        parents.append(under)
    return Tree(tuple(parents)), home


# Which nodes get a child, its token, and the law that the token was really drawn from.
Children = tuple[Int[Tensor, " m"], Int[Tensor, " m"], Float[Tensor, "m vocab"]]


def draw_children(
    q: Float[Tensor, "nodes vocab"], width: int, randomness: Randomness, *, replacement: bool
) -> Iterator[Children]:
    """``width`` children for each node, drawn from its row of q: the first child of every node, then the second.

    Without replacement a child's law is q less the earlier siblings, renormalised; a node gets no more children when q
    has no more tokens.
    """
    nodes = torch.arange(len(q), device=q.device)
    for _ in range(width):
        tokens = torch.as_tensor(randomness.categorical(q), device=q.device)
        yield nodes, tokens, q
        if not replacement:
            left = q.scatter(-1, tokens[:, None], 0)
            mass = left.sum(-1)
            nodes, q = nodes[mass > 0], (left / mass[:, None])[mass > 0]


def check_candidates(count: int, vocab: int) -> None:
    if count > vocab:
        raise ValueError(f"{count} candidates for one position, and the vocabulary has {vocab} tokens: ask for fewer")
