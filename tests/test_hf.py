"""Transformers models behind the protocol: the cache must be invisible, and what has no rollback must be refused."""

import copy
import inspect
import json
import sys

import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OpenAIGPTConfig,
    OpenAIGPTLMHeadModel,
    T5Config,
    T5ForConditionalGeneration,
)

from specdec_lite.checkpoints import ModelNotAvailable
from specdec_lite.hf import HFModel
from specdec_lite.tree import Tree

VOCAB, WINDOW, LENGTH = 64, 6, 40
SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 64, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2}
SLIDING = {"num_key_value_heads": 1, "head_dim": 16, "sliding_window": WINDOW}


def gpt2(cls=GPT2LMHeadModel, **options):
    sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "bos_token_id": 1}
    return cls(GPT2Config(**(sizes | {"eos_token_id": 2} | options)))


MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "gpt_neox": lambda: GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES)),
    "gpt2": gpt2,
    "mistral, every layer with a sliding window": lambda: MistralForCausalLM(MistralConfig(**SIZES, **SLIDING)),
    "gemma2, every other layer with one": lambda: Gemma2ForCausalLM(Gemma2Config(**SIZES, **SLIDING)),
}
SLIDING_MODELS = [name for name in MODELS if "layer" in name]


def build(name_or_factory, seed=0):
    """A small model with weights large enough that every token of the context changes the logits."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = MODELS.get(name_or_factory, name_or_factory)()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 0.2)
    return model


def random_tokens(n, rows=1, seed=0):
    return torch.randint(3, VOCAB, (rows, n), generator=torch.Generator().manual_seed(seed))


def uncached(model, tokens):
    with torch.no_grad():
        return model(input_ids=tokens, use_cache=False).logits


def decode_in_chunks(model, tokens, seed):
    """Feed the tokens in chunks of 1 to 5, most with up to 3 wrong tokens behind them that are rolled back."""
    generator = torch.Generator().manual_seed(seed)
    cache = model.new_cache(2 * LENGTH, rows=tokens.shape[0])
    pieces = []
    while cache.length < tokens.shape[1]:
        start = cache.length
        n = min(int(torch.randint(1, 6, (), generator=generator)), tokens.shape[1] - start)
        wrong = random_tokens(int(torch.randint(0, 4, (), generator=generator)), tokens.shape[0], seed + start)
        logits = model(torch.cat([tokens[:, start : start + n], wrong], dim=1), cache)
        pieces.append(logits[:, :n])
        cache.rollback(start + n)
    return torch.cat(pieces, dim=1)


@pytest.mark.parametrize("name", MODELS)
def test_decoding_in_chunks_with_rollbacks_equals_an_uncached_forward_at_every_position(name):
    model = build(name)
    tokens = random_tokens(LENGTH, rows=2)
    expected = uncached(model.eval(), tokens)
    assert expected.std() > 0.1  # the comparison means something
    for seed in range(3):
        torch.testing.assert_close(decode_in_chunks(HFModel(model), tokens, seed), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_a_rollback_by_zero_keeps_everything_and_may_be_followed_by_another(name):
    model = HFModel(build(name))
    tokens = random_tokens(20)
    cache = model.new_cache(64)
    model(torch.cat([tokens[:, :15], random_tokens(2, seed=1)], dim=1), cache)
    cache.rollback(17)
    assert cache.length == 17
    cache.rollback(15)
    torch.testing.assert_close(model(tokens[:, 15:], cache), uncached(model.model, tokens)[:, 15:], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_a_rollback_to_zero_forgets_everything(name):
    model = HFModel(build(name))
    cache = model.new_cache(64)
    model(random_tokens(5, seed=1), cache)
    cache.rollback(0)
    tokens = random_tokens(12)
    torch.testing.assert_close(model(tokens, cache), uncached(model.model, tokens), atol=1e-5, rtol=0)


def test_a_rollback_beyond_what_the_cache_holds_is_an_error():
    model = HFModel(build("llama"))
    cache = model.new_cache(64)
    model(random_tokens(5), cache)
    for length in (6, -1):
        with pytest.raises(ValueError, match=f"cannot roll back to {length}: the cache holds 5 tokens"):
            cache.rollback(length)
    assert cache.length == 5


@pytest.mark.parametrize("name", SLIDING_MODELS)
def test_a_sliding_window_goes_back_to_its_last_rollback_and_not_silently_further(name):
    model = HFModel(build(name))
    cache = model.new_cache(64)
    model(random_tokens(20), cache)
    cache.rollback(15)
    with pytest.raises(ValueError, match="cannot roll back to 14: the cache holds 15 tokens and goes back to 15"):
        cache.rollback(14)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in SLIDING_MODELS])
def test_without_a_sliding_window_rollbacks_may_follow_each_other(name):
    model = HFModel(build(name))
    tokens = random_tokens(20)
    cache = model.new_cache(64)
    model(tokens, cache)
    for length in (15, 9, 2):
        cache.rollback(length)
    torch.testing.assert_close(model(tokens[:, 2:], cache), uncached(model.model, tokens)[:, 2:], atol=1e-5, rtol=0)


FULL_MODELS = [name for name in MODELS if name not in SLIDING_MODELS]  # each layer sees the whole text
TREE = Tree((-1, 0, -1, 1, 2, 0, -1))


@pytest.mark.parametrize("cached", [0, 9])
@pytest.mark.parametrize("name", FULL_MODELS)
def test_each_node_of_a_tree_has_the_logits_of_its_path_and_a_kept_path_stays_as_if_read_alone(name, cached):
    """Rotary positions too: siblings stand at one position, and a gathered key keeps the one that it was made with."""
    model = HFModel(build(name).double())
    text, nodes, after = random_tokens(12), random_tokens(len(TREE), seed=1), random_tokens(3, seed=2)
    for kept in ((), (2,), (0, 1, 3), (2, 4)):
        cache = model.new_cache(64)
        if cached:
            model(text[:, :cached], cache)
        feed = torch.cat([text[:, cached:], nodes], dim=1)
        logits = model(feed, cache, last=len(TREE) + 1, **TREE.topology(cached, 12, model.device))[0]
        for node in range(-1, len(TREE)):
            chain = torch.cat([text, nodes[:, list(TREE.path_to(node))]], dim=1)
            torch.testing.assert_close(logits[node + 1], uncached(model.model, chain)[0, -1], atol=1e-10, rtol=0)
        cache.keep(12, kept)
        assert cache.length == cache.cache.get_seq_length() == 12 + len(kept)
        expected = uncached(model.model, torch.cat([text, nodes[:, list(kept)], after], dim=1))[:, -3:]
        torch.testing.assert_close(model(after, cache), expected, atol=1e-10, rtol=0)


@pytest.mark.parametrize(("length", "nodes"), [(4, [1]), (4, [-1]), (2, [0, 3]), (6, []), (-1, [0])])
def test_to_keep_what_the_cache_does_not_hold_is_refused(length, nodes):
    model = HFModel(build("llama"))
    cache = model.new_cache(64)
    model(random_tokens(5), cache)
    with pytest.raises(ValueError, match=f"cannot keep {length} tokens and .* it holds 5"):
        cache.keep(length, nodes)
    assert cache.length == cache.cache.get_seq_length() == 5


@pytest.mark.parametrize("name", SLIDING_MODELS)
def test_a_sliding_window_takes_no_tree_and_says_so_before_any_work(name):
    model = HFModel(build(name), name="mine")
    cache = model.new_cache(64)
    model(random_tokens(3), cache)
    with pytest.raises(ValueError, match="mine has sliding-window layers, which cannot read a token tree"):
        model(random_tokens(7), cache, last=8, **TREE.topology(3, 3, model.device))
    assert cache.length == 3


class NoLogitsToKeep(GPT2LMHeadModel):
    def forward(self, input_ids, cache=None, use_cache=None):
        name = "cache" if "cache" in inspect.signature(super().forward).parameters else "past_key_values"
        return super().forward(input_ids, use_cache=use_cache, **{name: cache})


@pytest.mark.parametrize("factory", [gpt2, lambda: gpt2(NoLogitsToKeep)], ids=["logits_to_keep", "sliced"])
@pytest.mark.parametrize("last", [1, 3, 8])
def test_last_gives_the_logits_of_the_last_positions_and_feeds_all_tokens(factory, last):
    model = HFModel(build(factory))
    tokens = random_tokens(8)
    cache = model.new_cache(64)
    logits = model(tokens, cache, last=last)
    assert logits.shape == (1, last, VOCAB)
    torch.testing.assert_close(logits, uncached(model.model, tokens)[:, -last:], atol=1e-5, rtol=0)
    assert cache.length == 8


def test_last_is_left_to_the_model_where_it_can_select_logits():
    model = HFModel(build("llama"))
    heads = []
    model.model.lm_head.register_forward_hook(lambda module, inputs, output: heads.append(output.shape[1]))
    model(random_tokens(8), model.new_cache(64), last=2)
    assert heads == [2]


def test_id_0_is_a_token_even_where_it_pads():
    model = HFModel(build(lambda: gpt2(pad_token_id=0)))
    tokens = torch.zeros(1, 10, dtype=torch.long)
    with torch.no_grad():
        expected = model.model(tokens, attention_mask=torch.ones_like(tokens), use_cache=False).logits
    torch.testing.assert_close(decode_in_chunks(model, tokens, seed=0), expected, atol=1e-5, rtol=0)


def test_a_state_space_model_is_refused_by_the_name_of_its_cache_before_any_work():
    model = MambaForCausalLM(MambaConfig(vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, state_size=4))
    model.register_forward_pre_hook(lambda *_: pytest.fail("a forward was run"))
    with pytest.raises(ValueError, match="DynamicCache of LinearAttentionLayer, which cannot be cropped"):
        HFModel(model).new_cache(64)


def test_a_model_without_a_cache_is_refused():
    model = OpenAIGPTLMHeadModel(OpenAIGPTConfig(vocab_size=VOCAB, n_embd=32, n_layer=1, n_head=2))
    with pytest.raises(ValueError, match=r"OpenAIGPTLMHeadModel\) takes no key-value cache"):
        HFModel(model)


class IgnoresItsCache(GPT2LMHeadModel):
    def forward(self, input_ids, cache=None, **options):
        return super().forward(input_ids, **options)


def test_a_model_that_ignores_its_cache_is_found_out():
    model = HFModel(gpt2(IgnoresItsCache))
    with pytest.raises(ValueError, match=r"IgnoresItsCache.* does not use the cache"):
        model(random_tokens(3), model.new_cache(64))


def test_an_encoder_decoder_is_refused():
    model = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=16, d_ff=16, num_layers=1, num_heads=1))
    with pytest.raises(ValueError, match="T5ForConditionalGeneration is an encoder-decoder"):
        HFModel(model)


@pytest.mark.parametrize("name", MODELS)
def test_configs_are_the_same_before_and_after(name):
    model = build(name)
    model.generation_config.num_assistant_tokens = 7
    before = copy.deepcopy((model.config.to_dict(), model.generation_config.to_dict()))
    decode_in_chunks(HFModel(model), random_tokens(LENGTH), seed=0)
    assert (model.config.to_dict(), model.generation_config.to_dict()) == before
    assert not model.training


def test_a_config_that_turns_the_cache_off_does_not_matter():
    model = build(gpt2)
    tokens = random_tokens(LENGTH)
    expected = uncached(model.eval(), tokens)
    model.config.use_cache = False
    torch.testing.assert_close(decode_in_chunks(HFModel(model), tokens, 0), expected, atol=1e-5, rtol=0)


def test_a_model_can_be_trained_after_it_was_used():
    model = build("llama")
    assert not decode_in_chunks(HFModel(model), random_tokens(LENGTH), seed=0).requires_grad
    model.train()(input_ids=random_tokens(8), labels=random_tokens(8)).loss.backward()
    assert model.lm_head.weight.grad.abs().sum() > 0


def test_the_global_generator_is_left_alone():
    model = HFModel(build("gpt2"))
    before = torch.get_rng_state()
    decode_in_chunks(model, random_tokens(LENGTH), seed=0)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_a_model_says_of_itself():
    model = HFModel(build("gpt2"), name="mine")
    assert (model.name, model.vocab_size, model.context, model.device) == ("mine", VOCAB, 64, torch.device("cpu"))
    assert HFModel(build("gpt2")).name == "GPT2LMHeadModel"
    bloom = BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=2))
    assert HFModel(bloom).context == sys.maxsize  # its positions have no end


@pytest.mark.parametrize(("capacity", "limit"), [(10, 10), (1000, 64)])
def test_more_tokens_than_the_cache_or_the_context_holds_are_an_error_before_the_forward(capacity, limit):
    model = HFModel(build("gpt2"))
    cache = model.new_cache(capacity)
    model(random_tokens(limit), cache)
    with pytest.raises(ValueError, match=f"1 tokens do not fit: the cache is for {limit} and holds {limit}"):
        model(random_tokens(1), cache)
    assert cache.length == limit


# --- loading ---


def test_a_saved_model_is_loaded_in_the_dtype_asked_for(tmp_path):
    model = build("llama")
    model.save_pretrained(tmp_path)
    loaded = HFModel.from_pretrained(tmp_path)
    tokens = random_tokens(LENGTH)
    torch.testing.assert_close(decode_in_chunks(loaded, tokens, 0), uncached(model.eval(), tokens), atol=1e-5, rtol=0)
    assert loaded.name == str(tmp_path)
    assert HFModel.from_pretrained(tmp_path, dtype=torch.bfloat16).model.dtype == torch.bfloat16


def test_pickled_weights_are_never_read(tmp_path):
    model = build("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelNotAvailable, match=r"model\.safetensors"):
        HFModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("model_type", ["llama", "unheard-of"])
def test_code_in_a_checkpoint_is_never_run(tmp_path, model_type):
    build("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": model_type, "auto_map": {"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "mine.py").write_text(f"open({str(tmp_path / 'it-ran')!r}, 'w')", encoding="utf-8")
    if model_type == "llama":  # transformers has code of its own for it
        HFModel.from_pretrained(tmp_path)
    else:
        with pytest.raises(ValueError, match=r"unheard-of.*code .* never run"):
            HFModel.from_pretrained(tmp_path)
    assert not (tmp_path / "it-ran").exists()


def test_an_encoder_decoder_checkpoint_is_refused_before_its_weights_are_read(tmp_path):
    T5Config(vocab_size=VOCAB).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is an encoder-decoder"):
        HFModel.from_pretrained(tmp_path)


def test_a_folder_without_a_model_is_an_error_that_says_so(tmp_path):
    with pytest.raises(ModelNotAvailable, match=r"config\.json"):
        HFModel.from_pretrained(tmp_path)
