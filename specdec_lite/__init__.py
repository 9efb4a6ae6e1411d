"""specdec-lite: speculative decoding, derived, built, proved lossless and measured."""

__version__ = "0.1.0"

from .decoding import autoregressive, speculative, stream
from .distributions import GREEDY, Sampling
from .pairs import Pair, load_pair
from .record import Result, Round

__all__ = ["GREEDY", "Pair", "Result", "Round", "Sampling", "autoregressive", "load_pair", "speculative", "stream"]
