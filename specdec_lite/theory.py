"""Formulas: what a round yields, how fast and how dear that should be, when it pays, and what rounds say about alpha.

Times and costs are ratios: one plain decoding step (a target pass over one token) is 1. Nothing here is measured, and
nothing needs a model. Leviathan et al. (2023) is "Fast Inference from Transformers via Speculative Decoding".
"""

from collections.abc import Callable
from numbers import Integral
from typing import NamedTuple

import numpy as np
from jaxtyping import Int


def expected_tokens_per_round(alpha: float, K: int) -> float:
    """E: accepted draft tokens plus the recovered or bonus token, when each draft token is accepted with chance alpha.

    E = 1 + alpha + ... + alpha^K = (1 - alpha^(K+1)) / (1 - alpha). Leviathan et al. (2023), equation 1.
    Raises ``ValueError`` unless 0 <= alpha <= 1 and K >= 0, as all functions here do.
    """
    check_alpha(alpha)
    check_K(K)
    return float(sum(alpha**i for i in range(K + 1)))


def variance_of_tokens_per_round(alpha: float, K: int) -> float:
    """Var N, in tokens squared, of the tokens N of one round. The mean over R rounds has variance Var N / R.

    N is a geometric number cut at K + 1 (Leviathan et al. (2023), section 3.1): P(N >= n) = alpha^(n-1) for n up to
    K + 1. So E[N^2] = sum over those n of (2n - 1) alpha^(n-1), because (2n - 1) is n^2 - (n-1)^2.
    """
    mean = expected_tokens_per_round(alpha, K)
    return sum((2 * n - 1) * alpha ** (n - 1) for n in range(1, K + 2)) - mean**2


def accepted_over_drafted(alpha: float, K: int) -> float:
    """The share of drafted tokens that is accepted: (E - 1) / K = alpha (1 - alpha^K) / (K (1 - alpha)).

    It falls with K although alpha does not: what follows a rejection was drafted and never tried.
    Raises ``ValueError`` for K = 0 too: nothing is drafted, so there is no share.
    """
    accepted = expected_tokens_per_round(alpha, K) - 1
    if K == 0:
        raise ValueError("K is 0: nothing is drafted, so no share of it is accepted; give K = 1 or more")
    return accepted / K


def simulate_rounds(
    alpha: float, K: int, rounds: int, *, correlation: float = 0.0, seed: int = 0
) -> Int[np.ndarray, " rounds"]:
    """Accepted draft tokens, 0..K, of each simulated round. A round's tokens are one more.

    correlation: between any two acceptances of a round, in [0, 1). 0 is the assumption of Leviathan et al. (2023),
    section 3.1. Above 0 every round has an alpha of its own, drawn from a beta law with mean ``alpha`` and this
    intra-class correlation: some passages are easy, some are hard. The first position is still accepted with chance
    alpha; but a round that got far is likely to be an easy one, so the chance rises with the position, and E is larger
    than the formula says.
    """
    check_alpha(alpha)
    check_K(K)
    if not 0 <= correlation < 1:
        raise ValueError(f"correlation is {correlation}; it must lie in [0, 1), 0 for independent acceptances")
    # Mixing over a beta law is Polya's urn: each acceptance puts `correlation` on the side of the next one.
    earlier = np.arange(K)
    chances = (alpha * (1 - correlation) + earlier * correlation) / (1 - correlation + earlier * correlation)
    accepted = np.random.default_rng(seed).random((rounds, K)) < chances
    return accepted.cumprod(axis=1, dtype=int).sum(axis=1)


def alpha_mle(accepted: int, rejections: int) -> float | None:
    """Maximum likelihood for alpha from observed rounds: successes over trials that were really made.

    A draft token after a rejection was never tried, so it is no trial (it is censored). ``None`` without a trial.
    """
    trials = accepted + rejections
    return accepted / trials if trials else None


def predicted_speedup(alpha: float, K: int, c: float, v: float = 1.0, overhead: float = 0.0) -> float:
    """S = E / (v + K c + overhead): tokens of a round over its time, in units of one plain decoding step.

    c: time of one draft forward pass; v: time of a target pass over K + 1 tokens; overhead: the rest of a round; all
    over the time of a target pass over one token. v = 1 (verification is free) and no overhead: Leviathan et al.
    (2023), Theorem 3.8.
    """
    return expected_tokens_per_round(alpha, K) / time_of_round(K, c, v, overhead)


def time_of_round(K: int, c: float, v: float, overhead: float) -> float:
    """v + K c + overhead, in plain decoding steps. Raises ``ValueError`` unless it can be a time."""
    check_K(K)
    time = v + K * c + overhead
    if not (c >= 0 and time > 0):
        raise ValueError(f"c is {c} and a round takes {time} plain steps; c must be 0 or more, a round above 0")
    return time


class BestK(NamedTuple):
    """The draft length with the largest predicted speedup, and that speedup. K = 0: do not speculate."""

    K: int
    speedup: float


def free_verification(n: int) -> float:
    """v(n) = 1: a pass over n tokens takes as long as a pass over one."""
    return 1.0


def best_K(
    alpha: float,
    c: float,
    v: Callable[[int], float] = free_verification,
    overhead: float = 0.0,
    largest: int = 64,
) -> BestK:
    """The K from 0 to ``largest`` that maximises S; of equals, the smallest.

    v: n -> time of a target pass over n tokens over that of a pass over one. It is asked for n = 2 .. largest + 1, so
    a measured curve needs a ``largest`` that stays on it. K = 0 is plain decoding: speedup 1, no overhead.
    """
    check_K(largest)
    speedups = {K: predicted_speedup(alpha, K, c, v(K + 1), overhead) for K in range(1, largest + 1)}
    speedups = {0: predicted_speedup(alpha, 0, c)} | speedups
    K = max(speedups, key=speedups.__getitem__)
    return BestK(K, speedups[K])


def one_more_pays(alpha: float, K: int, c: float) -> bool:
    """Whether K + 1 draft tokens beat K when verification is free: alpha^(K+1) (1 + K c) > c E(alpha, K).

    That is E(K+1) / (1 + (K+1) c) > E(K) / (1 + K c), sorted. Once it fails it fails for every larger K, so the first K
    at which it fails is the best one. At K = 0 it reads alpha > c: Leviathan et al. (2023), Corollary 3.9.
    """
    return alpha ** (K + 1) * time_of_round(K, c, v=1.0, overhead=0.0) > c * expected_tokens_per_round(alpha, K)


def break_even_alpha(K: int, c: float, v: float = 1.0, overhead: float = 0.0) -> float | None:
    """The smallest alpha at which S >= 1, to 1e-12; ``None`` when even alpha = 1 makes speculation slower.

    S rises with alpha, so halving an interval finds it. Arguments as for ``predicted_speedup``.
    """
    if predicted_speedup(1.0, K, c, v, overhead) < 1:
        return None
    if predicted_speedup(0.0, K, c, v, overhead) >= 1:
        return 0.0
    slower, faster = 0.0, 1.0
    while faster - slower > 1e-12:
        middle = (slower + faster) / 2
        if predicted_speedup(middle, K, c, v, overhead) < 1:
            slower = middle
        else:
            faster = middle
    return faster


def batch_break_even(alpha: float, K: int, c: float, critical_tokens: float) -> float:
    """How many sequences at once until speculation stops paying: B* (E - K c) / (K + 1). 0: it never pays.

    critical_tokens: B*, the tokens per pass from which a pass is bound by arithmetic (``roofline.Device``). Up to B*
    sequences a plain step takes 1. Verifying B (K + 1) tokens takes max(1, B (K + 1) / B*). The two are even where E
    equals that plus K c. Weights only: the key-value cache, which grows with the context, is left out.
    """
    drafting = time_of_round(K, c, v=1.0, overhead=0.0) - 1
    worth = expected_tokens_per_round(alpha, K) - drafting  # plain steps that the verification may take
    return critical_tokens * worth / (K + 1) if worth >= 1 else 0.0


def work_factor(alpha: float, K: int, c_ops: float) -> float:
    """Operations per token, over those of plain decoding: ((K + 1) + K c_ops) / E. Leviathan et al. (2023), Theorem
    3.11.

    c_ops: operations of one draft pass over those of a target pass, per token (near the ratio of parameters).
    """
    return time_of_round(K, c_ops, v=K + 1, overhead=0.0) / expected_tokens_per_round(alpha, K)


def cost_per_token(seconds_per_token: float, price_per_hour: float) -> float:
    """Price of a million tokens, in the currency of ``price_per_hour`` (of the machine that writes them).

    Per million, as prices are quoted. seconds_per_token: of all sequences together, so 1 / throughput.
    """
    return seconds_per_token * 1e6 * price_per_hour / 3600


def energy_per_token(seconds_per_token: float, watts: float) -> float:
    """Joules per token of a machine that draws ``watts`` while it decodes."""
    return seconds_per_token * watts


def cost_at_low_load(cost: float, speedup: float) -> float:
    """A token's cost with speculation, when the machine has nothing else to do: time is paid for, so cost / speedup."""
    return cost / speedup


def cost_at_saturation(cost: float, work: float) -> float:
    """A token's cost with speculation, when arithmetic is scarce: wasted work displaces paid work, so cost x work.

    work: the ``work_factor``. It is never below 1: a saturated machine should not speculate.
    """
    return cost * work


def check_alpha(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; it is a probability and must lie in [0, 1]")


def check_K(K: int) -> None:
    if not (isinstance(K, Integral) and K >= 0):
        raise ValueError(f"K is {K}; it must be a whole number, 0 (no drafting) or more")
