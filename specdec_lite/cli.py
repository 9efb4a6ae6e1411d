"""The command line, ``specdec``: what each command does. The only room that prints."""

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

import huggingface_hub
from tqdm import tqdm

from .arguments import parser
from .bench import PROMPTS, bench, check_plan
from .checkpoints import ModelNotAvailable
from .comparison import as_text as comparison_text
from .comparison import compare as compare_methods
from .comparison import rows_of, write_comparison
from .costs import check_room
from .decoding import autoregressive, speculative, stream
from .demo import compare, demo_text
from .distributions import Sampling
from .doctor import diagnose
from .engines import EngineError, engine_by_name
from .forms import accelerate
from .pairs import Pair, load_pair
from .record import Result, Round
from .report import Report
from .results import read_results
from .selfcheck import check, table
from .text import decode_text
from .writeup import as_text, write_report

COLOURS = {"accepted": "\033[32m", "recovered": "\033[31m", "bonus": "\033[36m"}  # green, red, cyan
RESET = "\033[0m"
BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 fine, 1 a check failed, 2 bad input (told in one line on stderr)."""
    options = parser(RUNS).parse_args(arguments)
    options.command = shlex.join(["specdec", *(sys.argv[1:] if arguments is None else arguments)])
    huggingface_hub.logging.set_verbosity_error()  # it reports each retry; an error here is one line
    try:
        return options.run(options)
    except (ValueError, MemoryError, ModelNotAvailable, EngineError, FloatingPointError, OSError) as error:
        print(f"specdec: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("specdec: stopped", file=sys.stderr)
        return 130


def pair_of(options: argparse.Namespace) -> Pair:
    return load_pair(
        options.pair, target=options.target, draft=options.draft, device=options.device, dtype=options.dtype
    )


def show_rounds(rounds: Any, pair: Pair, *, colour: bool, quiet: bool) -> Result:
    """Print each round's text as it commits, by origin; the finished result."""
    result = None
    while result is None:
        try:
            round = next(rounds)
        except StopIteration as end:
            result = end.value
        else:
            if not quiet:
                print(painted(round, pair) if colour else round.text, end="", flush=True)
    if not quiet:
        print()
    return result


def painted(round: Round, pair: Pair) -> str:
    """The round's text in the colours of its tokens' origins; whole, in the last token's colour, where a character is
    spread over tokens."""
    pieces = [decode_text(pair.tokenizer, [token]) for token in round.tokens]
    if "".join(pieces) != round.text:
        return f"{COLOURS[round.origins[-1]]}{round.text}{RESET}"
    return "".join(f"{COLOURS[origin]}{piece}{RESET}" for piece, origin in zip(pieces, round.origins, strict=True))


def wants_colour(options: argparse.Namespace) -> bool:
    return not options.no_color and "NO_COLOR" not in os.environ and sys.stdout.isatty()


def decoding_options(options: argparse.Namespace) -> dict[str, Any]:
    sampling = Sampling(options.temperature, options.top_k, options.top_p)
    return {"max_new_tokens": options.max_new_tokens, "sampling": sampling, "seed": options.seed}


def run_generate(options: argparse.Namespace) -> int:
    pair = pair_of(options)
    colour = wants_colour(options)
    rounds = stream(pair, options.prompt, K=options.K, stop_strings=options.stop, **decoding_options(options))
    result = show_rounds(rounds, pair, colour=colour, quiet=options.json)
    if options.json:
        report = {
            "pair": pair.name, "prompt": options.prompt, "text": result.text, "tokens": result.tokens,
            "origins": result.origins, "finish_reason": result.finish_reason, "alpha": result.alpha,
            "tokens_per_round": result.tokens_per_round, "seconds": result.seconds,
        }  # fmt: skip
        print(json.dumps(report))
    return 0


def run_demo(options: argparse.Namespace) -> int:
    """Speculative and plain decoding of one prompt: identical? how fast? as predicted?"""
    pair = pair_of(options)
    colour = wants_colour(options)
    common = decoding_options(options)
    check_room(pair, options.K)
    for K in (0, options.K):  # warm-up: the first passes of a process are slower
        speculative(pair, options.prompt, K=K, **(common | {"max_new_tokens": min(16, options.max_new_tokens)}))
    if not options.json:
        origins = "  ".join(f"{COLOURS[o]}{o}{RESET}" for o in COLOURS) if colour else "no colours here: not a terminal"
        print(f"{pair.name}: K = {options.K}, temperature {options.temperature:g}   [{origins}]\n")
        print(options.prompt, end="", flush=True)
    rounds = stream(pair, options.prompt, K=options.K, **common)
    fast = [show_rounds(rounds, pair, colour=colour, quiet=options.json)]
    plain = [autoregressive(pair, options.prompt, **common)]
    while len(plain) < 5 and sum(run.seconds for run in plain) < 5:  # in turn, so that a drift of the machine hits both
        fast.append(speculative(pair, options.prompt, K=options.K, **common))
        plain.append(autoregressive(pair, options.prompt, **common))
    report = compare(pair, fast, plain, options.K, options.temperature)
    print(json.dumps(report) if options.json else demo_text(report))
    return 1 if report["identical"] is False else 0


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr, and the function that moves it: progress(done, in all, what is next)."""
    with tqdm(unit="run", file=sys.stderr, leave=False, delay=1) as bar:  # none where bad input ends it at once

        def progress(done: int, total: int, what: str) -> None:
            bar.total, bar.n = total, done
            bar.set_description(what)

        yield progress


def run_bench(options: argparse.Namespace) -> int:
    check_plan(options.K, options.prompts or PROMPTS, options.max_new_tokens, options.repeats, options.alpha)
    pair = accelerate(pair_of(options), options.mode) if options.mode else pair_of(options)
    path = results_path(options, pair)
    with progress_bar() as progress:
        report = bench(
            pair,
            options.K,
            prompts=options.prompts or PROMPTS,
            max_new_tokens=options.max_new_tokens,
            sampling=decoding_options(options)["sampling"],
            repeats=options.repeats,
            hugging_face=not (options.no_hugging_face or options.mode),  # whose models have no such form
            seed=options.seed,
            alpha=options.alpha,
            path=path,
            command=options.command,
            progress=progress,
        )
    _, page, picture = write_report(path)
    show_report(report, options)
    print(f"\nresults: {path}\nreport:  {page}\npicture: {picture}", file=sys.stderr)
    return 0


def run_methods(options: argparse.Namespace) -> int:
    pair = pair_of(options)
    path = results_path(options, pair)
    with progress_bar() as progress:
        compare_methods(
            pair,
            prompts=options.prompts or PROMPTS,
            max_new_tokens=options.max_new_tokens,
            sampling=decoding_options(options)["sampling"],
            repeats=options.repeats,
            seed=options.seed,
            path=path,
            command=options.command,
            progress=progress,
        )
    return show_comparison(path, options)


def show_comparison(path: Path, options: argparse.Namespace) -> int:
    records = read_results(path)
    print(json.dumps([asdict(row) for row in rows_of(records)]) if options.json else comparison_text(records))
    print(f"\nresults: {path}\nreport:  {write_comparison(path)}", file=sys.stderr)
    return 0


def results_path(options: argparse.Namespace, pair: Pair) -> Path:
    return Path(options.out or f"specdec-{options.name}-{slug(pair.name)}-{datetime.now():%Y%m%d-%H%M%S}.jsonl")


def run_report(options: argparse.Namespace) -> int:
    if "methods" in read_results(options.results)[0]:
        return show_comparison(Path(options.results), options)
    report, page, picture = write_report(options.results)
    show_report(report, options)
    print(f"\nreport:  {page}\npicture: {picture}", file=sys.stderr)
    return 0


def show_report(report: Report, options: argparse.Namespace) -> None:
    print(json.dumps(asdict(report)) if options.json else as_text(report))


def slug(name: str) -> str:
    """A name that can be part of a file's name."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", name).strip("-")


def run_check(options: argparse.Namespace) -> int:
    pair = pair_of(options)
    engine = engine_by_name(options.engine, pair, options.K)
    with progress_bar() as progress:
        report = check(
            pair,
            engine,
            prompts=options.prompts,
            draws=options.draws,
            K=options.K,
            planted=options.planted,
            progress=progress,
            **decoding_options(options),
        )
    print(json.dumps(asdict(report)) if options.json else table(report))
    if report.error:
        print(f"specdec: {report.error}", file=sys.stderr)
    return report.exit_code


def run_doctor(options: argparse.Namespace) -> int:
    rows = diagnose()
    if options.json:
        print(json.dumps([asdict(row) for row in rows]))
    else:
        for row in rows:
            state = "OK" if row.ok else "--" if row.optional else "FAIL"
            print(f"{state:<5} {row.name:<18} {row.detail}")
    return 0 if all(row.ok or row.optional for row in rows) else 1


RUNS = {
    "demo": run_demo,
    "generate": run_generate,
    "bench": run_bench,
    "methods": run_methods,
    "report": run_report,
    "check": run_check,
    "doctor": run_doctor,
}

if __name__ == "__main__":
    sys.exit(main())
