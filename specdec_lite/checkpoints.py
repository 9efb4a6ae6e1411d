"""Finding a checkpoint (a local folder, or the hub's copy of one) and reading a Hugging Face GPT-2 out of it."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub.constants import HF_HUB_CACHE
from safetensors.torch import load_file
from torch import Tensor

FILES = ["*.json", "*.safetensors", "*.txt", "*.model"]  # never code, never pickled weights


class ModelNotAvailable(RuntimeError):
    """A checkpoint is neither on this machine nor can it be fetched."""


def checkpoint_folder(folder_or_id: str | Path, revision: str | None = None) -> Path:
    """The local folder of a checkpoint, downloaded into Hugging Face's cache when it is a hub id.

    Raises ``ModelNotAvailable``, saying what was tried and how to go on without a network.
    """
    folder = Path(folder_or_id)
    if folder.is_dir():
        return folder
    try:
        return Path(huggingface_hub.snapshot_download(str(folder_or_id), revision=revision, allow_patterns=FILES))
    except Exception as error:  # the hub client raises many kinds, and the way on is the same after each
        raise ModelNotAvailable(
            f"could not load {folder_or_id!r} (revision {revision or 'main'}): it is no local folder, it is not in the "
            f"cache at {HF_HUB_CACHE}, and the hub answered {type(error).__name__}: {first_line(error)}. Offline, "
            f"download it on another machine and give the folder, or copy that cache and set HF_HOME; "
            f'load_pair("tiny") needs no network.'
        ) from error


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0][:200]


def read_config(folder: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint. Raises ``ModelNotAvailable`` when the folder has none."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelNotAvailable(f"{folder} has no config.json: it is not a Hugging Face checkpoint folder")
    return json.loads(path.read_text(encoding="utf-8"))


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint's safetensors files. Raises ``ModelNotAvailable`` when there are none."""
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise ModelNotAvailable(f"{folder} has no .safetensors file; other formats can run code when read, and are not")
    return {name: tensor for shard in shards for name, tensor in load_file(shard).items()}


# Hugging Face's names inside a layer, and ours. Their "Conv1D" stores weights as (in, out), nn.Linear as (out, in).
LAYER_NAMES = {
    "ln_1": "norm_1",
    "attn.c_attn": "query_key_value",
    "attn.c_proj": "attention_out",
    "ln_2": "norm_2",
    "mlp.c_fc": "mlp_in",
    "mlp.c_proj": "mlp_out",
}
OUTER_NAMES = {"wte": "token_embedding", "wpe": "position_embedding", "ln_f": "norm"}


def gpt2_state(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Hugging Face GPT-2 weights under the names of ``gpt2.GPT2``, transposed where the layouts differ."""
    state = {}
    for name, tensor in weights.items():
        module, _, kind = name.removeprefix("transformer.").rpartition(".")
        if module in OUTER_NAMES:
            state[f"{OUTER_NAMES[module]}.{kind}"] = tensor
        elif module.startswith("h.") and module.split(".", 2)[2] in LAYER_NAMES:
            _, layer, inner = module.split(".", 2)
            matrix = kind == "weight" and not inner.startswith("ln_")
            state[f"blocks.{layer}.{LAYER_NAMES[inner]}.{kind}"] = tensor.T if matrix else tensor
    return state  # what is left out: causal-mask buffers of old checkpoints, and the output head, which is wte again


def hugging_face_state(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The way back: ``gpt2.GPT2``'s weights under Hugging Face's names and in its layout."""
    inner_names = {ours: theirs for theirs, ours in LAYER_NAMES.items()}
    outer_names = {ours: theirs for theirs, ours in OUTER_NAMES.items()}
    weights = {}
    for name, tensor in state.items():
        module, _, kind = name.rpartition(".")
        if module in outer_names:
            weights[f"transformer.{outer_names[module]}.{kind}"] = tensor
        else:
            _, layer, inner = module.split(".")
            matrix = kind == "weight" and not inner.startswith("norm")
            theirs = f"transformer.h.{layer}.{inner_names[inner]}.{kind}"
            weights[theirs] = tensor.T.contiguous() if matrix else tensor
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    return weights
