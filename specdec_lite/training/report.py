"""The finished pair: what it can do, measured for the model card, and its copy for the package."""

import shutil
from pathlib import Path

from jaxtyping import Int
from torch import Tensor
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

from .corpus import consecutive_windows
from .distill import agreement, sample_windows
from .pretrain import validation_loss

OWN_TEXT_SEED, OWN_TEXT_ROWS = 1_000, 32
SAMPLE_SEEDS, SAMPLE_TOKENS = (1, 2, 3), 120
CARD_BEGIN, CARD_END = "<!-- report -->", "<!-- end of report -->"
SHIPPED_LIMIT = 22_000_000  # bytes: the pair takes 17 MB, and what else was trained for its target 4


def measure(
    target: GPT2LMHeadModel,
    draft: GPT2LMHeadModel,
    tokenizer: PreTrainedTokenizerFast,
    validation: Int[Tensor, " tokens"],
) -> dict:
    """Losses in nats per token and agreement of the pair, in float32, on text that neither was trained on.

    That text is the validation stories, and ``OWN_TEXT_ROWS`` windows freshly sampled from the target at temperature 1.
    """
    length = target.config.n_positions
    held_out = consecutive_windows(validation, length=length)
    own_text = sample_windows(target, rows=OWN_TEXT_ROWS, length=length, seed=OWN_TEXT_SEED)
    pair = {"target": target, "draft": draft}
    return {
        "parameters": {name: model.num_parameters() for name, model in pair.items()},
        "validation_loss": {name: validation_loss(model, validation, length=length) for name, model in pair.items()},
        "agreement": {
            "validation stories": {"tokens": held_out.numel()} | agreement(draft, target, held_out),
            "the target's own text": {"tokens": own_text.numel()} | agreement(draft, target, own_text),
        },
        "samples": {seed: sample_text(target, tokenizer, seed) for seed in SAMPLE_SEEDS},
    }


def sample_text(target: GPT2LMHeadModel, tokenizer: PreTrainedTokenizerFast, seed: int) -> str:
    """The beginning of a story that the target tells."""
    tokens = sample_windows(target, rows=1, length=SAMPLE_TOKENS, seed=seed)[0]
    return str(tokenizer.decode(tokens[1:]))  # without the marker that begins it, with any that it wrote itself


def markdown(figures: dict) -> str:
    """``measure``'s result for the model card."""
    rows = [
        "| | target | draft |",
        "|---|---|---|",
        "| parameters | {target:,} | {draft:,} |".format(**figures["parameters"]),
        "| validation loss (nats per token) | {target:.3f} | {draft:.3f} |".format(**figures["validation_loss"]),
        "",
        "| draft against target, on | tokens | alpha, temperature 1 | alpha, greedy |",
        "|---|---|---|---|",
        *(
            f"| {text} | {found['tokens']:,} | {found['alpha']:.3f} | {found['greedy_alpha']:.3f} |"
            for text, found in figures["agreement"].items()
        ),
    ]
    for seed, text in figures["samples"].items():
        rows += ["", f"The target at temperature 1, seed {seed}, {SAMPLE_TOKENS} tokens:", "", "```text", text, "```"]
    return "\n".join(rows)


def fill_card(card: Path, report: str) -> None:
    """Put ``report`` between the markers of the model card, in place of what stood there.

    Raises ``ValueError`` when the card has no such place.
    """
    text = card.read_text(encoding="utf-8")
    before, begin, rest = text.partition(CARD_BEGIN)
    _, end, after = rest.partition(CARD_END)
    if not end:
        raise ValueError(f"{card} has no place for the report: it is put between {CARD_BEGIN} and {CARD_END}")
    card.write_text(f"{before}{begin}\n{report}\n{end}{after}", encoding="utf-8", newline="\n")


def ship(target: GPT2LMHeadModel, draft: GPT2LMHeadModel, tokenizer_folder: Path, shipped: Path) -> None:
    """Write the pair where the package reads it, in float16 and with only the files that loading needs.

    The models are converted in place. Raises ``ValueError`` when the whole is larger than a package should be.
    """
    for name, model in (("target", target), ("draft", draft)):
        model.half().save_pretrained(shipped / name)
        (shipped / name / "generation_config.json").unlink(missing_ok=True)
    (shipped / "tokenizer").mkdir(exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_folder / name, shipped / "tokenizer" / name)
    size = sum(file.stat().st_size for file in shipped.rglob("*") if file.is_file())
    if size > SHIPPED_LIMIT:
        raise ValueError(f"{shipped} is {size / 1e6:.1f} MB; the package may carry {SHIPPED_LIMIT / 1e6:.0f} MB")
