"""Row i of a batch is what prompt i gives alone: tokens, text and rounds, whatever else is in the batch."""

import random
from dataclasses import replace
from itertools import product

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_lite import GREEDY, Sampling, batch, load_pair, speculative
from specdec_lite.batch import Batch, Reader, close_ranks, decode_rows, make_rows, speculative_batch, verify_rows
from specdec_lite.gpt2 import GPT2, GPT2Config
from specdec_lite.randomness import TorchRandomness, enumerate_outcomes
from specdec_lite.table import TableModel
from specdec_lite.verify import verify

SAMPLINGS = [GREEDY, Sampling(0.7), Sampling(), Sampling(1.0, top_k=3), Sampling(0.7, top_p=0.8), Sampling(1.0, 4, 0.9)]
PIECES = ["é".encode()[:1], "é".encode()[1:], *(bytes([letter]) for letter in b" abcdefghi")]  # é needs two tokens


def small(seed, vocab=9, context=64, layers=1, spread=20, **options):
    """A small GPT-2 in float64, where rounding cannot flip a draw. spread: how sure it is of its next token."""
    config = GPT2Config(vocab, context, width=16, layers=layers, heads=2)
    model = GPT2.random(config, seed=seed, dtype=torch.float64, **options)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.mul_(spread)
    return model


def untimed(result):
    return replace(
        result, rounds=[replace(r, draft_seconds=0, target_seconds=0, other_seconds=0) for r in result.rounds]
    )


def own_runs(pair, prompts, max_new_tokens, seeds, **options):
    return [
        untimed(speculative(pair, prompt, max_new_tokens=most, seed=seed, **options))
        for prompt, most, seed in zip(prompts, max_new_tokens, seeds, strict=True)
    ]


def in_a_batch(pair, prompts, max_new_tokens, seeds, **options):
    return [
        untimed(result)
        for result in speculative_batch(pair, prompts, max_new_tokens=max_new_tokens, seeds=seeds, **options)
    ]


def random_case(seed, pair_of, tokenizer_of):
    """A pair whose contexts may fill up, a list of rows (prompt, max_new_tokens, seed), and options."""
    chance = random.Random(seed)
    vocab = chance.randint(3, 12)
    contexts = [chance.choice([7, 9, 64, 64]) for _ in "pq"]
    draft_vocab = vocab + chance.choice([0, 0, 0, -1, 2])
    draft_seed = seed if draft_vocab == vocab and chance.random() < 0.3 else seed + 1000  # now and then a good draft
    tokenizer = tokenizer_of(PIECES[:vocab]) if chance.random() < 0.5 else None
    pair = pair_of(small(seed, vocab, contexts[0]), small(draft_seed, draft_vocab, contexts[1]), tokenizer)
    rows = [
        ([chance.randrange(vocab) for _ in range(chance.randint(1, 6))], chance.randint(0, 7), chance.randrange(99))
        for _ in range(chance.randint(1, 8))
    ]
    options = {
        "K": chance.randint(0, 5),
        "sampling": chance.choice(SAMPLINGS),
        "eos_token_id": chance.choice([None, [], chance.randrange(vocab), [0, vocab - 1]]),
        "stop_strings": chance.choice([None, "é", ["a ", "  "]]) if tokenizer and vocab > 3 else None,
    }
    return pair, rows, options


def events(results):
    """What happened in a batch, so that a test can say that its cases were worth running."""
    for result in results:
        yield result.finish_reason
        if result.draft_stopped_at is not None:
            yield "draft full"
        yield from result.origins
    for same_round in zip(*(result.rounds for result in results), strict=False):
        if len({len(round.draft_tokens) for round in same_round}) > 1:
            yield "unequal drafts"
        if len({round.accepted for round in same_round}) > 1:
            yield "ragged acceptance"
    if len({len(result.rounds) for result in results}) > 1:
        yield "a row leaves before another"
    if len({len(result.prompt_tokens) for result in results}) > 1:
        yield "unequal prompts"


EVENTS = {
    "length", "stop", "context", "draft full", "accepted", "recovered", "bonus", "unequal drafts", "ragged acceptance",
    "a row leaves before another", "unequal prompts",
}  # fmt: skip


@pytest.mark.parametrize("group", range(6))
def test_row_i_equals_its_own_run_in_210_random_cases(group, pair_of, tokenizer_of):
    seen = set()
    for seed in range(35 * group, 35 * group + 35):
        pair, rows, options = random_case(seed, pair_of, tokenizer_of)
        prompts, most, seeds = zip(*rows, strict=True)
        results = in_a_batch(pair, prompts, most, seeds, **options)
        assert results == own_runs(pair, prompts, most, seeds, **options), f"case {seed}"
        seen.update(events(results))
    assert seen == EVENTS


ROWS = [([1, 2, 3], 12, 0), ([4], 7, 1), ([5, 6, 7, 8, 1, 2], 15, 2), ([2, 2], 12, 3), ([3], 1, 4)]


@pytest.mark.parametrize("sampling", [Sampling(), GREEDY])
def test_a_row_does_not_depend_on_its_batch_mates(sampling, pair_of):
    pair, options = pair_of(small(1, layers=2), small(2)), {"K": 3, "sampling": sampling}
    whole = in_a_batch(pair, *zip(*ROWS, strict=True), **options)
    for order in ([4, 3, 2, 1, 0], [2, 0, 1, 4, 3], [1, 3], [2], [0, 0, 0]):
        assert in_a_batch(pair, *zip(*(ROWS[i] for i in order), strict=True), **options) == [whole[i] for i in order]


def test_rows_with_the_same_prompt_and_another_seed_differ(pair_of):
    pair = pair_of(small(1, spread=5), small(2, spread=5))
    results = speculative_batch(pair, [[1]] * 4, max_new_tokens=20, seeds=[0, 0, 1, None])
    first, same, other, unseeded = (result.tokens for result in results)
    assert first == same
    assert len({tuple(tokens) for tokens in (first, other, unseeded)}) == 3


def test_one_number_of_tokens_serves_all_and_the_global_generators_are_left_alone(pair_of, global_generators):
    pair = pair_of(small(1), small(2))
    global_generators.seed(0)
    before = global_generators.state()
    assert [len(result.tokens) for result in speculative_batch(pair, [[1], [2, 3]], max_new_tokens=5)] == [5, 5]
    assert global_generators.state() == before


@pytest.mark.parametrize("K", [0, 4])
def test_the_embedded_pair_in_float32_writes_the_greedy_text_of_its_own_runs(K):
    pair = load_pair("tiny")
    prompts = ["Once upon a time", "The", "The old woman said to the youngest of her three sons:"]
    results = speculative_batch(pair, prompts, max_new_tokens=[20, 25, 15], K=K, sampling=GREEDY)
    for result, prompt, most in zip(results, prompts, [20, 25, 15], strict=True):
        assert result.text == speculative(pair, prompt, max_new_tokens=most, K=K, sampling=GREEDY).text


# The exact law --------------------------------------------------------------------------------------------------------


def law_of_tokens(model, prompt, n):
    """The law of n tokens drawn one by one from the model: by hand, from its logits."""
    law = {}
    for tokens in product(range(model.vocab_size), repeat=n):
        logits = model(torch.tensor([[*prompt, *tokens]]), model.new_cache(len(prompt) + n))[0]
        steps = logits.softmax(-1)[len(prompt) - 1 : -1]
        law[tokens] = float(steps[range(n), list(tokens)].prod())
    return law


@pytest.fixture
def draws_one_by_one(monkeypatch):
    """The batch asks its rows for one draw after the other, as ``enumerate_outcomes`` can follow them."""

    def categorical(probs, rows):
        return torch.tensor([row.categorical(law) for law, row in zip(probs, rows, strict=True)])

    def first_failure(accept, trials, rows):
        return torch.tensor([row.first_failure(a[:n]) for a, n, row in zip(accept, trials, rows, strict=True)])

    monkeypatch.setattr(batch, "categorical_rows", categorical)
    monkeypatch.setattr(batch, "first_failure_rows", first_failure)


@pytest.mark.parametrize(("K", "lengths"), [(0, (2, 2)), (1, (2, 2)), (2, (2, 1)), (1, (1, 3))])
def test_the_joint_law_of_two_rows_is_the_product_of_the_targets_laws(K, lengths, pair_of, draws_one_by_one):
    target, draft = small(3, vocab=2, spread=12), small(4, vocab=2, spread=12)
    prompts = [[0, 1, 1], [1]]

    def play(randomness):
        rows = make_rows(pair_of(target, draft), prompts, lengths, K, None)
        for row in rows:
            row.randomness = randomness
        decode_rows(target, draft, rows, K, Sampling(), ends=lambda output: False)
        return tuple(tuple(row.result.tokens) for row in rows)

    one, other = (law_of_tokens(target, prompt, n) for prompt, n in zip(prompts, lengths, strict=True))
    expected = {(a, b): one[a] * other[b] for a in one for b in other}
    assert max(expected.values()) < 0.9, "the models are too sure for the law to say much"
    assert enumerate_outcomes(play) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_verifying_rows_together_is_verifying_each_alone(dtype, random_table):
    drafted, most, vocab = [3, 0, 2, 3, 1], 3, 4
    q, p = random_table(5, most + 1, vocab, seed=1).to(dtype), random_table(5, most + 1, vocab, seed=2).to(dtype)
    for row, n in enumerate(drafted):
        q[row, n:] = 0
    draft_tokens = torch.randint(vocab, (5, most), generator=torch.Generator().manual_seed(0))
    for seed in range(40):
        together, alone = ([TorchRandomness.seeded(seed + r) for r in range(5)] for _ in "ab")
        accepted, next_token = verify_rows(draft_tokens, drafted, q, p, together)
        for r, n in enumerate(drafted):
            outcome = verify(draft_tokens[r, :n], q[r, :n], p[r, : n + 1], alone[r])
            assert (accepted[r], next_token[r]) == (outcome.accepted, outcome.next_token)


def test_a_reader_gives_every_row_its_own_last_logits_and_repeats_them_where_others_want_more():
    model = small(1)
    tokens = torch.randint(9, (3, 12), generator=torch.Generator().manual_seed(0))
    reader = Reader(model, 3, 12)
    reader.read(tokens, [2, 5, 4], [1, 1, 1])
    logits = reader.read(tokens, [4, 6, 4], [2, 1, 0])  # the last row is fed nothing
    whole = model(tokens, model.new_cache(12, rows=3))
    torch.testing.assert_close(logits[:2], torch.stack([whole[0, 2:4], whole[1, [5, 5]]]))
    assert reader.cache.lengths == [4, 6, 4]


# What it costs --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fed(monkeypatch):
    """fed(model): the number of rows of each pass of the model so far."""
    passes = []
    real = GPT2.hidden

    def hidden(self, tokens, cache, **options):
        passes.append((self, len(tokens)))
        return real(self, tokens, cache, **options)

    monkeypatch.setattr(GPT2, "hidden", hidden)
    return lambda model: [rows for which, rows in passes if which is model]


@pytest.mark.parametrize("K", [0, 3])
def test_no_pass_is_fed_a_finished_row(K, pair_of, fed):
    target, draft = small(1), small(2)
    prompts, most, seeds = zip(*ROWS, strict=True)
    results = speculative_batch(pair_of(target, draft), prompts, max_new_tokens=most, seeds=seeds, K=K, eos_token_id=5)
    rounds = [result.rounds for result in results]
    longest = max(len(of_row) for of_row in rounds)
    live = [sum(len(of_row) > i for of_row in rounds) for i in range(longest)]
    assert fed(target) == live
    assert live[0] == 5 > live[-1]
    steps = [max(len(of_row[i].draft_tokens) for of_row in rounds if len(of_row) > i) for i in range(longest)]
    assert fed(draft) == [rows for rows, passes in zip(live, steps, strict=True) for _ in range(passes)]


def test_plain_decoding_takes_no_memory_for_a_draft(pair_of):
    pair = pair_of(small(1), small(2))
    plain, drafting = (Batch(pair.target, pair.draft, make_rows(pair, [[1]], 9, K, None), K) for K in (0, 2))
    assert plain.draft.cache.capacity == 0
    assert drafting.draft.cache.capacity > 9


def test_prompts_that_ask_for_no_tokens_cost_no_pass(pair_of, fed):
    target = small(1)
    results = speculative_batch(pair_of(target, small(2)), [[1], [2, 3]], max_new_tokens=0)
    assert [(result.tokens, result.rounds, result.finish_reason) for result in results] == [([], [], "length")] * 2
    assert fed(target) == []


def test_the_rows_of_a_round_share_its_times(pair_of):
    results = speculative_batch(pair_of(small(1), small(2)), [[1], [2, 3], [4]], max_new_tokens=8, seeds=[1, 2, 3])
    for same_round in zip(*(result.rounds for result in results), strict=False):
        assert len({(r.draft_seconds, r.target_seconds, r.other_seconds) for r in same_round}) == 1
        assert min(same_round[0].draft_seconds, same_round[0].target_seconds, same_round[0].other_seconds) >= 0
    assert all(round.target_seconds > 0 for result in results for round in result.rounds)


class Waits(TorchDispatchMode):
    """Counts numbers that are fetched from a tensor one by one; each is a wait on a GPU."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


def test_a_round_waits_for_the_device_once(pair_of, monkeypatch):
    fetches, real = [], torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: fetches.append(1) or real(self))
    with Waits() as waits:
        results = speculative_batch(pair_of(small(1), small(2)), [[1], [2, 3], [4]], max_new_tokens=[9, 3, 12])
    assert waits.count == 0
    assert len(fetches) == max(len(result.rounds) for result in results)


def test_the_last_rows_fill_the_gaps_and_no_other_row_moves():
    for stays in product([True, False], repeat=5):
        kept = close_ranks(list(stays))
        assert sorted(kept) == [row for row in range(5) if stays[row]]
        assert all(old == new or old >= len(kept) for new, old in enumerate(kept))


# Bad input ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("broken", ["target", "draft"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_nan_logits_are_an_error_that_names_the_model(broken, temperature, pair_of):
    models = {"target": small(1), "draft": small(2)}
    for name, model in models.items():
        model.name = f"my {name}"
    models[broken].position_embedding.weight[4] = torch.nan  # only the longest row comes that far
    pair = pair_of(models["target"], models["draft"])
    options = {"K": 2, "sampling": Sampling(temperature)}
    with pytest.raises(FloatingPointError, match=f"my {broken} gave NaN"):
        speculative_batch(pair, [[1], [1, 2, 3], [2]], max_new_tokens=[1, 6, 2], **options)
    speculative_batch(pair, [[1], [2]], max_new_tokens=[1, 2], **options)


TWO = [[1], [2, 3]]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "at least one prompt"),
        ("a text", {}, "call speculative"),
        ([1, 2], {}, "call speculative"),
        ([[1], []], {}, "prompt 1: the prompt is empty"),
        ([[1], [9]], {}, "prompt 1: .*ids 0 to 8"),
        ([[1], [1] * 65], {}, "prompt 1: .*65 tokens"),
        (["text", [1]], {}, "prompt 0: .*no tokenizer"),
        (TWO, {"seeds": [1]}, "seeds must be a list with one entry for each of the 2"),
        (TWO, {"seeds": 1}, "seeds must be a list"),
        (TWO, {"max_new_tokens": [1, 2, 3]}, "max_new_tokens must be a list with one entry for each of the 2"),
        (TWO, {"max_new_tokens": [1, -2]}, "prompt 1: max_new_tokens is -2"),
        (TWO, {"max_new_tokens": 2.5}, "max_new_tokens is 2.5; it must be a whole number"),
        (TWO, {"K": -1}, "K is -1"),
        (TWO, {"K": 1.5}, "K is 1.5"),
        (TWO, {"stop_strings": "a"}, "no"),
    ],
)
def test_bad_input_is_refused_before_any_work(prompts, options, message, pair_of, monkeypatch):
    monkeypatch.setattr(batch, "decode_rows", lambda *a: pytest.fail("work was begun"))
    with pytest.raises(ValueError, match=message):
        speculative_batch(pair_of(small(1), small(2)), prompts, **options)


def test_models_of_another_kind_are_refused_unless_they_are_not_needed(pair_of):
    table = TableModel([0.5, 0.5], name="my table")
    for pair in (pair_of(table, small(1)), pair_of(small(1), table)):
        with pytest.raises(ValueError, match="my table is a TableModel.*call speculative"):
            speculative_batch(pair, [[1]])
    assert len(speculative_batch(pair_of(small(1), table), [[1]], max_new_tokens=3, K=0)[0].tokens) == 3
