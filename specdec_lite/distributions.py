"""From logits to the distribution that tokens are drawn from, and the two quantities that compare p with q.

One function makes every distribution in the project: drafting, verifying and plain decoding all call
``Sampling.probs``. Greedy decoding is the one-hot distribution that temperature 0 gives: it needs no code of its own.
"""

import math
from dataclasses import dataclass
from numbers import Integral

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How logits become a distribution: temperature, then top-k, then top-p (the order of Hugging Face).

    temperature: 0 or more; 0 is greedy (all mass on the argmax, ties to the lowest id).
    top_k: keep the k most likely tokens; ``None`` or 0 keeps all. Tokens that tie with the k-th are kept.
    top_p: keep the fewest most likely tokens that together have at least this mass; 1 keeps all.

    Raises ``ValueError`` naming the value and the range it must lie in.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature is {self.temperature}; it must be a finite number, 0 (greedy) or more")
        if self.top_k is not None and not (isinstance(self.top_k, Integral) and self.top_k >= 0):
            raise ValueError(f"top_k is {self.top_k}; it must be a whole number, 1 or more (None or 0: keep all)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1] (1: keep all)")

    def probs(self, logits: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
        """The distribution over the vocabulary, in float32 (float64 logits stay float64).

        A NaN among the logits gives a NaN among the probabilities, at every temperature.
        """
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.temperature == 0:
            return one_hot(logits.argmax(-1), like=logits).masked_fill_(logits.isnan(), math.nan)
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature  # 0 at most: cannot overflow
        if self.top_k and self.top_k < logits.shape[-1]:
            kth_largest = logits.topk(self.top_k).values[..., -1:]
            logits = logits.masked_fill(logits < kth_largest, -math.inf)
        probs = logits.softmax(-1)
        return keep_top_p(probs, self.top_p) if self.top_p < 1 else probs


GREEDY = Sampling(temperature=0.0)


def one_hot(tokens, *, like: Float[Tensor, "*batch vocab"]) -> Float[Tensor, "*batch vocab"]:
    """All mass on one token per row; dtype, device and vocabulary are those of ``like``."""
    return torch.zeros_like(like).scatter_(-1, tokens.unsqueeze(-1), 1)


def keep_top_p(probs: Float[Tensor, "*batch vocab"], top_p: float) -> Float[Tensor, "*batch vocab"]:
    """Drop the least likely tokens as long as those dropped have at most ``1 - top_p`` mass together; renormalise."""
    ascending, order = probs.sort(dim=-1)
    dropped = ascending.cumsum(-1) <= 1 - top_p
    dropped[..., -1] = False  # the most likely token always stays
    kept = probs.masked_fill(dropped.scatter(-1, order, dropped), 0)
    return kept / kept.sum(-1, keepdim=True)


def residual(p, q):
    """The distribution of the recovered token: ``normalise(max(0, p - q))``, Leviathan et al. (2023), section 2.3.

    p, q: ``Float[..., "*batch vocab"]``, torch tensors or NumPy arrays (of ``Fraction`` too, for exact work).
    Where ``p == q`` nothing is left over; a rejection then has probability 0, and ``p`` itself is returned.
    """
    excess = (p - q).clip(min=0)
    weights = excess + p * (excess.sum(axis=-1, keepdims=True) == 0)
    return weights / weights.sum(axis=-1, keepdims=True)


def overlap(p, q):
    """``sum_x min(p(x), q(x)) = 1 - TV(p, q)``: the chance that a token drawn from q is accepted.

    p, q: ``Float[..., "*batch vocab"]`` as for ``residual``. Leviathan et al. (2023), Theorem 3.5.
    """
    return p.sum(axis=-1) - (p - q).clip(min=0).sum(axis=-1)
