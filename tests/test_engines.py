"""Engines behind one call: our own loops, Hugging Face's, and anything that somebody brings along."""

import pytest
import torch
from transformers import GenerationConfig

from specdec_lite.decoding import autoregressive, speculative
from specdec_lite.distributions import GREEDY, Sampling
from specdec_lite.drafters.model import ModelDrafter
from specdec_lite.engines import Batch, Function, HuggingFace, Loop, as_engine, engine_by_name, transformers_model
from specdec_lite.gallery import WRONG_RULES
from specdec_lite.gpt2 import GPT2, GPT2Config
from specdec_lite.hf import HFModel
from specdec_lite.pairs import Pair
from specdec_lite.record import Statistics
from specdec_lite.table import TableModel

OPTIONS = {"max_new_tokens": 12, "sampling": Sampling()}


@pytest.fixture(scope="module")
def pair():
    """Two random GPT-2s with laws that are not flat."""
    config = GPT2Config(vocab_size=30, positions=32, width=16, layers=1, heads=2)
    models = [GPT2.random(config, seed=seed) for seed in (0, 1)]
    for model in models:
        model.token_embedding.weight.data *= 15
    return Pair("small", *models, None)


def test_the_loop_as_an_engine_is_the_loop(pair):
    engine = Loop(pair, 3)
    result = speculative(pair, [1, 2], K=3, seed=5, **OPTIONS)
    assert engine.generate([1, 2], seed=5, **OPTIONS) == result.tokens
    assert engine.statistics == result.statistics
    end = result.tokens[4]
    cut = engine.generate([1, 2], seed=5, eos_token_id=[end], **OPTIONS)
    assert cut == result.tokens[: result.tokens.index(end) + 1]


def test_a_loop_can_be_given_another_drafter_and_rule(pair):
    rule = WRONG_RULES["greedy_draft"]
    drafter = rule.wrap(ModelDrafter(pair.draft, 30))
    engine = Loop(pair, 3, drafter=drafter, verify=WRONG_RULES["first_unverified"].verify, name="wrong")
    assert engine.name == "wrong"
    tokens = engine.generate([1, 2], seed=5, **OPTIONS)
    assert (
        tokens[0]
        == autoregressive(Pair("d", pair.draft, None, None), [1, 2], max_new_tokens=1, sampling=GREEDY).tokens[0]
    )


def test_a_batch_gives_each_prompt_what_it_gives_it_alone(pair):
    engine = Batch(pair, 3)
    prompts, seeds = [[1, 2], [3, 4, 5]], [7, 8]
    many = engine.generate_many(prompts, seeds=seeds, **OPTIONS)
    both = engine.statistics
    alone = [engine.generate(prompt, seed=seed, **OPTIONS) for prompt, seed in zip(prompts, seeds, strict=True)]
    assert many == alone == [Loop(pair, 3).generate(p, seed=s, **OPTIONS) for p, s in zip(prompts, seeds, strict=True)]
    assert both.tokens == 24


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
def test_hugging_face_tells_what_it_drafted_and_accepted(pair, sampling):
    engine = HuggingFace(pair, 3)
    for seed in range(3):
        tokens = engine.generate([1, 2], max_new_tokens=14, sampling=sampling, seed=seed)
        found = engine.statistics
        assert found.tokens == len(tokens) == 14  # those of this call only
        assert found.tokens == found.accepted + found.rounds
        assert found.rounds <= found.drafted <= 3 * found.rounds
        assert found.rejections <= found.rounds
    if sampling == GREEDY:
        assert found == speculative(pair, [1, 2], K=3, max_new_tokens=14, sampling=GREEDY).statistics


def test_plain_hugging_face_generation_drafts_nothing(pair):
    engine = HuggingFace(pair)
    engine.generate([1, 2], seed=0, **OPTIONS)
    assert engine.statistics == Statistics(rounds=0, tokens=0, drafted=0, accepted=0, rejections=0)


def test_the_users_model_and_its_generation_settings_are_neither_used_nor_changed(pair):
    target, draft = (HFModel(transformers_model(model), name="mine") for model in (pair.target, pair.draft))
    ours = autoregressive(pair, [1, 2], max_new_tokens=12, sampling=GREEDY).tokens
    settings = GenerationConfig(eos_token_id=ours[3], repetition_penalty=5.0, temperature=0.1, do_sample=True)
    target.model.generation_config, draft.model.generation_config = settings, GenerationConfig(max_new_tokens=1)
    before = dict(target.model.__dict__), settings.to_dict()
    for K in (0, 3):
        engine = HuggingFace(Pair("mine", target, draft, None), K)
        assert engine.generate([1, 2], max_new_tokens=12, sampling=GREEDY, seed=0) == ours
    assert (target.model.__dict__, settings.to_dict()) == before
    assert draft.model.generation_config.max_new_tokens == 1


def test_a_function_or_an_object_without_a_name_becomes_an_engine():
    def mine(prompt, *, max_new_tokens, sampling, seed):
        return [seed] * max_new_tokens

    class Nameless:
        def generate(self, prompt, **options):
            return mine(prompt, **options)

    named = Function(mine, "a name")
    assert as_engine(named) is named
    for given, name in [(mine, "mine"), (Nameless(), "Nameless"), (named, "a name")]:
        engine = as_engine(given)
        assert engine.name == name
        assert engine.generate([1], max_new_tokens=2, sampling=GREEDY, seed=3) == [3, 3]
    with pytest.raises(ValueError, match="must have generate"):
        as_engine("loop")


def test_engines_are_found_by_name_and_in_files(pair, tmp_path):
    assert [type(engine_by_name(name, pair, 2)) for name in ("loop", "batch", "hugging-face")] == [
        Loop,
        Batch,
        HuggingFace,
    ]
    file = tmp_path / "mine.py"
    file.write_text("def zeros(prompt, *, max_new_tokens, sampling, seed):\n    return [0] * max_new_tokens\n")
    engine = engine_by_name(f"{file}:zeros", pair, 2)
    assert engine.name == "zeros"
    assert engine.generate([1], max_new_tokens=2, sampling=GREEDY, seed=0) == [0, 0]


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("vllm", None, "unknown engine 'vllm': give loop, batch, hugging-face or FILE.py:FUNCTION"),
        ("FILE:nothing", "x = 1", "defines no 'nothing'"),
        ("FILE:x", "x = 1", "engine is 1"),
        ("FILE:x", "import no_such_package", "raised ModuleNotFoundError when it was run"),
        ("FILE:x", "import sys; sys.exit(0)", "raised SystemExit when it was run"),
        ("nowhere.py:x", None, "a file that exists"),
        ("FILE", "x = 1", "FILE.py:FUNCTION"),
    ],
)
def test_an_engine_that_cannot_be_found_is_a_clear_error(pair, tmp_path, name, content, words):
    if content:
        (tmp_path / "mine.py").write_text(content)
    with pytest.raises(ValueError, match=words) as caught:
        engine_by_name(name.replace("FILE", str(tmp_path / "mine.py"), 1), pair, 2)
    assert "\n" not in str(caught.value)


def test_engines_leave_the_global_generators_alone(pair, global_generators):
    global_generators.seed(3)
    before = global_generators.state()
    for engine in (Loop(pair, 2), Batch(pair, 2), HuggingFace(pair, 2), HuggingFace(pair)):
        first, again, other = (engine.generate([1, 2], seed=seed, **OPTIONS) for seed in (0, 0, 1))
        assert first == again != other
    assert global_generators.state() == before


def test_a_table_has_no_counterpart_in_transformers():
    model = TableModel(torch.tensor([0.5, 0.5]))
    with pytest.raises(TypeError, match="counterpart"):
        HuggingFace(Pair("tables", model, model, None), 2)
