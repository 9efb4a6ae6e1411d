"""Is this machine ready for the course? A row per check: what, whether it is fine, and what was found or what to do."""

import importlib.metadata
import platform
import socket
import sys
from dataclasses import dataclass
from urllib.parse import urlparse

import psutil
import torch
from huggingface_hub import constants, try_to_load_from_cache

from .pairs import DRAFT_OF, GB, HUB, WEIGHTS, free_memory, memory_needed

LIBRARIES = ("torch", "transformers", "tokenizers", "safetensors", "numpy", "matplotlib", "ipywidgets")


@dataclass(frozen=True)
class Row:
    """optional: the course runs without it, so its failure is no fault of the machine."""

    name: str
    ok: bool
    detail: str
    optional: bool = False


def diagnose() -> list[Row]:
    """All rows, in the order in which a reader would want them."""
    return [
        python(),
        *map(library, LIBRARIES),
        *devices(),
        memory(),
        embedded_pair(),
        network(),
        *map(hub_pair, DRAFT_OF),
    ]


def python() -> Row:
    return Row("Python", sys.version_info >= (3, 10), f"{platform.python_version()} (3.10 or newer is needed)")


def library(name: str) -> Row:
    try:
        return Row(name, True, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        return Row(name, False, f"missing: pip install {name}")


def devices() -> list[Row]:
    rows = [Row("CPU", True, f"{torch.get_num_threads()} threads, {platform.machine()}")]
    if torch.cuda.is_available():
        rows += [Row(f"cuda:{i}", True, torch.cuda.get_device_name(i)) for i in range(torch.cuda.device_count())]
    else:
        rows.append(Row("CUDA", False, "no CUDA GPU: everything runs on the CPU, large pairs slowly", optional=True))
    if torch.backends.mps.is_available():
        rows.append(Row("MPS", False, "present, but gives wrong numbers for some models: prefer cpu", optional=True))
    return rows


def memory() -> Row:
    free = psutil.virtual_memory().available
    return Row("memory", free > 1 * GB, f"{free / GB:.1f} GB free (the embedded pair needs less than 1)")


def embedded_pair() -> Row:
    parts = ["target/model.safetensors", "draft/model.safetensors", "tokenizer/tokenizer.json"]
    missing = [part for part in parts if not (WEIGHTS / "tiny" / part).is_file()]
    return Row(
        "pair tiny", not missing, f"missing {missing}: reinstall the package" if missing else "ready, no download"
    )


def network() -> Row:
    host = urlparse(constants.ENDPOINT).hostname or ""
    try:
        socket.create_connection((host, 443), timeout=3).close()
        return Row("network", True, f"{host} answers", optional=True)
    except OSError as error:
        return Row("network", False, f"{host} does not answer ({error}): only the pairs on this machine", optional=True)


def hub_pair(name: str) -> Row:
    """Ready when both checkpoints are in the local cache and the pair fits in memory (float32)."""
    cached = all(
        isinstance(try_to_load_from_cache(*HUB[part][:1], "model.safetensors", revision=HUB[part].revision), str)
        for part in (name, DRAFT_OF[name])
    )
    needed, free = memory_needed(name, torch.float32), free_memory(torch.device("cpu"))
    detail = f"{'in the local cache' if cached else 'not downloaded yet'}; needs {needed / GB:.1f} GB in float32"
    if needed > free:
        detail += f", {free / GB:.1f} GB free (half of it in bfloat16)"
    return Row(f"pair {name}", cached and needed <= free, detail, optional=True)
