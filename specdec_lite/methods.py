"""Every way to draft that this library knows, ready to be compared on the embedded pair."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .distributions import Sampling
from .drafters import Drafter
from .drafters.eagle import EagleDrafter, EagleLayer
from .drafters.eagle_tree import DynamicTree
from .drafters.early_exit import EarlyExitDrafter, ExitHead
from .drafters.medusa import MedusaDrafter, MedusaHeads, best_tree
from .drafters.model import ModelDrafter
from .drafters.ngram import NGramDrafter
from .drafters.specinfer import TOP, Merged, TreeDrafter
from .gpt2 import GPT2
from .hf import HFModel
from .pairs import Pair, embedded
from .verify import Verify, verify, verify_block

PLAIN = "plain decoding"
# How often EAGLE's first, second, ... candidate is the greedy target's choice: nearly the same at each depth.
EAGLE_BY_RANK = ((0.73, 0.14, 0.05, 0.03),) * 4
# Steps x windows x tokens that the networks of the embedded pair were trained with (docs/model-card.md), by method.
TRAINED_ON = {
    "draft model": 1400 * 8 * 512,
    "SpecInfer": 1400 * 8 * 512,
    "early exit": 600 * 8 * 64,
    "Medusa": 600 * 8 * 64,
    "EAGLE": 2400 * 4 * 512,
}


@dataclass(frozen=True)
class Method:
    """One row of the comparison: a drafter, how deep it drafts, and how its draft is verified.

    modules: the networks that it needs beside the target; their memory is counted, with their caches.
    """

    drafter: Drafter | None
    K: int
    verify: Verify = verify
    modules: Sequence[Any] = ()


def catalogue(pair: Pair, sampling: Sampling) -> dict[str, Method]:
    """What is compared: methods by name, each with the settings worth trying on a small machine.

    Any pair can draft with its draft model and by n-grams; what was trained for the embedded target drafts only for it.
    """
    methods = {PLAIN: Method(None, 0)} | without_training(pair, sampling)
    return methods | trained_for(pair.target) if pair.name == "tiny" else methods


def without_training(pair: Pair, sampling: Sampling) -> dict[str, Method]:
    vocab, modules = pair.target.vocab_size, [pair.draft]

    def chain() -> ModelDrafter:
        return ModelDrafter(pair.draft, vocab)

    methods = {f"draft model, K = {K}": Method(chain(), K, modules=modules) for K in (2, 3, 4, 5)}
    trees = ((2, 1), (2, 1, 1, 1), (3, 2, 1))
    methods |= {
        f"SpecInfer tree, top {widths}": Method(
            TreeDrafter(pair.draft, vocab, widths, TOP), len(widths), modules=modules
        )
        for widths in trees
    }
    if sampling.temperature > 0:  # at 0 a drawn tree is a chain, and the block rule is the standard one
        methods["draft model, K = 4, block verification"] = Method(chain(), 4, verify=verify_block, modules=modules)
        methods |= {
            f"SpecInfer tree, drawn {widths}": Method(
                TreeDrafter(pair.draft, vocab, widths), len(widths), modules=modules
            )
            for widths in trees
        }
    methods |= {f"n-gram, K = {K}": Method(NGramDrafter(), K) for K in (3, 6)}
    methods["draft model + n-gram, K = 3"] = Method(Merged([chain(), NGramDrafter()], 3), 3, modules=modules)
    return methods


def trained_for(target: Any) -> dict[str, Method]:
    """What the package has for the embedded target: a draft trained on text alone, early exit, Medusa and EAGLE."""
    early, heads, layer = ExitHead.load(target), MedusaHeads.load(target), EagleLayer.load(target)
    plain = GPT2.from_pretrained(str(embedded("draft-not-distilled")), device=target.device, dtype=target.dtype)
    methods = {
        f"draft model, not distilled, K = {K}": Method(ModelDrafter(plain, target.vocab_size), K, modules=[plain])
        for K in (2, 3)
    }
    methods |= {f"early exit, K = {K}": Method(EarlyExitDrafter(target, early), K, modules=[early]) for K in (2, 4)}
    methods |= {f"Medusa chain, K = {K}": Method(MedusaDrafter(target, heads), K, modules=[heads]) for K in (2, 4)}
    methods |= {f"EAGLE chain, K = {K}": Method(EagleDrafter(target, layer), K, modules=[layer]) for K in (2, 3, 4)}
    for nodes in (6, 12):
        drafters: dict[str, tuple[Drafter, Any]] = {
            "Medusa tree": (MedusaDrafter(target, heads, best_tree(heads.accuracies, nodes)), heads),
            "EAGLE static tree": (EagleDrafter(target, layer, best_tree(torch.tensor(EAGLE_BY_RANK), nodes)), layer),
            "EAGLE dynamic tree": (EagleDrafter(target, layer, DynamicTree(nodes, width=3, depth=4)), layer),
        }
        for name, (drafter, module) in drafters.items():
            methods[f"{name}, {nodes} nodes"] = Method(drafter, 4, modules=[module])
    return methods


def trained_on(pair: Pair, name: str) -> int | None:
    """How many tokens the method's networks were trained on; ``None`` where that is not known."""
    known = TRAINED_ON if pair.name == "tiny" else {}
    needs_none = name == PLAIN or name.startswith("n-gram")
    return 0 if needs_none else next((n for family, n in known.items() if name.startswith(family)), None)


def memory(method: Method, context: int) -> int:
    """Bytes that a method needs beside the target: weights, and a full cache of its own (transformers' not counted)."""
    total = 0
    for module in method.modules:
        network = module.model if isinstance(module, HFModel) else module
        total += sum(weight.nbytes for weight in network.parameters())
        if isinstance(module, GPT2 | EagleLayer):
            cache = module.new_cache(context)
            total += sum(block.nbytes for block in (*cache.keys, *cache.values))
    return total
