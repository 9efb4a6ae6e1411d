"""Typical acceptance: keep what the target finds plausible enough, not what keeps its law. Lossy, and meant to be.

The rule asks of a candidate only that the target might well have said it, so more candidates pass. What comes out has
no longer the target's law: text drifts to what the drafter likes among the plausible. Cai et al. (2024), "Medusa",
2401.10774, "Typical acceptance".
"""

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .randomness import Randomness
from .tree import Tree, TreeVerification, VerifyTree


def typical(epsilon: float = 0.09, delta: float | None = None) -> VerifyTree:
    """The rule as a ``verify_tree``: x is kept when ``p(x) > min(epsilon, delta * exp(-H(p)))``, H the entropy of p.

    So where the target is undecided (H large), less probability will do. The deepest node wins that is kept with all on
    its way, of several the first; the token after it is drawn from p, as if nothing had been rejected there.
    delta: ``None`` is ``sqrt(epsilon)``. The defaults are those of the paper's code. No draft_probs are looked at. At
    temperature 0, H is 0 and p one-hot: then the rule is exact.

    Raises ``ValueError`` unless both lie in [0, 1): from 1 on a sure token would not pass.
    """
    delta = math.sqrt(epsilon) if delta is None and epsilon >= 0 else delta
    if delta is None or not (0 <= epsilon < 1 and 0 <= delta < 1):
        raise ValueError(f"epsilon is {epsilon} and delta {delta}; both must lie in [0, 1)")

    def verify_typical(
        tree: Tree,
        draft_tokens: Int[Tensor, " n"],
        draft_probs: Float[Tensor, "n vocab"] | None,
        target_probs: Float[Tensor, "n+1 vocab"],
        randomness: Randomness,
    ) -> TreeVerification:
        path = deepest(tree, plausible(tree, draft_tokens, target_probs, epsilon, delta))
        row = path[-1] + 1 if path else 0
        next_token = randomness.categorical(target_probs[row])
        return TreeVerification(path, next_token, complete=not tree.children[row])

    return verify_typical


def plausible(
    tree: Tree, draft_tokens: Int[Tensor, " n"], target_probs: Float[Tensor, "n+1 vocab"], epsilon: float, delta: float
) -> list[bool]:
    """Of each node: does p, given the nodes on its way, find its token plausible?"""
    entropy = torch.special.entr(target_probs).sum(-1)
    threshold = (delta * (-entropy).exp()).clamp(max=epsilon)
    row = torch.tensor(tree.parents, dtype=torch.long, device=target_probs.device) + 1
    return (target_probs[row, draft_tokens] > threshold[row]).tolist()


def deepest(tree: Tree, kept: Sequence[bool]) -> tuple[int, ...]:
    """The way to the deepest node that is kept with all on its way; of equally deep ones to the first."""
    best: tuple[int, ...] = ()
    for node in range(len(tree)):
        path = tree.path_to(node)
        if len(path) > len(best) and all(kept[step] for step in path):
            best = path
    return best
