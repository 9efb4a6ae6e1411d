"""A stopwatch that reads the clock of the device where the work is done."""

import time

import torch


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
