"""A test of a sampler's law that can fail: do tokens from an engine have the target's own distribution?

Given its prefix, the law p of each token is known exactly. So nothing is compared with a second, noisy sample.

- First token, at fixed contexts. The vocabulary is cut into coarse buckets, and their counts are compared with their
  exact masses: chi-square, summed over the contexts.
- Later tokens. Their prefixes hardly ever repeat. With the vocabulary in some order, a token becomes the number
  ``u = P(tokens before it) + U * P(it)``, with U uniform. If the law is right, u is uniform whatever the prefix was, so
  the draws of all prefixes can be pooled in equal bins (the randomised probability integral transform).

The order decides what is seen. By p: rare tokens that come too often. By p/q: what a wrong acceptance rule does. It
moves mass from tokens with q > p to tokens with p > q, or back, and so to one end of the order.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .distributions import Sampling
from .models import LanguageModel
from .pairs import Pair

FALSE_ALARM = 1e-3  # of all tests together: so often a lossless engine is rejected
POWER = 0.99
BINS = 10
LEAST_EXPECTED = 20  # draws in a bucket: with fewer the chi-square distribution is a poor approximation
MOST_ROWS = 64  # runs that are scored at a time, and fewer of
MOST_NUMBERS = 2**21  # probabilities, so that memory stays bounded


@dataclass(frozen=True)
class Rounding:
    """How a pass over a block differs from passes over single tokens, on the same text: the model's own rounding.

    logits: the largest difference. law: the mean chi-square divergence between the two laws of a token.
    """

    logits: float = 0.0
    law: float = 0.0


@dataclass(frozen=True)
class ChiSquare:
    """One test. position: 1 is the first new token. order: what the vocabulary was sorted by, "p" or "p/q".

    noncentrality: what rounding may add to the statistic (in float32: nothing to speak of).
    """

    position: int
    order: str
    draws: int
    statistic: float
    df: int
    noncentrality: float = 0.0

    @property
    def p_value(self) -> float:
        return chi_square_tail(self.statistic, self.df, self.noncentrality)

    def visible_shift(self, level: float) -> float:
        """The smallest total variation between buckets that a test at ``level`` sees with probability ``POWER``.

        A shift of d adds at least 4 d^2 per draw to the noncentrality, whichever buckets it empties (Cauchy-Schwarz).
        """
        most = 1000 + 10 * (self.df + self.noncentrality)
        critical = bisect(lambda x: chi_square_tail(x, self.df, self.noncentrality) < level, most)
        added = bisect(lambda x: chi_square_tail(critical, self.df, self.noncentrality + x) > POWER, 10 * most)
        return min(1.0, math.sqrt(added / (4 * self.draws)))


@dataclass(frozen=True)
class LawTest:
    """All tests of one engine. impossible: the first token seen that the target never writes, in words."""

    tests: tuple[ChiSquare, ...]
    impossible: str | None = None

    @property
    def level(self) -> float:
        """Each test rejects below this p-value; all together then reject with chance ``FALSE_ALARM`` (Bonferroni)."""
        return FALSE_ALARM / max(1, len(self.tests))

    @property
    def p_value(self) -> float:
        """Of all tests together: the smallest, times their number."""
        return 0.0 if self.impossible else min([1.0, *(test.p_value * len(self.tests) for test in self.tests)])

    @cached_property
    def visible_shift(self) -> float:
        """Of the least sensitive test."""
        return max((test.visible_shift(self.level) for test in self.tests), default=1.0)


def chi_square_tail(statistic: float, df: int, noncentrality: float = 0.0) -> float:
    """P(X >= statistic) for a noncentral chi-square X: a Poisson mixture of central ones."""
    half = torch.tensor(noncentrality / 2, dtype=torch.float64)
    terms = torch.arange(int(half + 12 * half.sqrt()) + 40, dtype=torch.float64)
    weights = (torch.special.xlogy(terms, half) - half - torch.lgamma(terms + 1)).exp()
    tails = torch.special.gammaincc(df / 2 + terms, torch.full_like(terms, statistic / 2))
    return min(1.0, float((weights * tails).sum()))


def bisect(reached: Callable[[float], bool], most: float) -> float:
    """The smallest number of [0, most] at which ``reached`` holds."""
    low = 0.0
    for _ in range(40):
        middle = (low + most) / 2
        low, most = (low, middle) if reached(middle) else (middle, most)
    return most


def check_law(
    pair: Pair,
    contexts: Sequence[list[int]],
    tokens: Int[Tensor, "draws n"],
    sampling: Sampling,
    *,
    rounding: Rounding = Rounding(),
    seed: int = 0,
) -> LawTest:
    """Do ``tokens`` have the target's law? Row i: the first n tokens of a run from ``contexts[i % len(contexts)]``.

    seed: of the randomised transform; the draws are given. A position where there is nothing to test (a certain token,
    or too few draws) gets no test. Raises ``FloatingPointError`` for NaN logits.
    """
    draws, n = tokens.shape
    uniforms = torch.rand(draws, n, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    first: dict[str, list[tuple[float, int]]] = {}
    later: dict[str, Int[Tensor, "n bins"]] = {}
    impossible = None
    for i, context in enumerate(contexts):
        mine, uniform = tokens[i :: len(contexts)], uniforms[i :: len(contexts)]
        distinct, which = mine.unique(dim=0, return_inverse=True)
        for block in score(pair, context, distinct, sampling, rounding):
            if block.never.any() and not impossible:
                row, position = block.never.nonzero()[0].tolist()
                token = int(distinct[block.start + row, position])
                impossible = f"new token {position + 1} of prompt {i + 1} was {token}, of probability 0"
            held = (which >= block.start) & (which < block.start + len(block.p))
            for order, key in block.keys.items():
                if block.start == 0:
                    first.setdefault(order, []).append(first_token(block.p[0, 0], key[0, 0], mine[:, 0]))
                below, mass = interval(block.p, key, distinct[block.start : block.start + len(block.p)])
                rows = which[held] - block.start
                later[order] = later.get(order, 0) + histogram(below[rows] + uniform[held] * mass[rows])
    return LawTest(tuple(chi_squares(first, later, draws, rounding)), impossible)


def chi_squares(
    first: dict[str, list[tuple[float, int]]], later: dict[str, Int[Tensor, "n bins"]], draws: int, rounding: Rounding
) -> Iterator[ChiSquare]:
    # What an engine may differ by and be right. Cutting a law into buckets cannot raise its divergence from another.
    noncentrality = draws * rounding.law
    for order, contexts in first.items():
        statistic, df = (sum(column) for column in zip(*contexts, strict=True))
        if df:
            yield ChiSquare(1, order, draws, statistic, int(df), noncentrality)
    expected = draws / BINS
    if expected >= LEAST_EXPECTED:
        for order, bins in later.items():
            for position, counts in enumerate(bins[1:].tolist(), start=2):
                statistic = sum((count - expected) ** 2 / expected for count in counts)
                yield ChiSquare(position, order, draws, statistic, BINS - 1, noncentrality)


def first_token(p: Float[Tensor, " vocab"], key: Float[Tensor, " vocab"], tokens: Int[Tensor, " draws"]):
    """(statistic, degrees of freedom) of the tokens drawn from ``p`` in coarse buckets along ``key``."""
    buckets = coarse_buckets(p, key, max(1 / BINS, LEAST_EXPECTED / len(tokens)))
    expected = buckets.bincount(weights=p) * len(tokens)
    counts = buckets[tokens].bincount(minlength=len(expected))
    return float(((counts - expected) ** 2 / expected).sum()), len(expected) - 1


def divergence(p: Float[Tensor, "*batch vocab"], other: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch"]:
    """Chi-square divergence between two laws, with their mean below the fraction, so that it is finite."""
    return (2 * (p - other) ** 2 / (p + other)).nan_to_num(0).sum(-1)


def coarse_buckets(p: Float[Tensor, " vocab"], key: Float[Tensor, " vocab"], least: float) -> Int[Tensor, " vocab"]:
    """Each token's bucket: runs of the order by ``key``, as short as possible with a mass of ``least`` or more."""
    order = key.argsort(stable=True)
    cumulative = p[order].cumsum(0)
    ends: list[Tensor] = []  # in the order, the last token of each bucket
    filled = 0.0
    while float(cumulative[-1]) - filled >= least:
        ends.append(torch.searchsorted(cumulative, filled + least).clamp(max=len(p) - 1))
        filled = float(cumulative[ends[-1]])
    places = torch.searchsorted(torch.stack(ends), torch.arange(len(p))) if ends else torch.zeros_like(order)
    # What is left over is too little for a bucket of its own.
    return torch.empty_like(order).scatter_(0, order, places.clamp(max=max(0, len(ends) - 1)))


def interval(p: Float[Tensor, "rows n vocab"], key: Float[Tensor, "rows n vocab"], tokens: Int[Tensor, "rows n"]):
    """(mass before the token, its own) in the order by ``key``; tokens of equal key count as one."""
    own = key.gather(-1, tokens.unsqueeze(-1))
    return (p * (key < own)).sum(-1), (p * (key == own)).sum(-1)


def histogram(u: Float[Tensor, "draws n"]) -> Int[Tensor, "n bins"]:
    bins = (u * BINS).long().clamp(0, BINS - 1)
    return torch.stack([column.bincount(minlength=BINS) for column in bins.T])


@dataclass(frozen=True)
class Block:
    """Laws along some distinct runs, those from ``start`` on: at row r and position j, of token j given those before.

    keys: what orders the vocabulary. never: tokens that the target does not write.
    """

    start: int
    p: Float[Tensor, "rows n vocab"]
    keys: dict[str, Float[Tensor, "rows n vocab"]]
    never: Bool[Tensor, "rows n"]


def score(
    pair: Pair, context: list[int], runs: Int[Tensor, "distinct n"], sampling: Sampling, rounding: Rounding
) -> Iterator[Block]:
    """The laws of all tokens of ``runs`` after ``context``, some runs at a time."""
    vocab, n = pair.target.vocab_size, runs.shape[1]
    rows = max(1, min(len(runs), MOST_ROWS, MOST_NUMBERS // (n * vocab)))
    target = reader(pair.target, context, rows, n, vocab)
    fits = pair.draft is not None and len(context) + n - 1 <= pair.draft.context
    draft = reader(pair.draft, context, rows, n, vocab) if fits else None
    for start in range(0, len(runs), rows):
        block = runs[start : start + rows]
        logits = target(block)
        p = sampling.probs(logits).double()
        p /= p.sum(-1, keepdim=True)
        if p.isnan().any():
            raise FloatingPointError(f"{pair.target.name} gave NaN logits; try float32")
        keys = {"p": p}
        if draft:
            keys["p/q"] = (p / sampling.probs(draft(block)).double()).nan_to_num(0, posinf=math.inf)  # 0/0: no mass
        yield Block(start, p, keys, never_written(logits, p, block, sampling, rounding))


def reader(
    model: LanguageModel, context: list[int], rows: int, n: int, vocab: int
) -> Callable[[Int[Tensor, "few n"]], Float[Tensor, "few n vocab"]]:
    """A function that gives the logits of n new tokens each, for up to ``rows`` runs at once. The context is read once.

    vocab: as ``ModelDrafter`` does, a model with more logits is cut to it, and one with fewer never says the rest.
    """
    known = model.vocab_size - 1
    fed = torch.tensor([context], device=model.device).clamp(max=known).expand(rows, -1)
    cache = model.new_cache(len(context) + n - 1, rows)
    if len(context) > 1:
        with torch.inference_mode():
            model(fed[:, :-1], cache, last=1)

    def logits(runs):
        padded = runs[torch.arange(rows).clamp(max=len(runs) - 1), :-1]  # the cache has a fixed number of rows
        with torch.inference_mode():
            found = model(torch.cat([fed[:, -1:], padded.to(fed).clamp(max=known)], 1), cache, last=n)
        cache.rollback(len(context) - 1)
        return F.pad(found[: len(runs)].cpu(), (0, vocab - found.shape[-1]), value=-math.inf)

    return logits


def never_written(
    logits: Float[Tensor, "rows n vocab"],
    p: Float[Tensor, "rows n vocab"],
    tokens: Int[Tensor, "rows n"],
    sampling: Sampling,
    rounding: Rounding,
) -> Bool[Tensor, "rows n"]:
    """Which tokens have probability 0, and would have it however the logits were rounded."""
    never = p.gather(-1, tokens.unsqueeze(-1)).squeeze(-1) == 0
    raised, at = logits[never], tokens[never].unsqueeze(-1)
    raised.scatter_add_(-1, at, torch.full_like(at, 2 * rounding.logits, dtype=raised.dtype))
    looser = min(1.0, sampling.top_p + math.expm1(min(1.0, 2 * rounding.logits / sampling.temperature)))
    never[never.clone()] = replace(sampling, top_p=looser).probs(raised).gather(-1, at).squeeze(-1) == 0
    return never
