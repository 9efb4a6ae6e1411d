"""What single passes cost, measured apart from any loop: what a prediction is made of."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from .distributions import Sampling
from .drafters.model import ModelDrafter
from .models import LanguageModel
from .pairs import Pair
from .randomness import TorchRandomness
from .timing import interleaved

MOST_REPEATS, FEWEST_REPEATS = 25, 5


@dataclass(frozen=True)
class Costs:
    """t1: seconds of a target pass over one token, its distribution included. Everything else is over t1.

    v: n -> a target pass over n tokens. drafting: K -> a draft of K tokens, each with its pass, distribution and draw.
    prefill: a target pass over ``context`` tokens with an empty cache, the cache's allocation included.
    """

    t1: float
    v: dict[int, float]
    drafting: dict[int, float]
    prefill: float
    context: int

    @property
    def c(self) -> float:
        """One draft step: the median over K of ``drafting[K] / K``."""
        return median(cost / K for K, cost in self.drafting.items())


def passes(
    model: LanguageModel, ns: Iterable[int], *, context: int, sampling: Sampling = Sampling()
) -> dict[int, Callable[[], None]]:
    """Pieces of work to be timed: a pass over n tokens behind ``context`` others, with the distributions it gives."""
    longest = max(ns)
    cache = model.new_cache(context + longest)
    tokens = torch.zeros((1, context + longest), dtype=torch.long, device=model.device)
    with torch.inference_mode():
        model(tokens[:, :context], cache, last=1)

    def pass_over(n: int) -> Callable[[], None]:
        def work() -> None:
            with torch.inference_mode():
                sampling.probs(model(tokens[:, :n], cache, last=n))
            cache.rollback(context)

        return work

    return {n: pass_over(n) for n in ns}


def drafts(pair: Pair, Ks: Iterable[int], *, context: int, sampling: Sampling) -> dict[int, Callable[[], None]]:
    """Pieces of work to be timed: the pair's draft proposes K tokens behind ``context`` others, as in the loop."""
    drafter = ModelDrafter(pair.draft, pair.target.vocab_size)
    drafter.start(context + max(Ks))
    tokens = torch.zeros(context, dtype=torch.long, device=pair.target.device)
    randomness = TorchRandomness.seeded(0, pair.target.device)

    def draft_of(K: int) -> Callable[[], None]:
        def work() -> None:
            with torch.inference_mode():
                drafter.propose(tokens, K, sampling, randomness)
            drafter.commit(context, [])

        return work

    works = {K: draft_of(K) for K in Ks}
    next(iter(works.values()))()  # it has read the context from now on
    return works


def prefill(model: LanguageModel, context: int) -> Callable[[], None]:
    """A piece of work to be timed: a new cache, and one pass over a prompt of ``context`` tokens."""
    tokens = torch.zeros((1, context), dtype=torch.long, device=model.device)

    def work() -> None:
        with torch.inference_mode():
            model(tokens, model.new_cache(context), last=1)

    return work


def check_room(pair: Pair, K: int) -> None:
    """Raises ``ValueError`` when K draft tokens fit in no pass of the pair's models."""
    most = min(pair.target.context - 2, pair.draft.context - 1)  # with a token of context, and the one that follows
    if most < K:
        raise ValueError(f"K is {K}, and the contexts of {pair.name} leave room for {most}: give a smaller K")


def measure_costs(
    pair: Pair,
    Ks: Iterable[int],
    *,
    longest: int = 0,
    context: int = 64,
    sampling: Sampling = Sampling(),
    budget: float = 10.0,
) -> Costs:
    """t(1), v(1 .. max(K) + 1, or up to ``longest``), drafting and prefill: medians, all taken in turn.

    context: tokens in front of each pass (fewer when a model cannot hold them). budget: about how many seconds this may
    take; there are at least 5 repeats and at most 25.
    """
    Ks = list(Ks)
    check_room(pair, max(Ks))
    longest = min(max(longest, max(Ks) + 1), pair.target.context - 1)
    context = max(1, min(context, pair.target.context - longest, pair.draft.context - max(Ks)))
    works: dict[Any, Callable[[], None]] = dict(
        passes(pair.target, range(1, longest + 1), context=context, sampling=sampling)
    )
    works |= {("draft", K): work for K, work in drafts(pair, Ks, context=context, sampling=sampling).items()}
    works["prefill"] = prefill(pair.target, context)
    device = pair.target.device
    one_turn = sum(seconds for (seconds,) in interleaved(works, device=device, repeats=1, warmup=1).values())
    repeats = int(min(MOST_REPEATS, max(FEWEST_REPEATS, budget / one_turn)))
    times = interleaved(works, device=device, repeats=repeats, warmup=0)  # all is warm by now
    seconds = {key: median(each) for key, each in times.items()}
    t1 = seconds[1]
    return Costs(
        t1=t1,
        v={n: seconds[n] / t1 for n in range(1, longest + 1)},
        drafting={K: seconds["draft", K] / t1 for K in Ks},
        prefill=seconds["prefill"] / t1,
        context=context,
    )
