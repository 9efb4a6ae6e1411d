"""Medusa: extra heads on the target guess several positions at once, and a tree of their candidates is verified.

When a round begins, the target has not read the last committed token yet. The newest feature is the one from which that
token was drawn. So head i, which looks i positions further than the target's own head, guesses the i-th token that is
still open, and guesses it without knowing any token between. Cai et al. (2024), 2401.10774.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..distributions import Sampling
from ..gpt2 import GPT2
from ..randomness import Randomness
from ..tree import Tree, check_candidates
from . import Draft
from .observe import FromNewestFeature
from .trained import load_trained, save_trained, shipped

RANKS = 10  # of each head's choices, so many have their accuracy measured


class MedusaHeads(nn.Module):
    """Head i turns the target's feature into one from which the target's own output head reads the i-th later token.

    Each is a residual block, ``h + SiLU(W_i h + b_i)`` ("Medusa heads" in the paper). The weights begin at 0, so an
    untrained head says what the target says of the next token.

    accuracies: how often each head's first, second, ... choice is the target's first choice (``rank_accuracies`` at
    temperature 0); training measures it, for ``best_tree``.
    """

    accuracies: Float[Tensor, "heads ranks"]

    def __init__(self, width: int, heads: int):
        super().__init__()
        if heads < 1:
            raise ValueError(f"heads is {heads}; there must be 1 or more")
        self.width, self.heads = width, heads
        self.linears = nn.ModuleList(nn.Linear(width, width) for _ in range(heads))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)
        self.register_buffer("accuracies", torch.zeros(heads, RANKS))

    def forward(self, features: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch heads width"]:
        return torch.stack([features + F.silu(linear(features)) for linear in self.linears], -2)

    def save(self, path: Path, target: GPT2) -> None:
        save_trained(path, self, target, "medusa", width=self.width, heads=self.heads)

    @classmethod
    def load(cls, target: GPT2, path: Path | None = None) -> "MedusaHeads":
        """Trained heads (default: those that the package has for the embedded target).

        Raises ``ValueError`` when the file is damaged or belongs to another target.
        """
        sizes, weights = load_trained(path or shipped("medusa"), "medusa", target)
        heads = cls(**sizes).to(target.device, target.dtype)
        heads.load_state_dict(weights)
        return heads.eval().requires_grad_(False)


class MedusaDrafter(FromNewestFeature):
    """Drafts with ``heads`` from the newest feature of ``target``. Needs no cache, and one pass for all positions.

    tree: which of the heads' candidates are proposed. A node of depth d at place r among its siblings is head d's r-th
    choice. These are chosen, not drawn, so they are exact at every temperature. ``None``: a chain in which each head
    draws a token from its own law (at temperature 0: its first choice).
    The first round drafts nothing: there is no feature before the target has read the prompt.

    Raises ``ValueError`` when the heads have another width than the target, when the tree is deeper than there are
    heads, and when it asks for more candidates than there are tokens.
    """

    name = "Medusa"

    def __init__(self, target: GPT2, heads: MedusaHeads, tree: Tree | None = None):
        if heads.width != target.config.width:
            raise ValueError(
                f"these heads read features of width {heads.width}, and those of {target.name} have "
                f"{target.config.width}: use heads trained for this target"
            )
        if tree and tree.depth > heads.heads:
            raise ValueError(f"the tree has depth {tree.depth}, and there are {heads.heads} heads: prune it")
        super().__init__(target)
        self.heads, self.tree = heads, tree
        self.nodes = len(tree) if tree else heads.heads
        if tree:
            check_candidates(1 + max(ranks(tree)), target.vocab_size)

    def propose(self, context: Int[Tensor, " length"], K: int, sampling: Sampling, randomness: Randomness) -> Draft:
        if self.feature is None:
            return Draft(context[:0], None)
        logits = self.target.logits(self.heads(self.feature)[:K])
        if self.tree:
            tree = self.tree.pruned(K) if self.tree.depth > K else self.tree
            return Draft(candidates(tree, logits), None, tree)
        q = sampling.probs(logits)
        return Draft(torch.as_tensor(randomness.categorical(q), device=context.device), q)


def ranks(tree: Tree) -> list[int]:
    """Of each node its place among its siblings, from 0."""
    place = {node: rank for siblings in tree.children for rank, node in enumerate(siblings)}
    return [place[node] for node in range(len(tree))]


def candidates(tree: Tree, logits: Float[Tensor, "heads vocab"]) -> Int[Tensor, " nodes"]:
    """The token of each node: by its depth it is of one head, by its rank one of that head's most likely tokens."""
    rank = torch.tensor(ranks(tree), device=logits.device)
    head = torch.tensor(tree.depths, device=logits.device) - 1
    return logits.topk(int(rank.max()) + 1).indices[head, rank]


@torch.no_grad()
def rank_accuracies(
    target: GPT2,
    heads: MedusaHeads,
    features: Float[Tensor, "rows length width"],
    sampling: Sampling,
    ranks: int = RANKS,
) -> Float[Tensor, "heads ranks"]:
    """How often the r-th choice of head i would be accepted, as a mean over all positions of a text.

    features: the target's, of each position. Entry [i, r] is the mean of p(that choice), with the p that the target has
    i + 1 positions later, given the text's own tokens. At temperature 0: how often it is the target's own choice.
    """
    check_candidates(ranks, target.vocab_size)
    accuracies = []
    for row in features:
        n = len(row) - heads.heads
        chosen = target.logits(heads(row[:n])).topk(ranks).indices
        p = sampling.probs(target.logits(row))
        later = torch.stack([p[i + 1 : i + 1 + n].gather(-1, chosen[:, i]) for i in range(heads.heads)])
        accuracies.append(later.mean(1))
    return torch.stack(accuracies).mean(0)


def best_tree(accuracies: Float[Tensor, "heads ranks"], nodes: int) -> Tree:
    """The tree of ``nodes`` nodes that is expected to have the most tokens accepted, if the heads err independently.

    A node is accepted when all on its way are: the product of their accuracies. The best node that can still be added
    is added, one after the other (the paper's "Searching for the optimized tree construction").
    Raises ``ValueError`` when so many nodes cannot be had.
    """
    heads, most = accuracies.shape
    possible = sum(most**depth for depth in range(1, heads + 1))
    if not 1 <= nodes <= possible:
        raise ValueError(f"nodes is {nodes}; {heads} heads with {most} candidates each give 1 to {possible}")
    table = accuracies.tolist()
    chance: dict[tuple[int, ...], float] = {(): 1.0}
    open_paths: dict[tuple[int, ...], float] = {(0,): table[0][0]}  # their parents and earlier siblings are in the tree
    for _ in range(nodes):
        path = max(open_paths, key=lambda path: open_paths[path])
        chance[path] = open_paths.pop(path)
        before, rank, depth = path[:-1], path[-1], len(path)
        sibling, child = (*before, rank + 1), (*path, 0)
        if rank + 1 < most:
            open_paths[sibling] = chance[before] * table[depth - 1][rank + 1]
        if depth < heads:
            open_paths[child] = chance[path] * table[depth][0]
    return Tree.paths(path for path in chance if path)
