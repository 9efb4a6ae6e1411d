"""Does it pay, and with which K? Speculative decoding measured against plain decoding, beside its prediction.

Everything is measured in one process, taken in turn: the costs of single passes (for the prediction), plain decoding,
speculative decoding for each K and, if wanted, Hugging Face's ``generate``. A speedup is a ratio of two times of one
run.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
import torch
from jaxtyping import Float

from .decoding import speculative
from .distributions import Sampling
from .engines import HuggingFace
from .models import LanguageModel
from .pairs import Pair
from .record import Result, Statistics
from .text import encode_prompt
from .theory import check_K, predicted_speedup
from .timing import Stopwatch, interleaved

PROMPTS = {
    "story": "Once upon a time there was a king who had three daughters, and the youngest was so beautiful that",
    "dialogue": '"Where are you going?" said the old woman. "I am going to seek my fortune," said the boy. "Then',
    "list": "The princess packed three things for the journey: a loaf of bread, a silver cup, and",
    "code-like": "If the door is red, go left. If the door is blue, go right. If the door is green, go",
    "copy-heavy": "The cat sat on the wall. The dog sat on the wall. The hen sat on the wall. The fox",
}


@dataclass(frozen=True)
class Costs:
    """What single passes cost, measured apart from any loop. t1: seconds of a target pass over one token."""

    t1: float
    v: dict[int, float]  # n -> a target pass over n tokens, over t1
    c: float  # a draft step (pass, distribution, draw), over t1


@dataclass(frozen=True)
class Row:
    """One K. speedup: against plain decoding, with a 95% interval over prompts; rates as in ``record.Statistics``."""

    K: int
    alpha: float | None
    tokens_per_round: float
    acceptance_rate: float | None
    tokens_per_second: float
    speedup: float
    speedup_low: float
    speedup_high: float
    predicted_speedup: float
    hf_assisted_ratio: float | None = None  # our speed over Hugging Face's assisted generation with the same K


@dataclass(frozen=True)
class Report:
    pair: str
    temperature: float
    prompts: int
    repeats: int
    new_tokens: int
    threads: int
    device: str
    c: float
    v: dict[int, float]
    t1_milliseconds: float
    plain_tokens_per_second: float
    hf_plain_ratio: float | None  # our plain decoding's speed over Hugging Face's generate
    rows: list[Row]
    best_k_measured: int
    best_k_predicted: int
    verdict: str


def passes(model: LanguageModel, ns: Iterable[int], *, context: int) -> dict[int, Callable[[], None]]:
    """Pieces of work to be timed: a pass over n tokens behind ``context`` others, with the distributions it gives."""
    longest = max(ns)
    cache = model.new_cache(context + longest)
    tokens = torch.zeros((1, context + longest), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(tokens[:, :context], cache, last=1)

    def pass_over(n: int) -> Callable[[], None]:
        def work() -> None:
            with torch.inference_mode():
                Sampling().probs(model(tokens[:, :n], cache, last=n))
            cache.rollback(context)

        return work

    return {n: pass_over(n) for n in ns}


def measure_costs(pair: Pair, longest: int, *, context: int = 64, repeats: int = 40) -> Costs:
    """t(1), v(1..longest) and c from single passes, medians of interleaved repeats."""
    works: dict[Any, Callable[[], None]] = dict(passes(pair.target, range(1, longest + 1), context=context))
    works["draft"] = passes(pair.draft, [1], context=context)[1]
    seconds = {
        key: median(times) for key, times in interleaved(works, device=pair.target.device, repeats=repeats).items()
    }
    t1 = seconds[1]
    return Costs(t1, {n: seconds[n] / t1 for n in range(1, longest + 1)}, seconds["draft"] / t1)


@dataclass(frozen=True)
class Run:
    """One decoding run of the benchmark: seconds and tokens, without the first round (it holds the prefill)."""

    seconds: float
    tokens: int
    result: Result | None  # None: another engine's run, seen from outside and prefill included

    @property
    def wall_per_token(self) -> float:
        """Seconds per token, prefill included."""
        return self.result.seconds / len(self.result.tokens) if self.result else self.seconds / self.tokens

    @classmethod
    def of(cls, result: Result) -> "Run":
        rounds = result.rounds[1:]
        return cls(sum(r.seconds for r in rounds), sum(len(r.tokens) for r in rounds), result)


def bench(
    pair: Pair,
    Ks: Sequence[int] = (1, 2, 3, 4, 5, 6, 8),
    *,
    prompts: Sequence[str | Sequence[int]] = tuple(PROMPTS.values()),
    max_new_tokens: int = 128,
    sampling: Sampling = Sampling(),
    repeats: int = 3,
    hugging_face: bool = True,
    seed: int = 0,
    progress: Callable[[str], None] = lambda message: None,
) -> Report:
    """Plain and speculative decoding for each K, in turn, over prompts x repeats; see ``Report`` for what comes back.

    hugging_face: also run transformers' ``generate``, plain and assisted with each K, for comparison.
    Raises ``ValueError`` for bad input before any work is done.
    """
    for K in Ks:
        check_K(K)
    if not (Ks and min(Ks) >= 1 and repeats >= 1 and prompts and max_new_tokens >= 2):
        raise ValueError("bench needs at least one K >= 1, one prompt, one repeat and two new tokens")
    ids = [encode_prompt(pair.tokenizer, prompt, pair.target.vocab_size) for prompt in prompts]
    works = runners(pair, Ks, max_new_tokens, sampling, hugging_face)
    for key, work in works.items():
        progress(f"warming up: {key}")
        work(ids[0], seed)
    costs = measure_costs(pair, max(Ks) + 1, context=min(64, pair.target.context - max(Ks) - 1))
    runs: dict[Any, list[list[Run]]] = {key: [[] for _ in ids] for key in works}
    for repeat in range(repeats):
        for i, prompt in enumerate(ids):
            progress(f"repeat {repeat + 1} of {repeats}, prompt {i + 1} of {len(ids)}")
            for key, work in works.items():
                runs[key][i].append(work(prompt, seed + repeat))
    return make_report(pair, Ks, runs, costs, max_new_tokens, sampling)


def runners(
    pair: Pair, Ks: Sequence[int], max_new_tokens: int, sampling: Sampling, hugging_face: bool
) -> dict[Any, Callable[[list[int], int], Run]]:
    """What is run in turn: plain decoding under 0, speculative under K, Hugging Face's under ("hf", 0 or K)."""
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "eos_token_id": []}

    def own(K: int) -> Callable[[list[int], int], Run]:
        return lambda prompt, seed: Run.of(speculative(pair, prompt, K=K, seed=seed, **options))

    works: dict[Any, Callable[[list[int], int], Run]] = {K: own(K) for K in (0, *Ks)}
    if hugging_face:
        for K in (0, *Ks):
            works["hf", K] = timed_engine(HuggingFace(pair, K), pair.target.device, max_new_tokens, sampling)
    return works


def make_report(
    pair: Pair, Ks: Sequence[int], runs: dict[Any, list[list[Run]]], costs: Costs, new_tokens: int, sampling: Sampling
) -> Report:
    rows = [make_row(K, runs, costs) for K in Ks]
    best = max(rows, key=lambda row: row.speedup)
    return Report(
        pair=pair.name,
        temperature=sampling.temperature,
        prompts=len(runs[0]),
        repeats=len(runs[0][0]),
        new_tokens=new_tokens,
        threads=torch.get_num_threads(),
        device=str(pair.target.device),
        c=costs.c,
        v=costs.v,
        t1_milliseconds=costs.t1 * 1000,
        plain_tokens_per_second=float(1 / per_token(runs[0]).mean()),
        hf_plain_ratio=wall(runs["hf", 0]) / wall(runs[0]) if ("hf", 0) in runs else None,
        rows=rows,
        best_k_measured=best.K,
        best_k_predicted=max(rows, key=lambda row: row.predicted_speedup).K,
        verdict=verdict(best, costs),
    )


def timed_engine(
    engine: HuggingFace, device: torch.device, max_new_tokens: int, sampling: Sampling
) -> Callable[[list[int], int], Run]:
    def work(prompt: list[int], seed: int) -> Run:
        watch = Stopwatch(device)
        watch.mark()
        tokens = engine.generate(prompt, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
        watch.mark()
        return Run(watch.seconds()[0], len(tokens), None)

    return work


def per_token(runs: list[list[Run]]) -> Float[np.ndarray, " prompts"]:
    """Seconds per token for each prompt: the median over repeats."""
    return np.array([median(run.seconds / run.tokens for run in repeats) for repeats in runs])


def wall(runs: list[list[Run]]) -> float:
    """Seconds per token of whole runs, prefill included: what can be compared with an engine seen from outside."""
    return float(np.mean([median(run.wall_per_token for run in repeats) for repeats in runs]))


def make_row(K: int, runs: dict[Any, list[list[Run]]], costs: Costs) -> Row:
    plain, ours = per_token(runs[0]), per_token(runs[K])
    speedup = plain.sum() / ours.sum()
    choice = np.random.default_rng(0).integers(len(plain), size=(2000, len(plain)))
    low, high = np.quantile(plain[choice].sum(1) / ours[choice].sum(1), [0.025, 0.975])
    statistics = Statistics.pooled([run.result for repeats in runs[K] for run in repeats if run.result])
    return Row(
        K=K,
        alpha=statistics.alpha,
        tokens_per_round=statistics.tokens_per_round or 0.0,
        acceptance_rate=statistics.acceptance_rate,
        tokens_per_second=float(1 / ours.mean()),
        speedup=float(speedup),
        speedup_low=float(low),
        speedup_high=float(high),
        predicted_speedup=predicted_speedup(statistics.alpha or 0.0, K, costs.c, costs.v[K + 1]),
        hf_assisted_ratio=wall(runs["hf", K]) / wall(runs[K]) if ("hf", K) in runs else None,
    )


def verdict(best: Row, costs: Costs) -> str:
    """One sentence: speculate with which K, or why not."""
    if best.speedup_low > 1:
        return f"speculate with K = {best.K}: {best.speedup:.2f}x the speed of plain decoding"
    cost = costs.v[best.K + 1] + best.K * costs.c
    if best.speedup < 1:
        return (
            f"do not speculate: it would be slower, because even the best K = {best.K} yields "
            f"{best.tokens_per_round:.2f} tokens per round, and a round costs as much as {cost:.2f} plain steps"
        )
    return f"too close to call: {best.speedup_low:.2f}x to {best.speedup_high:.2f}x at K = {best.K}; use more prompts"
