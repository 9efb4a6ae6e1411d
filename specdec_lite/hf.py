"""Any causal language model of transformers as a ``LanguageModel``, through the public cache interface only."""

import inspect
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from .checkpoints import ModelNotAvailable, checkpoint_folder, first_line, read_config
from .models import additive

# The forward argument that takes the cache: its name from transformers 5.24 on, then those of 5.20 to 5.23 (the last
# one in state-space models, which are refused, but by the name of their cache).
CACHE_ARGUMENTS = ("cache", "past_key_values", "cache_params")


class HFCache:
    """A transformers cache with a length. A model appends to it in place."""

    def __init__(self, cache: DynamicCache, capacity: int):
        self.cache = cache
        self.capacity = capacity
        self.length = 0
        self.oldest = 0  # the length that a rollback can still reach

    def keep(self, length: int, nodes: Sequence[int]) -> None:
        """As ``KVCache.keep``."""
        if not 0 <= length <= self.length or any(not 0 <= node < self.length - length for node in nodes):
            raise ValueError(f"cannot keep {length} tokens and {list(nodes)} behind them: it holds {self.length}")
        slots = [*range(length), *(length + node for node in nodes)]
        layers: list[Any] = self.cache.layers  # Any: keys and values are typed as optional
        for layer in layers:
            layer.keys, layer.values = layer.keys[:, :, slots], layer.values[:, :, slots]
        self.length = len(slots)

    def rollback(self, length: int) -> None:
        """Forget back to ``length`` tokens. ``ValueError`` when it holds fewer, or no longer holds what came before.

        With sliding-window layers a rollback reaches back to the last rollback and no further.
        """
        if not self.oldest <= length <= self.length:
            raise ValueError(
                f"cannot roll back to {length}: the cache holds {self.length} tokens and goes back to {self.oldest}"
            )
        if length == self.length:
            return
        self.cache.crop(length - self.length)  # a count to remove, as a negative number; a positive one raises
        self.length = length
        if any(self.cache.is_sliding):
            # A crop also drops what has left the window. A second one, further back, would find keys missing and not
            # notice; refused at every length, so that it is not first seen when a text outgrows the window.
            self.oldest = length


class HFModel:
    """``tokens -> logits`` with a cache, for any causal language model of transformers.

    The model is put into evaluation mode; nothing else about it, its config or its generation config is changed.

    Raises ``ValueError`` for an encoder-decoder and for a model whose forward takes no cache object.
    """

    def __init__(self, model: PreTrainedModel, name: str | None = None):
        config = model.config.get_text_config(decoder=True)
        self.name = name or model.name_or_path or type(model).__name__
        if model.config.is_encoder_decoder:
            raise ValueError(f"{self.name} is an encoder-decoder; a causal (decoder-only) language model is needed")
        parameters = inspect.signature(model.forward).parameters
        names = [argument for argument in CACHE_ARGUMENTS if argument in parameters]
        if not names:
            raise ValueError(f"{self.name} ({type(model).__name__}) takes no key-value cache: it cannot be rolled back")
        self.cache_argument = names[0]
        self.selects_logits = "logits_to_keep" in parameters
        self.model = model.eval()
        self.vocab_size = config.vocab_size
        self.context = getattr(config, "max_position_embeddings", None) or sys.maxsize  # GPT-2's n_positions, too

    @property
    def device(self) -> torch.device:
        return self.model.device

    def new_cache(self, capacity: int, rows: int = 1) -> HFCache:
        """Raises ``ValueError``, naming its class, when the model's cache cannot be cropped (state-space models)."""
        cache = DynamicCache(config=self.model.config)
        if not cache.is_croppable:
            layers = sorted({type(layer).__name__ for layer in cache.layers})
            raise ValueError(
                f"{self.name} has a {type(cache).__name__} of {', '.join(layers)}, which cannot be cropped: "
                "rejected tokens could not be forgotten"
            )
        cache.activate_past_recording()  # a sliding-window layer drops old keys at once otherwise
        return HFCache(cache, min(capacity, self.context))

    @torch.no_grad()  # not inference_mode: tensors a model keeps for itself (rope tables) must stay fit for training
    def __call__(
        self,
        tokens: Int[Tensor, "rows n"],
        cache: HFCache,
        last: int | None = None,
        *,
        positions: Int[Tensor, "rows n"] | None = None,
        mask: Bool[Tensor, "rows 1 n end"] | None = None,
    ) -> Float[Tensor, "rows n_last vocab"]:
        """Logits at the last ``last`` positions (all when None). A token tree needs a model without sliding windows."""
        n = tokens.shape[1]
        if mask is not None and any(cache.cache.is_sliding):
            raise ValueError(f"{self.name} has sliding-window layers, which cannot read a token tree: draft a chain")
        if mask is None and cache.length + n > cache.capacity:
            raise ValueError(f"{n} tokens do not fit: the cache is for {cache.capacity} and holds {cache.length}")
        options: dict[str, Any] = {self.cache_argument: cache.cache, "use_cache": True}
        if mask is not None:
            options |= {"position_ids": positions, "attention_mask": additive(mask, self.model.dtype)}
        if self.selects_logits and last is not None:
            options["logits_to_keep"] = last
        logits = self.model(input_ids=tokens, **options).logits
        cache.length += n
        if cache.cache.get_seq_length() != cache.length:
            raise ValueError(f"{self.name} ({type(self.model).__name__}) does not use the cache that it is given")
        return logits if last is None else logits[:, -last:]

    @classmethod
    def from_pretrained(
        cls,
        folder_or_id: str | Path,
        revision: str | None = None,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> "HFModel":
        """A checkpoint from a local folder or the hub: safetensors only, and code that comes with it is never run.

        Raises ``ModelNotAvailable`` when it cannot be found or has no safetensors file, ``ValueError`` when it is no
        causal language model that transformers itself knows.
        """
        folder = checkpoint_folder(folder_or_id, revision)
        config = read_config(folder)
        if config.get("is_encoder_decoder"):
            raise ValueError(f"{folder_or_id} is an encoder-decoder; a causal (decoder-only) language model is needed")
        try:
            model = AutoModelForCausalLM.from_pretrained(
                folder, dtype=dtype, use_safetensors=True, trust_remote_code=False
            )
        except OSError as error:
            raise ModelNotAvailable(f"could not load {folder_or_id}: {first_line(error)}") from error
        except ValueError as error:
            raise ValueError(
                f"{folder_or_id} is of type {config.get('model_type')!r}, of which transformers itself has no causal "
                f"language model (code that comes with a checkpoint is never run): {first_line(error)}"
            ) from error
        return cls(model.to(device), name=str(folder_or_id))  # type: ignore[arg-type]  # transformers hides its type
