"""The command line: ``specdec demo | generate | bench | doctor``. The only room that prints."""

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

import huggingface_hub

from . import __version__
from .bench import PROMPTS, Report, bench, measure_costs
from .checkpoints import ModelNotAvailable
from .decoding import autoregressive, speculative, stream
from .distributions import Sampling
from .doctor import diagnose
from .pairs import Pair, load_pair
from .record import Result, Round, Statistics
from .text import decode_text
from .theory import predicted_speedup

COLOURS = {"accepted": "\033[32m", "recovered": "\033[31m", "bonus": "\033[36m"}  # green, red, cyan
RESET = "\033[0m"
BAD_INPUT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0 fine, 1 a check failed, 2 bad input (told in one line on stderr)."""
    options = parser().parse_args(arguments)
    huggingface_hub.logging.set_verbosity_error()  # it reports each retry; an error here is one line
    try:
        return options.run(options)
    except (ValueError, MemoryError, ModelNotAvailable, FloatingPointError, OSError) as error:
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
            sub.add_argument("--max-new-tokens", type=int, default=128)
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
    measure.add_argument("--repeats", type=int, default=3)
    measure.add_argument("--no-hugging-face", action="store_true", help="leave out the comparison with generate()")
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
    report = compare(pair, fast, plain, options)
    print(json.dumps(report) if options.json else demo_text(report))
    return 1 if report["identical"] is False else 0


def compare(pair: Pair, fast: list[Result], plain: list[Result], options: argparse.Namespace) -> dict[str, Any]:
    """What the demo reports. identical is None when sampling (the law is the same then, not the tokens), alpha when the
    weights are random (it would mean nothing)."""
    K = options.K
    costs = measure_costs(pair, K + 1, context=min(64, pair.target.context - K - 1))
    alpha = None if pair.random_weights else Statistics.pooled(fast).alpha
    plain_seconds, fast_seconds = (median(run.seconds for run in runs) for runs in (plain, fast))
    return {
        "pair": pair.name,
        "K": K,
        "temperature": options.temperature,
        "new_tokens": len(fast[0].tokens),
        "identical": fast[0].tokens == plain[0].tokens if options.temperature == 0 else None,
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


def number(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:.2f}{unit}"


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


def run_bench(options: argparse.Namespace) -> int:
    report = bench(
        pair_of(options),
        options.K,
        max_new_tokens=options.max_new_tokens,
        sampling=decoding_options(options)["sampling"],
        repeats=options.repeats,
        hugging_face=not options.no_hugging_face,
        seed=options.seed,
        progress=lambda message: print(f"\r{message:<50}", end="", file=sys.stderr, flush=True),
    )
    print("\r" + " " * 50 + "\r", end="", file=sys.stderr)
    print(json.dumps(asdict(report)) if options.json else bench_text(report))
    return 0


def bench_text(report: Report) -> str:
    head = (
        f"{'K':>2} {'alpha':>6} {'E':>5} {'tok/s':>7} {'speedup':>8} {'95% interval':>13} {'predicted':>9} {'vs HF':>6}"
    )
    lines = [
        f"{report.pair} on {report.device}, {report.threads} threads, temperature {report.temperature:g}, "
        f"{report.prompts} prompts x {report.repeats} repeats x {report.new_tokens} tokens",
        f"t(1) = {report.t1_milliseconds:.2f} ms, c = {report.c:.3f}, "
        + ", ".join(f"v({n}) = {v:.2f}" for n, v in report.v.items() if n > 1),
        f"plain decoding {report.plain_tokens_per_second:.0f} tokens/s"
        + (f", {report.hf_plain_ratio:.2f}x Hugging Face generate" if report.hf_plain_ratio else ""),
        "",
        head,
    ]
    for row in report.rows:
        lines.append(
            f"{row.K:>2} {number(row.alpha):>6} {row.tokens_per_round:>5.2f} {row.tokens_per_second:>7.0f} "
            f"{row.speedup:>7.2f}x {row.speedup_low:>6.2f}-{row.speedup_high:<6.2f} {row.predicted_speedup:>8.2f}x "
            f"{number(row.hf_assisted_ratio):>6}"
        )
    return "\n".join([*lines, "", report.verdict])


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
