"""Prompt lookup: draft what followed the last few tokens the last time they were written. No model, so c is near 0.

It guesses well where a text copies: code, lists, quotes, and a prompt whose words come back. The tokens are chosen, not
drawn, so q is a point mass. Saxena (2023), prompt lookup decoding; Yang et al. (2023), "Inference with Reference".
"""

from collections.abc import Collection, Sequence

from jaxtyping import Int
from torch import Tensor

from ..distributions import Sampling
from ..randomness import Randomness
from . import Draft


class NGramDrafter:
    """Looks for the last n tokens of the context earlier in it, for n from ``max_n`` down to ``min_n``.

    Of several places the first counts, as it has the longest continuation. ends: token ids that end a text; nothing is
    drafted past one of them. Raises ``ValueError`` unless 1 <= min_n <= max_n.
    """

    name = "n-gram"

    def __init__(self, max_n: int = 3, min_n: int = 1, ends: Collection[int] = ()):
        if not 1 <= min_n <= max_n:
            raise ValueError(f"min_n is {min_n} and max_n {max_n}; it must be 1 <= min_n <= max_n")
        self.lengths = range(max_n, min_n - 1, -1)
        self.ends = frozenset(ends)

    def start(self, capacity: int) -> None: ...

    def limit(self, length: int) -> int:
        return length  # a continuation is part of the context

    def propose(self, context: Int[Tensor, " length"], K: int, sampling: Sampling, randomness: Randomness) -> Draft:
        """At most K tokens, and none when the context holds no repetition."""
        start = self.continuation(context)
        tokens = context[start : start + K]
        for i, token in enumerate(tokens.tolist() if self.ends else ()):
            if token in self.ends:
                tokens = tokens[: i + 1]
                break
        return Draft(tokens, None)

    def commit(self, length: int, kept: Sequence[int]) -> None: ...

    def continuation(self, context: Int[Tensor, " length"]) -> int:
        """Where the text goes on after the first earlier place of the longest n-gram (at the context's end: none)."""
        for n in self.lengths:
            if n < len(context):
                earlier = context[:-1].unfold(0, n, 1)  # an n-gram at the very end has no continuation
                found = (earlier == context[-n:]).all(1).nonzero()
                if len(found):
                    return int(found[0]) + n
        return len(context)
