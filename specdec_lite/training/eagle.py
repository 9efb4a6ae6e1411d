"""Training EAGLE's layer: it learns the target's laws and features, also where it has to go on from its own guesses.

The loss is KL(p || q) between the laws that the target's head reads off the true and off the guessed feature, plus a
little of the distance of the two features (smooth L1). KL leads, because it is tokens that get accepted; the distance
keeps a guess fit to be read as a feature again. Li et al. (2024), 2401.15077, section 3.2, weight the
distance with 1 and a cross-entropy with 0.1. There the layer reads true features (with a little noise) while it learns.
Here, in the manner of EAGLE-3's training-time test (2503.01840), it also learns to go on from its guesses. Without that
the second token of a draft is far worse than the first.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..distributions import overlap
from ..drafters.eagle import EagleLayer, embed
from ..gpt2 import GPT2
from .corpus import random_windows, spread_windows
from .distill import forward_kl
from .loop import train

FEATURE_WEIGHT = 0.1
DEPTHS = 2  # trained; more cost more and bring little
MEASURED_DEPTHS = 4
VALIDATION_WINDOWS = 8


def new_layer(target: GPT2, seed: int) -> EagleLayer:
    """Fresh weights for ``target``, as ``seed`` has it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return EagleLayer(target.config).to(target.device, target.dtype)


def drafted(
    layer: EagleLayer,
    target: GPT2,
    tokens: Int[Tensor, "rows length"],
    features: Float[Tensor, "rows length width"],
    depths: int,
) -> list[Float[Tensor, "rows n width"]]:
    """What the layer guesses when it drafts ``tokens``: entry d is made at depth d + 1, from d guesses in a row.

    Guess i of entry d is of the feature at position i + d + 1. The first entry needs true features only.
    """
    rows, pairs = tokens.shape[0], tokens.shape[1] - 1
    cache = layer.new_cache(depths * pairs, rows)
    embedded = embed(target, tokens, torch.arange(pairs + 1, device=tokens.device))[:, 1:]
    read, guesses = features[:, :-1], []
    for depth in range(depths):
        guesses.append(layer(read, embedded[:, depth:], cache, seen_at(depth, pairs).to(tokens.device)))
        read = guesses[-1][:, :-1]
        # The next depth writes beside these keys, and the backward pass wants them as they were.
        cache.keys, cache.values = [[block.clone() for block in part] for part in (cache.keys, cache.values)]
    return guesses


def seen_at(depth: int, pairs: int) -> Bool[Tensor, "1 1 n end"]:
    """The mask of the pairs drafted at ``depth`` (0: all features are true).

    The cache holds a block for each depth. Pair i of this one sees the true features of the positions up to i and then
    one guess of each depth, the one on its own way.
    """
    row = torch.arange(pairs - depth)[:, None]
    blocks = [torch.arange(pairs) <= row, *(torch.arange(pairs - d) == row for d in range(1, depth + 1))]
    return torch.cat(blocks, 1)[None, None]


def eagle_loss(
    layer: EagleLayer, target: GPT2, tokens: Int[Tensor, "rows length"], depths: int = DEPTHS
) -> Float[Tensor, ""]:
    """KL(p || q) in nats + ``FEATURE_WEIGHT`` * smooth L1 of the features, each a mean over positions and depths."""
    with torch.autocast(tokens.device.type, dtype=torch.bfloat16):
        with torch.no_grad():
            features = target.hidden(tokens, target.new_cache(tokens.shape[1], len(tokens)))
            p = target.logits(features).softmax(-1, dtype=torch.float32)
        guesses = drafted(layer, target, tokens, features, depths)
        logits = [target.logits(guess) for guess in guesses]
    losses = [
        forward_kl(q, p[:, depth:]) + FEATURE_WEIGHT * F.smooth_l1_loss(guess.float(), features[:, depth:].float())
        for depth, (guess, q) in enumerate(zip(guesses, logits, strict=True), start=1)
    ]
    return torch.stack(losses).mean()


@torch.inference_mode()
def agreement(
    layer: EagleLayer, target: GPT2, windows: Int[Tensor, "rows length"], depths: int = MEASURED_DEPTHS
) -> dict[str, list[float]]:
    """How well the layer guesses the target on ``windows`` at each depth of a chain, as means over the positions.

    alpha: E[sum min(p, q)] at temperature 1. greedy_alpha: how often both have the same most likely token. Both given
    that the tokens before were right. The first entry is the acceptance rate of a draft's first token.
    """
    alpha, greedy_alpha = torch.zeros(2, depths)
    for batch in windows.split(4):
        features = target.hidden(batch, target.new_cache(batch.shape[1], len(batch)))
        truth = target.logits(features).softmax(-1)
        for depth, guess in enumerate(drafted(layer, target, batch, features, depths)):
            p, q = truth[:, depth + 1 :], target.logits(guess).softmax(-1)
            alpha[depth] += overlap(p, q).mean(-1).sum()
            greedy_alpha[depth] += (p.argmax(-1) == q.argmax(-1)).float().mean(-1).sum()
    return {"alpha": (alpha / len(windows)).tolist(), "greedy_alpha": (greedy_alpha / len(windows)).tolist()}


def train_eagle(
    layer: EagleLayer,
    target: GPT2,
    training: Int[Tensor, " tokens"],
    validation: Int[Tensor, " tokens"],
    *,
    out: Path,
    steps: int,
    rows: int = 4,
    lr: float = 6e-3,
    seed: int = 0,
) -> None:
    """Train ``layer`` in place, on windows of the text; see ``loop.train`` for ``out`` and how a killed run goes on."""
    length = target.context
    windows = spread_windows(validation, length=length, count=VALIDATION_WINDOWS)

    def loss_at(step: int) -> Tensor:
        return eagle_loss(layer, target, random_windows(training, rows=rows, length=length, seed=seed, step=step))

    train(
        layer, loss_at, steps=steps, lr=lr, out=out, validate_every=200,
        validate=lambda: agreement(layer, target, windows),
    )  # fmt: skip
