"""The command line: ``specdec demo | generate | bench | report | check | doctor``. The only room that prints."""

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

from . import __version__
from .bench import PROMPTS, bench, check_plan
from .checkpoints import ModelNotAvailable
from .costs import check_room
from .decoding import autoregressive, speculative, stream
from .demo import compare, demo_text
from .distributions import Sampling
from .doctor import diagnose
from .engines import EngineError, engine_by_name
from .forms import MODES, accelerate
from .pairs import Pair, load_pair
from .record import Result, Round
from .report import Report
from .selfcheck import check, table
from .text import decode_text
from .writeup import as_text, write_report

COLOURS = {"accepted": "\033[32m", "recovered": "\033[31m", "bonus": "\033[36m"}  # green, red, cyan
RESET = "\033[0m"
BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 fine, 1 a check failed, 2 bad input (told in one line on stderr)."""
    options = parser().parse_args(arguments)
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


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(prog="specdec", description=__doc__.splitlines()[0])
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(required=True, metavar="command")

    def command(name: str, run: Callable[[argparse.Namespace], int], text: str, *, decodes: bool) -> Any:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=run)
        sub.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        if decodes:
            sub.add_argument("--pair", default=None, help="tiny (default), gpt2-xl, random:gpt2-xl, ...")
            sub.add_argument("--target", help="a Hugging Face id or folder, with --draft")
            sub.add_argument("--draft", help="a smaller model with the same tokenizer")
            sub.add_argument("--device", default="cpu", help="cpu (default), cuda, mps or auto")
            sub.add_argument("--dtype", default="float32", help="float32 (default), bfloat16 or float16")
            sub.add_argument("--max-new-tokens", type=int, default=128, help="(default: 128)")
            sub.add_argument("--temperature", type=float, default=0.0 if name == "demo" else 1.0, help="0 is greedy")
            sub.add_argument("--top-k", type=int, default=None)
            sub.add_argument("--top-p", type=float, default=1.0)
            sub.add_argument("--seed", type=int, default=0)
        return sub

    demo = command("demo", run_demo, "Write a text speculatively, then plainly, and compare.", decodes=True)
    generate = command("generate", run_generate, "Write a text.", decodes=True)
    for sub in (demo, generate):
        sub.add_argument("--prompt", default=PROMPTS["story"])
        sub.add_argument("--K", type=int, default=4, help="tokens drafted per round (0: plain decoding)")
        sub.add_argument("--no-color", action="store_true", help="mark origins with signs instead of colours")
    generate.add_argument("--stop", action="append", help="a text that ends the output (may be given more than once)")
    measure = command("bench", run_bench, "Measure plain and speculative decoding for several K.", decodes=True)
    measure.add_argument("--K", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8])
    measure.add_argument("--prompts", nargs="+", help="texts to go on from (default: five of five kinds)")
    measure.add_argument("--repeats", type=int, default=3)
    measure.add_argument(
        "--alpha", type=float, help="assume this acceptance instead of verifying (random weights: 0.8)"
    )
    measure.add_argument("--out", help="results file (.jsonl); an unfinished one is resumed (default: a new file here)")
    measure.add_argument("--mode", choices=MODES, help="another form of the own GPT-2: packed is for float32 on a CPU")
    measure.add_argument("--no-hugging-face", action="store_true", help="leave out the comparison with generate()")
    again = command("report", run_report, "Make the report and the picture of a results file again.", decodes=False)
    again.add_argument("results", help="a .jsonl file that `specdec bench` wrote")
    proof = command("check", run_check, "Is it lossless? Examine the pair, or another engine with it.", decodes=True)
    proof.set_defaults(max_new_tokens=64)
    proof.add_argument("--engine", default="loop", help="loop (default), batch, hugging-face or FILE.py:FUNCTION")
    proof.add_argument("--K", type=int, default=2, help="tokens drafted per round")
    proof.add_argument("--prompts", nargs="+", default=list(PROMPTS.values()), help="texts to go on from")
    proof.add_argument("--draws", type=int, default=20_000, help="runs of the law test (default: 20,000)")
    proof.add_argument("--planted", action="store_true", help="run wrong rules as well, to see each of them caught")
    command("doctor", run_doctor, "Check this machine and its installation.", decodes=False)
    return top


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
    path = Path(options.out or f"specdec-bench-{slug(pair.name)}-{datetime.now():%Y%m%d-%H%M%S}.jsonl")
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


def run_report(options: argparse.Namespace) -> int:
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


if __name__ == "__main__":
    sys.exit(main())
