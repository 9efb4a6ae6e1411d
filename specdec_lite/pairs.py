"""Target/draft pairs: the embedded one, the GPT-2 family by name, and any two models that share a tokenizer."""

import importlib.resources
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import psutil
import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .checkpoints import ModelNotAvailable, checkpoint_folder, first_line, read_config
from .gpt2 import GPT2, SIZES, GPT2Config
from .hf import HFModel
from .models import LanguageModel

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GB = 1e9
WEIGHTS = Path(str(importlib.resources.files("specdec_lite"))) / "weights"
BUILD_IT = "Pair(name, target, draft, tokenizer)"


class Checkpoint(NamedTuple):
    """A hub id at a pinned revision."""

    id: str
    revision: str


# Parameters of each (millions): 82, 124, 355, 774, 1558. `memory_needed` gives the bytes of a pair.
HUB: Mapping[str, Checkpoint] = MappingProxyType(
    {
        "distilgpt2": Checkpoint("distilbert/distilgpt2", "2290a62682d06624634c1f46a6ad5be0f47f38aa"),
        "gpt2": Checkpoint("openai-community/gpt2", "607a30d783dfa663caf39e06633721c8d4cfcd7e"),
        "gpt2-medium": Checkpoint("openai-community/gpt2-medium", "6dcaa7a952f72f9298047fd5137cd6e4f05f41da"),
        "gpt2-large": Checkpoint("openai-community/gpt2-large", "32b71b12589c2f8d625668d2335a01cac3249519"),
        "gpt2-xl": Checkpoint("openai-community/gpt2-xl", "15ea56dee5df4983c59b2538573817e1667135e2"),
    }
)
# Named pairs, smallest first: target -> its draft. distilgpt2 is a draft only; nothing smaller could draft for it.
DRAFT_OF = MappingProxyType({"gpt2": "distilgpt2", "gpt2-medium": "gpt2", "gpt2-large": "gpt2", "gpt2-xl": "gpt2"})


@dataclass
class Pair:
    """A target, a draft and the tokenizer they share.

    random_weights: the models are good for timing only; no acceptance rate may be read off them.
    """

    name: str
    target: LanguageModel
    draft: LanguageModel
    tokenizer: PreTrainedTokenizerBase | None
    random_weights: bool = False


def load_pair(
    name: str | None = None,
    *,
    target: str | Path | PreTrainedModel | None = None,
    draft: str | Path | PreTrainedModel | None = None,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "float32",
) -> Pair:
    """A pair by name (``"tiny"`` when nothing is given), or from any two models with one tokenizer.

    name: ``"tiny"``, the embedded pair: no download. ``"gpt2"``, ``"gpt2-medium"``, ``"gpt2-large"``, ``"gpt2-xl"``:
    from the Hugging Face hub at pinned revisions, with gpt2 as the draft (of gpt2 itself: distilgpt2).
    ``"random:gpt2-xl"`` and so on: the same sizes with random weights, made on the spot, with tiny's tokenizer. For
    timing only: an acceptance rate of random models means nothing.
    target, draft: instead of a name; each a hub id, a local checkpoint folder, or a transformers model (which stays on
    its device, in its dtype). GPT-2s run in this library's own class, everything else in ``HFModel``.
    device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``, ``"mps"`` or ``"auto"`` (CUDA when there is one, else the CPU).
    dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``, as a name or a ``torch.dtype``.

    Raises ``ValueError`` for an unknown name, device or dtype and for differing tokenizers; ``MemoryError`` when a
    named pair does not fit, before anything is downloaded or made; ``ModelNotAvailable`` when a checkpoint is not to be
    had.
    """
    device, dtype = find_device(device), find_dtype(dtype)
    if target is not None or draft is not None:
        if name is not None or target is None or draft is None:
            raise ValueError("give either a name, or both target= and draft=")
        return join(target, draft, device, dtype)
    if name is None or name == "tiny":
        return tiny_pair(device, dtype)
    size = str(name).removeprefix("random:")
    if size not in DRAFT_OF:
        names = ["tiny", *DRAFT_OF, *(f"random:{size}" for size in DRAFT_OF)]
        raise ValueError(
            f"unknown pair {name!r}. Names: {', '.join(names)}. "
            'Any two models that share a tokenizer: load_pair(target="id or folder", draft="id or folder")'
        )
    check_memory(name, device, dtype)
    if size != name:
        return random_pair(size, device, dtype)
    (target, at), (draft, draft_at) = HUB[size], HUB[DRAFT_OF[size]]
    return join(target, draft, device, dtype, revisions=(at, draft_at), name=name)


def tiny_pair(device: torch.device, dtype: torch.dtype) -> Pair:
    target, draft = (
        GPT2.from_pretrained(str(embedded(role)), device=device, dtype=dtype) for role in ("target", "draft")
    )
    target.name, draft.name = "tiny target", "tiny draft"
    return Pair("tiny", target, draft, read_tokenizer(embedded("tokenizer")))


def random_pair(size: str, device: torch.device, dtype: torch.dtype) -> Pair:
    # Its ids lie within the larger vocabulary; those beyond it decode to nothing.
    tokenizer = read_tokenizer(embedded("tokenizer"))
    target = GPT2.random(size, seed=0, device=device, dtype=dtype)
    draft = GPT2.random(DRAFT_OF[size], seed=1, device=device, dtype=dtype)
    return Pair(f"random:{size}", target, draft, tokenizer, random_weights=True)


def embedded(part: str) -> Path:
    folder = WEIGHTS / "tiny" / part
    if not folder.is_dir():  # a path that does not exist would be taken for a hub id
        raise ModelNotAvailable(f"this installation lacks the embedded pair: there is no folder {folder}")
    return folder


def join(
    target: str | Path | PreTrainedModel,
    draft: str | Path | PreTrainedModel,
    device: torch.device,
    dtype: torch.dtype,
    revisions: tuple[str | None, str | None] = (None, None),
    name: str | None = None,
) -> Pair:
    """Two models as a pair. The tokenizers are compared before any weights are read."""
    sources = [find_source(given, at) for given, at in zip((target, draft), revisions, strict=True)]
    tokenizer, other = (read_tokenizer(source) for source in sources)
    check_same_tokenizer(tokenizer, other)
    p, q = (
        HFModel(source) if isinstance(source, PreTrainedModel) else read_model(source, str(given), device, dtype)
        for source, given in zip(sources, (target, draft), strict=True)
    )
    largest_id = max(tokenizer.get_vocab().values())
    for model in (p, q):
        if model.vocab_size <= largest_id:
            raise ValueError(
                f"{model.name} knows ids below {model.vocab_size}; its tokenizer has ids up to {largest_id}"
            )
    if p.device != q.device:
        raise ValueError(f"the target is on {p.device} and the draft on {q.device}: move one of them")
    return Pair(name or f"{p.name} + {q.name}", p, q, tokenizer)


def find_source(given: str | Path | PreTrainedModel, revision: str | None) -> Path | PreTrainedModel:
    """A model as it is, anything else as a local folder (downloaded when it is a hub id)."""
    if isinstance(given, PreTrainedModel):
        return given
    if not isinstance(given, str | Path):
        raise ValueError(
            f"target and draft must each be a hub id, a folder or a transformers model, not {type(given).__name__}; "
            f"for models of other kinds, make the pair yourself: {BUILD_IT}"
        )
    return checkpoint_folder(given, revision)


def read_model(source: Path, name: str, device: torch.device, dtype: torch.dtype) -> LanguageModel:
    config = read_config(source)
    try:
        GPT2Config.from_hugging_face(config)
        ours = config.get("model_type") == "gpt2"
    except (ValueError, KeyError):  # another architecture, or a variant of GPT-2 that the own class does not run
        ours = False
    model = (GPT2 if ours else HFModel).from_pretrained(str(source), device=device, dtype=dtype)
    model.name = name
    return model


def read_tokenizer(source: Path | PreTrainedModel) -> PreTrainedTokenizerBase:
    """The tokenizer beside a checkpoint. Raises ``ModelNotAvailable`` when there is none."""
    place = source.name_or_path if isinstance(source, PreTrainedModel) else source
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=False) if place else None
        reason = f"no tokenizer files in {place}" if place else "a model made from a config comes with no tokenizer"
    except (OSError, ValueError, ImportError) as error:
        tokenizer, reason = None, first_line(error)
    # Where the files are missing transformers may make up a tokenizer that knows special tokens only, and say nothing.
    if tokenizer is None or len(tokenizer) <= len(tokenizer.all_special_ids):
        raise ModelNotAvailable(
            f"{place or type(source).__name__} has no tokenizer that can be loaded ({reason}). Put tokenizer.json and "
            f"tokenizer_config.json beside its weights, or make the pair yourself: {BUILD_IT}"
        )
    return tokenizer


PROBES = ("Once upon a time, there was a king.", " two  spaces\n\tand a line", "naïve café, 東京 🙂", "f(x) = 3.14")


def check_same_tokenizer(target: PreTrainedTokenizerBase, draft: PreTrainedTokenizerBase) -> None:
    """Raises ``ValueError``, naming the first difference, unless both mean the same tokens by the same ids.

    Padding is left out: it plays no part in decoding, and a fine-tuned model often has its own.
    """
    ours, theirs = ({token_id: token for token, token_id in each.get_vocab().items()} for each in (target, draft))
    for token_id in sorted(ours.keys() | theirs.keys()):
        a, b = ours.get(token_id), theirs.get(token_id)
        if a != b:
            differ(f"id {token_id}", a, b)
    for kind in ("bos_token_id", "eos_token_id", "unk_token_id"):
        a, b = getattr(target, kind), getattr(draft, kind)
        if a != b:
            differ(kind, a, b)
    for text in PROBES:
        a, b = target.encode(text), draft.encode(text)
        if a != b:
            differ(f"the encoding of {text!r}", a, b)


def differ(what: str, target: Any, draft: Any) -> None:
    raise ValueError(
        f"target and draft have different tokenizers: {what} is {target!r} for the target and {draft!r} for the draft "
        "(None: there is none). Token ids must mean the same to both"
    )


def memory_needed(name: str, dtype: torch.dtype) -> int:
    """Bytes that a named pair takes, with its draft: the weights, and a full cache of each model."""
    size = name.removeprefix("random:")
    models: list[GPT2Config] = [SIZES[size], SIZES[DRAFT_OF[size]]]
    return dtype.itemsize * sum(m.parameters + 2 * m.layers * m.positions * m.width for m in models)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on the device (MPS shares the machine's memory)."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # PyTorch's to give out again
    return torch.cuda.mem_get_info(device)[0] + unused


def check_memory(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Raises ``MemoryError`` when a named pair does not fit, saying which smaller one does."""
    needed, free = memory_needed(name, dtype), free_memory(device)
    if needed <= free:
        return
    prefix = "random:" if name.startswith("random:") else ""
    fitting = ["tiny"] + [prefix + size for size in DRAFT_OF if memory_needed(size, dtype) <= free]
    raise MemoryError(
        f"{name!r} in {str(dtype).removeprefix('torch.')} needs {needed / GB:.1f} GB and {device} has "
        f"{free / GB:.1f} GB free. The largest that fits: {fitting[-1]!r}"
    )


def find_dtype(dtype: str | torch.dtype) -> torch.dtype:
    for name, found in DTYPES.items():
        if dtype in (name, found):
            return found
    raise ValueError(f"dtype is {dtype!r}; it must be one of {', '.join(DTYPES)}")


def find_device(device: str | torch.device) -> torch.device:
    """Raises ``ValueError`` listing what there is when the device is unknown or missing; warns of MPS."""
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    available = ["cpu", *gpus, *(["mps"] if torch.backends.mps.is_available() else [])]
    if device == "auto":  # never mps, see below
        device = gpus[0] if gpus else "cpu"
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        found = None
    if found == torch.device("cuda") and gpus:
        found = torch.device("cuda", torch.cuda.current_device())
    if found is None or str(found) not in available:
        raise ValueError(f"there is no device {str(device)!r} here; available: {', '.join(available)} (or 'auto')")
    if found.type == "mps":
        warnings.warn(
            "MPS gives wrong numbers for some models without saying so: compare with device='cpu', dtype='float32' "
            "before trusting a result",
            stacklevel=3,
        )
    return found
