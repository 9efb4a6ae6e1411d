"""From a benchmark's records to numbers: a row per K, what was measured beside what was predicted, and a verdict.

Nothing is measured here. The same records give the same report, today or in a year, so a report kept in a project can
be made again from its results file.
"""

from dataclasses import dataclass
from statistics import median

import numpy as np
from jaxtyping import Float

from .costs import Costs
from .record import Statistics
from .results import Record
from .theory import expected_tokens_per_round, predicted_speedup

Runs = list[list[Record]]  # for each prompt the runs of its repeats


@dataclass(frozen=True)
class Row:
    """One K. Intervals are 95%, by resampling prompts.

    alpha: as in ``record.Statistics``, or the one assumed. tokens_per_round: counted. speedup: over plain decoding.
    predicted_speedup: E (1 + o(0)) / (v(K+1) + drafting(K) + o(K)), where E follows from alpha and o is the time of a
    round outside of both models, taken from the loop. textbook_speedup: E / (1 + K c), with a free verification.
    loop: seconds of a round that are spent drafting, in the target and elsewhere, over t(1): to be compared with
    drafting(K) and v(K+1), which were measured outside of the loop.
    """

    K: int
    alpha: float
    alpha_low: float
    alpha_high: float
    tokens_per_round: float
    expected_tokens_per_round: float
    acceptance_rate: float
    tokens_per_second: float
    speedup: float
    speedup_low: float
    speedup_high: float
    predicted_speedup: float
    textbook_speedup: float
    loop: dict[str, float]
    hf_assisted_ratio: float | None  # our speed over Hugging Face's assisted generation with the same K
    hf_acceptance_rate: float | None  # accepted / drafted, as its assisted generation had it


@dataclass(frozen=True)
class Report:
    """What a benchmark says. acceptance_by_position: at the largest K, for each draft position the share accepted of
    those that were verified. prefill: the cost of the context, over t(1)."""

    settings: Record
    commands: list[str]
    t1_milliseconds: float
    c: float
    v: dict[int, float]
    drafting: dict[int, float]
    prefill: float
    plain_tokens_per_second: float
    plain_loop: dict[str, float]
    hf_plain_ratio: float | None  # our plain decoding's speed over Hugging Face's generate
    rows: list[Row]
    acceptance_by_position: list[float]
    best_k_measured: int
    best_k_predicted: int
    verdict: str

    @property
    def best(self) -> Row:
        return next(row for row in self.rows if self.best_k_measured == row.K)


def summarise(records: list[Record]) -> Report:
    """The report of a results file's records. Raises ``ValueError`` when no block of it is complete."""
    settings = {key: value for key, value in records[0].items() if key not in ("kind", "version")}
    runs = complete_runs(records)
    costs = costs_of(records)
    Ks, alpha = settings["Ks"], settings["alpha"]
    rows = [make_row(K, runs, costs, alpha) for K in Ks]
    best = max(rows, key=lambda row: row.speedup)
    plain, longest = runs["own", 0], [run for repeats in runs["own", max(Ks)] for run in repeats]
    hf = runs.get(("hugging face", 0))
    return Report(
        settings=settings,
        commands=sorted({r["command"] for r in records if r["kind"] == "session" and r["command"]}),
        t1_milliseconds=costs.t1 * 1000,
        c=costs.c,
        v=costs.v,
        drafting=costs.drafting,
        prefill=costs.prefill,
        plain_tokens_per_second=float(1 / per_token(plain).mean()),
        plain_loop=loop_costs(plain, costs),
        hf_plain_ratio=wall(hf) / wall(plain) if hf else None,
        rows=rows,
        acceptance_by_position=by_position(longest),
        best_k_measured=best.K,
        best_k_predicted=max(rows, key=lambda row: row.predicted_speedup).K,
        verdict=verdict(best, costs, assumed=alpha),
    )


def complete_runs(records: list[Record]) -> dict[tuple[str, int], Runs]:
    """By (engine, K): the runs of complete blocks. Of two runs of the same work the later one counts."""
    settings = records[0]
    keys = [("own", K) for K in (0, *settings["Ks"])]
    if settings["hugging_face"]:
        keys += [("hugging face", K) for K in (0, *settings["Ks"]) if K == 0 or settings["alpha"] is None]
    latest = {(r["engine"], r["K"], r["prompt"], r["repeat"]): r for r in records if r["kind"] == "run"}
    blocks = sorted({key[2:] for key in latest if all(k + key[2:] in latest for k in keys)})
    if not blocks:
        raise ValueError("no block of this benchmark is complete yet: run the same command again to resume it")
    prompts = sorted({prompt for prompt, _ in blocks})
    return {
        key: [[latest[key + block] for block in blocks if block[0] == prompt] for prompt in prompts] for key in keys
    }


def costs_of(records: list[Record]) -> Costs:
    record = next((r for r in records if r["kind"] == "costs"), None)  # two sessions at once write two
    if record is None:
        raise ValueError("these results lack the costs of single passes: run the same command again into another file")
    fields = {key: value for key, value in record.items() if key != "kind"}
    for name in ("v", "drafting"):  # JSON has text keys only
        fields[name] = {int(n): cost for n, cost in fields[name].items()}
    return Costs(**fields)


def make_row(K: int, runs: dict[tuple[str, int], Runs], costs: Costs, assumed: float | None) -> Row:
    plain, ours = per_token(runs["own", 0]), per_token(runs["own", K])
    counts = [[Statistics(**run["counts"]) for run in repeats] for repeats in runs["own", K]]
    per_prompt = np.array([[sum(s.accepted for s in each), sum(s.rejections for s in each)] for each in counts])
    choice = np.random.default_rng(0).integers(len(plain), size=(2000, len(plain)))
    accepted, rejections = per_prompt[choice].sum(1).T
    total = Statistics.summed([s for each in counts for s in each])
    alpha = total.alpha or 0.0 if assumed is None else assumed
    low, high = np.quantile(plain[choice].sum(1) / ours[choice].sum(1), [0.025, 0.975])
    alpha_low, alpha_high = np.quantile(accepted / np.maximum(accepted + rejections, 1), [0.025, 0.975])
    plain_loop, loop = loop_costs(runs["own", 0], costs), loop_costs(runs["own", K], costs)
    E = expected_tokens_per_round(alpha, K)
    assisted = runs.get(("hugging face", K))
    drafted = sum(run["drafted"] for repeats in assisted or [] for run in repeats)
    kept = sum(run["accepted"] for repeats in assisted or [] for run in repeats)
    return Row(
        K=K,
        alpha=alpha,
        alpha_low=float(alpha_low),
        alpha_high=float(alpha_high),
        tokens_per_round=total.tokens_per_round or 0.0,
        expected_tokens_per_round=E,
        acceptance_rate=total.acceptance_rate or 0.0,
        tokens_per_second=float(1 / ours.mean()),
        speedup=float(plain.sum() / ours.sum()),
        speedup_low=float(low),
        speedup_high=float(high),
        predicted_speedup=E * (1 + plain_loop["other"]) / (costs.v[K + 1] + costs.drafting[K] + loop["other"]),
        textbook_speedup=predicted_speedup(alpha, K, costs.c),
        loop=loop,
        hf_assisted_ratio=wall(assisted) / wall(runs["own", K]) if assisted else None,
        hf_acceptance_rate=kept / drafted if drafted else None,
    )


def per_token(runs: Runs) -> Float[np.ndarray, " prompts"]:
    """Seconds per token for each prompt, without the round that holds the prefill: the median over repeats."""
    return np.array([median(run["seconds"] / run["tokens"] for run in repeats) for repeats in runs])


def wall(runs: Runs) -> float:
    """Seconds per token of whole runs, prefill included: what can be compared with an engine seen from outside."""

    def of(run: Record) -> float:
        return (run["seconds"] + run.get("first_seconds", 0)) / (run["tokens"] + run.get("first_tokens", 0))

    return float(np.mean([median(of(run) for run in repeats) for repeats in runs]))


def loop_costs(runs: Runs, costs: Costs) -> dict[str, float]:
    """Where a round's time went, over t(1): the median over runs of each part's mean."""
    flat = [run for repeats in runs for run in repeats if run["counts"]["rounds"] > 1]
    return {
        part: median(run[f"{part}_seconds"] / (run["counts"]["rounds"] - 1) for run in flat) / costs.t1
        for part in ("draft", "target", "other")
    }


def by_position(runs: list[Record]) -> list[float]:
    longest = max(len(run["tried"]) for run in runs)
    tried, accepted = (
        np.sum([np.pad(run[name], (0, longest - len(run[name]))) for run in runs], axis=0)
        for name in ("tried", "accepted")
    )
    return [float(a / t) for a, t in zip(accepted, tried, strict=True) if t]


def verdict(best: Row, costs: Costs, assumed: float | None = None) -> str:
    """One sentence: speculate with which K, or why not."""
    condition = "" if assumed is None else f"if a draft token is accepted with chance {assumed:g} (assumed): "
    cost = costs.v[best.K + 1] + costs.drafting[best.K]
    if best.speedup_low > 1:
        return f"{condition}speculate with K = {best.K}: {best.speedup:.2f}x the speed of plain decoding"
    if best.speedup < 1:
        return (
            f"{condition}do not speculate: it would be slower, because even the best K = {best.K} yields "
            f"{best.tokens_per_round:.2f} tokens per round, and a round costs as much as {cost:.2f} plain steps"
        )
    return (
        f"{condition}too close to call: {best.speedup_low:.2f}x to {best.speedup_high:.2f}x at K = {best.K}; "
        "use more prompts"
    )
