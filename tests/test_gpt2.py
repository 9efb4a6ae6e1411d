"""Our GPT-2 gives the logits of transformers' GPT-2, however the tokens are fed."""

import shutil

import pytest
import torch
from transformers import GPT2Config as HuggingFaceConfig
from transformers import GPT2LMHeadModel

from specdec_lite.checkpoints import ModelNotAvailable, hugging_face_state
from specdec_lite.gpt2 import GPT2, SIZES, GPT2Config
from specdec_lite.tree import Tree

VOCAB, POSITIONS = 97, 48


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small checkpoint in Hugging Face's format, with weights large enough for attention to matter."""
    torch.manual_seed(0)
    config = HuggingFaceConfig(
        vocab_size=VOCAB, n_positions=POSITIONS, n_embd=64, n_layer=3, n_head=4, initializer_range=0.3,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("gpt2")
    GPT2LMHeadModel(config).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def reference(folder):
    return GPT2LMHeadModel.from_pretrained(folder).eval()


@pytest.fixture
def model(folder):
    return GPT2.from_pretrained(folder)


@pytest.fixture(scope="module")
def tokens():
    return torch.randint(VOCAB, (2, POSITIONS), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def expected(reference, tokens):
    with torch.no_grad():
        return reference(tokens).logits


def close(ours, theirs):
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max() < 1e-4


def test_prefill_gives_transformers_logits_at_every_position_up_to_the_last(model, tokens, expected):
    close(model(tokens, model.new_cache(POSITIONS, rows=2)), expected)


@pytest.mark.parametrize("chunk", [1, 2, 5, 7])
def test_decoding_in_chunks_gives_the_same_logits(model, tokens, expected, chunk):
    cache = model.new_cache(POSITIONS, rows=2)
    logits = torch.cat([model(part, cache) for part in tokens.split(chunk, dim=1)], dim=1)
    close(logits, expected)
    assert cache.length == POSITIONS


def test_what_was_rolled_back_leaves_no_trace(model, tokens, expected):
    cache = model.new_cache(POSITIONS, rows=2)
    model(tokens[:, :10], cache)
    for length, n in ((10, 6), (4, 3), (12, 1), (0, 9)):
        cache.rollback(min(length, cache.length))
        start = cache.length
        model((tokens[:, start : start + n] + 1) % VOCAB, cache)  # other tokens, to be forgotten
        cache.rollback(start)
        close(model(tokens[:, start : start + n], cache), expected[:, start : start + n])


def test_rollback_moves_a_number_and_copies_nothing(model, tokens):
    cache = model.new_cache(POSITIONS, rows=2)
    model(tokens, cache)
    before = [keys.clone() for keys in cache.keys]
    addresses = [keys.data_ptr() for keys in cache.keys]
    cache.rollback(3)
    assert cache.length == 3
    assert [keys.data_ptr() for keys in cache.keys] == addresses
    assert all(torch.equal(a, b) for a, b in zip(before, cache.keys, strict=True))


def test_rows_may_have_different_lengths(model, tokens, expected):
    cache = model.new_cache(POSITIONS, rows=2)
    model(tokens[:, :20], cache)
    cache.rollback([5, 12])
    logits = model(torch.stack([tokens[0, 5:9], tokens[1, 12:16]]), cache)
    close(logits[0], expected[0, 5:9])
    close(logits[1], expected[1, 12:16])
    assert cache.lengths == [9, 16]
    with pytest.raises(ValueError, match="different lengths"):
        cache.length  # noqa: B018


def test_rows_that_are_kept_go_on_as_if_nothing_had_happened(model, tokens, expected):
    cache = model.new_cache(POSITIONS, rows=4)
    model(tokens[[0, 0, 1, 1]][:, :20], cache)
    cache.rollback([5, 12, 8, 20])
    cache.keep_rows([0, 3, 2])  # the last row fills the gap
    assert cache.lengths == [5, 20, 8]
    logits = model(torch.stack([tokens[0, 5:9], tokens[1, 20:24], tokens[1, 8:12]]), cache)
    close(logits, torch.stack([expected[0, 5:9], expected[1, 20:24], expected[1, 8:12]]))


def test_keeping_rows_copies_only_those_that_change_place(model, tokens):
    cache = model.new_cache(POSITIONS, rows=3)
    model(tokens[[0, 1, 0]], cache)
    addresses = [keys.data_ptr() for keys in cache.keys]
    cache.keys[0][0] = 7  # a mark on a row that stays where it is
    cache.keep_rows([0, 2])
    assert [keys.data_ptr() for keys in cache.keys] == addresses
    assert [len(keys) for keys in cache.keys + cache.values] == [2] * 6
    assert (cache.keys[0][0] == 7).all()


@pytest.mark.parametrize("rows", [[1, 0], [0, 3], [0, 1, 2, 2]])
def test_a_row_moves_to_an_earlier_place_or_is_refused(model, tokens, rows):
    cache = model.new_cache(8, rows=3)
    model(tokens[[0, 1, 0], :4], cache)
    with pytest.raises(ValueError, match="earlier place"):
        cache.keep_rows(rows)
    assert cache.lengths == [4, 4, 4]


def test_positions_and_mask_can_be_given_so_that_siblings_share_a_position(model, tokens, expected):
    """Two candidates for position 6, scored in one pass: each sees the prefix and itself only."""
    cache = model.new_cache(POSITIONS, rows=2)
    model(tokens[:, :6], cache)
    candidates = torch.stack([tokens[:, 6], (tokens[:, 6] + 1) % VOCAB], dim=1)
    mask = torch.ones(2, 1, 2, 8, dtype=torch.bool)
    mask[..., 0, 7] = mask[..., 1, 6] = False
    logits = model(candidates, cache, positions=torch.tensor([[6, 6]]), mask=mask)
    close(logits[:, 0], expected[:, 6])
    cache.rollback(6)
    close(logits[:, 1:], model(candidates[:, 1:], cache))


def tree_pass(model, text, tree, nodes, capacity=POSITIONS, cached=0):
    """(logits after the text and after each node, the cache) from one pass behind ``cached`` tokens of the text."""
    cache = model.new_cache(capacity)
    if cached:
        model(text[:, :cached], cache)
    feed = torch.cat([text[:, cached:], nodes], dim=1)
    topology = tree.topology(cached, text.shape[1], model.device)
    return model(feed, cache, last=len(tree) + 1, **topology)[0], cache


TREES = [Tree.branching((3, 2, 2)), Tree((-1, 0, -1, 1, 2, 0)), Tree.chain(5)]


@pytest.fixture
def exact(folder):
    return GPT2.from_pretrained(folder, dtype=torch.float64)


@pytest.mark.parametrize("cached", [0, 3, 7])
@pytest.mark.parametrize("tree", TREES, ids=["branching", "crossed", "chain"])
def test_each_node_of_a_tree_has_the_logits_of_its_path_read_as_a_chain(exact, tokens, tree, cached):
    text, nodes = tokens[:1, :8], tokens[1:, : len(tree)]
    logits, cache = tree_pass(exact, text, tree, nodes, cached=cached)
    assert cache.length == 8 + len(tree)
    for node in range(-1, len(tree)):
        chain = torch.cat([text, nodes[:, list(tree.path_to(node))]], dim=1)
        expected = exact(chain, exact.new_cache(POSITIONS), last=1)[0, 0]
        assert (logits[node + 1] - expected).abs().max() < 1e-10


@pytest.mark.parametrize("tree", TREES, ids=["branching", "crossed", "chain"])
def test_a_kept_path_lies_in_the_cache_as_if_nothing_else_had_been_read(exact, tokens, tree):
    text, nodes = tokens[:1, :8], tokens[1:, : len(tree)]
    for node in range(-1, len(tree)):
        path = tree.path_to(node)
        _, cache = tree_pass(exact, text, tree, nodes)
        cache.keep(8, path)
        fresh = exact.new_cache(POSITIONS)
        exact(torch.cat([text, nodes[:, list(path)]], dim=1), fresh)
        assert cache.lengths == fresh.lengths == [8 + len(path)]
        for kept, expected in zip(cache.keys + cache.values, fresh.keys + fresh.values, strict=True):
            assert (kept[:, : cache.length] - expected[:, : cache.length]).abs().max() < 1e-12


def test_to_keep_a_path_copies_its_slots_bit_for_bit_and_touches_none_before_them(exact, tokens):
    _, cache = tree_pass(exact, tokens[:1, :8], Tree.branching((3, 2)), tokens[1:, :9])
    before = [block.clone() for block in cache.keys + cache.values]
    cache.keep(8, [2, 7])
    for kept, old in zip(cache.keys + cache.values, before, strict=True):
        assert torch.equal(kept[:, :10], old[:, [*range(8), 8 + 2, 8 + 7]])
    cache.keep(10, [])
    assert cache.length == 10


@pytest.mark.parametrize(("length", "nodes"), [(8, [9]), (8, [-1]), (8, [0, 99]), (18, []), (-1, []), (17, [0])])
def test_to_keep_what_the_cache_does_not_hold_is_refused(exact, tokens, length, nodes):
    _, cache = tree_pass(exact, tokens[:1, :8], Tree.branching((3, 2)), tokens[1:, :9])
    with pytest.raises(ValueError, match="cannot keep"):
        cache.keep(length, nodes)
    with pytest.raises(ValueError, match="cannot roll back"):
        cache.rollback(18)
    assert cache.length == 17


def test_a_tree_that_does_not_fit_is_refused_before_any_work(exact, tokens):
    with pytest.raises(ValueError, match="17 tokens do not fit: the cache has 16 slots"):
        tree_pass(exact, tokens[:1, :8], Tree.branching((3, 2)), tokens[1:, :9], capacity=16)


def test_last_gives_the_last_positions_only(model, tokens, expected):
    close(model(tokens, model.new_cache(POSITIONS, rows=2), last=3), expected[:, -3:])


def test_logits_come_from_the_hidden_states(model, tokens, expected):
    hidden = model.hidden(tokens, model.new_cache(POSITIONS, rows=2))
    assert hidden.shape == (2, POSITIONS, 64)
    close(model.logits(hidden), expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_in_half_precision(folder, tokens, expected, dtype):
    model = GPT2.from_pretrained(folder, dtype=dtype)
    logits = model(tokens, model.new_cache(POSITIONS, rows=2))
    assert logits.dtype == dtype
    assert (logits.float() - expected).abs().mean() < 0.02 * expected.abs().mean() + 0.05


@pytest.mark.filterwarnings("ignore")
def test_torch_compile_gives_the_same_logits(model, tokens, expected):
    """With the real compiler where this machine has a C++ compiler, which it needs on a CPU."""
    backend = "inductor" if shutil.which("c++") or shutil.which("g++") else "eager"
    compiled = torch.compile(model, backend=backend, dynamic=True)
    cache = model.new_cache(POSITIONS, rows=2)
    logits = torch.cat([compiled(part, cache) for part in tokens[:, :12].split(4, dim=1)], dim=1)
    close(logits, expected[:, :12])
    cache.rollback(5)
    close(compiled(tokens[:, 5:9], cache), expected[:, 5:9])


def test_the_weights_go_back_to_hugging_faces_names_and_layout(model, reference):
    theirs = reference.state_dict()
    ours = hugging_face_state(model.state_dict())
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_parameter_counts_are_the_published_ones():
    millions = {name: round(config.parameters / 1e6) for name, config in SIZES.items()}
    assert millions == {"distilgpt2": 82, "gpt2": 124, "gpt2-medium": 355, "gpt2-large": 774, "gpt2-xl": 1558}
    small = GPT2.random(GPT2Config(50, 16, 32, 2, 2))
    assert sum(p.numel() for p in small.parameters()) == small.config.parameters


def test_random_weights_repeat_and_leave_the_global_generator_alone():
    before = torch.get_rng_state()
    first, second, other = (GPT2.random(GPT2Config(50, 16, 32, 2, 2), seed=seed) for seed in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first.token_embedding.weight, second.token_embedding.weight)
    assert not torch.equal(first.token_embedding.weight, other.token_embedding.weight)


def test_more_tokens_than_the_cache_holds_are_refused_before_any_work(model, tokens):
    cache = model.new_cache(8, rows=2)
    with pytest.raises(ValueError, match="8 slots"):
        model(tokens[:, :9], cache)
    assert cache.length == 0


@pytest.mark.parametrize("length", [-1, 5])
def test_a_rollback_to_where_the_cache_never_was_is_refused(model, tokens, length):
    cache = model.new_cache(8, rows=2)
    model(tokens[:, :4], cache)
    with pytest.raises(ValueError, match="cannot roll back"):
        cache.rollback(length)


def test_pickled_weights_are_not_read(folder, tmp_path):
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    (tmp_path / "pytorch_model.bin").write_bytes(b"anything")
    with pytest.raises(ModelNotAvailable, match="safetensors"):
        GPT2.from_pretrained(tmp_path)


def test_another_architecture_is_refused_by_name(folder, tmp_path):
    text = (folder / "config.json").read_text(encoding="utf-8")
    (tmp_path / "config.json").write_text(text.replace('"gpt2"', '"llama"'), encoding="utf-8")
    with pytest.raises(ValueError, match="model_type"):
        GPT2.from_pretrained(tmp_path)


def test_the_head_reads_a_tensor_with_strides_of_its_own(monkeypatch):
    """A slice of the whole keeps its strides, and for those the CPU has no fast bfloat16 kernel."""
    model = GPT2.random(GPT2Config(60, 64, 32, 1, 2))
    read, head = [], model.logits
    monkeypatch.setattr(model, "logits", lambda hidden: read.append(hidden.stride()) or head(hidden))
    model(torch.zeros(2, 5, dtype=torch.long), model.new_cache(5, rows=2), last=1)
    assert read == [(32, 32, 1)]
