"""Train the embedded pair, stage by stage; see docs/model-card.md.

The defaults are the recipe of the embedded pair. A stage reads what the former ones left under --out; one that was
killed goes on from its last checkpoint when the same command is given again.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers.utils import logging

from ..drafters.early_exit import ExitHead
from ..drafters.medusa import MedusaHeads
from ..gpt2 import GPT2
from .corpus import read_stories, split, spread_windows, token_stream, train_tokenizer
from .distill import distill, init_from_target, sample_corpus
from .eagle import new_layer, train_eagle
from .gutenberg import MIRROR, build
from .heads import HELD_OUT_WINDOWS, WINDOWS, features_of, states_of, train_exit, train_medusa
from .pretrain import new_model, pretrain
from .report import fill_card, markdown, measure, ship

SIZES = ("vocab_size", "n_positions", "n_embd", "n_layer", "n_head")
SHIPPED = Path(__file__).parents[1] / "weights" / "tiny"


def read(kind, folder: Path, stage: str):
    """The model or tokenizer that ``stage`` leaves in ``folder`` at its end."""
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no {folder}: run the stage `{stage}` to its end first")
    try:
        return kind.from_pretrained(folder)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder} is damaged ({error}): run the stage `{stage}` again to write it anew") from None


def read_corpus(args: argparse.Namespace, home: Path) -> tuple:
    """The tokenizer, then the training and the validation stories as its tokens."""
    tokenizer = read(PreTrainedTokenizerFast, home / "tokenizer", "tokenizer")
    return tokenizer, *(token_stream(tokenizer, stories) for stories in split(read_stories(args.corpus)))


def check_resume(out: Path, model: GPT2LMHeadModel) -> None:
    """Raise ``ValueError`` when the checkpoint in ``out`` is of a model of other sizes than ``model``."""
    checkpoint, config = out / "checkpoint.pt", out / "config.json"
    if checkpoint.exists():
        begun = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
        now = {size: getattr(model.config, size) for size in begun if size in SIZES}
        if changed := [f"{size} {begun[size]}, not {now[size]}" for size in now if begun[size] != now[size]]:
            raise ValueError(f"{checkpoint} was begun with {'; '.join(changed)}: give the same, or another --out")
    model.config.save_pretrained(out)


def heads_windows(args: argparse.Namespace, target: GPT2) -> list:
    """Windows to train heads on, then windows to validate them on."""
    _, *streams = read_corpus(args, SHIPPED)
    counts = (WINDOWS, HELD_OUT_WINDOWS)
    return [spread_windows(stream, length=target.context, count=n) for stream, n in zip(streams, counts, strict=True)]


def pick(args: argparse.Namespace, names: str) -> dict:
    return {name: getattr(args, name) for name in names.split()}


def run_corpus(args: argparse.Namespace) -> None:
    build(args.out, mirror=args.mirror)


def run_tokenizer(args: argparse.Namespace) -> None:
    train_tokenizer(split(read_stories(args.corpus))[0], args.vocab).save_pretrained(args.out / "tokenizer")


def run_pretrain(args: argparse.Namespace) -> None:
    out, (tokenizer, *streams) = args.out / "target", read_corpus(args, args.out)
    target = new_model(tokenizer, **pick(args, "layers width heads positions seed"))
    check_resume(out, target)
    pretrain(target, *streams, out=out, **pick(args, "steps lr seed compiled"))
    target.save_pretrained(out / "model")


def run_distill(args: argparse.Namespace) -> None:
    out, target = args.out / "draft", read(GPT2LMHeadModel, args.out / "target" / "model", "pretrain")
    tokenizer, training, validation = read_corpus(args, args.out)
    draft = new_model(tokenizer, **pick(args, "layers width heads seed"), positions=target.config.n_positions)
    init_from_target(draft, target)
    check_resume(out, draft)
    training = torch.cat([training, sample_corpus(target, args.sampled, args.seed, out / "sampled.int32")])
    distill(draft, target, training, validation, out=out, **pick(args, "steps lr seed compiled"))
    draft.save_pretrained(out / "model")


def run_eagle(args: argparse.Namespace) -> None:
    out, target = args.out / "eagle", read(GPT2, SHIPPED / "target", "ship")
    _, training, validation = read_corpus(args, SHIPPED)
    layer = new_layer(target, args.seed)
    train_eagle(layer, target, training, validation, out=out, **pick(args, "steps lr seed"))
    layer.save(out / "eagle.safetensors", target)


def run_medusa(args: argparse.Namespace) -> None:
    out, target = args.out / f"medusa-{args.heads}", read(GPT2, SHIPPED / "target", "ship")
    heads = MedusaHeads(target.config.width, args.heads)
    training, held_out = (features_of(target, windows) for windows in heads_windows(args, target))
    train_medusa(heads, target, training, held_out, out=out, **pick(args, "steps lr seed"))
    heads.save(out / "medusa.safetensors", target)


def run_exit(args: argparse.Namespace) -> None:
    out, target = args.out / f"exit-{args.layers}", read(GPT2, SHIPPED / "target", "ship")
    head = ExitHead.untrained(target, args.layers)
    training, held_out = (
        (states_of(target, args.layers, windows), features_of(target, windows))
        for windows in heads_windows(args, target)
    )
    train_exit(head, target, training, held_out, out=out, **pick(args, "steps lr seed"))
    head.save(out / "exit.safetensors", target)


def run_report(args: argparse.Namespace) -> None:
    home, inner = (SHIPPED, ".") if args.shipped else (args.out, "model")
    target = read(GPT2LMHeadModel, home / "target" / inner, "pretrain").float()
    draft = read(GPT2LMHeadModel, home / "draft" / inner, "distill").float()
    tokenizer, _, validation = read_corpus(args, home)
    figures = measure(target, draft, tokenizer, validation)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "report.json").write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    print(markdown(figures))
    if args.card:
        fill_card(args.card, markdown(figures))


def run_ship(args: argparse.Namespace) -> None:
    target = read(GPT2LMHeadModel, args.out / "target" / "model", "pretrain")
    draft = read(GPT2LMHeadModel, args.out / "draft" / "model", "distill")
    ship(target, draft, args.out / "tokenizer", SHIPPED)


FLAGS: dict[str, dict] = {
    "corpus": {"type": Path, "default": Path("corpus.txt"), "help": "the corpus file"},
    "out": {"type": Path, "default": Path("runs"), "help": "where the stage writes, and reads what former ones wrote"},
    "mirror": {"default": MIRROR, "help": "a server with Project Gutenberg's cache/epub folder"},
    "vocab": {"type": int, "default": 4096, "help": "tokens in the vocabulary"},
    **{size: {"type": int, "help": "a size of the model"} for size in ("layers", "width", "heads", "positions")},
    "steps": {"type": int, "default": 1000, "help": "training steps"},
    "lr": {"type": float, "default": 6e-3, "help": "highest learning rate"},
    "seed": {"type": int, "default": 0, "help": "of the first weights, the batches and the sampled text"},
    "compile": {"dest": "compiled", "action": "store_true", "help": "use torch.compile: faster, needs a C++ compiler"},
    "sampled": {"type": int, "default": 0, "help": "tokens of the target's own text to train on, too"},
    "shipped": {"action": "store_true", "help": "measure the pair inside the package, not the one under --out"},
    "card": {"type": Path, "help": "a model card whose report is to be replaced"},
}
TARGET, DRAFT = (
    {"layers": 8, "width": 256, "heads": 4, "positions": 512},
    {"layers": 1, "width": 128, "heads": 4, "steps": 1400},
)
TRAINING = "corpus out layers width heads steps lr seed compile"
MEDUSA, EXIT = ({"heads": 4, "steps": 600, "lr": 0.01}, {"layers": 1, "steps": 600, "lr": 0.01})
HEADS = "corpus out steps lr seed"
STAGES: dict[str, tuple] = {  # what runs, what it does, its flags, their defaults where they differ from those above
    "corpus": (run_corpus, "download the books, write the corpus", "out mirror", {"out": Path("corpus.txt")}),
    "tokenizer": (run_tokenizer, "train the tokenizer", "corpus out vocab", {}),
    "pretrain": (run_pretrain, "train the target", f"{TRAINING} positions", TARGET),
    "distill": (run_distill, "train the draft on the target", f"{TRAINING} sampled", DRAFT),
    "report": (run_report, "measure the pair", "corpus out shipped card", {}),
    "eagle": (run_eagle, "train EAGLE's layer for the package's target", HEADS, {"steps": 2400}),
    "medusa": (run_medusa, "train Medusa's heads for the package's target", f"{HEADS} heads", MEDUSA),
    "exit": (run_exit, "train an early exit of the package's target", f"{HEADS} layers", EXIT),
    "ship": (run_ship, "copy the pair into the package", "out", {}),
}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m specdec_lite.training", description=__doc__)
    stages = parser.add_subparsers(required=True, metavar="stage")
    for name, (run, what, flags, defaults) in STAGES.items():
        stage = stages.add_parser(name, help=what, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
        for flag in flags.split():
            stage.add_argument(f"--{flag}", **FLAGS[flag])
        stage.set_defaults(run=run, **defaults)
    args = parser.parse_args(argv)
    logging.disable_progress_bar()
    try:
        args.run(args)
    except (OSError, ValueError, FloatingPointError) as error:
        parser.exit(2, f"error: {error}\n")


if __name__ == "__main__":
    main()
