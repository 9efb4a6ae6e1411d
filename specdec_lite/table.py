"""A toy language model: a table of next-token laws, small enough to check by hand and to enumerate."""

import sys
from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


class TableCache:
    """A table needs no keys or values; the cache only knows how many tokens it was fed."""

    def __init__(self) -> None:
        self.length = 0

    def rollback(self, length: int) -> None:
        if not 0 <= length <= self.length:
            raise ValueError(f"cannot roll back to {length}: the cache holds {self.length} tokens")
        self.length = length

    def keep(self, length: int, nodes: Sequence[int]) -> None:
        self.rollback(length + len(nodes))


class TableModel:
    """Next-token laws read from ``table``, in float64.

    table: ``[vocab]`` one law for every context; ``[vocab, vocab]`` the law after each last token (a bigram model);
    ``[positions, vocab, vocab]`` the same, by the last token's position (later positions use the last table).
    context: how many positions it accepts (no limit by default), to play a model with a short context.

    Raises ``ValueError`` when a law is negative anywhere or does not sum to 1.
    """

    def __init__(self, table: Float[Tensor, "*index vocab"], name: str = "table", context: int = sys.maxsize):
        table = torch.as_tensor(table, dtype=torch.float64)
        if table.ndim > 3 or (table.ndim > 1 and table.shape[-2] != table.shape[-1]):
            raise ValueError(
                f"a table has shape [vocab], [vocab, vocab] or [positions, vocab, vocab], not {list(table.shape)}"
            )
        if (table < 0).any() or not torch.allclose(table.sum(-1), torch.ones((), dtype=torch.float64), atol=1e-9):
            raise ValueError("every law of a table must be non-negative and sum to 1")
        self.vocab_size = table.shape[-1]
        by_position = table if table.ndim == 3 else table.expand(self.vocab_size, self.vocab_size)[None]
        self.log_table: Float[Tensor, "positions vocab vocab"] = by_position.log()
        self.name = name
        self.context = context
        self.device = table.device

    def new_cache(self, capacity: int, rows: int = 1) -> TableCache:
        return TableCache()

    def __call__(
        self,
        tokens: Int[Tensor, "rows n"],
        cache: TableCache,
        last: int | None = None,
        *,
        positions: Int[Tensor, "rows n"] | None = None,
        mask: Bool[Tensor, "rows 1 n end"] | None = None,  # no law looks further back than its last token
    ) -> Float[Tensor, "rows n_last vocab"]:
        n = tokens.shape[1]
        if positions is None:
            positions = torch.arange(cache.length, cache.length + n)
        cache.length += n
        logits = self.log_table[positions.clamp(max=len(self.log_table) - 1), tokens]
        return logits if last is None else logits[:, -last:]
