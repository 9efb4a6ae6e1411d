"""GPT-2, written to be read: a transformer with a key-value cache that is allocated once.

The cache is a block of memory per layer and a length per row. Appending writes behind the length; rolling back lowers
the length and copies nothing. Rows of a batch may have different lengths, and a caller may give positions and a mask of
its own (a token tree needs both). Radford et al. (2019); the weights are those of any Hugging Face GPT-2 checkpoint.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from .checkpoints import checkpoint_folder, gpt2_state, read_config, read_weights
from .models import additive


@dataclass(frozen=True)
class GPT2Config:
    """Sizes of a GPT-2; the names in brackets are Hugging Face's."""

    vocab_size: int = 50257
    positions: int = 1024  # n_positions: the longest context
    width: int = 768  # n_embd
    layers: int = 12  # n_layer
    heads: int = 12  # n_head
    norm_epsilon: float = 1e-5  # layer_norm_epsilon

    @classmethod
    def from_hugging_face(cls, config: dict[str, Any]) -> "GPT2Config":
        """From a checkpoint's ``config.json``. Raises ``ValueError`` for another architecture or variant."""
        expected = {"model_type": "gpt2", "activation_function": "gelu_new", "scale_attn_weights": True}
        expected |= {"scale_attn_by_inverse_layer_idx": False, "n_inner": None, "tie_word_embeddings": True}
        for key, value in expected.items():
            if config.get(key, value) != value:
                raise ValueError(f"not a GPT-2 that this class can run: its config has {key} = {config[key]!r}")
        return cls(
            vocab_size=config["vocab_size"],
            positions=config["n_positions"],
            width=config["n_embd"],
            layers=config["n_layer"],
            heads=config["n_head"],
            norm_epsilon=config["layer_norm_epsilon"],
        )

    @property
    def parameters(self) -> int:
        """How many numbers the model holds (the output head shares the embedding's)."""
        per_layer = 12 * self.width**2 + 13 * self.width
        return (self.vocab_size + self.positions + 2) * self.width + self.layers * per_layer


SIZES = {
    "distilgpt2": GPT2Config(layers=6),
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(width=1024, layers=24, heads=16),
    "gpt2-large": GPT2Config(width=1280, layers=36, heads=20),
    "gpt2-xl": GPT2Config(width=1600, layers=48, heads=25),
}


class KVCache:
    """Keys and values of every layer: ``[rows, capacity, heads, head_width]`` each, allocated once.

    ``lengths[r]`` tokens of row r are valid. The numbers live on the host, so reading or changing them never waits for
    the device.
    """

    def __init__(self, config: GPT2Config, rows: int, capacity: int, device: torch.device, dtype: torch.dtype):
        shape = (rows, capacity, config.heads, config.width // config.heads)
        self.keys = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.layers)]
        self.values = [torch.zeros(shape, device=device, dtype=dtype) for _ in range(config.layers)]
        self.slots = torch.arange(capacity, device=device)
        self.capacity = capacity
        self.lengths = [0] * rows

    @property
    def length(self) -> int:
        """The common length; a ``ValueError`` when the rows differ."""
        if len(set(self.lengths)) > 1:
            raise ValueError(f"the rows have different lengths, {self.lengths}: read .lengths")
        return self.lengths[0]

    def rollback(self, length: int | list[int]) -> None:
        """Forget back to ``length`` tokens (one for all rows, or one per row). Moves numbers, copies nothing."""
        lengths = [length] * len(self.lengths) if isinstance(length, int) else list(length)
        for new, old in zip(lengths, self.lengths, strict=True):
            if not 0 <= new <= old:
                raise ValueError(f"cannot roll back to {lengths}: the cache holds {self.lengths} tokens")
        self.lengths = lengths

    @torch.inference_mode()  # memory that was made in it, as that of ``static.py``, may not be written to outside
    def keep(self, length: int, nodes: Sequence[int]) -> None:
        """Keep ``length`` tokens, and of those behind them the ones at ``nodes``: an accepted path is gathered.

        A few slots are copied to where the text goes on. One row only.
        """
        if not 0 <= length <= self.length or any(not 0 <= node < self.length - length for node in nodes):
            raise ValueError(f"cannot keep {length} tokens and {list(nodes)} behind them: it holds {self.length}")
        from_slots = self.slots[[length + node for node in nodes]]
        for block in (*self.keys, *self.values):
            block[:, length : length + len(nodes)] = block[:, from_slots]
        self.lengths = [length + len(nodes)]

    def keep_rows(self, rows: list[int]) -> None:
        """Row i becomes what row ``rows[i]`` was, and the other rows are forgotten.

        Only a row that changes place is copied, onto an earlier place (so ``rows[i] >= i``). The memory of the rows
        that go is used no more, and is given back with the whole cache.
        """
        if any(old < new or old >= len(self.lengths) for new, old in enumerate(rows)):
            raise ValueError(f"cannot keep rows {rows} of {len(self.lengths)}: a row may only move to an earlier place")
        blocks = [*self.keys, *self.values]
        for new, old in enumerate(rows):
            if old != new:
                for block in blocks:
                    block[new, : self.lengths[old]] = block[old, : self.lengths[old]]
        self.keys, self.values = ([block[: len(rows)] for block in part] for part in (self.keys, self.values))
        self.lengths = [self.lengths[old] for old in rows]


@dataclass(frozen=True)
class Slots:
    """Where the new tokens of one forward pass go in the cache, and what each may attend to."""

    index: tuple[Any, Any]  # into [rows, capacity]
    end: int  # keys before this slot take part
    positions: Int[Tensor, "rows n"]
    mask: Float[Tensor, "rows 1 n end"] | None  # added to the scores: 0 or -inf. None: every key before ``end``


def next_slots(cache: KVCache, n: int, positions, visible, dtype: torch.dtype) -> Slots:
    """The n slots behind each row's length; positions and what is visible default to those of a plain sequence."""
    first, end = cache.lengths[0], max(cache.lengths) + n
    if end > cache.capacity:
        raise ValueError(
            f"{n} tokens do not fit: the cache has {cache.capacity} slots and holds {cache.lengths} tokens"
        )
    if all(length == first for length in cache.lengths):
        index: tuple[Any, Any] = (slice(None), slice(first, end))
        slots = cache.slots[None, first:end]
    else:
        starts = torch.tensor(cache.lengths).to(cache.slots.device, non_blocking=True)
        slots = starts[:, None] + cache.slots[:n]
        index = (torch.arange(len(starts), device=starts.device)[:, None], slots)
    if visible is None and (n > 1 or len(slots) > 1):
        visible = (cache.slots[:end] <= slots[..., None])[:, None]
    mask = None if visible is None else additive(visible, dtype)
    return Slots(index, end, slots if positions is None else positions, mask)


class Block(nn.Module):
    """One layer: attention over the cache, then a two-layer network, each added to the stream."""

    def __init__(self, config: GPT2Config):
        super().__init__()
        width = config.width
        self.heads = config.heads
        self.norm_1 = nn.LayerNorm(width, config.norm_epsilon)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.norm_2 = nn.LayerNorm(width, config.norm_epsilon)
        self.mlp_in = nn.Linear(width, 4 * width)
        self.mlp_out = nn.Linear(4 * width, width)

    def forward(
        self,
        x: Float[Tensor, "rows n width"],
        keys: Float[Tensor, "rows capacity heads head_width"],
        values: Float[Tensor, "rows capacity heads head_width"],
        slots: Slots,
    ) -> Float[Tensor, "rows n width"]:
        qkv = self.query_key_value(self.norm_1(x))
        query, key, value = qkv.unflatten(-1, (3, self.heads, -1)).unbind(-3)
        keys[slots.index] = key
        values[slots.index] = value
        attended = F.scaled_dot_product_attention(
            query.transpose(1, 2),
            keys[:, : slots.end].transpose(1, 2),
            values[:, : slots.end].transpose(1, 2),
            attn_mask=slots.mask,
        )
        x = x + self.attention_out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.norm_2(x)), approximate="tanh"))


class GPT2(nn.Module):
    """``tokens -> logits`` with a cache. Implements ``LanguageModel``; one forward pass appends to the cache."""

    def __init__(self, config: GPT2Config, name: str = "gpt2"):
        super().__init__()
        self.config = config
        self.name = name
        self.vocab_size = config.vocab_size
        self.context = config.positions
        self.token_embedding = nn.Embedding(config.vocab_size, config.width)
        self.position_embedding = nn.Embedding(config.positions, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width, config.norm_epsilon)

    @property
    def device(self) -> torch.device:
        return self.token_embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.token_embedding.weight.dtype

    def new_cache(self, capacity: int, rows: int = 1) -> KVCache:
        return KVCache(self.config, rows, capacity, self.device, self.dtype)

    def forward(
        self,
        tokens: Int[Tensor, "rows n"],
        cache: KVCache,
        last: int | None = None,
        *,
        positions: Int[Tensor, "rows n"] | None = None,
        mask: Bool[Tensor, "rows 1 n end"] | None = None,
    ) -> Float[Tensor, "rows n_last vocab"]:
        """Logits at the last ``last`` positions (all when None)."""
        return self.last_logits(self.hidden(tokens, cache, positions=positions, mask=mask), last)

    def last_logits(
        self, hidden: Float[Tensor, "rows n width"], last: int | None
    ) -> Float[Tensor, "rows n_last vocab"]:
        """The logits at the last ``last`` positions (all when None)."""
        # A copy, because a slice keeps the strides of the whole, and for these the CPU has no fast bfloat16 kernel: the
        # head of gpt2 would take 200 ms instead of 10.
        return self.logits(hidden if last is None else hidden[:, -last:].clone(memory_format=torch.contiguous_format))

    def hidden(
        self,
        tokens: Int[Tensor, "rows n"],
        cache: KVCache,
        *,
        positions: Int[Tensor, "rows n"] | None = None,
        mask: Bool[Tensor, "rows 1 n end"] | None = None,
    ) -> Float[Tensor, "rows n width"]:
        """The last layer's normalised states: what the output head reads (and what later drafters learn from)."""
        slots = next_slots(cache, tokens.shape[1], positions, mask, self.dtype)
        x = self.through(tokens, cache.keys, cache.values, slots)
        cache.lengths = [length + tokens.shape[1] for length in cache.lengths]
        return x

    def through(
        self, tokens: Int[Tensor, "rows n"], keys: list[Tensor], values: list[Tensor], slots: Slots
    ) -> Float[Tensor, "rows n width"]:
        """``hidden`` once it is settled where the tokens go: reads no length and changes none."""
        x = self.token_embedding(tokens) + self.position_embedding(slots.positions)
        for block, block_keys, block_values in zip(self.blocks, keys, values, strict=True):
            x = block(x, block_keys, block_values, slots)
        return self.norm(x)

    def logits(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocab"]:
        """The output head: the embedding matrix, used a second time."""
        return F.linear(hidden, self.token_embedding.weight)

    @classmethod
    def random(
        cls, size: "str | GPT2Config", *, seed: int = 0, device: torch.device | str = "cpu", dtype=torch.float32
    ) -> "GPT2":
        """Random weights (standard deviation 0.02, as GPT-2 starts its training): for timing and for tests."""
        config = SIZES[size] if isinstance(size, str) else size
        model = empty(config, f"random:{size}" if isinstance(size, str) else "random", device, dtype)
        generator = torch.Generator(device).manual_seed(seed)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.fill_(1.0 if name.endswith("weight") else 0.0)
            else:
                parameter.data.normal_(0, 0.02, generator=generator)
        return model

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str,
        revision: str | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "GPT2":
        """A Hugging Face GPT-2 checkpoint: a local folder or a hub id. Reads ``config.json`` and safetensors only.

        Raises ``ModelNotAvailable`` when it can be found in neither place, ``ValueError`` when it is no GPT-2.
        """
        folder = checkpoint_folder(folder_or_id, revision)
        model = empty(GPT2Config.from_hugging_face(read_config(folder)), str(folder_or_id), device, dtype)
        model.load_state_dict(gpt2_state(read_weights(folder)))
        return model


def empty(config: GPT2Config, name: str, device: torch.device | str, dtype: torch.dtype) -> GPT2:
    """A model whose weights are allocated on the device and not yet set (no time is spent on initialising them)."""
    with torch.device("meta"):
        model = GPT2(config, name)
    return model.to(dtype).to_empty(device=device).eval().requires_grad_(False)
