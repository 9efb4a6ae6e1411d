"""How many tokens to draft, decided anew before each round: as many as promise the most tokens per second.

The choice may look at earlier rounds and at nothing else. Whatever K a round has, the tokens it gives have the target's
law, as long as K does not depend on what the round itself will draw; so the output stays lossless. Adaptive draft
lengths: Leviathan et al. (2023), section 5; SpecDec++ (Huang et al. 2024, 2405.19715).
"""

from collections import deque
from collections.abc import Callable
from itertools import cycle
from typing import Protocol, cast

import numpy as np

from .record import Round
from .theory import best_K, check_K, free_verification

FIRST_ALPHA, FIRST_TRIALS = 0.7, 4.0  # what is believed before the first round, and how many trials that is worth
MEMORY = 16  # rounds: what is so long ago counts for 1/e
EXPLORE_EVERY = 16  # rounds


class KPolicy(Protocol):
    """What the decoding loop asks for a draft length. One object serves one text after the other."""

    def choose(self) -> int:
        """K for the round that begins."""

    def learn(self, round: Round) -> None:
        """What came of it."""


class FixedK:
    """The same K in every round. Raises ``ValueError`` unless it is a whole number, 0 or more."""

    def __init__(self, K: int):
        check_K(K)
        self.K = K

    def choose(self) -> int:
        return self.K

    def learn(self, round: Round) -> None: ...


class AutoK:
    """The K with the largest predicted speedup, for given costs and the alpha of the last rounds (``theory.best_K``).

    c, v, overhead: as in ``theory.predicted_speedup``; ``costs.measure_costs`` measures them. A dict of v goes in as
    ``v.__getitem__`` and must reach ``largest + 1``. Where K = 0 is best, every 16th round drafts one token all the
    same, or nobody would notice that the draft became good again. Nothing here looks at a clock: a seed repeats a run.

    ``alpha``: accepted over tried draft tokens, where older rounds count for less.
    Raises ``ValueError`` when ``largest`` is below 1, v is too short, or c, v and overhead make no time.
    """

    def __init__(
        self, c: float, v: Callable[[int], float] = free_verification, overhead: float = 0.0, largest: int = 8
    ):
        check_K(largest)
        if largest == 0:
            raise ValueError("largest is 0, so there is nothing to choose from: give K=0 for plain decoding")
        self.c, self.v, self.overhead, self.largest = c, v, overhead, largest
        self.accepted, self.tried = FIRST_ALPHA * FIRST_TRIALS, FIRST_TRIALS
        self.rounds = 0
        try:
            self.best()  # bad costs are found before any work
        except LookupError:
            raise ValueError(f"v is not known for every n up to {largest + 1}: measure it, or lower largest") from None

    @property
    def alpha(self) -> float:
        return self.accepted / self.tried

    def best(self) -> int:
        return best_K(self.alpha, self.c, self.v, self.overhead, self.largest).K

    def choose(self) -> int:
        return self.best() or int(self.rounds % EXPLORE_EVERY == 0)

    def learn(self, round: Round) -> None:
        kept = 1 - 1 / MEMORY
        self.accepted = kept * self.accepted + round.accepted
        self.tried = kept * self.tried + round.accepted + round.rejected
        self.rounds += 1


class TimedK(AutoK):
    """``AutoK`` that reads the costs off the rounds' own times: what ``K="auto"`` stands for.

    It takes the time of a round to be a straight line in the number of drafted tokens, drafting and verification
    together: ``seconds = plain + step * n``. So c is ``step / plain``, and v is 1. The first rounds, and later every
    16th, try out one length after the other (0, 1, 2, 4, ...), so that there is always a line to see. For a text of a
    few rounds that is a good part of it: keep the object and hand it to the next call, and it goes on where it was.

    The choices depend on a clock. The output's law does not: it is the target's for every K. But a seed no longer
    repeats the tokens of a *sampled* text. For that, and where v(n) is no line, measure first and give ``AutoK`` the
    costs.
    """

    def __init__(self, largest: int = 8):
        super().__init__(c=0.1, largest=largest)  # replaced as soon as two lengths are timed
        lengths = [0, *(2**i for i in range(largest.bit_length()))]
        self.start, self.lengths = len(lengths), cycle(reversed(lengths))
        self.K = 0
        self.times: deque[tuple[int, float]] = deque(maxlen=64)  # (drafted, seconds)

    def choose(self) -> int:
        explores = self.rounds <= self.start or self.rounds % EXPLORE_EVERY == 0
        self.K = next(self.lengths) if explores else self.best()
        return self.K

    def learn(self, round: Round) -> None:
        # In a tree there are more nodes than K; K is what can be chosen. The first round of all reads the prompt.
        if self.rounds:
            self.times.append((min(self.K, len(round.draft_tokens)), round.seconds))
        super().learn(round)
        if len({n for n, _ in self.times}) > 1:
            plain, step = line(*np.array(self.times).T)
            self.c = max(0.0, step) / max(plain, step / 100)


def line(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """(value at 0, slope) by the median slope of all pairs: one slow round in four does no harm. Sen (1968)."""
    i, j = np.triu_indices(len(x), 1)
    apart = x[i] != x[j]
    slope = np.median((y[j] - y[i])[apart] / (x[j] - x[i])[apart])
    return float(np.median(y - slope * x)), float(slope)


def policy_of(K: int | str | KPolicy) -> KPolicy:
    """What the loop's argument K means: a fixed number, ``"auto"`` (a new ``TimedK``), or a policy as it is.

    Raises ``ValueError`` for anything else.
    """
    if isinstance(K, str):
        if K != "auto":
            raise ValueError(f'K is {K!r}; it must be a whole number, "auto" or a policy (specdec_lite.adaptive)')
        return TimedK()
    return cast(KPolicy, K) if hasattr(K, "choose") else FixedK(K)
