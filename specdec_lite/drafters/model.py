"""The classical drafter: a smaller language model with a cache of its own."""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from ..distributions import Sampling
from ..models import LanguageModel
from ..randomness import Randomness
from . import Draft


class ModelDrafter:
    """Drafts one token at a time with ``model``.

    vocab_size: the target's. A draft whose logits are padded to more ids is sliced to it; one with fewer ids never
    proposes the missing ones, and reads them as its last id: its guess suffers, the output does not.
    """

    def __init__(self, model: LanguageModel, vocab_size: int):
        self.model = model
        self.vocab_size = vocab_size
        self.name = model.name

    def start(self, capacity: int) -> None:
        self.cache = self.model.new_cache(min(capacity, self.model.context))

    def limit(self, length: int) -> int:
        # Drafting K tokens feeds the context and all of them but the last.
        return max(0, self.model.context - length + 1)

    def propose(self, context: Int[Tensor, " length"], K: int, sampling: Sampling, randomness: Randomness) -> Draft:
        tokens, probs = [], []
        # What the cache lacks: the last committed token, and after a fully accepted round the last draft token too.
        feed = context[self.cache.length :]
        for _ in range(K):
            q = sampling.probs(self._logits(feed))
            token = torch.as_tensor(randomness.categorical(q), device=context.device)
            feed = token.view(1)
            tokens.append(token)
            probs.append(q)
        return Draft(torch.stack(tokens), torch.stack(probs))

    def commit(self, length: int) -> None:
        # The last committed token is fed with the next proposal; the last draft token was never fed.
        self.cache.rollback(min(self.cache.length, length - 1))

    def _logits(self, tokens: Int[Tensor, " n"]) -> Float[Tensor, " vocab"]:
        known = tokens.clamp(max=self.model.vocab_size - 1)
        logits = self.model(known[None], self.cache, last=1)[0, -1]
        missing = self.vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=-math.inf) if missing else logits
