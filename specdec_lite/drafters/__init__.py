"""Drafters propose; the verifier decides. Whatever a drafter does, the output's law stays the target's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float, Int
from torch import Tensor

from ..distributions import Sampling
from ..randomness import Randomness
from ..tree import Tree


@dataclass(frozen=True)
class Draft:
    """tokens: the proposal. probs: row i is what token i was really drawn from (``None``: chosen, not drawn).

    tree: which token follows which; ``None`` for a chain. In a tree row i is the law of token i given the siblings that
    were drawn before it.
    """

    tokens: Int[Tensor, " n"]
    probs: Float[Tensor, "n vocab"] | None
    tree: Tree | None = None


class Drafter(Protocol):
    """What the decoding loop needs of a drafter. One object serves one sequence at a time.

    A drafter may have two things more. ``nodes``: the most tokens in one of its drafts, when it drafts trees.
    ``observe(target)``: for a drafter that has to see the target's features or its cache; the loop then runs the model
    that it returns instead of the target.
    """

    name: str

    def start(self, capacity: int) -> None:
        """A new sequence begins; it will have at most ``capacity`` tokens."""

    def limit(self, length: int) -> int:
        """How deep one can draft after a context of ``length`` tokens (0: not at all, the context is too long)."""

    def propose(self, context: Int[Tensor, " length"], K: int, sampling: Sampling, randomness: Randomness) -> Draft:
        """At most K >= 1 tokens to follow ``context``, one after the other; a tree has at most depth K."""

    def commit(self, length: int, kept: Sequence[int]) -> None:
        """The sequence now has ``length`` tokens: forget what was drafted and does not stay.

        kept: by their index in the draft, the tokens of it that stay and that the target has read. The last of the
        ``length`` tokens is never among them: it will be fed with the next round.
        """
