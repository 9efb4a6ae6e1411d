"""Small things that several test files build their cases from."""

import random

import numpy as np
import pytest
import torch

from specdec_lite.drafters import Draft
from specdec_lite.pairs import Pair
from specdec_lite.table import TableModel


@pytest.fixture
def random_table():
    """random_table(*shape, seed=...): next-token laws along the last axis, all entries above 0, in float64."""

    def make(*shape, seed):
        weights = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 2 + 0.02
        return weights / weights.sum(-1, keepdim=True)

    return make


@pytest.fixture
def chain():
    """chain(tokens, vocab): a model that surely says ``tokens[i + 1]`` after the token at position i; then 0, 0, ..."""

    def make(tokens, vocab, name="chain", **options):
        table = torch.zeros(len(tokens), vocab, vocab, dtype=torch.float64)
        for position, token in enumerate([*tokens[1:], 0]):
            table[position, :, token] = 1
        return TableModel(table, name=name, **options)

    return make


@pytest.fixture
def pair_of():
    """pair_of(target, draft, tokenizer): a pair ready for the public functions."""
    return lambda target, draft, tokenizer=None: Pair("test", target, draft, tokenizer)


@pytest.fixture
def fixed_draft():
    """fixed_draft(tokens): a drafter that chooses the same tokens every time, so its draft is a point mass."""

    class FixedDraft:
        name = "fixed"

        def __init__(self, tokens):
            self.tokens = tokens

        def start(self, capacity): ...

        def limit(self, length):
            return len(self.tokens)

        def propose(self, context, K, sampling, randomness):
            return Draft(torch.tensor(self.tokens[:K]), None)

        def commit(self, length, kept): ...

    return FixedDraft


@pytest.fixture
def tokenizer_of():
    """tokenizer_of([b"one", b" piece", ...]): token i is the i-th piece of bytes; the last piece ends a sequence."""

    class PieceTokenizer:
        def __init__(self, pieces):
            self.pieces = pieces
            self.eos_token_id = len(pieces) - 1

        def encode(self, text):
            return [self.pieces.index(text.encode("utf-8"))]

        def decode(self, tokens, skip_special_tokens=False, **_):
            shown = [t for t in tokens if not (skip_special_tokens and t == self.eos_token_id)]
            return b"".join(self.pieces[token] for token in shown).decode("utf-8", errors="replace")

    return PieceTokenizer


@pytest.fixture
def spy_on():
    """spy_on(model): the same model, and a record of every forward: (length of its cache before, tokens fed)."""

    class Spy:
        def __init__(self, model):
            self.model = model
            self.fed = []
            self.caches = []

        def new_cache(self, capacity, rows=1):
            self.caches.append(self.model.new_cache(capacity, rows))
            return self.caches[-1]

        def __call__(self, tokens, cache, last=None, **tree):
            self.fed.append((cache.length, tokens[0].tolist()))
            return self.model(tokens, cache, last, **tree)

        def __getattr__(self, name):
            return getattr(self.model, name)

    return Spy


@pytest.fixture
def global_generators():
    """global_generators.seed(n), global_generators.state(): of torch, of Python and of NumPy."""

    class GlobalGenerators:
        @staticmethod
        def seed(seed):
            torch.manual_seed(seed)
            random.seed(seed)
            np.random.seed(seed)

        @staticmethod
        def state():
            return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()

    return GlobalGenerators
