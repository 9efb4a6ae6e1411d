"""Formulas: how many tokens a round yields, how fast that should be, and what the rounds say about alpha."""

from numbers import Integral


def expected_tokens_per_round(alpha: float, K: int) -> float:
    """E: accepted draft tokens plus the recovered or bonus token, when each draft token is accepted with chance alpha.

    E = 1 + alpha + ... + alpha^K. Leviathan et al. (2023), equation 1.
    Raises ``ValueError`` unless 0 <= alpha <= 1 and K >= 0.
    """
    check_alpha(alpha)
    check_K(K)
    return float(sum(alpha**i for i in range(K + 1)))


def predicted_speedup(alpha: float, K: int, c: float, v: float = 1.0, overhead: float = 0.0) -> float:
    """S = E / (v + K c + overhead): tokens of a round over its time, in units of one plain decoding step.

    c: time of one draft forward pass; v: time of a target pass over K + 1 tokens; overhead: the rest of a round; all
    over the time of a target pass over one token. v = 1 and no overhead: Leviathan et al. (2023), Theorem 3.8.
    """
    return expected_tokens_per_round(alpha, K) / (v + K * c + overhead)


def alpha_mle(accepted: int, rejections: int) -> float | None:
    """Maximum likelihood for alpha from observed rounds: successes over trials that were really made.

    A draft token after a rejection was never tried, so it is no trial (it is censored). ``None`` without a trial.
    """
    trials = accepted + rejections
    return accepted / trials if trials else None


def check_alpha(alpha: float) -> None:
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha is {alpha}; it is a probability and must lie in [0, 1]")


def check_K(K: int) -> None:
    if not (isinstance(K, Integral) and K >= 0):
        raise ValueError(f"K is {K}; it must be a whole number, 0 (no drafting) or more")
