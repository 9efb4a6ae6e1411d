"""A draft made live: half a minute, no corpus, nothing but the target.

``write_lesson`` lets the target write, and keeps what it thought at each token. ``distill_live`` teaches a new draft
from that. As decoding is lossless, a draft is asked to continue just such text: DistillSpec (Zhou et al. 2023,
2310.08461) studies distilling on generated text.
"""

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..distributions import overlap
from ..gpt2 import GPT2, GPT2Config
from .distill import Loss, forward_kl, principal
from .heads import BATCH, sample_text
from .loop import train

HELD_OUT = 8  # rows of a lesson that are kept for validation
INITIAL_SCALE = 0.02  # standard deviation of an embedding's first weights, as in GPT-2
POINTS = 10  # of a curve, besides its start


@dataclass(frozen=True)
class Lesson:
    """Text of a target, and the target's logits after each token (in float16: half the memory)."""

    tokens: Int[Tensor, "rows length"]
    logits: Float[Tensor, "rows length vocab"]


class Point(NamedTuple):
    """How far a run is: the loss, and alpha at temperature 1, both on the rows that it does not learn from."""

    step: int
    loss: float
    alpha: float


@torch.inference_mode()
def write_lesson(target: GPT2, start: int, *, rows: int = 112, length: int = 128, seed: int = 0) -> Lesson:
    """``rows`` texts sampled from the target at temperature 1, each begun by the token ``start``; none ends early.

    Takes 2 bytes x rows x length x vocabulary. Raises ``ValueError`` when no row is left to learn from, or when a row
    does not fit the target.
    """
    if rows <= HELD_OUT or not 1 <= length <= target.context:
        raise ValueError(
            f"{rows} rows of {length} tokens: give more than {HELD_OUT} rows (those are kept for validation), of at "
            f"most {target.context} tokens"
        )
    tokens = sample_text(target, start, rows=rows, length=length, seed=seed)
    batches = (target(batch, target.new_cache(length, len(batch))).half() for batch in tokens.split(BATCH))
    return Lesson(tokens, torch.cat(list(batches)))


def distill_live(
    target: GPT2,
    lesson: Lesson,
    loss: Loss = forward_kl,
    *,
    layers: int = 1,
    width: int = 128,
    heads: int = 4,
    steps: int = 200,
    rows: int = 4,
    lr: float = 6e-3,
    seed: int = 0,
) -> tuple[GPT2, list[Point]]:
    """A new draft for ``target`` and the curve of its training: its start, and a point at each tenth of the way.

    200 steps of 4 rows take about fifteen seconds on one CPU core. layers, width, heads: sizes of the draft. loss: one
    of ``distill.LOSSES``, or any function of the draft's logits and p. Raises ``ValueError`` when the draft is wider
    than the target, or its heads do not divide its width.
    """
    draft = new_draft(target, layers=layers, width=width, heads=heads, seed=seed)
    length = lesson.tokens.shape[1]

    def loss_at(step: int) -> Tensor:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        chosen = torch.randint(len(lesson.tokens) - HELD_OUT, (rows,), generator=generator)
        # At random places of the context: the draft learns positions that the lesson is too short for.
        first = torch.randint(target.context - length + 1, (rows, 1), generator=generator)
        return loss(logits_of(draft, lesson.tokens[chosen], first), lesson.logits[chosen].float().softmax(-1))

    start = Point(0, **measure(draft, lesson, loss))
    with tempfile.TemporaryDirectory() as folder:
        train(
            draft, loss_at, steps=steps, lr=lr, out=Path(folder) / "distill", checkpoint_every=steps,
            validate=lambda: measure(draft, lesson, loss), validate_every=max(1, steps // POINTS),
        )  # fmt: skip
        log = (Path(folder) / "distill" / "log.jsonl").read_text(encoding="utf-8")
    rows_of_log = map(json.loads, log.splitlines())
    curve = [Point(row["step"], row["loss"], row["alpha"]) for row in rows_of_log if "alpha" in row]
    return draft.eval().requires_grad_(False), [start, *curve]


def new_draft(target: GPT2, *, layers: int, width: int, heads: int, seed: int) -> GPT2:
    """An untrained draft whose embedding is the target's first principal components; see ``init_from_target``."""
    if width > target.config.width or width % heads:
        raise ValueError(
            f"the draft's width is {width}, with {heads} heads: give at most the target's {target.config.width}, and a "
            "multiple of the heads"
        )
    draft = GPT2.random(GPT2Config(target.vocab_size, target.context, width, layers, heads), seed=seed)
    draft.name = f"live draft, {layers} x {width}"
    draft.token_embedding.weight.copy_(principal(target.token_embedding.weight, width) * INITIAL_SCALE)
    return draft.requires_grad_(True)


def logits_of(
    draft: GPT2, tokens: Int[Tensor, "rows length"], first: Int[Tensor, "#rows 1"]
) -> Float[Tensor, "rows length vocab"]:
    """The draft's logits after each token, with row r at positions ``first[r]`` and on."""
    rows, length = tokens.shape
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return draft(tokens, draft.new_cache(length, rows), positions=first + torch.arange(length)).float()


@torch.no_grad()
def measure(draft: GPT2, lesson: Lesson, loss: Loss) -> dict[str, float]:
    """Loss and alpha on the rows that are kept for validation."""
    p = lesson.logits[-HELD_OUT:].float().softmax(-1)
    logits = logits_of(draft, lesson.tokens[-HELD_OUT:], torch.zeros(1, 1, dtype=torch.long))
    return {"loss": loss(logits, p).item(), "alpha": overlap(p, logits.softmax(-1)).mean().item()}
