"""The gallery's wing for token trees: slips with several candidates for one position, each with its exact law.

With one candidate the slips in the verification do no harm, so a test on chains passes them. The shipped decoding loop
runs them all: ``rule.wrap(drafter)`` proposes, and ``rule.verify_tree`` verifies.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from .distributions import residual
from .gallery import Misdrawn, WrongRule, greedy_draft, unchanged
from .randomness import Randomness, enumerate_outcomes
from .tree import ROOT, Step, Tree, TreeVerification, chosen_child, draw_children, drawn_child

# A verification's slip is in what it does at one node. So each rule has the arguments of ``tree.drawn_child``, under
# the names of the formulas: d are the draft tokens, q their laws as reported, p is the target's law after the node, and
# the children are tried in their order.


def siblings_against_one_p(children: Sequence[int], d, q, p, randomness: Randomness) -> Step:
    """Every sibling is tried against the target's p; what the failed ones have taken is subtracted at the end, once.

    Each trial is right for a draft of one token. But the second is only made when the first has failed, and what is to
    be drawn then has another law. It is made by putting a loop around the test and leaving the residual behind it.
    """
    for child in children:
        if int(randomness.first_failure((p[d[child]] / q[child, d[child]]).view(1))):
            return child, d[child]
    return None, randomness.categorical(residual(p, q[children[-1]]) if children else p)


def full_q_for_every_sibling(children: Sequence[int], d, q, p, randomness: Randomness) -> Step:
    """Siblings are drawn without replacement, and all verified with the draft's softmax, as if drawn with it.

    The second was drawn from q less the first, renormalised; that is its q. It is made by storing one row of q for each
    node of the tree and not one for each draw.
    """
    own = q.clone()
    own[list(children)] = q[list(children[:1])]
    return drawn_child(children, d, own, p, randomness)


def repeated_siblings_skipped(children: Sequence[int], d, q, p, randomness: Randomness) -> Step:
    """Siblings are drawn with replacement, and one that repeats another's token is taken out of the tree.

    To try it again looks useless: it must fail. But its q is then subtracted once more, and the siblings that are left
    were drawn under the condition that they differ. It is made to save the target a node. (With candidates that were
    chosen it is right.)
    """
    tokens = d.tolist()
    different = [child for i, child in enumerate(children) if tokens[child] not in [tokens[c] for c in children[:i]]]
    return drawn_child(different, d, q, p, randomness)


def top_candidates(q: Float[Tensor, " vocab"]) -> Float[Tensor, " vocab"]:
    """The candidates are the draft's most likely tokens, and its softmax is reported as their q.

    They were chosen and not drawn, so each q is a point mass. Under the true q the likely tokens are drafted more often
    than reported, and come too often. It is made by taking ``topk`` where the proof draws: Medusa and EAGLE-2 do, and
    stay exact only where they verify point masses.
    """
    return greedy_draft(q)


@dataclass(frozen=True)
class WrongTreeRule(WrongRule):
    """One slip of a tree. step: what the verification does at one node; proposes_from: as in the gallery."""

    step: Callable[..., Step] = drawn_child

    def verify_tree(self, tree: Tree, draft_tokens, draft_probs, target_probs, randomness) -> TreeVerification:
        """``tree.verify_tree`` with this slip in it; where the drafter chose its tokens there is none."""
        step = chosen_child if draft_probs is None else self.step
        path: tuple[int, ...] = ()
        while True:
            row = path[-1] + 1 if path else 0
            child, token = step(tree.children[row], draft_tokens, draft_probs, target_probs[row], randomness)
            if child is None:
                return TreeVerification(path, token, complete=not tree.children[row])
            path = (*path, child)

    @property
    def why(self) -> str:
        """What the slip is, why it is one, and where people make it."""
        slip = self.step if self.proposes_from is unchanged else self.proposes_from
        return inspect.getdoc(slip) or self.title


WRONG_TREE_RULES: dict[str, WrongTreeRule] = {
    rule.name: rule
    for rule in (
        WrongTreeRule("siblings_against_one_p", "Try every sibling against the same p", step=siblings_against_one_p),
        WrongTreeRule("full_q_for_every_sibling", "Do not renormalise q", step=full_q_for_every_sibling),
        WrongTreeRule("repeated_siblings_skipped", "Drop repeated siblings", step=repeated_siblings_skipped),
        WrongTreeRule("top_candidates", "Take the top candidates, report the softmax", proposes_from=top_candidates),
    )
}


def node_law(
    rule: WrongTreeRule, p: Float[Tensor, " vocab"], q: Float[Tensor, " vocab"], width: int, *, replacement=False
) -> Float[Tensor, " vocab"]:
    """The exact law of the token after a node with ``width`` children drawn from q, enumerated: p for a right rule."""
    p, q = (torch.as_tensor(law, dtype=torch.float64) for law in (p, q))

    def play(randomness: Randomness) -> int:
        drawn = draw_children(q[None], width, Misdrawn(randomness, rule.proposes_from), replacement=replacement)
        _, tokens, laws = map(torch.cat, zip(*drawn, strict=True))
        tree = Tree((ROOT,) * len(tokens))
        outcome = rule.verify_tree(tree, tokens, laws, p.expand(len(tree) + 1, -1), randomness)
        return int(tokens[outcome.path[0]] if outcome.path else outcome.next_token)

    law = enumerate_outcomes(play)
    return torch.tensor([law.get(token, 0.0) for token in range(len(p))], dtype=torch.float64)
