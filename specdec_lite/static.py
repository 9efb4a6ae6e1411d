"""GPT-2 passes of fixed shape, which a compiler can fuse and a CUDA graph can replay.

A pass over one token reads all the weights and does little with them. What a small model pays on a fast device is then
not the reading but the starting: every operation is launched from Python, a dozen per layer, and a launch costs the
same whatever the layer's size. So the draft costs c = its share of the *layers* (gpt2 to gpt2-xl: 12/48 = .25), where
the weights to be read would say c = its share of the *parameters* (.08). A CUDA graph launches a whole pass at once.

A graph replays the same kernels on the same addresses. Hence whatever changes from pass to pass has to lie in memory
of a fixed place: the tokens, the length of the cache (a tensor here, not a number), and the cache itself, of which
every pass reads all slots and masks those that come after its own position.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .gpt2 import GPT2, KVCache, Slots
from .models import LanguageModel, additive

STATIC_MODES = ("eager", "compile", "graphs", "compile+graphs")
LONGEST = 16  # tokens; a longer pass has work enough to hide its launches, and goes to the plain model
SMALLEST = 128  # slots; capacities are rounded up to this times a power of two


@dataclass
class Memory:
    """What a pass reads and writes, at addresses that stay. One sequence at a time; the next one may reuse it."""

    cache: KVCache  # its memory; the length is the sequence's own
    tokens: Int[Tensor, "1 LONGEST"]
    start: Int[Tensor, ""]  # how many tokens the cache holds
    passes: dict[int, Callable[[], Tensor]] = field(default_factory=dict)  # n -> a pass over n tokens


class StaticCache(KVCache):
    """A ``KVCache`` on borrowed memory, which holds at least ``capacity`` slots."""

    def __init__(self, memory: Memory, capacity: int):
        self.memory = memory
        self.keys, self.values, self.slots = memory.cache.keys, memory.cache.values, memory.cache.slots
        self.capacity = capacity
        self.lengths = [0]


class StaticGPT2:
    """A ``GPT2`` whose passes over 1 to 16 tokens have fixed shapes. Implements ``LanguageModel`` for one row.

    mode: ``"eager"``: the fixed shapes and nothing else. ``"compile"``: ``torch.compile``. ``"graphs"``: a CUDA graph
    for each number of tokens (not yet run on a CUDA device: see ``captured``). ``"compile+graphs"``: graphs of the
    compiled pass (few launches, and few kernels too). A pass is compiled (seconds to minutes) or captured when it is
    first asked for, so time the second run. The weights are the model's own: move or cast it before, not after. Not
    for two threads at once.

    Raises ``ValueError`` for an unknown mode, for graphs without CUDA and for a model that is no ``GPT2``.
    """

    def __init__(self, model: LanguageModel, mode: str = "eager"):
        if not isinstance(model, GPT2):
            raise ValueError(f"only this library's own GPT2 has a static form; {model.name} is {type(model).__name__}")
        check_mode(mode, model.device)
        self.model, self.mode = model, mode
        self.name, self.vocab_size, self.context = model.name, model.vocab_size, model.context
        self.compiled: dict[tuple[int, int], Callable[..., Tensor]] = {}
        self.spare: dict[int, list[Memory]] = {}  # slots -> memory that no cache uses now, with what was captured on it
        if "graphs" in mode:
            self.capture = torch.cuda.Stream(model.device), torch.cuda.graph_pool_handle()

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    def new_cache(self, capacity: int, rows: int = 1) -> StaticCache:
        """An empty cache. Its memory is used again, and what was captured on it, when the cache is dropped."""
        if rows != 1:
            raise ValueError(f"a static cache holds one sequence, not {rows}: for batches use the plain model, .model")
        slots = SMALLEST
        while slots < capacity:
            slots *= 2
        spare = self.spare.setdefault(slots, [])
        with torch.inference_mode():
            memory = spare.pop() if spare else self.new_memory(slots)
            # Masked slots are multiplied by 0, which a NaN that an earlier sequence left would survive.
            for block in (*memory.cache.keys, *memory.cache.values):
                block.zero_()
        cache = StaticCache(memory, capacity)
        weakref.finalize(cache, spare.append, memory).atexit = False
        return cache

    def new_memory(self, slots: int) -> Memory:
        tokens = torch.zeros((1, LONGEST), dtype=torch.long, device=self.device)
        return Memory(self.model.new_cache(slots), tokens, torch.zeros((), dtype=torch.long, device=self.device))

    def __call__(
        self, tokens: Int[Tensor, "1 n"], cache: StaticCache, last: int | None = None, **tree: Any
    ) -> Float[Tensor, "1 n_last vocab"]:
        """Logits at the last ``last`` positions (all when None). The plain model makes the first pass on a cache, and
        all passes over token trees."""
        n, length = tokens.shape[1], cache.length
        with torch.inference_mode():
            # Prompts have any length: to compile or capture for one would not pay. What does not fit is refused there.
            if tree or length == 0 or n > LONGEST or length + n > cache.capacity:
                return self.model(tokens, cache, last, **tree)
            cache.memory.tokens[:, :n].copy_(tokens)
            cache.memory.start.fill_(length)
            logits = self.pass_over(n, cache.memory)()
        cache.lengths = [length + n]
        return logits if last is None else logits[:, -last:]

    def pass_over(self, n: int, memory: Memory) -> Callable[[], Float[Tensor, "1 n vocab"]]:
        """The pass over the first n tokens of ``memory``, made when it is first asked for."""
        if n not in memory.passes:
            step = self.compiled_step(n, len(memory.cache.slots)) if "compile" in self.mode else static_step
            work = partial(step, self.model, memory.tokens[:, :n], memory.start, memory.cache)
            memory.passes[n] = captured(work, *self.capture) if "graphs" in self.mode else work
        return memory.passes[n]

    def compiled_step(self, n: int, slots: int) -> Callable[..., Tensor]:
        """``static_step`` compiled for one shape; memory of the same size shares it."""
        if (n, slots) not in self.compiled:
            # Compiled code is kept, searched and limited in number (8) per Python code object: give each its own.
            code = static_step.__code__.replace(co_name=f"static_step_{n}_{slots}")
            own = FunctionType(code, static_step.__globals__)
            self.compiled[n, slots] = torch.compile(own, fullgraph=True, dynamic=False)
        return self.compiled[n, slots]


def static_step(
    model: GPT2, tokens: Int[Tensor, "1 n"], start: Int[Tensor, ""], memory: KVCache
) -> Float[Tensor, "1 n vocab"]:
    """A pass over n tokens behind ``start`` others. Nothing in it depends on a number that the host holds."""
    positions = start + memory.slots[: tokens.shape[1]]
    visible = (memory.slots <= positions[:, None])[None, None]
    slots = Slots((slice(None), positions), len(memory.slots), positions[None], additive(visible, model.dtype))
    return model.logits(model.through(tokens, memory.keys, memory.values, slots))


def captured(work: Callable[[], Tensor], stream: "torch.cuda.Stream", pool: Any) -> Callable[[], Tensor]:
    """``work`` as one CUDA graph: calling it launches the whole at once and gives a copy of the result.

    **This has not been run on a CUDA device yet.** The tests run it with a stand-in for ``torch.cuda`` that records
    operations and replays them on the same memory, and have one more test for a machine with CUDA.

    ``work`` may read and write at fixed addresses only (whose owner has to outlive the graph), must not wait for the
    device, and is run a few times before it is captured. stream, pool: the same for all graphs of a model. They may
    share the pool's memory, in any order of replay, because no two replays overlap and because each result is copied
    before the next replay writes over it.
    """
    with torch.cuda.device(stream.device):
        stream.wait_stream(torch.cuda.current_stream())
        # What only a first run does (compile kernels, make a library's workspace for this stream) cannot be captured.
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            result = work()

    def replay() -> Tensor:
        graph.replay()
        return result.clone()

    return replay


def check_mode(mode: str, device: torch.device) -> None:
    if mode not in STATIC_MODES:
        raise ValueError(f"mode is {mode!r}; it must be one of {', '.join(STATIC_MODES)}")
    if "graphs" in mode and device.type != "cuda":
        raise ValueError(
            f"mode {mode!r} needs a CUDA device, and the model is on {device}: load the pair with "
            'device="cuda", or use mode "compile" or "eager"'
        )
