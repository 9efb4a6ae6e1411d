"""Randomness as an argument: two kinds of draw, made for real or enumerated.

Every random choice of the project is one of two: where does the first rejection fall, and which token is drawn.
``TorchRandomness`` makes them with a generator. ``enumerate_outcomes`` runs a function down every possible sequence of
choices and adds up the probabilities, so the exact law of what *the shipped code* returns can be compared with what it
should be.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from fractions import Fraction
from typing import Protocol, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Outcome = TypeVar("Outcome", bound=Hashable)


class Randomness(Protocol):
    """What an algorithm may ask of chance."""

    def first_failure(self, accept_probs: Float[Tensor, " K"]) -> int | Int[Tensor, ""]:
        """Trial i succeeds with probability ``accept_probs[i]``; the index of the first failure (K: there is none)."""

    def categorical(self, probs: Float[Tensor, "*batch vocab"]) -> int | Int[Tensor, "*batch"]:
        """An index drawn from ``probs``; from each row its own."""


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
        return first_failure_of(accept_probs, self.uniforms(accept_probs.shape))

    def categorical(self, probs: Float[Tensor, "*batch vocab"]) -> Int[Tensor, "*batch"]:
        return token_at(probs, self.uniforms(probs.shape[:-1], dtype=finest(probs.device)))

    def uniforms(self, *shape, dtype: torch.dtype = torch.float32) -> Float[Tensor, "*shape"]:
        return torch.rand(*shape, dtype=dtype, generator=self.generator, device=self.generator.device)


def finest(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # MPS has no float64


def first_failure_of(
    accept_probs: Float[Tensor, "*batch K"], uniforms: Float[Tensor, "*batch K"]
) -> Int[Tensor, "*batch"]:
    """Trial i succeeds when its uniform number lies below ``accept_probs[i]``; the index of the first that does not."""
    accepted = uniforms < accept_probs  # strict: a token of probability 0 fails even when the uniform is 0
    return accepted.int().cumprod(-1).sum(-1)


def token_at(probs: Float[Tensor, "*batch vocab"], uniforms: Float[Tensor, "*batch"]) -> Int[Tensor, "*batch"]:
    """The token in whose share of the cumulative sum the uniform number falls.

    (torch.multinomial checks its input on the host, which waits for the device, and draws a number for every token.)
    """
    cumulative = probs.cumsum(-1, dtype=finest(probs.device))
    points = uniforms.unsqueeze(-1) * cumulative[..., -1:]
    # From the last possible token on there is nothing to fall short of, however the product was rounded.
    ends = cumulative.masked_fill_(cumulative == cumulative[..., -1:], math.inf)
    found = torch.searchsorted(ends, points, right=True).squeeze(-1)
    return found.clamp_(max=probs.shape[-1] - 1)  # NaN probabilities lie beyond the end; the decoding loop reports them


def first_failure_rows(
    accept_probs: Float[Tensor, "rows K"], trials: Sequence[int], rows: Sequence[TorchRandomness]
) -> Int[Tensor, " rows"]:
    """``rows[r].first_failure(accept_probs[r, : trials[r]])`` for every row r, in one go.

    A row's numbers come from its own generator, as many as it needs, so no row's draws depend on the other rows.
    """
    own = [row.uniforms((n,)) for row, n in zip(rows, trials, strict=True)]
    # What is not tried fails: nothing lies above infinity.
    uniforms = pad_sequence(own, batch_first=True, padding_value=math.inf)
    return first_failure_of(accept_probs[:, : uniforms.shape[1]], uniforms)


def categorical_rows(probs: Float[Tensor, "rows vocab"], rows: Sequence[TorchRandomness]) -> Int[Tensor, " rows"]:
    """``rows[r].categorical(probs[r])`` for every row r, in one go."""
    return token_at(probs, torch.cat([row.uniforms(1, dtype=finest(probs.device)) for row in rows]))


class BranchLimitError(RuntimeError):
    """There are more branches than ``enumerate_outcomes`` was allowed to follow."""


class ScriptedRandomness:
    """Follows a given list of choices, then the first possible one; remembers what else was possible."""

    def __init__(self, script: list[int]):
        self.script = script
        self.choices: list[list[int]] = []  # per draw: the chosen index, then those still to be tried
        self.probability: float | Fraction = 1

    def categorical(self, probs):
        if len(probs.shape) > 1:
            return torch.tensor([self.categorical(row) for row in probs], dtype=torch.long)  # there may be none
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
