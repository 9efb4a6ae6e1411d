"""Passes of fixed shape give the plain model's logits, and are compiled or captured once."""

import contextlib
import gc
import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specdec_lite import static
from specdec_lite.decoding import autoregressive, speculative
from specdec_lite.distributions import GREEDY, Sampling
from specdec_lite.forms import accelerate
from specdec_lite.gpt2 import GPT2, GPT2Config
from specdec_lite.static import STATIC_MODES, StaticGPT2

VOCAB, POSITIONS = 31, 40
CONFIG = GPT2Config(VOCAB, POSITIONS, width=16, layers=2, heads=2)
WAITS = {"aten::item", "aten::_local_scalar_dense", "aten::is_nonzero", "aten::nonzero"}  # wait for the device


def make_model(config=CONFIG, seed=0, dtype=torch.float64, device="cpu"):
    """Random weights, large enough for attention to matter."""
    model = GPT2.random(config, seed=seed, dtype=dtype, device=device)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.mul_(15)
    return model


def tensors(tree):
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def place(tensor):
    return tensor.untyped_storage().data_ptr()


class Recording(TorchDispatchMode):
    """What a CUDA graph is, in slow motion: operations with their arguments, numbers and addresses fixed for ever."""

    def __init__(self):
        super().__init__()
        self.operations = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert operation.overloadpacket._qualified_op_name not in WAITS
        result = operation(*args, **(kwargs or {}))
        self.operations.append((operation, args, kwargs or {}, result))
        return result

    def run(self):
        for operation, args, kwargs, result in self.operations:
            for old, new in zip(tensors(result), tensors(operation(*args, **kwargs)), strict=True):
                if place(old) != place(new):  # neither a view nor done in place
                    old.copy_(new)

    def forget(self):
        """Its own memory may be written over by whoever shares it."""
        for _, args, kwargs, result in self.operations:
            given = {place(tensor) for tensor in tensors((args, kwargs))}
            for tensor in tensors(result):
                if place(tensor) not in given and tensor.is_floating_point():
                    tensor.fill_(torch.nan)


class StandInForCuda:
    """The calls of ``torch.cuda`` that a capture makes, on a CPU; refuses a capture that was not prepared."""

    def __init__(self):
        self.default = self.now = self.Stream("default", waited=set())
        self.graphs = []

    class Stream:
        def __init__(self, device, waited=None):
            self.device, self.waited, self.used = device, set() if waited is None else waited, False

        def wait_stream(self, other):
            self.waited.add(other)

    def current_stream(self):
        return self.now

    @contextlib.contextmanager
    def stream(self, stream):
        assert self.default in stream.waited, "the side stream starts before its input is there"
        before, self.now = self.now, stream
        with Recording() as recording:
            yield
        stream.used, self.now = len(recording.operations) > 0, before

    @contextlib.contextmanager
    def graph(self, graph, pool, stream):
        assert stream.used, "capture without a warm-up on the same stream"
        assert stream in self.default.waited, "the stream goes on before the warm-up is over"
        assert pool == "pool"
        with graph.recording:
            yield
        graph.recording.forget()  # a capture computes nothing
        self.graphs.append(graph)

    def new_graph(self):
        graph = type("Graph", (), {})()
        graph.recording = Recording()
        graph.replays = 0

        def replay():
            graph.replays += 1
            for other in self.graphs:
                other.recording.forget()  # one pool for all
            graph.recording.run()

        graph.replay = replay
        return graph

    def install(self, monkeypatch):
        monkeypatch.setattr(static, "check_mode", lambda mode, device: None)
        monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
        monkeypatch.setattr(torch.cuda, "CUDAGraph", self.new_graph)
        for name in ("Stream", "stream", "current_stream", "graph"):
            monkeypatch.setattr(torch.cuda, name, getattr(self, name))


@pytest.fixture
def cuda(monkeypatch):
    stand_in = StandInForCuda()
    stand_in.install(monkeypatch)
    return stand_in


@pytest.fixture
def quick_compiler(monkeypatch):
    """Everything of torch.compile but the last step: what it traced is run as it is."""
    torch.compiler.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))


@pytest.fixture(autouse=True)
def small_sizes(monkeypatch):
    monkeypatch.setattr(static, "SMALLEST", 8)  # so that the tests see memories of several sizes: 8, 16, 32, 64


@pytest.fixture(params=["eager", "graphs"])
def fixed(request):
    """fixed(model): its static form; CUDA is the stand-in above."""
    if request.param == "graphs":
        request.getfixturevalue("cuda")
    return lambda model: StaticGPT2(model, request.param)


@pytest.fixture(scope="module")
def model():
    return make_model()


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(VOCAB, (1, POSITIONS), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def expected(model, tokens):
    return model(tokens, model.new_cache(POSITIONS))


def close(ours, theirs, tolerance=1e-12):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < tolerance


@pytest.mark.parametrize("n", range(1, 9))
def test_a_pass_over_n_tokens_gives_the_plain_models_logits_at_every_length(fixed, model, tokens, expected, n):
    fixed = fixed(model)
    for length in (1, 6, 17, POSITIONS - n):  # the last fills the cache and the context
        cache = fixed.new_cache(length + n)
        close(fixed(tokens[:, :length], cache), expected[:, :length])
        close(fixed(tokens[:, length : length + n], cache), expected[:, length : length + n])
        assert cache.length == length + n


def test_decoding_in_chunks_of_changing_size_gives_the_same_logits(fixed, model, tokens, expected):
    fixed, start = fixed(model), 0
    cache = fixed.new_cache(POSITIONS)
    logits = []
    for n in (3, 1, 1, 5, 1, 2, 17, 5, 1, 4):  # 17: a long pass in the middle, the plain model's
        logits.append(fixed(tokens[:, start : start + n], cache))  # kept, and compared after all the others are made
        start += n
    assert start == POSITIONS
    close(torch.cat(logits, dim=1), expected)


def test_what_was_rolled_back_leaves_no_trace(fixed, model, tokens, expected):
    fixed = fixed(model)
    cache = fixed.new_cache(30)
    fixed(tokens[:, :10], cache)
    for length, n in ((10, 6), (4, 3), (12, 1), (1, 8), (0, 9), (5, 4)):
        cache.rollback(min(length, cache.length))
        start = cache.length
        fixed((tokens[:, start : start + n] + 1) % VOCAB, cache)  # other tokens, to be forgotten
        cache.rollback(start)
        close(fixed(tokens[:, start : start + n], cache), expected[:, start : start + n])


def test_last_gives_the_last_positions(fixed, model, tokens, expected):
    fixed = fixed(model)
    cache = fixed.new_cache(20)
    close(fixed(tokens[:, :7], cache, last=2), expected[:, 5:7])
    close(fixed(tokens[:, 7:12], cache, last=3), expected[:, 9:12])
    close(fixed(tokens[:, 12:13], cache, last=1), expected[:, 12:13])


def test_more_than_was_asked_for_is_refused_though_the_memory_has_room(fixed, model, tokens):
    fixed = fixed(model)
    cache = fixed.new_cache(9)
    fixed(tokens[:, :7], cache)
    with pytest.raises(ValueError, match="3 tokens do not fit: the cache has 9 slots"):
        fixed(tokens[:, 7:10], cache)
    assert cache.length == 7
    fixed(tokens[:, 7:9], cache)
    with pytest.raises(ValueError, match="cannot roll back"):
        cache.rollback(10)


def test_two_sequences_at_once_do_not_meet(fixed, model, tokens, expected):
    fixed = fixed(model)
    caches = [fixed.new_cache(12) for _ in range(2)]
    other = (tokens + 1) % VOCAB
    expected_of_other = model(other, model.new_cache(POSITIONS))
    for start in (0, 4, 8):
        for text, cache, logits in ((tokens, caches[0], expected), (other, caches[1], expected_of_other)):
            close(fixed(text[:, start : start + 4], cache), logits[:, start : start + 4])


def test_a_sequence_takes_over_the_memory_of_one_that_ended_and_nothing_in_it(fixed, model, tokens, expected):
    fixed = fixed(model)
    cache = fixed.new_cache(12)
    memory = cache.memory
    fixed(tokens[:, :4], cache)
    fixed(tokens[:, 4:6], cache)
    with torch.inference_mode():
        for block in (*cache.keys, *cache.values):
            block.fill_(torch.nan)
    del cache
    gc.collect()
    cache = fixed.new_cache(10)
    assert cache.memory is memory and cache.length == 0
    close(fixed(tokens[:, :4], cache), expected[:, :4])
    close(fixed(tokens[:, 4:6], cache), expected[:, 4:6])
    assert fixed.new_cache(10).memory is not memory


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=0.8)], ids=["greedy", "sampled"])
def test_an_accelerated_pair_writes_the_same_tokens(request, fixed, model, pair_of, sampling):
    draft = make_model(replace(CONFIG, layers=1), seed=1)
    for parameter, other in zip(draft.parameters(), model.parameters(), strict=False):
        if parameter.shape == other.shape:
            parameter.copy_(other + 0.3 * parameter)  # so that some drafts are accepted
    pair = pair_of(model, draft)
    accelerated = accelerate(pair, fixed(model).mode)
    assert all(isinstance(each, StaticGPT2) for each in (accelerated.target, accelerated.draft))
    options = {"max_new_tokens": 30, "sampling": sampling, "seed": 0}
    for K in (1, 3):
        runs = [speculative(each, [1, 2, 3], K=K, **options) for each in (pair, accelerated)]
        assert runs[0].tokens == runs[1].tokens
        assert [r.accepted for r in runs[0].rounds] == [r.accepted for r in runs[1].rounds]
        assert 0 < sum(r.accepted for r in runs[0].rounds) < 30
    assert autoregressive(pair, [1, 2, 3], **options).tokens == autoregressive(accelerated, [1, 2, 3], **options).tokens


def decode_some(fixed, tokens, expected, capacity=30):
    """Passes over 1 to 5 tokens at two lengths each, compared with what is expected; the cache, to keep it alive."""
    cache = fixed.new_cache(capacity)
    fixed(tokens[:, :9], cache)
    for length in (9, 6):
        for n in range(1, 6):
            cache.rollback(length)
            close(fixed(tokens[:, length : length + n], cache), expected[:, length : length + n])
    return cache


def test_each_number_of_tokens_is_compiled_once_for_a_size_of_memory(quick_compiler, model, tokens, expected):
    """Neither a new length, nor other memory, nor the mode the caller runs in compiles anything again."""
    compilations = torch._dynamo.utils.counters["stats"]
    fixed, before = StaticGPT2(model, "compile"), compilations["unique_graphs"]
    caches = [decode_some(fixed, tokens, expected)]
    assert compilations["unique_graphs"] == before + 5
    with torch._dynamo.config.patch(error_on_recompile=True):
        caches.append(decode_some(fixed, tokens, expected))
        with torch.inference_mode():
            caches.append(decode_some(fixed, tokens.clone(), expected))
    assert len({id(cache.memory) for cache in caches}) == 3
    assert compilations["unique_graphs"] == before + 5
    caches.append(decode_some(fixed, tokens, expected, capacity=33))
    assert compilations["unique_graphs"] == before + 10  # more than the eight that one function may have


def test_each_number_of_tokens_is_captured_once_and_replayed_ever_after(cuda, model, tokens, expected):
    fixed = StaticGPT2(model, "graphs")
    decode_some(fixed, tokens, expected)
    decode_some(fixed, tokens, expected)
    assert len(cuda.graphs) == 5
    assert [graph.replays for graph in cuda.graphs] == [4] * 5


def test_a_replayed_pass_launches_as_few_operations_whatever_the_layers(cuda, tokens):
    def launches(layers):
        model = make_model(replace(CONFIG, layers=layers))
        fixed = StaticGPT2(model, "graphs")
        cache, plain = fixed.new_cache(20), model.new_cache(20)
        counts = []
        for each, its_cache in ((fixed, cache), (model, plain)):
            for n in (4, 1):
                each(tokens[:, :n], its_cache)
        for graph in cuda.graphs:
            graph.replay = lambda: None
        for each, its_cache in ((fixed, cache), (model, plain)):
            with Recording() as recording:
                each(tokens[:, :1], its_cache)
            counts.append(len(recording.operations))
        return counts

    (few, some), (still_few, many) = launches(1), launches(3)
    assert few == still_few < some < many


@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="a CPU needs a C++ compiler for this")
def test_the_real_compiler_gives_the_same_logits(tokens):
    torch.compiler.reset()
    model = make_model(replace(CONFIG, layers=1))
    expected = model(tokens, model.new_cache(POSITIONS))
    fixed = StaticGPT2(model, "compile")
    cache = fixed.new_cache(30)
    for start, n in ((0, 4), (4, 3), (7, 1), (8, 3), (11, 1)):
        close(fixed(tokens[:, start : start + n], cache), expected[:, start : start + n])
    cache.rollback(6)
    close(fixed(tokens[:, 6:9], cache), expected[:, 6:9])


def test_it_stands_in_for_the_model(model):
    fixed = StaticGPT2(model)
    for name in ("name", "vocab_size", "context", "device", "dtype"):
        assert getattr(fixed, name) == getattr(model, name)


@pytest.mark.parametrize(("mode", "message"), [("fast", "eager, compile"), ("graphs", 'device="cuda"')])
def test_a_mode_that_cannot_be_is_refused_with_what_to_do(model, pair_of, mode, message):
    with pytest.raises(ValueError, match=message):
        StaticGPT2(model, mode)
    with pytest.raises(ValueError, match=message):
        accelerate(pair_of(model, model), mode)


def test_what_has_no_static_form_is_refused(model, pair_of, chain):
    with pytest.raises(ValueError, match="own GPT2 .* TableModel"):
        accelerate(pair_of(model, chain([1, 2], VOCAB)), "eager")
    with pytest.raises(ValueError, match="one sequence, not 3"):
        StaticGPT2(model).new_cache(8, rows=3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", STATIC_MODES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-9), (torch.float32, 1e-3)], ids=str)
def test_on_cuda_every_mode_gives_the_plain_models_logits(mode, tokens, dtype, tolerance):
    model = make_model(dtype=dtype, device="cuda")
    tokens = tokens.cuda()
    expected = model(tokens, model.new_cache(POSITIONS))
    fixed = StaticGPT2(model, mode)
    for _ in range(2):  # captured, then replayed on memory taken over
        cache, kept = fixed.new_cache(POSITIONS), []
        fixed(tokens[:, :5], cache)
        for n in (1, 5, 2, 5, 1, 2, 5):
            start = cache.length
            kept.append((start, fixed(tokens[:, start : start + n], cache)))
            cache.rollback(start + (n + 1) // 2)
        for start, logits in kept:  # read after all the replays
            close(logits, expected[:, start : start + logits.shape[1]], tolerance)
        del cache


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mode", STATIC_MODES)
def test_on_cuda_an_accelerated_pair_writes_the_same_tokens(mode, pair_of):
    pair = pair_of(make_model(device="cuda"), make_model(replace(CONFIG, layers=1), seed=1, device="cuda"))
    accelerated = accelerate(pair, mode)
    for _ in range(2):
        ours, plain = (speculative(each, [1, 2, 3], max_new_tokens=30, seed=0) for each in (accelerated, pair))
        assert ours.tokens == plain.tokens
