"""A roof over every pass: how fast a machine could be, from its memory bandwidth and its arithmetic alone.

A pass over n tokens fetches every weight once and uses it n times. Fetching and computing overlap, so the pass takes at
least as long as the slower of the two. Williams, Waterman and Patterson (2009). Only weights count here: the key-value
cache and the launching of kernels are left out, so a real pass takes longer.
"""

from dataclasses import dataclass
from statistics import median

import torch
import torch.nn.functional as F

from .timing import interleaved


@dataclass(frozen=True)
class Device:
    """bandwidth: bytes per second from memory. peak: operations per second, in the number format of the weights."""

    name: str
    bandwidth: float
    peak: float

    def __post_init__(self) -> None:
        if not (self.bandwidth > 0 and self.peak > 0):
            raise ValueError(f"{self.name} has bandwidth {self.bandwidth} and peak {self.peak}; both must be above 0")

    def critical_tokens(self, bytes_per_weight: float) -> float:
        """B*: tokens per pass from which arithmetic takes longer than memory: peak x bytes / (2 x bandwidth).

        A weight costs its bytes once, and 2 operations (a multiplication and an addition) for each token.
        """
        return self.peak * bytes_per_weight / (2 * self.bandwidth)

    def seconds_per_pass(self, parameters: float, bytes_per_weight: float, tokens: float = 1) -> float:
        """Seconds that a pass over ``tokens`` tokens (of all sequences together) takes at least."""
        return max(parameters * bytes_per_weight / self.bandwidth, 2 * tokens * parameters / self.peak)

    def v(self, n: float, bytes_per_weight: float, batch: int = 1) -> float:
        """Time of a pass over n tokens in each of ``batch`` sequences, over that of a pass over one token in each."""
        one = self.seconds_per_pass(1, bytes_per_weight, batch)
        return self.seconds_per_pass(1, bytes_per_weight, n * batch) / one


# From NVIDIA's product brief of the T4 and its datasheets of the A100 80GB, H100 and H200 (the SXM versions). The peak
# is that of dense half-precision matrices; where a sheet prints "with sparsity", half of what it prints.
DEVICES = {
    "T4": Device("T4", bandwidth=320e9, peak=65e12),
    "A100": Device("A100", bandwidth=2.039e12, peak=312e12),
    "H100": Device("H100", bandwidth=3.35e12, peak=989e12),
    "H200": Device("H200", bandwidth=4.8e12, peak=989e12),
}


def this_machine(dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu", repeats: int = 7) -> Device:
    """The machine at hand, measured with the two kinds of work that a model consists of; medians of ``repeats``.

    bandwidth: a matrix times one token's vector, as in plain decoding. The matrix is larger than the caches: 256 MiB on
    a CPU, 1 GiB elsewhere. peak: a product of large square matrices, which fetches little and computes much.
    On a CPU it uses PyTorch's threads, and takes a second or so.
    """
    device = torch.device(device)
    size, side = (2**28, 1024) if device.type == "cpu" else (2**30, 8192)
    with torch.inference_mode():
        weights = torch.ones(size // dtype.itemsize // 8192, 8192, dtype=dtype, device=device)  # zeros may lie nowhere
        token = torch.ones(1, 8192, dtype=dtype, device=device)
        # Random, because a GPU multiplies equal numbers faster than it would a model's.
        square = torch.randn(side, side, generator=torch.Generator(device).manual_seed(0), device=device).to(dtype)
        works = {"fetch": lambda: F.linear(token, weights), "compute": lambda: square @ square}
        seconds = {key: median(times) for key, times in interleaved(works, device=device, repeats=repeats).items()}
    bandwidth, peak = weights.nbytes / seconds["fetch"], 2 * side**3 / seconds["compute"]
    return Device("this machine, measured", bandwidth, peak)
