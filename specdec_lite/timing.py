"""Honest time: the device's own clock, warm-up, interleaved repeats."""

import random
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch

Key = TypeVar("Key", bound=Hashable)


class Stopwatch:
    """Marks moments; ``seconds()`` gives the time between one mark and the next.

    On CUDA a mark is an event in the stream, so marking does not wait; reading waits for the last mark. Elsewhere it is
    the host's clock (on MPS, work still under way counts towards the part that waits for it).
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.marks: list = []

    def mark(self) -> None:
        if self.device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record(torch.cuda.current_stream(self.device))
            self.marks.append(event)
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        if self.device.type == "cuda":
            self.marks[-1].synchronize()
            return [start.elapsed_time(end) / 1000 for start, end in pairs]
        return [end - start for start, end in pairs]


def interleaved(
    works: Mapping[Key, Callable[[], object]], *, device: torch.device, repeats: int = 30, warmup: int = 3
) -> dict[Key, list[float]]:
    """Seconds that each piece of work takes, ``repeats`` times, taken in turn.

    Taken in turn, because the speed of a machine drifts: what slows one piece then slows the others as well, and the
    ratios of medians hold. In a new order each turn, because a piece of work leaves its mark on the processor's caches
    for the next: no piece always follows the same other one. The first ``warmup`` turns are not counted.
    """
    seconds: dict[Key, list[float]] = {key: [] for key in works}
    orders = random.Random(0)
    for turn in range(warmup + repeats):
        for key, work in orders.sample(list(works.items()), len(works)):
            watch = Stopwatch(device)
            watch.mark()
            work()
            watch.mark()
            elapsed = watch.seconds()[0]
            if turn >= warmup:
                seconds[key].append(elapsed)
    return seconds
