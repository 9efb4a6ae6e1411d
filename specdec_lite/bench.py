"""Does it pay, and with which K? Speculative decoding measured against plain decoding, beside its prediction.

Everything is measured in one process, taken in turn: the costs of single passes (for the prediction), plain decoding,
speculative decoding for each K and, if wanted, Hugging Face's ``generate``. The work comes in blocks: one prompt, once
with every K. A speedup compares times of the same blocks. Each time is written down as it comes (``results.py``);
``report.py`` makes the numbers from what was written down, and from nothing else.
"""

import os
import platform
import random
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import asdict, replace
from datetime import datetime, timezone
from itertools import product
from pathlib import Path
from typing import Any

import torch
import transformers

from .costs import check_room, measure_costs
from .decoding import speculative
from .distributions import Sampling
from .engines import EngineError, HuggingFace
from .models import LanguageModel
from .pairs import Pair
from .record import Result, Statistics
from .report import Report, summarise
from .results import Record, Results
from .text import encode_prompt
from .theory import check_alpha, check_K
from .timing import Stopwatch
from .verify import Verification, Verify, verify

PROMPTS = {
    "story": "Once upon a time there was a king who had three daughters, and the youngest was so beautiful that",
    "dialogue": '"Where are you going?" said the old woman. "I am going to seek my fortune," said the boy. "Then',
    "list": "The princess packed three things for the journey: a loaf of bread, a silver cup, and",
    "code-like": "If the door is red, go left. If the door is blue, go right. If the door is green, go",
    "copy-heavy": "The cat sat on the wall. The dog sat on the wall. The hen sat on the wall. The fox",
}
LONGEST_PASS = 16  # v(n) is measured for n = 1 to at least this
WARM_UP_TOKENS = 8
OWN, HUGGING_FACE = "own", "hugging face"
Work = Callable[[list[int], int], Record]  # (prompt, seed) -> the fields of a "run" record


def bench(
    pair: Pair,
    Ks: Sequence[int] = (1, 2, 3, 4, 5, 6, 8),
    *,
    prompts: Mapping[str, str] | Sequence[str | Sequence[int]] = PROMPTS,
    max_new_tokens: int = 128,
    sampling: Sampling = Sampling(),
    repeats: int = 3,
    hugging_face: bool = True,
    seed: int = 0,
    alpha: float | None = None,
    path: str | Path | None = None,
    command: str = "",
    progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> Report:
    """Plain and speculative decoding for each K, in turn, over prompts x repeats; see ``Report`` for what comes back.

    hugging_face: also run transformers' ``generate``, plain and assisted with each K, for comparison.
    alpha: do not verify, but accept each draft token with this chance. What is timed is then a real loop with an
    assumed acceptance; a pair of random weights needs it (0.8 when nothing is given), and the report says so.
    path: a results file, written as the numbers come. If it exists, the run that it holds is resumed.
    command: how to repeat the run, for the report. progress: is called with (runs done, runs in all, what is next).

    Raises ``ValueError`` for bad input and a file of another run, before any work is done; ``EngineError`` when
    decoding fails on the way (what was measured until then is in the file).
    """
    check_plan(Ks, prompts, max_new_tokens, repeats, alpha)
    if alpha is None and pair.random_weights:
        alpha = 0.8
    check_room(pair, max(Ks))
    ids = token_ids(pair, prompts, max_new_tokens)
    settings = {
        "pair": pair.name, "Ks": list(Ks), "prompts": ids, "max_new_tokens": max_new_tokens,
        "sampling": asdict(sampling), "repeats": repeats, "seed": seed, "hugging_face": hugging_face, "alpha": alpha,
    }  # fmt: skip
    results = Results(settings | machine(pair.target), path)
    results.append("session", command=command, **state())
    works = runners(pair, Ks, max_new_tokens, sampling, hugging_face, alpha)
    progress(0, len(works) * len(ids) * repeats, "warming up")
    for (engine, K), work in runners(pair, Ks, WARM_UP_TOKENS, sampling, hugging_face, alpha).items():
        attempt(work, ids[0], seed, f"{engine} with K = {K}", 0, results.path)
    if not results.of("costs"):
        progress(0, len(works) * len(ids) * repeats, "single passes")
        results.append("costs", **asdict(measure_costs(pair, Ks, longest=LONGEST_PASS, sampling=sampling)))
    measure_blocks(works, ids, repeats, seed, results, progress)
    return summarise(results.records)


def token_ids(
    pair: Pair, prompts: Mapping[str, str] | Sequence[str | Sequence[int]], max_new_tokens: int
) -> list[list[int]]:
    """The prompts as token ids. Raises ``ValueError`` where one is bad or, with its output, outgrows the context."""
    texts = list(prompts.values()) if isinstance(prompts, Mapping) else list(prompts)
    ids = [encode_prompt(pair.tokenizer, text, pair.target.vocab_size) for text in texts]
    longest = max(map(len, ids))
    if longest + max_new_tokens > pair.target.context:
        raise ValueError(
            f"the longest prompt has {longest} tokens and {max_new_tokens} are to follow, but {pair.target.name} can "
            f"hold {pair.target.context}: shorten it, or lower max_new_tokens"
        )
    return ids


def check_plan(Ks: Sequence[int], prompts: Sized, max_new_tokens: int, repeats: int, alpha: float | None) -> None:
    """Raises ``ValueError`` for what ``bench`` cannot do; needs no pair, so it can be asked before one is loaded."""
    for K in Ks:
        check_K(K)
    if not (Ks and min(Ks) >= 1 and repeats >= 1 and len(prompts) and max_new_tokens >= 2):
        raise ValueError("bench needs at least one K >= 1, one prompt, one repeat and two new tokens")
    if len(set(Ks)) < len(Ks):
        raise ValueError(f"Ks holds a number twice: {list(Ks)}")
    if max_new_tokens < max(Ks) + 2:  # the first round, of up to K + 1 tokens, is not counted
        raise ValueError(f"with K = {max(Ks)} bench needs max_new_tokens {max(Ks) + 2} or more, not {max_new_tokens}")
    if alpha is not None:
        check_alpha(alpha)


def measure_blocks(
    works: Mapping[tuple[str, int], Work],
    prompts: list[list[int]],
    repeats: int,
    seed: int,
    results: Results,
    progress: Callable[[int, int, str], None],
) -> None:
    """Run every block that the results lack. A block that was interrupted is run again as a whole."""
    measured = {(r["repeat"], r["prompt"], r["engine"], r["K"]) for r in results.of("run")}
    total, done = len(works) * len(prompts) * repeats, 0
    for repeat, i in product(range(repeats), range(len(prompts))):
        missing = {key for key in works if (repeat, i, *key) not in measured}
        order = random.Random(f"{seed} {repeat} {i}").sample(list(works), len(works)) if missing else []
        for engine, K in order:
            progress(done, total, f"prompt {i + 1}, {engine}, K = {K}")
            record = attempt(works[engine, K], prompts[i], seed + repeat, f"{engine} with K = {K}", i, results.path)
            results.append("run", repeat=repeat, prompt=i, engine=engine, K=K, **record)
            done += 1
        done += 0 if missing else len(works)
    progress(done, total, "done")


def attempt(work: Work, prompt: list[int], seed: int, what: str, i: int, path: Path | None) -> Record:
    """Do it, or say in one line what failed and how to go on."""
    try:
        return work(prompt, seed)
    except Exception as error:
        said = (str(error).strip().splitlines() or [type(error).__name__])[0]
        advice = "; leave that column out with --no-hugging-face" if what.startswith(HUGGING_FACE) else ""
        kept = f"; what was measured is in {path}" if path else ""
        raise EngineError(f"{what} failed on prompt {i + 1}: {said}{advice}{kept}") from error


def runners(
    pair: Pair, Ks: Sequence[int], max_new_tokens: int, sampling: Sampling, hugging_face: bool, alpha: float | None
) -> dict[tuple[str, int], Work]:
    """What is run in turn, by (engine, K). K = 0 is plain decoding."""
    rule = verify if alpha is None else assumed_acceptance(alpha)
    options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "sampling": sampling, "eos_token_id": []}

    def own(K: int) -> Work:
        return lambda prompt, seed: own_record(speculative(pair, prompt, K=K, seed=seed, verify=rule, **options))

    works: dict[tuple[str, int], Work] = {(OWN, K): own(K) for K in (0, *Ks)}
    if hugging_face:  # which cannot be told what to accept: with an assumed alpha only plain decoding compares
        for K in (0, *Ks) if alpha is None else (0,):
            works[HUGGING_FACE, K] = timed(HuggingFace(pair, K), pair.target.device, max_new_tokens, sampling)
    return works


def assumed_acceptance(alpha: float) -> Verify:
    """A rule for timing only: each draft token is accepted with chance ``alpha``, whatever p and q say."""

    def rule(draft_tokens, draft_probs, target_probs, randomness) -> Verification:
        outcome = verify(draft_tokens, draft_probs, target_probs, randomness)  # its time belongs to the round
        chances = torch.full(draft_tokens.shape, alpha, device=target_probs.device)
        return replace(outcome, accepted=randomness.first_failure(chances))

    return rule


def own_record(result: Result) -> Record:
    """A run of this library. Times and ``tokens`` are without the first round, which holds the prompt's prefill."""
    later = result.rounds[1:]
    positions = max((len(round.draft_tokens) for round in result.rounds), default=0)
    return {
        "first_seconds": result.rounds[0].seconds,
        "first_tokens": len(result.rounds[0].tokens),
        "seconds": sum(round.seconds for round in later),
        "tokens": sum(len(round.tokens) for round in later),
        "draft_seconds": sum(round.draft_seconds for round in later),
        "target_seconds": sum(round.target_seconds for round in later),
        "other_seconds": sum(round.other_seconds for round in later),
        "counts": asdict(Statistics.pooled([result])),
        # For each draft position: in how many rounds it was verified, and in how many it was accepted.
        "tried": [sum(round.accepted + round.rejected > i for round in result.rounds) for i in range(positions)],
        "accepted": [sum(round.accepted > i for round in result.rounds) for i in range(positions)],
    }


def timed(engine: HuggingFace, device: torch.device, max_new_tokens: int, sampling: Sampling) -> Work:
    """A run of another engine, seen from outside: prefill included."""

    def work(prompt: list[int], seed: int) -> Record:
        watch = Stopwatch(device)
        watch.mark()
        tokens = engine.generate(prompt, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed)
        watch.mark()
        seen = engine.statistics
        return {
            "seconds": watch.seconds()[0], "tokens": len(tokens), "drafted": seen.drafted, "accepted": seen.accepted,
        }  # fmt: skip

    return work


def machine(model: LanguageModel) -> Record:
    """What a time depends on besides the work. A run is resumed only where this is the same."""
    cuda = model.device.type == "cuda"
    return {
        "device": str(model.device),
        "device_name": torch.cuda.get_device_name(model.device) if cuda else processor(),
        "dtype": str(getattr(model, "dtype", torch.float32)).removeprefix("torch."),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def processor() -> str:
    """The CPU's own name where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def state() -> Record:
    """When a session began, and how busy the machine was."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    return {"begun": datetime.now(timezone.utc).isoformat(timespec="seconds"), "load_average": load}
