"""Every way to draft, side by side: one run, one target, the same prompts, taken in turn with plain decoding.

``compare`` measures and writes each time down as it comes. ``rows_of`` makes the numbers from what was written down and
from nothing else, and ``write_comparison`` a page to be read.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import numpy as np

from .bench import (
    PROMPTS,
    WARM_UP_TOKENS,
    Work,
    attempt,
    check_plan,
    machine,
    measure_blocks,
    own_record,
    state,
    token_ids,
)
from .decoding import Continuation, speculative
from .distributions import Sampling
from .methods import PLAIN, Method, catalogue, memory, trained_on
from .pairs import Pair
from .randomness import TorchRandomness
from .record import Statistics
from .report import Runs, by_position, per_token
from .results import Record, Results, read_results
from .timing import Stopwatch
from .tree import TreeVerification
from .verify import Verification
from .writeup import aligned, markdown_table, number

FORCED_ROUNDS, FORCED_WARM_UP = 25, 5
COST_CONTEXT = 64


def compare(
    pair: Pair,
    methods: Mapping[str, Method] | None = None,
    *,
    prompts: Mapping[str, str] | Sequence[str | Sequence[int]] = PROMPTS,
    max_new_tokens: int = 128,
    sampling: Sampling = Sampling(),
    repeats: int = 3,
    seed: int = 0,
    path: str | Path | None = None,
    command: str = "",
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> list["MethodRow"]:
    """Run every method (default: ``methods.catalogue``) over prompts x repeats, in turn; a row for each comes back.

    Plain decoding is one of them, under the name ``PLAIN``; it is what the speedups are over. path, command, progress,
    errors: as for ``bench.bench``; an interrupted comparison is resumed.
    """
    methods = {PLAIN: Method(None, 0)} | dict(catalogue(pair, sampling) if methods is None else methods)
    check_plan([max(1, *(method.K for method in methods.values()))], prompts, max_new_tokens, repeats, None)
    ids = token_ids(pair, prompts, max_new_tokens)
    check_forced_rounds(pair, methods)
    settings = {
        "pair": pair.name, "methods": {name: method.K for name, method in methods.items()}, "prompts": ids,
        "max_new_tokens": max_new_tokens, "sampling": asdict(sampling), "repeats": repeats, "seed": seed,
    }  # fmt: skip
    results = Results(settings | machine(pair.target), path)
    results.append("session", command=command, **state())
    progress(0, len(methods) * len(ids) * repeats, "warming up")
    for (name, K), work in works(pair, methods, WARM_UP_TOKENS, sampling).items():
        attempt(work, ids[0], seed, f"{name} with K = {K}", 0, results.path)
    if not results.of("costs"):
        results.append("costs", methods=forced_rounds(pair, methods, sampling))
    measure_blocks(works(pair, methods, max_new_tokens, sampling), ids, repeats, seed, results, progress)
    return rows_of(results.records)


def works(
    pair: Pair, methods: Mapping[str, Method], max_new_tokens: int, sampling: Sampling
) -> dict[tuple[str, int], Work]:
    def work(method: Method) -> Work:
        return lambda prompt, seed: own_record(
            speculative(
                pair, prompt, K=method.K, drafter=method.drafter, verify=method.verify, seed=seed, sampling=sampling,
                max_new_tokens=max_new_tokens, eos_token_id=[],
            )
        )  # fmt: skip

    return {(name, method.K): work(method) for name, method in methods.items()}


def forced_rounds(pair: Pair, methods: Mapping[str, Method], sampling: Sampling) -> dict[str, Record]:
    """What a draft and its verification cost, apart from any text: rounds in which every draft is rejected.

    All methods take turns, each on a text of its own that starts with the same ``COST_CONTEXT`` tokens. Medians: draft
    and target in seconds, nodes: drafted tokens. bytes: memory beyond the target's. trained: see ``trained_on``.
    """
    ids = min(23, pair.target.vocab_size)
    prompt = [i % ids for i in range(COST_CONTEXT)]  # it repeats, so that n-grams are found
    turns = FORCED_WARM_UP + FORCED_ROUNDS
    limit = length_of_forced_rounds(methods)
    texts = {name: Continuation(pair.target, method.drafter, prompt, limit) for name, method in methods.items()}
    seen: dict[str, list[tuple[float, float, int]]] = {name: [] for name in methods}
    randomness, orders = TorchRandomness.seeded(0, pair.target.device), random.Random(0)
    for _ in range(turns):
        for name in orders.sample(list(methods), len(methods)):
            watch = Stopwatch(pair.target.device)
            watch.mark()
            verified = texts[name].draft_and_verify(methods[name].K, sampling, randomness, no_token, no_node, watch)
            texts[name].commit([verified.next_token], [])
            seen[name].append((*watch.seconds(), len(verified.tokens)))  # type: ignore[arg-type]
    costs = {}
    for name, method in methods.items():
        draft, target, nodes = (median(each) for each in zip(*seen[name][FORCED_WARM_UP:], strict=True))
        costs[name] = {"draft": draft, "target": target, "nodes": nodes, "bytes": memory(method, pair.target.context)}
        costs[name]["trained"] = trained_on(pair, name)
    return costs


def length_of_forced_rounds(methods: Mapping[str, Method]) -> int:
    return COST_CONTEXT + FORCED_WARM_UP + FORCED_ROUNDS + max(method.K for method in methods.values()) + 1


def check_forced_rounds(pair: Pair, methods: Mapping[str, Method]) -> None:
    """Raises ``ValueError`` when a context of the pair is too short for them."""
    longest = length_of_forced_rounds(methods)
    for model in (pair.target, pair.draft):
        if model.context < longest:
            raise ValueError(
                f"the costs are measured on texts of {longest} tokens, and {model.name} can hold {model.context}: "
                "compare with a larger one"
            )


def no_token(draft_tokens, draft_probs, target_probs, randomness) -> Verification:
    return Verification(0, target_probs[0].argmax(), drafted=len(draft_tokens))


def no_node(tree, draft_tokens, draft_probs, target_probs, randomness) -> TreeVerification:
    return TreeVerification((), target_probs[0].argmax(), complete=False)


@dataclass(frozen=True)
class MethodRow:
    """One method. Costs are over t(1), a plain step's target pass; intervals are 95%, by resampling prompts.

    drafting, verifying: of forced rounds. by_depth: the share of rounds that went on at each depth, of those that got
    there. predicted: tokens_per_round x (1 + the rest of a plain round) / (drafting + verifying + the rest of a round).
    """

    name: str
    nodes: float
    by_depth: list[float]
    tokens_per_round: float
    drafting: float
    verifying: float
    speedup: float
    speedup_low: float
    speedup_high: float
    predicted: float
    megabytes: float
    megatokens: float | None


def rows_of(records: list[Record]) -> list[MethodRow]:
    """A row for each method, from a comparison's records. Raises ``ValueError`` when no block of it is complete."""
    keys = list(records[0]["methods"].items())
    latest = {(r["engine"], r["K"], r["prompt"], r["repeat"]): r for r in records if r["kind"] == "run"}
    blocks = sorted({key[2:] for key in latest if all(k + key[2:] in latest for k in keys)})
    if not blocks:
        raise ValueError("no block of this comparison is complete yet: run the same command again to resume it")
    prompts = sorted({prompt for prompt, _ in blocks})
    runs = {k: [[latest[k + b] for b in blocks if b[0] == prompt] for prompt in prompts] for k in keys}
    costs = next(r for r in records if r["kind"] == "costs")["methods"]
    return [row_of(name, runs[name, K], runs[PLAIN, 0], costs) for name, K in keys]


def row_of(name: str, runs: Runs, plain: Runs, costs: dict[str, Record]) -> MethodRow:
    t1 = costs[PLAIN]["target"]
    drafting, verifying = costs[name]["draft"] / t1, costs[name]["target"] / t1
    trained = costs[name].get("trained")
    flat = [run for repeats in runs for run in repeats]
    total = Statistics.summed([Statistics(**run["counts"]) for run in flat])
    slow, fast = per_token(plain), per_token(runs)
    choice = np.random.default_rng(0).integers(len(slow), size=(2000, len(slow)))
    low, high = np.quantile(slow[choice].sum(1) / fast[choice].sum(1), [0.025, 0.975])
    E = total.tokens_per_round or 0.0
    return MethodRow(
        name=name,
        nodes=total.drafted / total.rounds,
        by_depth=by_position(flat),
        tokens_per_round=E,
        drafting=drafting,
        verifying=verifying,
        speedup=float(slow.sum() / fast.sum()),
        speedup_low=float(low),
        speedup_high=float(high),
        predicted=E * (1 + rest(plain) / t1) / (drafting + verifying + rest(runs) / t1),
        megabytes=costs[name]["bytes"] / 1e6,
        megatokens=None if trained is None else trained / 1e6,
    )


def rest(runs: Runs) -> float:
    """Seconds of a round that are spent neither drafting nor in the target."""
    flat = [run for repeats in runs for run in repeats if run["counts"]["rounds"] > 1]
    return median(run["other_seconds"] / (run["counts"]["rounds"] - 1) for run in flat)


COLUMNS: dict[str, Callable[[MethodRow], str]] = {
    "method": lambda row: row.name,
    "drafted": lambda row: number(row.nodes, digits=1),
    "accepted by depth": lambda row: " ".join(f"{rate:.2f}".lstrip("0") for rate in row.by_depth) or "-",
    "tokens/round": lambda row: number(row.tokens_per_round),
    "drafting": lambda row: number(row.drafting),
    "verifying": lambda row: number(row.verifying),
    "measured": lambda row: number(row.speedup, "x"),
    "95% interval": lambda row: f"{row.speedup_low:.2f}-{row.speedup_high:.2f}",
    "predicted": lambda row: number(row.predicted, "x"),
    "memory, MB": lambda row: number(row.megabytes, digits=1),
    "trained on, M tokens": lambda row: number(row.megatokens, digits=1),
}


def table(rows: Sequence[MethodRow]) -> list[list[str]]:
    """A header and a row per method, as text."""
    return [list(COLUMNS), *([cell(row) for cell in COLUMNS.values()] for row in rows)]


def head_lines(records: list[Record]) -> list[str]:
    s = records[0]
    t1 = next(r for r in records if r["kind"] == "costs")["methods"][PLAIN]["target"]
    return [
        f"{s['pair']} on {s['device']} ({s['device_name']}), {s['dtype']}, {s['threads']} threads, torch {s['torch']}",
        f"temperature {s['sampling']['temperature']:g}, {len(s['prompts'])} prompts x {s['repeats']} repeats "
        f"x {s['max_new_tokens']} tokens, t(1) = {t1 * 1000:.2f} ms",
    ]


def as_text(records: list[Record]) -> str:
    """For a terminal."""
    rows = rows_of(records)  # first: it says so when there is nothing to show yet
    return "\n".join([*head_lines(records), "", *aligned(table(rows))])


def write_comparison(results_file: str | Path) -> Path:
    """Make the page of a comparison's results file and put it beside it."""
    source = Path(results_file)
    records = read_results(source)
    rows = rows_of(records)
    best = max(rows, key=lambda row: row.speedup)
    commands = sorted({r["command"] for r in records if r["kind"] == "session" and r["command"]})
    page = source.with_suffix(".md")
    lines = [
        f"# {records[0]['pair']}: every method, side by side",
        "",
        *(f"- {line}" for line in head_lines(records)),
        f"- fastest: {best.name}, {best.speedup:.2f}x plain decoding ({best.speedup_low:.2f}-{best.speedup_high:.2f})",
        "",
        *markdown_table(table(rows)),
        "",
        "drafted: tokens, or nodes of a tree, per round. accepted by depth: of the rounds that got there, the share",
        "that went on. drafting, verifying: their time in a round, over t(1), a plain step; from rounds that were",
        "forced to reject everything. predicted: from these, the counted tokens per round, and the rest of a round.",
        "memory: weights and caches beside the target's. trained on: what the networks beside the target were shown.",
        "",
        "## Repeat it",
        "",
        *([f"    {command}" for command in commands] or ["From Python: `specdec_lite.comparison.compare`."]),
        "",
    ]
    page.write_text("\n".join(lines), encoding="utf-8", newline="\n")
    return page
