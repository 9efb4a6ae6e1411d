"""The loop's promises that no replayed case covers: one wait per round, errors that name the model, the public face."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import specdec_lite
from specdec_lite import Sampling, autoregressive, decoding, speculative, stream
from specdec_lite.decoding import Continuation, decode
from specdec_lite.drafters.model import ModelDrafter
from specdec_lite.gpt2 import GPT2, GPT2Config
from specdec_lite.randomness import TorchRandomness
from specdec_lite.record import Statistics
from specdec_lite.table import TableModel
from specdec_lite.verify import verify

SMALL = GPT2Config(60, 64, 32, 2, 2)


@pytest.fixture(scope="module")
def models():
    pair = GPT2.random(SMALL, seed=0), GPT2.random(SMALL, seed=1)
    for model in pair:
        for parameter in model.parameters():
            parameter.data.mul_(5)
    return pair


class HostReads(TorchDispatchMode):
    """Counts how often a number is fetched from a tensor one by one (``item``): each is a wait on a GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_round_waits_for_the_device_once(models, monkeypatch, temperature):
    """All of a round's numbers are fetched together, by one ``tolist`` at its end, and nothing is read before."""
    target, draft = models
    fetches = []
    real = Continuation.fetch
    monkeypatch.setattr(Continuation, "fetch", lambda self, *a: fetches.append(1) or real(self, *a))
    rounds = decode(
        target, ModelDrafter(draft, 60), [1, 2, 3], max_new_tokens=20, K=3, sampling=Sampling(temperature),
        randomness=TorchRandomness.seeded(0),
    )  # fmt: skip
    with HostReads() as reads:
        finished = list(rounds)
    assert reads.count == 0
    assert len(fetches) == len(finished)


def test_the_counter_of_waits_sees_a_wait():
    with HostReads() as reads:
        torch.ones(3)[0].item()
        torch.arange(3)[torch.tensor(1)]  # an index that is a tensor of no dimensions is fetched
    assert reads.count == 2


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", ["target", "draft"])
def test_nan_logits_are_an_error_that_names_the_model(broken, temperature, pair_of):
    table = {name: TableModel(torch.tensor([0.5, 0.5]), name=f"my {name}") for name in ("target", "draft")}
    table[broken].log_table = torch.full((1, 2, 2), torch.nan, dtype=torch.float64)
    pair = pair_of(table["target"], table["draft"])
    with pytest.raises(FloatingPointError, match=f"my {broken} gave NaN"):
        speculative(pair, [0], max_new_tokens=5, K=2, sampling=Sampling(temperature))


def test_plain_decoding_makes_one_pass_for_each_token_and_drafts_nothing(models, pair_of):
    result = autoregressive(pair_of(*models), [1, 2], max_new_tokens=7)
    assert len(result.rounds) == 7
    assert result.origins == ["bonus"] * 7
    assert (result.alpha, result.acceptance_rate, result.tokens_per_round) == (None, None, 1.0)


def test_another_rule_and_another_drafter_plug_in(models, pair_of, fixed_draft):
    asked = []

    def counting(*arguments):
        asked.append(len(arguments[0]))
        return verify(*arguments)

    options = {"max_new_tokens": 6, "sampling": specdec_lite.GREEDY}
    result = speculative(pair_of(*models), [1], drafter=fixed_draft([5, 5]), verify=counting, **options)
    assert result.tokens == autoregressive(pair_of(*models), [1], **options).tokens
    assert max(asked) == 2


def test_the_stream_returns_the_result_of_the_same_call(models, pair_of):
    rounds = stream(pair_of(*models), [1], max_new_tokens=9, seed=4)
    seen = []
    while True:
        try:
            seen.append(next(rounds))
        except StopIteration as end:
            result = end.value
            break
    assert seen == result.rounds
    assert result.tokens == speculative(pair_of(*models), [1], max_new_tokens=9, seed=4).tokens


def test_every_second_of_a_round_is_counted_once(models, pair_of):
    result = speculative(pair_of(*models), [1], max_new_tokens=9, seed=0)
    assert all(r.seconds == r.draft_seconds + r.target_seconds + r.other_seconds for r in result.rounds)
    assert result.seconds == pytest.approx(sum(r.seconds for r in result.rounds))
    assert all(min(r.draft_seconds, r.target_seconds, r.other_seconds) >= 0 for r in result.rounds)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("text", "no tokenizer"), ([], "prompt is empty"), ([60], "ids 0 to 59"), ([-1], "ids 0 to 59")],
)
def test_a_bad_prompt_is_refused_before_any_work(models, pair_of, prompt, message, monkeypatch):
    monkeypatch.setattr(decoding, "decode", lambda *a, **k: pytest.fail("work was begun"))
    with pytest.raises(ValueError, match=message):
        speculative(pair_of(*models), prompt)


@pytest.mark.parametrize("option", [{"max_new_tokens": -1}, {"max_new_tokens": 2.5}, {"K": -1}, {"K": 1.5}])
def test_a_bad_length_is_refused_before_any_work(models, pair_of, option, spy_on):
    target = spy_on(models[0])
    with pytest.raises(ValueError, match="whole number"):
        speculative(pair_of(target, models[1]), [1], **option)
    assert target.fed == []


def test_statistics_of_the_embedded_pair_are_those_of_its_rounds():
    pair = specdec_lite.load_pair("tiny")
    result = speculative(pair, "The wolf", max_new_tokens=40, seed=0)
    assert result.text == pair.tokenizer.decode(result.tokens)
    pooled = Statistics.pooled([result, result])
    assert pooled.alpha == result.alpha
    assert pooled.tokens == 2 * len(result.tokens)


@pytest.mark.parametrize("K", [1, 2, 4, 7])
def test_the_embedded_pair_writes_the_same_greedy_text_with_any_K(K):
    pair = specdec_lite.load_pair("tiny")
    for prompt in ("Once upon a time", "The old woman said to the"):
        options = {"max_new_tokens": 60, "sampling": specdec_lite.GREEDY}
        assert speculative(pair, prompt, K=K, **options).tokens == autoregressive(pair, prompt, **options).tokens
