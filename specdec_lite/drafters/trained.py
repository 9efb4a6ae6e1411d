"""Small networks that were trained for one target, as files: the target's fingerprint is stored, and checked.

Heads fit the features they learned from. On another target they would draft nonsense, at full price and without an
error, so they are refused there.
"""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ..gpt2 import GPT2
from ..pairs import WEIGHTS


def shipped(kind: str) -> Path:
    """Where the package keeps what was trained for the embedded target."""
    return WEIGHTS / "tiny" / f"{kind}.safetensors"


def fingerprint(target: GPT2) -> str:
    """A hash of the target's weights, rounded to bfloat16: the same in float32 and bfloat16, and in float16 where the
    checkpoint is stored in float16, as the embedded one is (rounding twice is not rounding once)."""
    digest = hashlib.sha256()
    for name, weight in sorted(target.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.to("cpu", torch.bfloat16).view(torch.int16).numpy().tobytes())
    return digest.hexdigest()


def save_trained(path: Path, module: nn.Module, target: GPT2, kind: str, **sizes: int) -> None:
    """Write the weights in float16, beside and then renamed, so that an interruption leaves no half a file."""
    weights = {name: weight.to("cpu", torch.float16).contiguous() for name, weight in module.state_dict().items()}
    partial = path.with_suffix(".unfinished")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(weights, partial, {"kind": kind, "target": fingerprint(target), "sizes": json.dumps(sizes)})
    partial.replace(path)


def load_trained(path: Path, kind: str, target: GPT2) -> tuple[dict[str, int], dict[str, Tensor]]:
    """(sizes, weights in the target's dtype and on its device).

    Raises ``ValueError`` when there is no such file, when it is cut short, holds something else, or belongs to another
    target.
    """
    path = Path(path)
    if type(target) is not GPT2:  # a packed or static form has no features to show, and other weights to hash
        raise ValueError(f"{target.name} is a {type(target).__name__}: what was trained needs a plain GPT2 as target")
    if not path.is_file():
        raise ValueError(f"there is no {path}: train it with `python -m specdec_lite.training {kind}`")
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            about = file.metadata() or {}
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no dict)
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or cut short ({error}): copy or train it again") from None
    if about.get("kind") != kind:
        raise ValueError(f"{path} holds {about.get('kind', 'no trained heads')}, not {kind}: give another file")
    if about["target"] != fingerprint(target):
        raise ValueError(
            f"{path} was trained for another target than {target.name}: train it for this one with "
            f"`python -m specdec_lite.training {kind}`"
        )
    return json.loads(about["sizes"]), {
        name: weight.to(target.device, target.dtype) for name, weight in weights.items()
    }
