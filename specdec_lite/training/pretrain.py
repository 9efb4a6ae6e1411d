"""Pretraining the embedded target: next-token cross-entropy on the corpus."""

from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from .corpus import consecutive_windows, random_windows
from .loop import train


def new_model(
    tokenizer: PreTrainedTokenizerFast, *, layers: int, width: int, heads: int, positions: int, seed: int
) -> GPT2LMHeadModel:
    """A GPT-2 with fresh weights and no dropout (the corpus is passed over a few times only)."""
    end = tokenizer.eos_token_id
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=positions, n_embd=width, n_layer=layers, n_head=heads,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=end, eos_token_id=end,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GPT2LMHeadModel(config)


def next_token_loss(
    logits: Float[Tensor, "rows length vocab"], tokens: Int[Tensor, "rows length"]
) -> Float[Tensor, ""]:
    """Mean cross-entropy of each token given those before it, in nats per token."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), tokens[:, 1:].flatten())


@torch.inference_mode()
def validation_loss(model: GPT2LMHeadModel, stream: Int[Tensor, " tokens"], *, length: int) -> float:
    """Nats per token over the whole validation stream, in float32, in windows of ``length`` tokens."""
    windows = consecutive_windows(stream, length=length)
    losses = [next_token_loss(model(input_ids=batch).logits, batch) * len(batch) for batch in windows.split(8)]
    return float(torch.stack(losses).sum() / len(windows))


def pretrain(
    model: GPT2LMHeadModel,
    training: Int[Tensor, " tokens"],
    validation: Int[Tensor, " tokens"],
    *,
    out: Path,
    steps: int,
    rows: int = 8,
    lr: float = 6e-3,
    seed: int = 0,
    compiled: bool = False,
) -> None:
    """Train in place; see ``loop.train`` for what ``out`` holds and how a killed run goes on."""
    length = model.config.n_positions
    forward = torch.compile(model) if compiled else model

    def loss_at(step: int) -> Tensor:
        tokens = random_windows(training, rows=rows, length=length, seed=seed, step=step)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = forward(input_ids=tokens).logits
        return next_token_loss(logits, tokens)

    def validate() -> dict[str, float]:
        return {"validation_loss": validation_loss(model, validation, length=length)}

    train(model, loss_at, steps=steps, lr=lr, out=out, validate=validate)
