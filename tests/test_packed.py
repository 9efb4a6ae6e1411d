"""Packed weights: the same numbers, up to rounding, from another layout."""

import pytest
import torch

from specdec_lite.distributions import GREEDY
from specdec_lite.engines import transformers_model
from specdec_lite.forms import accelerate
from specdec_lite.gpt2 import GPT2, GPT2Config
from specdec_lite.packed import PackedGPT2
from specdec_lite.pairs import Pair
from specdec_lite.table import TableModel

needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this PyTorch has no oneDNN")
CONFIG = GPT2Config(60, 32, 32, 2, 2)


@needs_onednn
@pytest.mark.parametrize("n", [1, 2, 5, 9])
def test_packed_logits_are_the_models_own(n):
    model = GPT2.random(CONFIG, seed=1)
    packed = PackedGPT2(model)
    tokens = torch.randint(60, (2, 6 + n), generator=torch.Generator().manual_seed(0))
    logits = []
    for each in (model, packed):
        cache = each.new_cache(6 + n, rows=2)
        each(tokens[:, :6], cache, last=1)
        logits.append(each(tokens[:, 6:], cache))
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)


@needs_onednn
def test_a_packed_pair_decodes_the_same_greedy_tokens():
    from specdec_lite.decoding import autoregressive, speculative

    models = [GPT2.random(GPT2Config(60, 64, 32, layers, 2), seed=layers) for layers in (2, 1)]
    for model in models:
        for parameter in model.parameters():
            parameter.data.mul_(8)  # so that the argmax is no near-tie
    plain = autoregressive(Pair("plain", *models, None), [3, 1], max_new_tokens=20, sampling=GREEDY)
    packed = Pair("packed", *map(PackedGPT2, models), None)
    assert speculative(packed, [3, 1], K=3, max_new_tokens=20, sampling=GREEDY).tokens == plain.tokens


@needs_onednn
def test_the_model_that_was_packed_is_left_as_it_was():
    model = GPT2.random(CONFIG, seed=1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    PackedGPT2(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert len(before) == len(model.state_dict())


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (TableModel(torch.tensor([0.5, 0.5]), name="my table"), "my table is TableModel"),
        (GPT2.random(CONFIG, dtype=torch.bfloat16), "bfloat16 on cpu"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(model, says):
    with pytest.raises(ValueError, match=says):
        PackedGPT2(model)


@needs_onednn
def test_a_packed_model_is_not_copied_into_transformers_without_its_weights():
    with pytest.raises(TypeError, match="no counterpart"):
        transformers_model(PackedGPT2(GPT2.random(CONFIG)))


@needs_onednn
def test_a_pair_in_packed_form_says_so_and_shares_its_tokenizer():
    pair = Pair("small", GPT2.random(CONFIG, seed=1), GPT2.random(CONFIG, seed=2), tokenizer=None)
    packed = accelerate(pair, "packed")
    assert packed.name == "small (packed)"
    assert isinstance(packed.target, PackedGPT2)
    assert isinstance(packed.draft, PackedGPT2)
    assert type(pair.target) is GPT2


def test_an_unknown_form_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="packed, eager, compile"):
        accelerate(Pair("none", None, None, None), "fast")
