"""The classical drafter: a smaller language model with a cache of its own."""

import math
from collections.abc import Sequence

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

    confidence: stop drafting after a token to which the draft's own softmax (at temperature 1, whatever the sampling)
    gives less than this; 0 never stops. The token that ends the draft stays part of it and is verified like any other:
    to stop may depend on what was drawn, to drop it may not (``gallery.unsure_tokens_dropped``). Each token then waits
    once for the device. Hugging Face's ``assistant_confidence_threshold``, which when sampling looks at q instead.
    Raises ``ValueError`` unless 0 <= confidence <= 1.
    """

    def __init__(self, model: LanguageModel, vocab_size: int, confidence: float = 0.0):
        if not 0 <= confidence <= 1:
            raise ValueError(f"confidence is {confidence}; it is a probability: give 0 (never stop early) to 1")
        self.confidence = confidence
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
            logits = self.logits(feed)[0]
            q = sampling.probs(logits)
            token = torch.as_tensor(randomness.categorical(q), device=context.device)
            feed = token.view(1)
            tokens.append(token)
            probs.append(q)
            if self.confidence and logits.softmax(-1)[token] < self.confidence:
                break
        return Draft(torch.stack(tokens), torch.stack(probs))

    def commit(self, length: int, kept: Sequence[int]) -> None:
        # The last committed token is fed with the next proposal; the last draft token was never fed.
        self.cache.rollback(min(self.cache.length, length - 1))

    def logits(self, tokens: Int[Tensor, " n"], last: int = 1, **tree: Tensor) -> Float[Tensor, "last vocab"]:
        known = tokens.clamp(max=self.model.vocab_size - 1)
        logits = self.model(known[None], self.cache, last=last, **tree)[0]
        missing = self.vocab_size - logits.shape[-1]
        return F.pad(logits, (0, missing), value=-math.inf) if missing else logits
