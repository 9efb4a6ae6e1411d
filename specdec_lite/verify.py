"""Speculative sampling: which draft tokens are kept, and which token comes after them.

A draft token drawn from q is accepted with probability ``min(1, p/q)``. At the first rejection a recovered token is
drawn from the residual ``normalise(max(0, p - q))``; if there is none, a bonus token is drawn from p. The output then
has exactly the law p, whatever q was. Leviathan et al. (2023), Algorithm 1; Chen et al. (2023), Theorem 1.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .distributions import residual
from .randomness import Randomness


@dataclass(frozen=True)
class Verification:
    """accepted: how many draft tokens survive, 0..K. next_token: the token after them. drafted: K.

    ``accepted`` and ``next_token`` are 0-d tensors while they live on the device, ints under ``enumerate_outcomes``.
    """

    accepted: int | Int[Tensor, ""]
    next_token: int | Int[Tensor, ""]
    drafted: int

    @property
    def origin(self) -> str:
        """Where ``next_token`` came from: "bonus" when every draft token was accepted, else "recovered"."""
        return "bonus" if int(self.accepted) == self.drafted else "recovered"


def verify(
    draft_tokens: Int[Tensor, " K"],
    draft_probs: Float[Tensor, "K vocab"] | None,
    target_probs: Float[Tensor, "K+1 vocab"],
    randomness: Randomness,
) -> Verification:
    """Keep the longest surviving prefix of the draft and draw the token that follows it.

    draft_tokens: what was drafted. draft_probs: row i is the q that token i was really drawn from (``None``: the
    drafter did not draw but chose, so each row is one-hot). target_probs: row i is p given the first i draft tokens.
    K = 0 is plain decoding. Greedy decoding is the case of one-hot p and q. NumPy arrays of ``Fraction`` work too.
    """
    each = index_of_rows(target_probs, draft_tokens)
    proposed = proposed_rows(draft_tokens, draft_probs, target_probs)
    accepted = randomness.first_failure(target_probs[each] / proposed[each])
    next_token = randomness.categorical(residual(row(target_probs, accepted), row(proposed, accepted)))
    return Verification(accepted, next_token, drafted=len(draft_tokens))


def verify_block(
    draft_tokens: Int[Tensor, " K"],
    draft_probs: Float[Tensor, "K vocab"] | None,
    target_probs: Float[Tensor, "K+1 vocab"],
    randomness: Randomness,
) -> Verification:
    """Decide on the draft as a whole: as exact as ``verify``, accepts at least as much on average, greedy just as much.

    ``verify`` gives up at the first token that fails. Here r_i, the chance that the first i draft tokens are kept as
    far as the target is concerned, may fall at one token and still be good enough: the longest prefix wins whose own
    trial succeeds, wherever the trials before it went. Sun et al. (2025), "Block Verification Accelerates Speculative
    Decoding", Algorithm 2. Tensors only.
    """
    each = index_of_rows(target_probs, draft_tokens)
    proposed = proposed_rows(draft_tokens, draft_probs, target_probs)
    kept = [torch.ones_like(target_probs[0, :1])]  # r_0 = 1
    for ratio in target_probs[each] / proposed[each]:
        kept.append((kept[-1] * ratio).clamp(max=1))
    r = torch.cat(kept)
    weighted = r[:, None] * target_probs  # row i: what the target still owes each token after i draft tokens
    owed = (weighted - proposed).clamp(min=0).sum(-1)
    # Trial i succeeds with h_i (h_K is r_K, as nothing was proposed there). 0/0 means r = 1 and p = q in the next row:
    # a longer prefix wins then in any case.
    h = (owed / (owed + 1 - r)).nan_to_num(1)
    from_the_end = randomness.first_failure((1 - h[1:]).flip(0))  # K: none succeeds, and the empty prefix is kept
    accepted = len(draft_tokens) - from_the_end
    next_token = randomness.categorical(residual(row(weighted, accepted), row(proposed, accepted)))
    return Verification(accepted, next_token, drafted=len(draft_tokens))


Verify = Callable[
    [Int[Tensor, " K"], Float[Tensor, "K vocab"] | None, Float[Tensor, "K+1 vocab"], Randomness], Verification
]


def proposed_rows(
    draft_tokens: Int[Tensor, " K"],
    draft_probs: Float[Tensor, "K vocab"] | None,
    target_probs: Float[Tensor, "K+1 vocab"],
) -> Float[Tensor, "K+1 vocab"]:
    """q for every row. Nothing was proposed after the last draft token, so that row stays 0."""
    proposed = target_probs * 0
    if draft_probs is None:
        proposed[index_of_rows(target_probs, draft_tokens)] = 1
    else:
        proposed[: len(draft_tokens)] = draft_probs
    return proposed


def index_of_rows(table: Float[Tensor, "rows vocab"], tokens: Int[Tensor, " K"]) -> tuple:
    """An index for entry ``tokens[i]`` of row i: on the table's device, or in plain numbers for a NumPy array."""
    if isinstance(table, Tensor):
        return torch.arange(len(tokens), device=tokens.device), tokens
    return list(range(len(tokens))), [int(token) for token in tokens]


def row(table: Float[Tensor, "rows vocab"], index: int | Int[Tensor, ""]) -> Float[Tensor, " vocab"]:
    """``table[index]``; an index that is still on the device is not fetched to the host, as ``[]`` would do."""
    return table[index] if isinstance(index, int) else table.index_select(0, index.view(1))[0]
