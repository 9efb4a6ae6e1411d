"""What the demo says: one text, written speculatively and plainly, and the two compared."""

from statistics import median
from typing import Any

from .costs import measure_costs
from .pairs import Pair
from .record import Result, Statistics
from .theory import predicted_speedup
from .writeup import number


def compare(pair: Pair, fast: list[Result], plain: list[Result], K: int, temperature: float) -> dict[str, Any]:
    """What the demo reports. identical is None when sampling (the law is the same then, not the tokens), alpha when the
    weights are random (it would mean nothing)."""
    costs = measure_costs(pair, [max(K, 1)], budget=5)
    alpha = None if pair.random_weights else Statistics.pooled(fast).alpha
    plain_seconds, fast_seconds = (median(run.seconds for run in runs) for runs in (plain, fast))
    return {
        "pair": pair.name,
        "K": K,
        "temperature": temperature,
        "new_tokens": len(fast[0].tokens),
        "identical": fast[0].tokens == plain[0].tokens if temperature == 0 else None,
        "alpha": alpha,
        "tokens_per_round": fast[0].tokens_per_round,
        "plain_seconds": plain_seconds,
        "speculative_seconds": fast_seconds,
        "speedup": plain_seconds / fast_seconds if fast_seconds else None,
        "predicted_speedup": None if alpha is None else predicted_speedup(alpha, K, costs.c, costs.v[K + 1]),
        "c": costs.c,
        "v": costs.v[K + 1],
        "text": fast[0].text,
    }


def demo_text(report: dict[str, Any]) -> str:
    same = {
        True: "yes, token for token",
        False: "NO: the two texts differ (in half precision a near-tie can tip; in float32 this is a fault)",
        None: "not expected when sampling: the law is the same, the draws are not (try --temperature 0)",
    }
    formula = f"E / (v(K+1) + K c) with v = {report['v']:.2f}, c = {report['c']:.2f}"
    return f"""
{report["new_tokens"]} tokens
plain decoding        {report["plain_seconds"]:.3f} s
speculative decoding  {report["speculative_seconds"]:.3f} s
identical             {same[report["identical"]]}
acceptance (alpha)    {number(report["alpha"])}
tokens per round      {number(report["tokens_per_round"])}   of at most K + 1 = {report["K"] + 1}
speedup, measured     {number(report["speedup"], "x")}
speedup, predicted    {number(report["predicted_speedup"], "x")}   {formula}"""
