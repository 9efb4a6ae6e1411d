"""Training small heads on a frozen target: Medusa's, and an early exit.

A head learns from states of the target that are computed once and kept, so a step runs the output head and no layer.
What it learns is the target's whole law at a later position (or, for an exit, at the same one), not only the token that
a text has there. Cai et al. (2024), 2401.10774, "Medusa-1", with the law in the place of the token.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..distributions import GREEDY, Sampling, overlap
from ..drafters.early_exit import ExitHead, early_states
from ..drafters.hydra import HydraHeads
from ..drafters.medusa import RANKS, MedusaHeads, rank_accuracies
from ..gpt2 import GPT2
from ..randomness import TorchRandomness, finest, token_at
from .distill import forward_kl
from .loop import train

ROWS, LENGTH = 8, 64  # of the pieces that a step learns from
BATCH = 8  # windows that the target reads at a time
WINDOWS, HELD_OUT_WINDOWS = 160, 16  # of a corpus, for the stages: their states take 100 MB


@torch.inference_mode()
def sample_text(target: GPT2, start: int, *, rows: int, length: int, seed: int) -> Int[Tensor, "rows length"]:
    """The target's own text at temperature 1; each row begins with the token ``start`` (a text's beginning)."""
    randomness = TorchRandomness.seeded(seed, target.device)
    tokens = torch.full((rows, length), start, device=target.device)
    cache = target.new_cache(length - 1, rows)
    for i in range(length - 1):
        p = Sampling().probs(target(tokens[:, i : i + 1], cache)[:, -1])
        tokens[:, i + 1] = token_at(p, randomness.uniforms(rows, dtype=finest(target.device)))
    return tokens


@torch.no_grad()
def features_of(target: GPT2, windows: Int[Tensor, "rows length"]) -> Float[Tensor, "rows length width"]:
    """What the target's output head reads at every position."""
    length = windows.shape[1]
    return torch.cat([target.hidden(rows, target.new_cache(length, len(rows))) for rows in windows.split(BATCH)])


@torch.no_grad()
def states_of(target: GPT2, layers: int, windows: Int[Tensor, "rows length"]) -> Float[Tensor, "rows length width"]:
    """The states after the target's first ``layers`` layers at every position."""
    length = windows.shape[1]
    batches = windows.split(BATCH)
    return torch.cat([early_states(target, layers, rows, target.new_cache(length, len(rows))) for rows in batches])


def train_medusa(
    heads: MedusaHeads,
    target: GPT2,
    features: Float[Tensor, "rows length width"],
    held_out: Float[Tensor, "rows length width"],
    **options,
) -> list[dict]:
    """Train ``heads`` in place on the target's features; see ``fit`` for the options and for what comes back.

    Every head counts the same. (The paper weights head i by 0.8^i. No two heads share a parameter, so weights would
    scale gradients only, and neither Muon nor AdamW minds.) At the end the heads' accuracies are measured, on
    ``held_out``.
    """

    def guess(features):
        return heads(features[:, : features.shape[1] - heads.heads])

    log = fit(heads, guess, target, (features, features), (held_out, held_out), first=1, **options)
    ranks = min(RANKS, target.vocab_size)
    heads.accuracies[:, :ranks] = rank_accuracies(target, heads, held_out, GREEDY, ranks)
    return log


def train_hydra(
    heads: HydraHeads,
    target: GPT2,
    training: tuple[Int[Tensor, "rows length"], Float[Tensor, "rows length width"]],
    held_out: tuple[Int[Tensor, "rows length"], Float[Tensor, "rows length width"]],
    **options,
) -> list[dict]:
    """Train ``heads`` in place; ``training`` and ``held_out`` are (windows, ``features_of`` them)."""

    def guess(both):
        n = both.shape[1] - heads.heads
        features, embedded = both.chunk(2, -1)
        later = torch.stack([embedded[:, 1 + i : 1 + i + n] for i in range(heads.heads)], 2)
        return torch.stack([heads(features[:, :n], later[:, :, : i + 1]) for i in range(heads.heads)], 2)

    parts = [
        (torch.cat([states, target.token_embedding(tokens)], -1), states) for tokens, states in (training, held_out)
    ]
    return fit(heads, guess, target, *parts, first=1, **options)


def train_exit(
    head: ExitHead,
    target: GPT2,
    states: tuple[Float[Tensor, "rows length width"], Float[Tensor, "rows length width"]],
    held_out: tuple[Float[Tensor, "rows length width"], Float[Tensor, "rows length width"]],
    **options,
) -> list[dict]:
    """Train an exit in place; ``states`` and ``held_out`` are (``states_of``, ``features_of``) the same windows."""
    return fit(head, lambda states: head(states).unsqueeze(-2), target, states, held_out, first=0, **options)


def fit(
    module: nn.Module,
    guess: Callable[[Tensor], Tensor],
    target: GPT2,
    training: tuple[Tensor, Tensor],
    held_out: tuple[Tensor, Tensor],
    *,
    first: int,
    steps: int,
    lr: float = 1e-2,
    seed: int = 0,
    out: Path | None = None,
) -> list[dict]:
    """Minimise KL(p || q), in nats, over random pieces of the training windows; the log's rows come back.

    training, held_out: (what the heads read, the target's features). guess: from the former to one feature for each
    position and head; that of head i at position t stands for the target's at t + first + i.
    out: where checkpoints and the log go, so that a killed run can go on (see ``loop.train``). ``None``: nowhere.

    Raises ``ValueError`` when the windows are too short to cut pieces from.
    """
    if training[0].shape[1] < LENGTH:
        raise ValueError(f"the windows have {training[0].shape[1]} tokens; training cuts pieces of {LENGTH} from them")

    def loss_at(step: int) -> Tensor:
        inputs, features = (random_pieces(states, seed=seed, step=step) for states in training)
        with torch.autocast(target.device.type, dtype=torch.bfloat16):
            with torch.no_grad():
                p = target.logits(features).softmax(-1, dtype=torch.float32)
            logits = target.logits(guess(inputs)).unbind(2)
        n = logits[0].shape[1]
        return torch.stack([forward_kl(q, p[:, first + i :][:, :n]) for i, q in enumerate(logits)]).mean()

    with tempfile.TemporaryDirectory() as nowhere:
        out = out or Path(nowhere) / "heads"
        train(
            module, loss_at, steps=steps, lr=lr, out=out, validate_every=250,
            validate=lambda: agreement(guess, target, *held_out, first=first),
        )  # fmt: skip
        return [json.loads(row) for row in (out / "log.jsonl").read_text(encoding="utf-8").splitlines()]


def random_pieces(
    states: Float[Tensor, "rows length width"], *, seed: int, step: int
) -> Float[Tensor, "pieces piece width"]:
    """Pieces at random places of random rows, a function of (seed, step) and nothing else."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    rows = torch.randint(len(states), (ROWS, 1), generator=generator)
    starts = torch.randint(states.shape[1] - LENGTH + 1, (ROWS, 1), generator=generator)
    return states[rows, starts + torch.arange(LENGTH)]


@torch.inference_mode()
def agreement(
    guess: Callable[[Tensor], Tensor],
    target: GPT2,
    inputs: Float[Tensor, "rows length width"],
    features: Float[Tensor, "rows length width"],
    *,
    first: int,
) -> dict[str, list[float]]:
    """How well each head guesses the target's law, in the dtype of the target, as a mean over all positions.

    alpha: E[sum min(p, q)] at temperature 1. greedy_alpha: how often both have the same most likely token.
    """
    sums = []
    for row, feature in zip(inputs.split(1), features.split(1), strict=True):
        p = target.logits(feature).softmax(-1)
        laws = target.logits(guess(row)).softmax(-1).unbind(2)
        pairs = [(p[:, first + i :][:, : q.shape[1]], q) for i, q in enumerate(laws)]
        sums.append([[overlap(p, q).mean(), (p.argmax(-1) == q.argmax(-1)).float().mean()] for p, q in pairs])
    alpha, greedy_alpha = torch.tensor(sums).mean(0).unbind(-1)
    return {"alpha": alpha.tolist(), "greedy_alpha": greedy_alpha.tolist()}
