"""alpha, estimated three ways, each with its standard error.

1. ``overlap_on_text`` reads a text with both models and averages sum min(p, q): alpha by definition (Leviathan et al.
   (2023), Corollary 3.6), with no draft and no luck in it.
2. ``from_rounds`` counts the trials of a run: maximum likelihood. A draft token after a rejection is no trial.
3. ``accepted_over_drafted`` counts every drafted token. It is what engines report, and no alpha: it falls with K.

Each is a ratio of two sums. What is summed comes in pieces that chance made together (the tokens of a passage, the
rounds of a run), and the standard error is read off the spread between the pieces.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from .distributions import Sampling, overlap
from .models import LanguageModel
from .pairs import Pair
from .record import Result, Round
from .text import encode_prompt

PIECE = 128  # tokens read in one pass: bounds the memory that the distributions take


@dataclass(frozen=True)
class Estimate:
    """value: a rate in [0, 1]. trials: what it is a rate of. standard_error: infinite when there was one piece only."""

    value: float
    standard_error: float
    trials: int

    @property
    def interval(self) -> tuple[float, float]:
        """95%. Where all trials went one way they show no spread, and the rule of three gives the width: 3 / trials."""
        margin = 1.96 * self.standard_error if 0 < self.value < 1 else 3 / self.trials
        return max(0.0, self.value - margin), min(1.0, self.value + margin)


def overlap_on_text(pair: Pair, tokens: str | Sequence[int], sampling: Sampling = Sampling()) -> Estimate:
    """The mean of sum min(p, q) after each token of a text: alpha, if the text is one that the target would write.

    tokens: token ids, or text. They are read in windows that fit the shorter of the two contexts, each with fresh
    caches, so a window's first tokens lack their context. Neighbouring tokens are about equally hard: the pieces are
    blocks of sqrt(n) tokens where there are n, and the windows.

    Raises ``ValueError`` for bad input and for random weights, ``FloatingPointError`` for NaN logits.
    """
    if pair.random_weights:
        raise ValueError(f"{pair.name} has random weights, whose overlap means nothing; give a trained pair")
    ids = torch.tensor(encode_prompt(pair.tokenizer, tokens, pair.target.vocab_size), device=pair.target.device)
    block = math.isqrt(len(ids))
    windows = []
    for window in ids.split(min(len(ids), pair.target.context, pair.draft.context)):
        laws = (laws_along(model, window, sampling, pair.target.vocab_size) for model in (pair.target, pair.draft))
        shared = torch.cat([overlap(p, q) for p, q in zip(*laws, strict=True)]).clamp(0, 1)  # rounding may leave it
        blocks = np.array_split(shared.cpu().numpy(), max(1, len(window) // block))
        windows.append(np.array([(each.sum(dtype=float), len(each)) for each in blocks]))
    return rate(windows)


def from_rounds(results: Sequence[Result]) -> Estimate:
    """Maximum likelihood: accepted / (accepted + rounds that ended in a rejection), pooled over runs.

    The pieces are the rounds, and the runs when there are several. The value is ``Statistics.pooled(results).alpha``.
    Raises ``ValueError`` when no draft token was tried.
    """
    return rate(counts(results, tried))


def accepted_over_drafted(results: Sequence[Result]) -> Estimate:
    """accepted / drafted, pooled over runs: what engines report. ``theory.accepted_over_drafted`` is its expectation.

    Pieces and errors as in ``from_rounds``.
    """
    return rate(counts(results, lambda round: len(round.draft_tokens)))


def by_position(results: Sequence[Result]) -> list[Estimate]:
    """For draft position i = 0, 1, ...: the chance that it is accepted, given that all before it were.

    Flat for a draft that writes token by token, as long as passages are equally hard. Positions that no round tried are
    left out.
    """
    runs = counts(results, tried)
    deepest = max((run[:, 1].max(initial=0) for run in runs), default=0)
    return [rate([(run > i).astype(float) for run in runs]) for i in range(int(deepest))]


def tried(round: Round) -> int:
    """Draft tokens whose acceptance was decided: those accepted, and the one rejected."""
    return round.accepted + round.rejected


def counts(results: Sequence[Result], trials: Callable[[Round], int]) -> list[Float[np.ndarray, "rounds 2"]]:
    """(accepted, trials) of each round, an array for each run."""
    rows = ([(round.accepted, trials(round)) for round in result.rounds] for result in results)
    return [np.array(row, dtype=float).reshape(-1, 2) for row in rows]


def rate(runs: Sequence[Float[np.ndarray, "pieces 2"]]) -> Estimate:
    """All hits over all trials. The standard error is that of a ratio of sums over independent pieces.

    Taken twice, with the pieces and with whole runs, and the larger counts: pieces cannot tell that one run is harder
    than the next, and a few runs may agree by luck. One run, or runs that are all alike, speak for no other prompts.
    """
    runs = [run[run[:, 1] > 0] for run in runs]
    runs = [run for run in runs if len(run)]
    if not runs:
        raise ValueError("no draft token was tried in these runs: decode with K = 1 or more, and more than one token")
    pieces, totals = np.concatenate(runs), np.array([run.sum(0) for run in runs])
    hits, trials = pieces.sum(0)
    errors = [spread(each, hits / trials) for each in ([pieces, totals] if len(runs) > 1 else [pieces])]
    return Estimate(float(hits / trials), max(errors), round(trials))


def spread(pieces: Float[np.ndarray, "pieces 2"], value: float) -> float:
    """The standard error of sum(hits) / sum(trials) from how far each piece is off: Cochran (1977), chapter 6."""
    n = len(pieces)
    if n == 1:
        return math.inf
    residuals = pieces[:, 0] - value * pieces[:, 1]
    return math.sqrt(n / (n - 1) * (residuals**2).sum()) / float(pieces[:, 1].sum())


def laws_along(
    model: LanguageModel, tokens: Int[Tensor, " n"], sampling: Sampling, vocab_size: int
) -> Iterator[Float[Tensor, "piece vocab"]]:
    """The model's law after each token, in pieces. Padded ids are cut off, missing ones get 0, as in drafting."""
    cache = model.new_cache(len(tokens))
    for piece in tokens.clamp(max=model.vocab_size - 1).split(PIECE):
        with torch.inference_mode():
            logits = model(piece[None], cache)[0]
            missing = vocab_size - logits.shape[-1]
            probs = sampling.probs(F.pad(logits, (0, missing), value=-math.inf) if missing else logits)
        if probs.isnan().any():
            raise FloatingPointError(f"{model.name} gave NaN logits; try float32, and check that its weights are whole")
        yield probs
