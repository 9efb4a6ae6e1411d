"""The training loop that all stages share: schedule, checkpoints, resume, log.

What is learned is the caller's business: it passes a function that gives the loss of one step.
"""

import json
import time
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

WARMUP_STEPS = 100
DECAY_SHARE = 0.4  # the last part of the run, over which the learning rate falls to zero


def learning_rate_scale(step: int, steps: int) -> float:
    """Warm-up, then constant, then linear decay to zero over the last 40% of the run."""
    decay_steps = max(1, int(DECAY_SHARE * steps))
    return min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / decay_steps)


def make_optimizers(model: nn.Module, lr: float, weight_decay: float) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for everything else (embeddings, biases, norms); frozen parameters are left out.

    Muon (Jordan et al. 2024) reaches the same loss in noticeably fewer steps on a model of this size; its updates are
    scaled to the size of AdamW's, so that both share one learning rate.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    learned = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in learned if p.ndim == 2 and id(p) not in embeddings]
    others = [p for p in learned if p.ndim != 2 or id(p) in embeddings]
    optimizers: list[torch.optim.Optimizer] = []
    if matrices:
        optimizers.append(torch.optim.Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"))
    if others:
        optimizers.append(torch.optim.AdamW(others, lr=lr, weight_decay=0.0, betas=(0.9, 0.99)))
    return optimizers


def train(
    model: nn.Module,
    loss_at: Callable[[int], Tensor],
    *,
    steps: int,
    lr: float,
    out: Path,
    weight_decay: float = 0.1,
    checkpoint_every: int = 100,
    validate: Callable[[], dict[str, Any]] | None = None,
    validate_every: int = 500,
) -> None:
    """Minimise ``loss_at(step)`` over ``model``'s parameters; ``out`` holds ``checkpoint.pt`` and ``log.jsonl``.

    Started again with the same ``out``, it goes on from the last checkpoint: at most ``checkpoint_every`` steps are
    repeated, and since a step depends on its number alone they come out the same.
    """
    if steps < 1:
        raise ValueError(f"steps is {steps}; it must be 1 or more")
    out.mkdir(parents=True, exist_ok=True)
    optimizers = make_optimizers(model, lr, weight_decay)
    first = load_checkpoint(out, model, optimizers)
    progress = tqdm(range(first, steps), initial=first, total=steps, desc=out.name, unit="step")
    started = time.perf_counter()
    for step in progress:
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = lr * learning_rate_scale(step, steps)
        model.train()
        loss = loss_at(step)
        if not torch.isfinite(loss):
            raise FloatingPointError(f"the loss is {loss.item()} at step {step}: lower --lr and resume from {out}")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

        done = step + 1
        row: dict[str, Any] = {"step": done, "loss": loss.item()}
        progress.set_postfix(loss=f"{row['loss']:.3f}")
        if validate and (done % validate_every == 0 or done == steps):
            model.eval()
            row |= validate()
        if done % 10 == 0 or done == steps or len(row) > 2:
            row["seconds"] = round(time.perf_counter() - started, 1)
            with (out / "log.jsonl").open("a", encoding="utf-8") as log:
                log.write(json.dumps(row) + "\n")
        if done % checkpoint_every == 0 or done == steps:
            save_checkpoint(out, model, optimizers, done)


def save_checkpoint(out: Path, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer], step: int) -> None:
    """Written beside and then renamed, so that a kill at any moment leaves a whole checkpoint."""
    state = {"step": step, "model": model.state_dict(), "optimizers": [o.state_dict() for o in optimizers]}
    partial = out / "checkpoint.pt.partial"
    torch.save(state, partial)
    partial.replace(out / "checkpoint.pt")


def load_checkpoint(out: Path, model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> int:
    """Restore model and optimizers; the number of steps already done (0 when there is no checkpoint).

    Raises ``ValueError`` naming the file when it is cut short.
    """
    path = out / "checkpoint.pt"
    if not path.exists():
        return 0
    if not zipfile.is_zipfile(path):  # what torch.save writes
        raise ValueError(f"{path} is damaged or cut short: delete it to begin this stage anew")
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return state["step"]
