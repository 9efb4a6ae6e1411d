"""Trees that are drawn from draft models, and trees of several drafters in one. Miao et al. (2024), 2305.09781."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..distributions import Sampling, one_hot
from ..models import LanguageModel
from ..randomness import Randomness
from ..tree import ROOT, Children, Tree, check_candidates, draw_children, merge
from . import Draft, Drafter
from .model import ModelDrafter

WITHOUT, WITH, TOP = "without replacement", "with replacement", "top"


class TreeDrafter(ModelDrafter):
    """Gives ``widths[d]`` children to every node of depth d; ``model`` reads each level in one pass.

    children: how they are found. ``"without replacement"``: drawn, and no child repeats its sibling. ``"with
    replacement"``: each drawn from the same q. ``"top"``: chosen, the most likely ones, so each q is a point mass. At
    temperature 0 only these are several: drawing finds one token then.

    Raises ``ValueError`` when a width is below 1 or above the vocabulary, and for another word for ``children``.
    """

    def __init__(self, model: LanguageModel, vocab_size: int, widths: Sequence[int], children: str = WITHOUT):
        super().__init__(model, vocab_size)
        if children not in (WITHOUT, WITH, TOP):
            raise ValueError(f"children is {children!r}; it must be {WITHOUT!r}, {WITH!r} or {TOP!r}")
        self.widths, self.children = tuple(widths), children
        if not self.widths:
            raise ValueError("widths is empty: give the number of children for at least one level")
        self.nodes = len(Tree.branching(self.widths))
        check_candidates(max(self.widths), vocab_size)
        self.name = f"{model.name}, tree of {self.widths}, {children}"

    def start(self, capacity: int) -> None:
        self.cache = self.model.new_cache(min(capacity, self.model.context) + self.nodes)
        self.read = 0

    def propose(self, context: Int[Tensor, " length"], K: int, sampling: Sampling, randomness: Randomness) -> Draft:
        self.read = len(context)  # behind this many tokens the cache holds nodes
        everything, laws = context, []
        parents: list[int] = []
        level = [ROOT]
        for width in self.widths[:K]:
            topology = {}
            if parents:
                topology = Tree(tuple(parents)).topology(self.cache.length, len(context), context.device)
            logits = self.logits(everything[self.cache.length :], len(level), **topology)
            first = len(parents)
            for nodes, tokens, law in self.find(logits, width, sampling, randomness):
                everything = torch.cat([everything, tokens])
                parents += [level[i] for i in nodes.tolist()]
                laws.append(law)
            level = list(range(first, len(parents)))
        tree = Tree(tuple(parents))
        return Draft(everything[len(context) :], None if self.children == TOP else torch.cat(laws), tree)

    def find(
        self, logits: Float[Tensor, "m vocab"], width: int, sampling: Sampling, randomness: Randomness
    ) -> Iterator[Children]:
        if self.children != TOP:
            return draw_children(sampling.probs(logits), width, randomness, replacement=self.children == WITH)
        nodes = torch.arange(len(logits), device=logits.device)
        return ((nodes, tokens, logits) for tokens in logits.topk(width).indices.unbind(-1))

    def commit(self, length: int, kept: Sequence[int]) -> None:
        text = min(self.read, self.cache.length, length - 1)
        nodes = self.cache.length - text  # the deepest level was drawn, and not read
        self.cache.keep(text, [node for node in kept if node < nodes])
        self.read = self.cache.length


class Merged:
    """Several drafters' proposals in one tree; those of the first are tried first. A chain counts as a tree.

    K: how deep each may draft, whatever the loop asks for. Raises ``ValueError`` for a drafter that observes the
    target: it needs to know where its own tokens lie in the target's pass.
    """

    def __init__(self, drafters: Sequence[Drafter], K: int):
        if seeing := [drafter.name for drafter in drafters if hasattr(drafter, "observe")]:
            raise ValueError(f"{seeing[0]} observes the target and cannot be merged: merge drafters that do not")
        if K < 1 or not drafters or len(set(map(id, drafters))) < len(drafters):
            raise ValueError(f"merging needs K >= 1, not {K}, and one or more drafters, each another object")
        self.drafters, self.K = list(drafters), K
        self.nodes = sum(getattr(drafter, "nodes", K) for drafter in drafters)
        self.name = " + ".join(drafter.name for drafter in drafters)

    def start(self, capacity: int) -> None:
        self.homes: list[list[int]] = [[] for _ in self.drafters]
        for drafter in self.drafters:
            drafter.start(capacity)

    def limit(self, length: int) -> int:
        return min(drafter.limit(length) for drafter in self.drafters)

    def propose(self, context: Int[Tensor, " length"], K: int, sampling: Sampling, randomness: Randomness) -> Draft:
        drafts = [drafter.propose(context, min(K, self.K), sampling, randomness) for drafter in self.drafters]
        tree, tokens = Tree(()), list[int]()
        for i, draft in enumerate(drafts):
            own = draft.tokens.tolist()
            tree, self.homes[i] = merge(tree, tokens, draft.tree or Tree.chain(len(own)), own)
            tokens = tokens + own
        return Draft(torch.cat([draft.tokens for draft in drafts]), laws_of(drafts), tree)

    def commit(self, length: int, kept: Sequence[int]) -> None:
        for drafter, home in zip(self.drafters, self.homes, strict=True):
            # As far as it had drafted the same tokens: what it did not draft has none of its nodes behind it. To the
            # drafter the sequence ends there, with one token that is still to be read; the rest comes as context.
            own = [home.index(node) for node in kept if node in home]
            drafter.commit(length - len(kept) + len(own), own)


def laws_of(drafts: Sequence[Draft]) -> Float[Tensor, "n vocab"] | None:
    """The laws of all tokens in a row; those of chosen tokens are one-hot where others were drawn."""
    drawn = [draft.probs for draft in drafts if draft.probs is not None]
    if not drawn:
        return None
    like = drawn[0][:1]
    laws = [
        one_hot(draft.tokens, like=like.expand(len(draft.tokens), -1)) if draft.probs is None else draft.probs
        for draft in drafts
    ]
    return torch.cat(laws)
