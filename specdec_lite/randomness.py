"""Randomness as an argument: two kinds of draw, made for real or enumerated.

Every random choice of the project is one of two: where does the first rejection fall, and which token is drawn.
``TorchRandomness`` makes them with a generator. ``enumerate_outcomes`` runs a function down every possible sequence of
choices and adds up the probabilities, so the exact law of what *the shipped code* returns can be compared with what it
should be.
"""

import math
from collections.abc import Callable, Hashable
from fractions import Fraction
from typing import Protocol, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

Outcome = TypeVar("Outcome", bound=Hashable)


class Randomness(Protocol):
    """What an algorithm may ask of chance."""

    def first_failure(self, accept_probs: Float[Tensor, " K"]) -> int | Int[Tensor, ""]:
        """Trial i succeeds with probability ``accept_probs[i]``; the index of the first failure (K: there is none)."""

    def categorical(self, probs: Float[Tensor, " vocab"]) -> int | Int[Tensor, ""]:
        """An index drawn from ``probs``."""


class TorchRandomness:
    """Draws with a ``torch.Generator`` of its own, and leaves the global generators alone.

    The results are 0-d tensors on the generator's device: nothing waits for the device to catch up.
    """

    def __init__(self, generator: torch.Generator):
        self.generator = generator

    @classmethod
    def seeded(cls, seed: int | None, device: torch.device | str = "cpu") -> "TorchRandomness":
        """The same draws for the same seed; ``None`` seeds from the operating system."""
        generator = torch.Generator(device)
        if seed is None:
            generator.seed()
        else:
            generator.manual_seed(seed)
        return cls(generator)

    def first_failure(self, accept_probs: Float[Tensor, " K"]) -> Int[Tensor, ""]:
        uniforms = torch.rand(accept_probs.shape, generator=self.generator, device=self.generator.device)
        accepted = uniforms < accept_probs  # strict: a token of probability 0 fails even when the uniform is 0
        return accepted.int().cumprod(0).sum()

    def categorical(self, probs: Float[Tensor, " vocab"]) -> Int[Tensor, ""]:
        # Where a uniform number falls in the cumulative sum. (torch.multinomial checks its input on the host, which
        # waits for the device, and draws a number for every token.) MPS has no float64.
        exact = torch.float32 if probs.device.type == "mps" else torch.float64
        cumulative = probs.cumsum(0, dtype=exact)
        point = torch.rand(1, dtype=exact, generator=self.generator, device=self.generator.device) * cumulative[-1]
        # From the last possible token on there is nothing to fall short of, however the product was rounded.
        ends = cumulative.masked_fill_(cumulative == cumulative[-1], math.inf)
        found = torch.searchsorted(ends, point, right=True)[0]
        return found.clamp_(max=len(probs) - 1)  # NaN probabilities lie beyond the end; the decoding loop reports them


class BranchLimitError(RuntimeError):
    """There are more branches than ``enumerate_outcomes`` was allowed to follow."""


class ScriptedRandomness:
    """Follows a given list of choices, then the first possible one; remembers what else was possible."""

    def __init__(self, script: list[int]):
        self.script = script
        self.choices: list[list[int]] = []  # per draw: the chosen index, then those still to be tried
        self.probability: float | Fraction = 1

    def categorical(self, probs) -> int:
        return self._choose(list(probs.tolist()))

    def first_failure(self, accept_probs) -> int:
        law, reached = [], 1
        for accept in accept_probs.tolist():
            accept = min(accept, 1)
            law.append(reached * (1 - accept))
            reached = reached * accept
        return self._choose([*law, reached])

    def _choose(self, law: list) -> int:
        possible = [index for index, probability in enumerate(law) if probability > 0]
        draw = len(self.choices)
        if draw < len(self.script):
            possible = possible[possible.index(self.script[draw]) :]
        self.choices.append(possible)
        self.probability = self.probability * law[possible[0]]
        return possible[0]


def enumerate_outcomes(
    fn: Callable[[Randomness], Outcome], *, max_branches: int = 200_000
) -> dict[Outcome, float | Fraction]:
    """The exact law of ``fn(randomness)``: every outcome with its probability.

    ``fn`` is run once per branch, from the start, so it must depend on nothing but its argument. Probabilities are
    float64, or exact when the distributions it draws from hold ``Fraction``. Branches of probability 0 are not entered.

    Raises ``BranchLimitError`` when there are more than ``max_branches`` branches.
    """
    law: dict[Outcome, float | Fraction] = {}
    script: list[int] = []
    for _ in range(max_branches):
        randomness = ScriptedRandomness(script)
        outcome = fn(randomness)
        law[outcome] = law.get(outcome, 0) + randomness.probability
        choices = randomness.choices
        while choices and len(choices[-1]) == 1:
            choices.pop()
        if not choices:
            return law
        script = [possible[0] for possible in choices[:-1]] + [choices[-1][1]]
    raise BranchLimitError(
        f"more than {max_branches} branches: use a smaller vocabulary, a smaller K or fewer tokens, "
        "or raise max_branches"
    )
