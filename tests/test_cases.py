"""Faults that other implementations of speculative decoding had, replayed here. Each test is named after its case.

L: losslessness. S: stops and lengths. C: caches. V: vocabulary and context. B: seeds and statistics. The models are
tables small enough to check by hand; where a real cache matters, tiny GPT-2s with random weights.
"""

import copy
import math
from dataclasses import replace

import pytest
import torch
from transformers import GPT2Config as HFGPT2Config
from transformers import GPT2LMHeadModel

from specdec_lite.decoding import autoregressive, decode, speculative, stream
from specdec_lite.distributions import GREEDY, Sampling, overlap
from specdec_lite.drafters.model import ModelDrafter
from specdec_lite.gpt2 import GPT2, GPT2Config
from specdec_lite.hf import HFModel
from specdec_lite.randomness import TorchRandomness, enumerate_outcomes
from specdec_lite.record import Result, Round, Statistics
from specdec_lite.table import TableModel
from specdec_lite.verify import verify


def law_of_output(target, drafter, n, K, sampling=Sampling(), show=lambda rounds: None):
    """Exact law of (the first n tokens, show(rounds)) under the shipped loop."""

    def play(randomness):
        rounds, tokens = [], ()
        for round in decode(target, drafter, [0], max_new_tokens=n + K, K=K, sampling=sampling, randomness=randomness):
            rounds.append(round)
            tokens += round.tokens
            if len(tokens) >= n:
                return tokens[:n], show(rounds)

    return enumerate_outcomes(play)


def first_token_law(target, drafter, K, sampling=Sampling()):
    law = law_of_output(target, drafter, 1, K, sampling)
    return [law.get(((token,), None), 0) for token in range(target.vocab_size)]


class ForcedRejection:
    """Randomness that rejects at a given position whatever the chances are, and notes what the next draw is from."""

    def __init__(self, position=0, seed=0):
        self.position = position
        self.real = TorchRandomness.seeded(seed)

    def first_failure(self, accept_probs):
        return torch.tensor(self.position)

    def categorical(self, probs):
        self.drawn_from = probs
        return self.real.categorical(probs)


def tiny_gpt2(seed, vocab=50, positions=256, layers=2, dtype=torch.float64):
    """Random weights, scaled up so that the next tokens are not all equally likely."""
    config = GPT2Config(vocab_size=vocab, positions=positions, width=16, layers=layers, heads=2)
    model = GPT2.random(config, seed=seed, dtype=dtype)
    for parameter in model.parameters():
        if parameter.ndim == 2:
            parameter.mul_(20)
    return model


# Losslessness ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", range(5))
def test_L1_the_first_token_has_the_law_of_the_target(K):
    p, q = [0.6, 0.3, 0.1], [0.3, 0.6, 0.1]
    drafter = ModelDrafter(TableModel(q), 3)
    assert first_token_law(TableModel(p), drafter, K) == pytest.approx(p, abs=1e-12)
    if K:
        law = law_of_output(TableModel(p), drafter, 1, K, show=lambda rounds: rounds[0].accepted > 0)
        assert sum(chance for (_, kept), chance in law.items() if kept) == pytest.approx(0.7, abs=1e-12)


@pytest.mark.parametrize("K", [1, 2, 4])
def test_L2_greedy_output_is_the_argmax_every_time(K, pair_of):
    pair = pair_of(TableModel([0.6, 0.3, 0.05, 0.05]), TableModel([0.3, 0.6, 0.05, 0.05]))
    for seed in range(20):
        assert speculative(pair, [1], max_new_tokens=12, K=K, sampling=GREEDY, seed=seed).tokens == [0] * 12


@pytest.mark.parametrize(
    ("rejected", "residual"), [(0, [0, 0.25, 0.75]), (1, [2 / 3, 1 / 3, 0]), (2, [0.5, 0, 0.5]), (3, [0.1, 0.7, 0.2])]
)
def test_L3_the_residual_uses_the_rows_of_the_rejected_position(rejected, residual):
    p = torch.tensor([[0.2, 0.3, 0.5], [0.5, 0.4, 0.1], [0.4, 0.1, 0.5], [0.1, 0.7, 0.2]])
    q = torch.tensor([[0.6, 0.2, 0.2], [0.3, 0.3, 0.4], [0.2, 0.5, 0.3]])
    chance = ForcedRejection(position=rejected)
    outcome = verify(torch.tensor([0, 2, 1]), q, p, chance)
    assert int(outcome.accepted) == rejected
    torch.testing.assert_close(chance.drawn_from, torch.tensor(residual, dtype=torch.float32))


@pytest.mark.parametrize("q", [[0.1, 0.1, 0.8], [0.0, 1.0, 0.0], [0.6, 0.3, 0.1]])
def test_L4_a_truncated_token_is_never_emitted_whatever_the_draft_does(q):
    target, drafter = TableModel([0.6, 0.3, 0.1]), ModelDrafter(TableModel(q), 3)
    assert law_of_output(target, drafter, 3, K=2, sampling=Sampling(top_p=0.5)) == {((0, 0, 0), None): 1}
    assert law_of_output(target, Narrow(TableModel(q), 3, top_p=1.0), 3, 2, Sampling(top_p=0.5)).keys() == {
        ((0,) * 3, None)
    }


class Narrow(ModelDrafter):
    """A drafter with a sampling of its own, which it reports truthfully."""

    def __init__(self, model, vocab_size, **own):
        super().__init__(model, vocab_size)
        self.own = own

    def propose(self, context, K, sampling, randomness):
        return super().propose(context, K, replace(sampling, **self.own), randomness)


@pytest.mark.parametrize(
    "own", [{"top_k": 1}, {"top_k": 2}, {"top_p": 0.5}, {"temperature": 0.3}, {"temperature": 0.0}]
)
def test_L5_a_draft_restricted_in_its_own_way_leaves_the_law_alone(own, random_table):
    p, q = random_table(3, 3, seed=3), random_table(3, 3, seed=4)
    target = TableModel(p)
    open_law = law_of_output(target, ModelDrafter(TableModel(q), 3), 2, K=2)
    law = law_of_output(target, Narrow(TableModel(q), 3, **own), 2, K=2)
    assert law == pytest.approx(open_law, abs=1e-12)
    assert law == pytest.approx(
        {((a, b), None): float(p[0, a] * p[a, b]) for a in range(3) for b in range(3)}, abs=1e-12
    )


@pytest.mark.parametrize("K", [1, 2, 3])
def test_L6_a_deterministic_draft_leaves_the_law_alone(K, fixed_draft):
    assert first_token_law(TableModel([0.5, 0.5]), fixed_draft([0] * K), K) == pytest.approx([0.5, 0.5], abs=1e-12)


def test_L6_the_rejected_token_of_a_deterministic_draft_is_excluded_and_p_renormalised():
    p, chance = torch.tensor([[0.5, 0.3, 0.2]] * 2), ForcedRejection()
    verify(torch.tensor([0]), None, p, chance)
    torch.testing.assert_close(chance.drawn_from, torch.tensor([0.0, 0.6, 0.4]))


def test_L7_the_first_draft_token_is_verified_too(pair_of, fixed_draft):
    says_five = torch.full((7,), 0.01, dtype=torch.float64)
    says_five[5] = 0.94
    pair = pair_of(TableModel(says_five), None)
    out = speculative(pair, [1, 1, 1], max_new_tokens=4, K=1, sampling=GREEDY, drafter=fixed_draft([1]))
    assert out.tokens == [5, 5, 5, 5]
    assert (out.rounds[0].draft_tokens, out.rounds[0].accepted) == ((1,), 0)


def test_L8_a_token_of_probability_zero_is_rejected_even_by_a_uniform_of_zero(monkeypatch):
    drawn = []
    monkeypatch.setattr(torch, "rand", lambda shape, **_: drawn.append(shape) or torch.zeros(shape))
    p, q = torch.tensor([[0.0, 1.0], [0.5, 0.5]]), torch.tensor([[0.5, 0.5]])
    outcome = verify(torch.tensor([0]), q, p, TorchRandomness.seeded(0))
    assert drawn
    assert (int(outcome.accepted), int(outcome.next_token)) == (0, 1)


@pytest.mark.parametrize("p_row", [[0.0, 1.0, 0.0], [0.2, 0.5, 0.3]])
def test_L9_a_forced_rejection_where_p_equals_q_falls_back_to_p(p_row):
    p, chance = torch.tensor([p_row, p_row]), ForcedRejection()
    outcome = verify(torch.tensor([1]), p[:1], p, chance)
    assert chance.drawn_from.tolist() == p[0].tolist()
    assert p_row[int(outcome.next_token)] > 0


@pytest.mark.parametrize("q_row", [[0.0, 0.0, 1.0], [0.3, 0.3, 0.4], None])
def test_L10_a_forced_rejection_of_the_targets_one_token_recovers_that_token(q_row):
    p = torch.tensor([[0.0, 0.0, 1.0], [0.0, 0.0, 1.0]])
    q = None if q_row is None else torch.tensor([q_row])
    assert int(verify(torch.tensor([2]), q, p, ForcedRejection()).next_token) == 2


@pytest.mark.parametrize("K", [0, 4])
def test_L11_temperature_is_really_applied(K, pair_of):
    pair = pair_of(TableModel([0.5, 0.5]), TableModel([0.8, 0.2]))
    ones = sum(speculative(pair, [0], max_new_tokens=1000, K=K, seed=1).tokens)
    assert 437 < ones < 563  # four standard deviations
    cold = pair_of(TableModel([0.6, 0.4]), TableModel([0.8, 0.2]))
    out = speculative(cold, [0], max_new_tokens=1000, K=K, sampling=Sampling(temperature=0.5), seed=1)
    assert 248 < sum(out.tokens) < 367  # .16 / .52 = .308 of them


def test_L12_acceptance_is_the_overlap_and_p_of_the_token_for_a_point_mass(fixed_draft):
    p, q = [0.6, 0.2, 0.1, 0.1], [0.7, 0.2, 0.05, 0.05]
    acceptances = []
    for drafter in (ModelDrafter(TableModel(q), 4), fixed_draft([0])):
        law = law_of_output(TableModel(p), drafter, 1, K=1, show=lambda rounds: rounds[0].accepted)
        acceptances.append(sum(chance for (_, accepted), chance in law.items() if accepted))
    assert acceptances == pytest.approx([0.9, 0.6], abs=1e-12)
    assert float(overlap(torch.tensor(p), torch.tensor(q))) == pytest.approx(0.9)


# Greedy verification --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("draft", "argmaxes", "output"),
    [
        ([1, 2, 3], [1, 2, 3, 4], [1, 2, 3, 4]),
        ([1, 2, 3], [1, 5, 3, 4], [1, 5]),
        ([], [5], [5]),
        ([1, 2, 3], [0, 2, 3, 4], [0]),
    ],
)
@pytest.mark.parametrize("report", ["one-hot q", "no q"])
def test_greedy_verification_keeps_what_matches_and_adds_the_targets_token(draft, argmaxes, output, report):
    rows = torch.eye(6)
    q = rows[torch.tensor(draft, dtype=torch.long)] if report == "one-hot q" else None
    for seed in range(10):
        outcome = verify(torch.tensor(draft, dtype=torch.long), q, rows[argmaxes], TorchRandomness.seeded(seed))
        assert [*draft[: int(outcome.accepted)], int(outcome.next_token)] == output


# Stops and lengths ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [4, 5, 8, 16])
def test_S1_an_end_token_inside_a_block_stops_where_plain_decoding_stops(K, chain, pair_of):
    said = list(range(10, 30))
    doubtful = [*said[:5], 0, *said[6:]]  # the draft is wrong about one token
    pair = pair_of(chain([1, *said], 31), chain([1, *doubtful], 31))
    options = {"max_new_tokens": 20, "sampling": GREEDY, "eos_token_id": said[7]}
    plain, fast = autoregressive(pair, [1], **options), speculative(pair, [1], K=K, **options)
    assert fast.tokens == plain.tokens == said[:8]
    assert fast.finish_reason == plain.finish_reason == "stop"


@pytest.mark.parametrize("K", [4, 7, 16])
def test_S1_the_same_with_gpt2(K, pair_of):
    pair = pair_of(tiny_gpt2(1), tiny_gpt2(1, layers=1))
    end = autoregressive(pair, [3, 4], max_new_tokens=8, sampling=GREEDY).tokens[7]
    options = {"max_new_tokens": 40, "sampling": GREEDY, "eos_token_id": end}
    plain, fast = autoregressive(pair, [3, 4], **options), speculative(pair, [3, 4], K=K, **options)
    assert fast.tokens == plain.tokens
    assert fast.tokens.index(end) == len(fast.tokens) - 1 <= 7


@pytest.mark.parametrize("ends", [[4, 2], [2, 4]])
def test_S2_the_earliest_position_ends_the_output_not_the_first_id_listed(ends, chain, pair_of):
    model = chain([0, 1, 2, 3, 4], 5)
    out = speculative(pair_of(model, model), [0], K=4, max_new_tokens=4, sampling=GREEDY, eos_token_id=ends)
    assert (out.tokens, out.finish_reason) == ([1, 2], "stop")


@pytest.mark.parametrize("K", range(4))
def test_S3_exactly_the_number_of_tokens_that_was_asked_for(K, pair_of, random_table):
    pair = pair_of(TableModel(random_table(4, 4, seed=5)), TableModel(random_table(4, 4, seed=6)))
    for wanted in range(K + 3):
        for seed in range(5):
            out = speculative(pair, [0], K=K, max_new_tokens=wanted, seed=seed)
            assert len(out.tokens) == len(out.origins) == wanted
            assert out.finish_reason == "length"
            assert out.alpha is None or 0 <= out.alpha <= 1
            assert out.acceptance_rate is None or 0 <= out.acceptance_rate <= 1
            assert (out.tokens_per_round is None) == (wanted == 0)
            if wanted <= 1 or K == 0:
                assert (out.alpha, out.acceptance_rate) == (None, None)  # nothing was drafted


def test_S4_the_output_ends_at_the_stop_before_its_length(chain, pair_of):
    STOP = 12
    model = chain([1, 10, 11, STOP, 20, 21, 22], 23)
    for K in range(6):
        out = speculative(pair_of(model, model), [1], K=K, max_new_tokens=5, sampling=GREEDY, eos_token_id=STOP)
        assert (out.tokens, out.finish_reason) == ([10, 11, STOP], "stop")


def test_S4_a_stop_on_the_very_last_token_is_still_a_stop(chain, pair_of):
    model = chain([1, 10, 11, 12], 13)
    for K in range(4):
        out = speculative(pair_of(model, model), [1], K=K, max_new_tokens=3, sampling=GREEDY, eos_token_id=12)
        assert (out.tokens, out.finish_reason) == ([10, 11, 12], "stop")


def test_S5_tokens_behind_the_stop_are_not_counted(chain, pair_of):
    model = chain([0, 1, 2, 3, 4, 5, 6], 7)  # drafted and verified: 1, 2, EOS = 3, 4, 5, and a bonus 6
    out = speculative(pair_of(model, model), [0], K=5, max_new_tokens=50, sampling=GREEDY, eos_token_id=3)
    assert out.tokens == [1, 2, 3]
    (only,) = out.rounds
    assert (only.tokens, only.accepted, only.rejected) == ((1, 2, 3), 3, False)
    assert out.origins == ["accepted"] * 3
    assert (out.statistics.tokens, out.statistics.accepted, out.statistics.rejections) == (3, 3, 0)
    assert (out.tokens_per_round, out.alpha) == (3, 1)


@pytest.mark.parametrize("K", [0, 1, 5, 20])
def test_S6_the_context_is_used_to_its_end_and_not_beyond(K, pair_of):
    pair = pair_of(tiny_gpt2(1, positions=16), tiny_gpt2(1, layers=1, positions=16))
    prompt = [1, 2, 3, 4, 5, 6]
    out = speculative(pair, prompt, K=K, max_new_tokens=10, sampling=GREEDY)
    assert (len(out.tokens), out.finish_reason) == (10, "length")
    # 16 tokens can be fed and each feeds one more out of the model: 11 new tokens at most.
    out = speculative(pair, prompt, K=K, max_new_tokens=50, sampling=GREEDY)
    assert (len(out.tokens), out.finish_reason) == (11, "context")
    assert out.tokens == autoregressive(pair, prompt, max_new_tokens=50, sampling=GREEDY).tokens
    out = speculative(pair, list(range(16)), K=K, max_new_tokens=50, sampling=GREEDY)
    assert (len(out.tokens), out.finish_reason) == (1, "context")


def test_S6_a_prompt_longer_than_the_context_is_refused_before_any_work(pair_of, spy_on):
    target = spy_on(tiny_gpt2(1, positions=16))
    with pytest.raises(ValueError, match=r"17 tokens.* 16"):
        speculative(pair_of(target, tiny_gpt2(2, positions=16)), list(range(17)), max_new_tokens=3)
    assert target.fed == []


HELLO = [b"<s>", b"Hel", b"lo,", b" wo", b"rld", b"! A", b"nd ", b"so ", b"on.", b"</s>"]


@pytest.mark.parametrize("K", [0, 1, 3, 5, 8])
@pytest.mark.parametrize(
    ("stop_strings", "kept"),
    [("o, w", 3), (["zzz", "! "], 5), (["on.", "d"], 4), ("Hel", 1), (["nowhere"], 9), ("so on.", 8)],
)
def test_S7_tokens_text_statistics_and_stream_end_where_the_stop_string_does(
    stop_strings, kept, K, chain, pair_of, tokenizer_of
):
    model, tokenizer = chain(range(10), 10), tokenizer_of(HELLO)
    rounds, out = drain(
        stream(
            pair_of(model, model, tokenizer), [0], K=K, max_new_tokens=20, sampling=GREEDY, stop_strings=stop_strings
        )
    )
    said = list(range(1, kept + 1))
    assert out.tokens == said
    assert out.text == tokenizer.decode(said, skip_special_tokens=True)
    assert out.finish_reason == "stop"
    assert sum((round.tokens for round in rounds), ()) == tuple(said)
    assert "".join(round.text for round in rounds) == out.text
    assert out.statistics.tokens == len(out.origins) == kept


def drain(rounds):
    """The rounds that a stream yields, and the result that it returns."""
    seen = []
    while True:
        try:
            seen.append(next(rounds))
        except StopIteration as end:
            return seen, end.value


@pytest.mark.parametrize("model", ["table", "gpt2"])
def test_S8_a_draft_that_is_the_target_is_accepted_whole(model, pair_of, random_table):
    model = TableModel(random_table(5, 5, seed=7)) if model == "table" else tiny_gpt2(1)
    pair = pair_of(model, model)
    out = speculative(pair, [0], K=4, max_new_tokens=4, sampling=GREEDY)
    assert out.tokens == autoregressive(pair, [0], max_new_tokens=4, sampling=GREEDY).tokens
    assert (len(out.tokens), out.acceptance_rate, out.alpha, len(out.rounds)) == (4, 1.0, 1.0, 1)


PIECES = [
    b"<s>",
    b"na",
    b"\xc3",
    b"\xaf",
    b"ve ",
    b"caf\xc3",
    b"\xa9 ",
    b"\xe2\x82",
    b"\xac",
    b"\xf0\x9f",
    b"\x98",
    b"\x80",
    b"</s>",
]


@pytest.mark.parametrize("K", range(6))
@pytest.mark.parametrize("wrong_about", [(), (3, 8), (1, 2, 4, 6, 7)])
def test_S9_the_stream_is_the_result_every_token_once_and_no_half_characters(
    wrong_about, K, chain, pair_of, tokenizer_of
):
    vocab = len(PIECES)
    draft = chain([0 if i in wrong_about else i for i in range(vocab)], vocab)
    pair = pair_of(chain(range(vocab), vocab), draft, tokenizer_of(PIECES))
    rounds, out = drain(stream(pair, [0], K=K, max_new_tokens=50, sampling=GREEDY))
    assert [token for round in rounds for token in round.tokens] == out.tokens == list(range(1, vocab))
    assert "".join(round.text for round in rounds) == out.text == "naïve café €😀"
    assert not any("\ufffd" in round.text for round in rounds)
    assert out.rounds == rounds


def test_S9_an_output_that_ends_within_a_character_shows_all_its_bytes(chain, pair_of, tokenizer_of):
    model = chain(range(len(PIECES)), len(PIECES))
    pair = pair_of(model, model, tokenizer_of(PIECES))
    out = autoregressive(pair, [0], max_new_tokens=5, sampling=GREEDY)
    assert out.text == pair.tokenizer.decode(out.tokens) == "naïve caf\ufffd"


@pytest.mark.parametrize("K", [1, 3, 6])
def test_S10_the_drafter_is_never_asked_for_more_than_can_be_used(K, pair_of, random_table):
    table = random_table(4, 4, seed=8)
    asked = []

    class Asked(ModelDrafter):
        def propose(self, context, K, sampling, randomness):
            asked.append((len(context), K))
            return super().propose(context, K, sampling, randomness)

    for seed in range(10):
        asked.clear()
        out = speculative(
            pair_of(TableModel(table), None),
            [0, 1],
            K=K,
            max_new_tokens=9,
            drafter=Asked(TableModel(table), 4),
            seed=seed,
        )
        assert len(out.tokens) == 9
        assert all(1 <= wanted == min(K, 2 + 9 - length - 1) for length, wanted in asked)


# Caches ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [1, 3, 6])
def test_C1_a_prompt_of_one_token(K, pair_of):
    pair = pair_of(tiny_gpt2(1), tiny_gpt2(1, layers=1))
    for token in (0, 17, 49):
        plain = autoregressive(pair, [token], max_new_tokens=30, sampling=GREEDY)
        assert speculative(pair, [token], K=K, max_new_tokens=30, sampling=GREEDY).tokens == plain.tokens


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()])
@pytest.mark.parametrize("n", [197, 198, 199, 200])
def test_C2_a_draft_that_is_the_target_takes_a_pass_for_every_K_plus_one_tokens(n, sampling, pair_of, random_table):
    model = TableModel(random_table(4, 4, seed=9))
    out = speculative(pair_of(model, model), [0], K=3, max_new_tokens=n, sampling=sampling, seed=0)
    assert (out.acceptance_rate, len(out.rounds)) == (1.0, math.ceil(n / 4))


def test_C2_the_same_with_gpt2(pair_of):
    model = tiny_gpt2(1)
    out = speculative(pair_of(model, model), [0], K=3, max_new_tokens=200, sampling=GREEDY)
    assert (len(out.tokens), out.acceptance_rate, len(out.rounds)) == (200, 1.0, 50)


def spied_run(spy_on, K, seed, max_new_tokens=40):
    """A sampled run of two GPT-2s that agree now and then; (target, draft, prompt, per round: the state after it)."""
    target, draft = spy_on(tiny_gpt2(1)), spy_on(tiny_gpt2(1, layers=1))
    prompt, states, length = [5, 6, 7], [], 3
    for round in decode(
        target,
        ModelDrafter(draft, 50),
        prompt,
        max_new_tokens=max_new_tokens,
        K=K,
        sampling=Sampling(temperature=0.7),
        randomness=TorchRandomness.seeded(seed),
    ):
        length += len(round.tokens)
        states.append((round, length, target.caches[-1].length, draft.caches[-1].length))
    return target, draft, prompt, states


@pytest.mark.parametrize("K", [1, 3, 5])
def test_C3_after_each_round_the_caches_lack_only_what_was_not_fed(K, spy_on):
    kinds = set()
    for seed in range(5):
        *_, states = spied_run(spy_on, K, seed)
        for round, length, target_length, draft_length in states:
            assert target_length == length - 1
            everything_kept = len(round.draft_tokens) > 0 and round.accepted == len(round.draft_tokens)
            kinds.add(everything_kept)
            if round.draft_tokens:  # fully accepted: the last draft token was never fed to the draft
                assert draft_length == length - (2 if everything_kept else 1)
    assert kinds == {True, False}


def test_C4_a_rollback_to_the_present_length_keeps_everything():
    model, tokens = tiny_gpt2(1), torch.tensor([[4, 8, 15, 16]])
    rolled, plain = model.new_cache(8), model.new_cache(8)
    model(tokens, rolled), model(tokens, plain)
    rolled.rollback(4)
    assert rolled.length == 4
    next_token = torch.tensor([[23]])
    assert torch.equal(model(next_token, rolled), model(next_token, plain))
    table_cache = TableModel([0.5, 0.5]).new_cache(8)
    TableModel([0.5, 0.5])(torch.zeros(1, 4, dtype=torch.long), table_cache)
    table_cache.rollback(4)
    assert table_cache.length == 4


@pytest.mark.parametrize("K", [1, 4])
def test_C5_every_forward_receives_exactly_the_tokens_that_are_not_cached(K, spy_on):
    for seed in range(5):
        target, draft, prompt, states = spied_run(spy_on, K, seed)
        committed, drafts = list(prompt), iter(draft.fed)
        draft_cached = 0
        for (round, _, _, draft_length), (cached, fed) in zip(states, target.fed, strict=True):
            assert cached == (len(committed) - 1 if committed != prompt else 0)
            assert fed == committed[cached:] + list(round.draft_tokens)
            if round.draft_tokens:
                # The draft first catches up with what was committed, then is fed its own tokens but the last.
                expected = [committed[draft_cached:], *([token] for token in round.draft_tokens[:-1])]
                assert [next(drafts)[1] for _ in round.draft_tokens] == expected
            committed += round.tokens
            draft_cached = draft_length
        assert next(drafts, None) is None


def test_C6_a_long_run_after_a_short_one_is_as_on_fresh_objects(pair_of):
    def fresh():
        return pair_of(tiny_gpt2(1), tiny_gpt2(1, layers=1))

    used = fresh()
    drafter = ModelDrafter(used.draft, 50)
    speculative(used, [9, 9, 9, 9], K=5, max_new_tokens=3, seed=1, drafter=drafter)
    speculative(used, [1], K=2, max_new_tokens=30, seed=1, drafter=drafter)
    again = speculative(used, [7, 8], K=4, max_new_tokens=60, seed=2, drafter=drafter)
    first = speculative(fresh(), [7, 8], K=4, max_new_tokens=60, seed=2)
    assert again.tokens == first.tokens
    assert [r.draft_tokens for r in again.rounds] == [r.draft_tokens for r in first.rounds]


# Vocabulary and context -----------------------------------------------------------------------------------------------


def test_V2_a_padded_draft_vocabulary_is_sliced_and_renormalised(random_table):
    p, padded = random_table(3, 3, seed=10), random_table(5, 5, seed=11)
    drafter = ModelDrafter(TableModel(padded), 3)
    law = law_of_output(TableModel(p), drafter, 2, K=2)
    assert law == pytest.approx(
        {((a, b), None): float(p[0, a] * p[a, b]) for a in range(3) for b in range(3)}, abs=1e-12
    )
    drafter.start(4)
    draft = drafter.propose(torch.tensor([0]), 1, Sampling(), TorchRandomness.seeded(0))
    torch.testing.assert_close(draft.probs, padded[:1, :3] / padded[:1, :3].sum())


def test_V2_the_same_with_gpt2(pair_of):
    pair = pair_of(tiny_gpt2(1, vocab=50), tiny_gpt2(2, vocab=64, layers=1))
    plain = autoregressive(pair, [3], max_new_tokens=30, sampling=GREEDY)
    assert speculative(pair, [3], K=4, max_new_tokens=30, sampling=GREEDY).tokens == plain.tokens
    out = speculative(pair, [3], K=4, max_new_tokens=100, seed=0)
    assert all(token < 50 for round in out.rounds for token in round.draft_tokens)


@pytest.mark.parametrize("context", [[0], [0, 2], [2, 1]])
def test_V2_a_draft_with_fewer_ids_than_the_target_leaves_the_law_alone(context, random_table):
    p, smaller = random_table(3, 3, seed=12), random_table(2, 2, seed=13)  # id 2 is unknown to the draft

    def play(randomness):
        drafter, tokens = ModelDrafter(TableModel(smaller), 3), ()
        for round in decode(
            TableModel(p), drafter, context, max_new_tokens=4, K=2, sampling=Sampling(), randomness=randomness
        ):
            assert 2 not in round.draft_tokens
            tokens += round.tokens
            if len(tokens) >= 2:
                return tokens[:2]

    last = context[-1]
    expected = {(a, b): float(p[last, a] * p[a, b]) for a in range(3) for b in range(3)}
    assert enumerate_outcomes(play) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("K", [1, 4, 7])
def test_V3_decoding_goes_on_when_the_draft_cannot_hold_the_context(K, pair_of):
    pair = pair_of(tiny_gpt2(1, positions=64), tiny_gpt2(1, layers=1, positions=16))
    prompt = list(range(12))
    out = speculative(pair, prompt, K=K, max_new_tokens=20, sampling=GREEDY)
    assert out.tokens == autoregressive(pair, prompt, max_new_tokens=20, sampling=GREEDY).tokens
    assert len(out.tokens) == 20
    # The draft can be fed 16 tokens, so it proposes up to the 17th: 5 of the 20. Asked for 7, it falls short at once.
    assert out.draft_stopped_at == 0 if K == 7 else 0 < out.draft_stopped_at <= 5
    assert not any(round.draft_tokens for round in out.rounds[-3:])


def test_V3_a_prompt_too_long_for_the_draft_is_decoded_without_it(pair_of):
    pair = pair_of(tiny_gpt2(1, positions=64), tiny_gpt2(1, layers=1, positions=16))
    prompt = list(range(30))
    out = speculative(pair, prompt, K=4, max_new_tokens=10, sampling=GREEDY)
    assert out.tokens == autoregressive(pair, prompt, max_new_tokens=10, sampling=GREEDY).tokens
    assert (out.draft_stopped_at, out.alpha) == (0, None)


def test_V3_a_draft_that_lasts_is_not_reported_as_stopped(pair_of):
    pair = pair_of(tiny_gpt2(1, positions=64), tiny_gpt2(1, layers=1, positions=64))
    assert speculative(pair, [1], K=4, max_new_tokens=20, sampling=GREEDY).draft_stopped_at is None


@pytest.mark.parametrize("K", range(4))
def test_V4_id_zero_is_a_token_like_any_other(K, pair_of):
    zero, other = TableModel([1.0, 0.0, 0.0]), TableModel([0.2, 0.3, 0.5])
    for target, draft in [(zero, zero), (zero, other)]:
        for sampling in (GREEDY, Sampling()):
            out = speculative(pair_of(target, draft), [0], K=K, max_new_tokens=7, sampling=sampling, seed=0)
            assert out.tokens == [0] * 7
    stopped = speculative(pair_of(zero, zero), [0], K=K, max_new_tokens=7, eos_token_id=0)
    assert (stopped.tokens, stopped.finish_reason) == ([0], "stop")


def test_V5_models_and_their_configs_are_left_as_they_were(pair_of):
    torch.manual_seed(0)
    config = HFGPT2Config(vocab_size=50, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    users_model = GPT2LMHeadModel(config)
    ours = tiny_gpt2(1)
    before = [copy.deepcopy(state(model)) for model in (users_model, ours)]
    pair = pair_of(ours, HFModel(users_model))
    speculative(pair, [1, 2], K=3, max_new_tokens=20, sampling=Sampling(0.8, 10, 0.9), seed=0)
    speculative(pair_of(pair.draft, pair.target), [1, 2], K=3, max_new_tokens=20, sampling=GREEDY)
    for model, (settings, weights) in zip((users_model, ours), before, strict=True):
        assert state(model)[0] == settings
        assert all(torch.equal(weights[name], tensor) for name, tensor in model.state_dict().items())


def state(model):
    settings = (
        [model.config.to_dict(), model.generation_config.to_dict()]
        if hasattr(model, "generation_config")
        else model.config
    )
    return settings, model.state_dict()


# Seeds and statistics -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("K", [0, 4])
def test_B3_a_seed_repeats_the_tokens_and_leaves_the_global_generators_alone(K, pair_of, global_generators):
    pair = pair_of(tiny_gpt2(1), tiny_gpt2(1, layers=1))
    global_generators.seed(7)
    before = global_generators.state()
    first = speculative(pair, [1], K=K, max_new_tokens=40, seed=3)
    assert global_generators.state() == before
    global_generators.seed(8)
    assert speculative(pair, [1], K=K, max_new_tokens=40, seed=3).tokens == first.tokens
    assert speculative(pair, [1], K=K, max_new_tokens=40, seed=4).tokens != first.tokens
    assert (
        speculative(pair, [1], K=K, max_new_tokens=40).tokens != speculative(pair, [1], K=K, max_new_tokens=40).tokens
    )


def test_B4_acceptances_behind_the_first_rejection_do_not_count():
    # Certain to be accepted, rejected, accepted, accepted.
    p = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [1.0, 0.0], [1.0, 0.0]])
    outcome = verify(torch.tensor([0, 0, 0, 0]), torch.full((4, 2), 0.5), p, TorchRandomness.seeded(0))
    assert int(outcome.accepted) == 1


def run_of(*rounds):
    """A result with rounds of (drafted, accepted); a round that kept not all ended in a rejection."""
    result = Result([0])
    for drafted, accepted in rounds:
        origins = ("accepted",) * accepted + ("bonus" if accepted == drafted else "recovered",)
        result.add(Round((1,) * drafted, (1,) * (accepted + 1), origins, 0.1, 0.2, 0.0))
    return result


def test_B5_rates_over_several_runs_are_pooled_and_not_a_mean_of_rates():
    long, short = run_of((4, 4), (4, 4), (4, 3)), run_of((4, 0))
    pooled = Statistics.pooled([long, short])
    assert (pooled.rounds, pooled.drafted, pooled.accepted, pooled.rejections, pooled.tokens) == (4, 16, 11, 2, 15)
    assert pooled.acceptance_rate == 11 / 16  # the mean of 11/12 and 0 would be 11/24
    assert pooled.alpha == 11 / 13  # accepted over accepted and rejected: what came after a rejection was never tried
    assert pooled.tokens_per_round == 15 / 4
    assert (long.acceptance_rate, short.acceptance_rate, short.alpha) == (11 / 12, 0.0, 0.0)


def test_B5_without_any_round_there_is_no_rate():
    empty = Statistics.pooled([])
    assert (empty.alpha, empty.acceptance_rate, empty.tokens_per_round) == (None, None, None)
