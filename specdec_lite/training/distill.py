"""Distilling a draft: it learns the target's whole distribution at every position, not only the next token.

The embedded draft's loss is KL(p || q) at first and TV(p, q) for the last part of the run. The acceptance rate is
exactly 1 - TV(p, q) (Leviathan et al. 2023, Corollary 3.6), so the second loss optimises what the draft is used for. It
does not come first: where q is near 0 its gradient vanishes, while that of KL, q - p, still pulls q up to where p is.

A draft without a corpus, in half a minute: ``live.py``.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from tqdm.auto import tqdm
from transformers import GPT2LMHeadModel

from ..distributions import overlap
from .corpus import random_windows, spread_windows
from .loop import train

VALIDATION_WINDOWS = 32  # a subset, so that validating takes seconds
SAMPLE_ROWS = 64


def forward_kl(logits: Float[Tensor, "rows length vocab"], p: Float[Tensor, "rows length vocab"]) -> Float[Tensor, ""]:
    """Mean over positions of KL(p || q) in nats, with q = softmax(logits)."""
    cross_entropy = F.cross_entropy(logits.flatten(0, 1).float(), p.flatten(0, 1))
    return cross_entropy - torch.special.entr(p).sum(-1).mean()


def reverse_kl(logits: Float[Tensor, "rows length vocab"], p: Float[Tensor, "rows length vocab"]) -> Float[Tensor, ""]:
    """Mean over positions of KL(q || p) in nats, with q = softmax(logits). p must be above 0 wherever q is."""
    log_q = logits.float().log_softmax(-1)
    return (log_q.exp() * (log_q - p.log())).sum(-1).mean()


def variation(logits: Float[Tensor, "rows length vocab"], p: Float[Tensor, "rows length vocab"]) -> Float[Tensor, ""]:
    """Mean over positions of TV(p, q) = 1 - sum min(p, q), with q = softmax(logits): the share of rejected tokens."""
    return 1 - overlap(p, logits.softmax(-1, dtype=torch.float32)).mean()


Loss = Callable[[Float[Tensor, "rows length vocab"], Float[Tensor, "rows length vocab"]], Float[Tensor, ""]]
LOSSES: Mapping[str, Loss] = MappingProxyType(
    {"forward KL": forward_kl, "reverse KL": reverse_kl, "total variation": variation}
)


@torch.no_grad()
def init_from_target(draft: GPT2LMHeadModel, target: GPT2LMHeadModel) -> None:
    """Start the draft's token embedding as the target's, projected on its first principal components.

    Words that the target has learned to treat alike then start alike, which so short a run would else spend its first
    part on finding out. The scale is that of a fresh embedding, so that the learning rate suits it.

    Raises ``ValueError`` when the vocabularies differ or the draft is the wider one.
    """
    learned, own = target.transformer.wte.weight, draft.transformer.wte.weight
    if own.shape[0] != learned.shape[0] or own.shape[1] > learned.shape[1]:
        raise ValueError(
            f"the draft's embedding is {own.shape[0]} x {own.shape[1]}, the target's {learned.shape[0]} x "
            f"{learned.shape[1]}: it needs the same vocabulary and at most the same width"
        )
    own.copy_(principal(learned, own.shape[1]) * draft.config.initializer_range)


def principal(embedding: Float[Tensor, "vocab width"], width: int) -> Float[Tensor, "vocab smaller"]:
    """An embedding on its first ``width`` principal components, with a standard deviation of 1."""
    centred = embedding - embedding.mean(0)  # what all tokens share adds the same to every logit, so it says nothing
    _, _, components = torch.linalg.svd(centred, full_matrices=False)  # most variance first
    projected = centred @ components[:width].T
    return projected / projected.std()


@torch.inference_mode()
def agreement(draft: GPT2LMHeadModel, target: GPT2LMHeadModel, windows: Int[Tensor, "rows length"]) -> dict[str, float]:
    """How well the draft guesses the target on ``windows``, in float32, as a mean over all positions.

    alpha: E[sum min(p, q)] at temperature 1. greedy_alpha: how often both have the same most likely token, which is
    alpha at temperature 0.
    """
    alpha = greedy_alpha = 0.0
    for batch in windows.split(4):
        p, q = (model(input_ids=batch, use_cache=False).logits.float().softmax(-1) for model in (target, draft))
        alpha += overlap(p, q).mean(-1).sum().item()
        greedy_alpha += (p.argmax(-1) == q.argmax(-1)).float().mean(-1).sum().item()
    return {"alpha": alpha / len(windows), "greedy_alpha": greedy_alpha / len(windows)}


def distill(
    draft: GPT2LMHeadModel,
    target: GPT2LMHeadModel,
    training: Int[Tensor, " tokens"],
    validation: Int[Tensor, " tokens"],
    *,
    out: Path,
    steps: int,
    rows: int = 8,
    lr: float = 6e-3,
    seed: int = 0,
    compiled: bool = False,
    variation_share: float = 0.3,
) -> None:
    """Train ``draft`` in place; see ``loop.train`` for what ``out`` holds and how a killed run goes on.

    The loss in the log is KL in nats up to step ``(1 - variation_share) * steps`` and TV from there.
    """
    length = draft.config.n_positions
    variation_from = steps - int(variation_share * steps)
    windows = spread_windows(validation, length=length, count=VALIDATION_WINDOWS)
    target.eval()
    teacher, student = (torch.compile(target), torch.compile(draft)) if compiled else (target, draft)

    def loss_at(step: int) -> Tensor:
        tokens = random_windows(training, rows=rows, length=length, seed=seed, step=step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():  # not inference_mode: the backward pass of the loss reads p
                p = teacher(input_ids=tokens, use_cache=False).logits.softmax(-1, dtype=torch.float32)
            logits = student(input_ids=tokens, use_cache=False).logits
        loss = forward_kl if step < variation_from else variation
        return loss(logits, p)

    train(
        draft, loss_at, steps=steps, lr=lr, out=out, validate_every=250,
        validate=lambda: agreement(draft, target, windows),
    )  # fmt: skip


def sample_windows(target: GPT2LMHeadModel, *, rows: int, length: int, seed: int) -> Int[Tensor, "rows length"]:
    """Text sampled from the target at temperature 1, each row begun by the end-of-text token.

    A row does not stop where a story ends but goes on to the next, as the corpus does.
    """
    end = target.config.eos_token_id
    prompt = torch.tensor([[end]]).repeat(rows, 1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return target.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=True, top_k=0, max_length=length,
            eos_token_id=[], pad_token_id=end,
        )  # fmt: skip


def sample_corpus(target: GPT2LMHeadModel, tokens: int, seed: int, out: Path) -> Int[Tensor, " tokens"]:
    """At least ``tokens`` tokens of the target's own text, to train the draft on beside the corpus.

    Because decoding is lossless, its contexts are distributed as the target's own text is: this is what the draft will
    be asked to continue. DistillSpec (Zhou et al. 2023, 2310.08461) studies distilling on generated text.

    ``out`` holds little-endian int32, one batch appended after the other. A killed run goes on after its last whole
    batch. The text is the target's: delete the file when the target is trained anew.
    """
    length = target.config.n_positions
    batch_tokens = SAMPLE_ROWS * length
    batches = -(-tokens // batch_tokens)
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("ab") as file:
        done = file.tell() // (4 * batch_tokens)
        file.truncate(done * 4 * batch_tokens)
        for batch in tqdm(range(done, batches), initial=done, total=batches, desc="sample", unit="batch"):
            rows = sample_windows(target, rows=SAMPLE_ROWS, length=length, seed=seed * 1_000_003 + batch)
            file.write(rows.numpy().astype("<i4").tobytes())
            file.flush()
    return torch.from_numpy(np.fromfile(out, dtype="<i4", count=batches * batch_tokens).astype(np.int64))
