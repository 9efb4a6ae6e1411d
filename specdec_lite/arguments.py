"""The arguments of the command line ``specdec``: every command, every flag, every default."""

import argparse
from collections.abc import Callable, Mapping
from typing import Any

from . import __version__
from .bench import PROMPTS
from .forms import MODES

Run = Callable[[argparse.Namespace], int]


def parser(runs: Mapping[str, Run]) -> argparse.ArgumentParser:
    """``runs``: for each command what it does; it ends up as ``run`` among the parsed arguments."""
    top = argparse.ArgumentParser(prog="specdec", description="Speculative decoding: see it, measure it, check it.")
    top.add_argument("--version", action="version", version=__version__)
    commands = top.add_subparsers(required=True, metavar="command")

    def command(name: str, text: str, *, decodes: bool) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(run=runs[name], name=name)
        sub.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        if decodes:
            add_decoding(sub, temperature=0.0 if name in ("demo", "methods") else 1.0)
        return sub

    add_writing(
        command("demo", "Write a text speculatively, then plainly, and compare.", decodes=True),
        command("generate", "Write a text.", decodes=True),
    )
    add_measuring(
        command("bench", "Measure plain and speculative decoding for several K.", decodes=True),
        command("methods", "Measure every way to draft, side by side.", decodes=True),
    )
    again = command("report", "Make the report of a results file again.", decodes=False)
    again.add_argument("results", help="a .jsonl file that `specdec bench` or `specdec methods` wrote")
    add_checking(command("check", "Is it lossless? Examine the pair, or another engine with it.", decodes=True))
    command("doctor", "Check this machine and its installation.", decodes=False)
    return top


def add_decoding(sub: argparse.ArgumentParser, temperature: float) -> None:
    sub.add_argument("--pair", default=None, help="tiny (default), gpt2-xl, random:gpt2-xl, ...")
    sub.add_argument("--target", help="a Hugging Face id or folder, with --draft")
    sub.add_argument("--draft", help="a smaller model with the same tokenizer")
    sub.add_argument("--device", default="cpu", help="cpu (default), cuda, mps or auto")
    sub.add_argument("--dtype", default="float32", help="float32 (default), bfloat16 or float16")
    sub.add_argument("--max-new-tokens", type=int, default=128, help="(default: 128)")
    sub.add_argument("--temperature", type=float, default=temperature, help=f"0 is greedy (default: {temperature:g})")
    sub.add_argument("--top-k", type=int, default=None)
    sub.add_argument("--top-p", type=float, default=1.0)
    sub.add_argument("--seed", type=int, default=0)


def add_writing(demo: argparse.ArgumentParser, generate: argparse.ArgumentParser) -> None:
    for sub in (demo, generate):
        sub.add_argument("--prompt", default=PROMPTS["story"])
        sub.add_argument("--no-color", action="store_true", help="mark origins with signs instead of colours")
    per_round = "tokens drafted per round (0: plain decoding)"
    demo.add_argument("--K", type=int, default=4, help=per_round)
    generate.add_argument("--K", type=draft_length, default=4, help=f"{per_round}, or auto")
    generate.add_argument("--stop", action="append", help="a text that ends the output (may be given more than once)")


def add_measuring(bench: argparse.ArgumentParser, methods: argparse.ArgumentParser) -> None:
    bench.add_argument("--K", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 8])
    for sub in (bench, methods):
        sub.add_argument("--prompts", nargs="+", help="texts to go on from (default: five of five kinds)")
        sub.add_argument("--repeats", type=int, default=3)
        sub.add_argument("--out", help="results file (.jsonl); an unfinished one is resumed (default: a new file here)")
    bench.add_argument("--alpha", type=float, help="assume this acceptance instead of verifying (random weights: 0.8)")
    bench.add_argument("--mode", choices=MODES, help="another form of the own GPT-2: packed is for float32 on a CPU")
    bench.add_argument("--no-hugging-face", action="store_true", help="leave out the comparison with generate()")


def add_checking(check: argparse.ArgumentParser) -> None:
    check.set_defaults(max_new_tokens=64)
    check.add_argument("--engine", default="loop", help="loop (default), batch, hugging-face or FILE.py:FUNCTION")
    check.add_argument("--K", type=int, default=2, help="tokens drafted per round")
    check.add_argument("--prompts", nargs="+", default=list(PROMPTS.values()), help="texts to go on from")
    check.add_argument("--draws", type=int, default=20_000, help="runs of the law test (default: 20,000)")
    check.add_argument("--planted", action="store_true", help="run wrong rules as well, to see each of them caught")


def draft_length(text: str) -> Any:
    return text if text == "auto" else int(text)
