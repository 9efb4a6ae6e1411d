"""Drafters propose; the verifier decides. Whatever a drafter does, the output's law stays the target's."""

from dataclasses import dataclass
from typing import Protocol

from jaxtyping import Float, Int
from torch import Tensor

from ..distributions import Sampling
from ..randomness import Randomness


@dataclass(frozen=True)
class Draft:
    """tokens: the proposal. probs: row i is what token i was really drawn from (``None``: chosen, not drawn)."""

    tokens: Int[Tensor, " K"]
    probs: Float[Tensor, "K vocab"] | None


class Drafter(Protocol):
    """What the decoding loop needs of a drafter. One object serves one sequence at a time."""

    name: str

    def start(self, capacity: int) -> None:
        """A new sequence begins; it will have at most ``capacity`` tokens."""

    def limit(self, length: int) -> int:
        """How many tokens can be drafted after a context of ``length`` tokens (0: none, the context is too long)."""

    def propose(self, context: Int[Tensor, " length"], K: int, sampling: Sampling, randomness: Randomness) -> Draft:
        """At most K >= 1 tokens to follow ``context``."""

    def commit(self, length: int) -> None:
        """The sequence now has ``length`` tokens: forget what was drafted and not accepted."""
