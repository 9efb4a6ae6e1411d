"""Every way to draft is lossless: by enumeration on small targets, and with the shipped weights on the tiny one.

The drafters of the catalogue that need no target have their proofs in test_exactness and test_specinfer, Medusa and
early exit theirs beside them; EAGLE's is here.
"""

import pytest
import torch

from specdec_lite import autoregressive, load_pair, speculative
from specdec_lite.decoding import decode
from specdec_lite.distributions import GREEDY, Sampling
from specdec_lite.drafters.eagle import EagleDrafter, EagleLayer
from specdec_lite.drafters.eagle_tree import DynamicTree
from specdec_lite.engines import Loop
from specdec_lite.gpt2 import GPT2, GPT2Config
from specdec_lite.lossy import typical
from specdec_lite.methods import PLAIN, catalogue
from specdec_lite.randomness import enumerate_outcomes
from specdec_lite.selfcheck import LOSSLESS, check
from specdec_lite.tree import Tree

SMALL = GPT2Config(vocab_size=3, positions=16, width=16, layers=2, heads=2)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def target_and_layer(seed):
    """Random weights in float64, large enough for the text to matter; a layer that guesses at random."""
    target = GPT2.random(SMALL, seed=seed, dtype=torch.float64)
    layer = EagleLayer(SMALL).double().requires_grad_(False)
    generator = torch.Generator().manual_seed(seed)
    for model, scale in ((target, 0.4), (layer, 0.4)):
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.data = scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return target, layer


SHAPES = {
    "chain": (None, 2),
    "static tree": (Tree.branching((2, 1)), 2),
    "three candidates": (Tree.branching((3, 3)), 2),
    "dynamic tree": (DynamicTree(nodes=4, width=2, depth=3), 3),
}


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("shape", SHAPES)
def test_the_law_of_eagles_text_is_the_targets(shape, seed):
    target, layer = target_and_layer(seed)
    shape, K = SHAPES[shape]

    def law(drafter, K):
        def run(randomness):
            options = {"max_new_tokens": 4, "K": K, "sampling": Sampling(), "randomness": randomness}
            return tuple(token for round in decode(target, drafter, [0, 2], **options) for token in round.tokens)

        return enumerate_outcomes(run)

    own, drafted = law(None, 0), law(EagleDrafter(target, layer, shape), K)
    assert sum(drafted.values()) == pytest.approx(1, abs=1e-12)
    assert max(abs(own[text] - drafted.get(text, 0)) for text in own) < 1e-12


@pytest.fixture(scope="module")
def tiny():
    return load_pair("tiny")


@pytest.fixture(scope="module")
def prompts(tiny):
    """Thirteen, of 4 to 16 tokens, from text that the pair has written itself."""
    text = speculative(tiny, "There was once a", max_new_tokens=130, seed=3, eos_token_id=[]).tokens
    return [text[9 * i : 9 * i + 4 + i] for i in range(13)]


@pytest.fixture(scope="module")
def plain(tiny, prompts):
    options = {"max_new_tokens": 16, "sampling": GREEDY, "eos_token_id": []}
    return [autoregressive(tiny, prompt, **options).tokens for prompt in prompts]


FAMILIES = ("draft model", "SpecInfer", "n-gram", "early exit", "Medusa", "EAGLE")


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_texts_of_the_embedded_target_are_its_own_with_every_method(family, tiny, prompts, plain):
    """13 prompts, and for Medusa and EAGLE at least 4 shapes: more than 50 texts of each."""
    methods = {name: method for name, method in catalogue(tiny, GREEDY).items() if name.startswith(family)}
    assert methods
    for name, method in methods.items():
        options = {"max_new_tokens": 16, "sampling": GREEDY, "eos_token_id": [], "K": method.K}
        texts = [speculative(tiny, prompt, drafter=method.drafter, **options).tokens for prompt in prompts]
        assert texts == plain, name


@pytest.mark.parametrize("name", ["EAGLE chain, K = 2", "EAGLE static tree, 6 nodes", "Medusa tree, 6 nodes",
                                  "early exit, K = 2"])  # fmt: skip
def test_sampled_texts_of_the_embedded_target_have_its_law(name, tiny):
    method = catalogue(tiny, Sampling())[name]
    engine = Loop(tiny, method.K, drafter=method.drafter, name=name)
    report = check(tiny, engine, prompts=["The wolf said to the"], draws=400, K=method.K, max_new_tokens=8)
    assert report.exit_code == LOSSLESS, report.verdict


def test_the_same_check_rejects_typical_acceptance(tiny):
    method = catalogue(tiny, Sampling())["Medusa tree, 6 nodes"]
    engine = Loop(tiny, method.K, drafter=method.drafter, verify_tree=typical(), name="typical acceptance")
    report = check(tiny, engine, prompts=["The wolf said to the"], draws=400, K=method.K, max_new_tokens=8)
    assert report.exit_code != LOSSLESS


def test_the_catalogue_begins_with_plain_decoding(tiny):
    assert next(iter(catalogue(tiny, GREEDY))) == PLAIN
