"""Early exit: the target's own first layers draft, with the target's own output head, in the target's own cache.

No second model and no memory beside the target's: what the first layers write into the cache while they draft are the
keys and values that the target's pass writes there again. Read out as they are, early layers guess badly, as nothing
ever asked them to; a small trained exit helps. Zhang et al. (2023), "Draft & Verify", 2309.08168; Elhoushi et al.
(2024), "LayerSkip", 2404.16710.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..distributions import Sampling
from ..gpt2 import GPT2, KVCache, next_slots
from ..randomness import Randomness
from . import Draft
from .observe import OnTarget
from .trained import load_trained, save_trained, shipped


class ExitHead(nn.Module):
    """From the state after ``layers`` layers to a feature that the target's output head can read.

    The norm, then a residual block as in Medusa. Made with ``untrained``, it begins as the target's last norm alone.
    """

    def __init__(self, width: int, layers: int, norm_epsilon: float = 1e-5):
        super().__init__()
        self.layers = layers
        self.norm = nn.LayerNorm(width, norm_epsilon)
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, states: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        x = self.norm(states)
        return x + F.silu(self.linear(x))

    @classmethod
    def untrained(cls, target: GPT2, layers: int) -> "ExitHead":
        """Raises ``ValueError`` unless 1 <= layers < the target's."""
        if not 1 <= layers < target.config.layers:
            raise ValueError(f"layers is {layers}; {target.name} has {target.config.layers}: exit before its last")
        head = cls(target.config.width, layers, target.config.norm_epsilon).to(target.device, target.dtype)
        head.norm.load_state_dict(target.norm.state_dict())
        return head

    def save(self, path: Path, target: GPT2) -> None:
        save_trained(path, self, target, "exit", layers=self.layers)

    @classmethod
    def load(cls, target: GPT2, path: Path | None = None) -> "ExitHead":
        """A trained exit (default: the one that the package has for the embedded target).

        Raises ``ValueError`` when the file is damaged or belongs to another target.
        """
        sizes, weights = load_trained(path or shipped("exit"), "exit", target)
        head = cls.untrained(target, **sizes)
        head.load_state_dict(weights)
        return head.eval().requires_grad_(False)


def early_states(
    target: GPT2, layers: int, tokens: Int[Tensor, "rows n"], cache: KVCache
) -> Float[Tensor, "rows n width"]:
    """The states after the first ``layers`` layers, not normalised; appends to the cache, in these layers only."""
    n = tokens.shape[1]
    slots = next_slots(cache, n, None, None, target.dtype)
    x = target.token_embedding(tokens) + target.position_embedding(slots.positions)
    for block, keys, values in zip(target.blocks[:layers], cache.keys, cache.values, strict=False):
        x = block(x, keys, values, slots)
    cache.lengths = [length + n for length in cache.lengths]
    return x


class EarlyExitDrafter(OnTarget):
    """Drafts one token at a time with the first layers of ``target``, up to ``head``, in the target's cache."""

    name = "early exit"

    def __init__(self, target: GPT2, head: ExitHead):
        super().__init__(target)
        self.head = head

    def start(self, capacity: int) -> None: ...

    def limit(self, length: int) -> int:
        # Drafting K tokens feeds the context and all of them but the last.
        return max(0, self.target.context - length + 1)

    def propose(self, context: Int[Tensor, " length"], K: int, sampling: Sampling, randomness: Randomness) -> Draft:
        cache = self.observed.cache
        read = cache.length  # by the whole target
        feed = context[read:]
        tokens, probs = [], []
        for _ in range(K):
            states = early_states(self.target, self.head.layers, feed[None], cache)[0, -1]
            q = sampling.probs(self.target.logits(self.head(states)))
            token = torch.as_tensor(randomness.categorical(q), device=context.device)
            feed = token.view(1)
            tokens.append(token)
            probs.append(q)
        cache.rollback(read)  # the target reads them again, all layers
        return Draft(torch.stack(tokens), torch.stack(probs))

    def commit(self, length: int, kept: Sequence[int]) -> None: ...
