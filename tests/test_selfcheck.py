"""The losslessness check: passes what is right at the stated rate, catches what is wrong, says when it cannot tell."""

import math

import pytest
import torch

from specdec_lite import examine, selfcheck
from specdec_lite.distributions import Sampling
from specdec_lite.engines import Batch, HuggingFace, Loop, transformers_model
from specdec_lite.gallery import WRONG_RULES
from specdec_lite.gpt2 import GPT2, GPT2Config
from specdec_lite.hf import HFModel
from specdec_lite.lawtest import (
    FALSE_ALARM,
    ChiSquare,
    LawTest,
    Rounding,
    check_law,
    chi_square_tail,
    coarse_buckets,
    divergence,
    interval,
)
from specdec_lite.pairs import Pair, load_pair
from specdec_lite.record import Statistics
from specdec_lite.selfcheck import check, table
from specdec_lite.table import TableCache, TableModel

VOCAB = 5
PROMPTS = [[1], [0, 2], [4, 3, 0]]
QUICK = {"prompts": PROMPTS, "max_new_tokens": 12}


def make_pair():
    """Two bigram tables that differ clearly; some of the draft's tokens are sure ones."""
    models = []
    for seed in (1, 2):
        weights = (
            torch.rand(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3 + 0.02
        )
        models.append(TableModel(weights / weights.sum(-1, keepdim=True)))
    return Pair("tables", *models, None)


@pytest.fixture
def pair():
    return make_pair()


class Sampler:
    """An engine that draws from a bigram table, all prompts at once. It stands in for anything that is not ours."""

    name = "sampler"

    def __init__(self, laws):
        self.laws = laws

    def generate_many(self, prompts, *, max_new_tokens, sampling, seeds):
        last = torch.tensor([prompt[-1] for prompt in prompts])
        generator = torch.Generator().manual_seed(seeds[0])
        columns = []
        for _ in range(max_new_tokens):
            p = sampling.probs(self.laws.log())[last]
            last = torch.multinomial(p, 1, generator=generator)[:, 0] if sampling.temperature else p.argmax(-1)
            columns.append(last)
        return torch.stack(columns, 1).tolist()

    def generate(self, prompt, *, seed, **options):
        return self.generate_many([prompt], seeds=[seed], **options)[0]

    def draw(self, draws, seed, n=3, sampling=Sampling()):
        """Draws of the law test, made in one go."""
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(draws)]
        return torch.tensor(self.generate_many(prompts, max_new_tokens=n, sampling=sampling, seeds=[seed]))


def laws_of(model):
    return model.log_table[0].exp()


def row(report, name):
    return next(row for row in report.rows if row.name == name)


# The library itself, and its wrong rules


def test_the_shipped_loop_passes_every_row(planted):
    report, _ = planted
    assert report.exit_code == 0, table(report)
    assert report.verdict.startswith("lossless")
    assert [r.name for r in report.rows if not r.passed] == ["tokenizers"]  # tables have none
    assert {"law of token 1", "law of token 2", "law of token 3", "law"} <= {r.name for r in report.rows}
    assert "3 of 3 prompts" in row(report, "greedy").detail


@pytest.mark.parametrize("sampling", [Sampling(0.7), Sampling(top_k=4), Sampling(1.3, top_p=0.8)])
def test_the_shipped_loop_passes_under_every_sampling(pair, sampling):
    report = check(pair, draws=450, sampling=sampling, **QUICK)
    assert report.exit_code == 0, table(report)


@pytest.fixture(scope="module")
def planted():
    """(report, progress calls) of the shipped loop with all wrong rules run in its place."""
    calls = []
    report = check(make_pair(), draws=1500, planted=True, progress=lambda *state: calls.append(state), **QUICK)
    return report, calls


@pytest.mark.parametrize("name", WRONG_RULES)
def test_every_wrong_rule_is_rejected(name, planted):
    found = {r.name: r for r in planted[0].planted}[name]
    assert found.passed, found.detail
    assert found.p_value < FALSE_ALARM


def test_planted_rules_leave_the_verdict_alone_and_are_shown(planted):
    report, calls = planted
    assert report.exit_code == 0
    assert "wrong rules" in table(report)
    assert any("no_residual" in what for _, _, what in calls)


def test_a_loop_with_a_wrong_rule_is_not_lossless(pair):
    report = check(pair, Loop(pair, 2, verify=WRONG_RULES["no_residual"].verify), draws=900, **QUICK)
    assert report.exit_code == 1
    assert report.p_value < FALSE_ALARM
    assert row(report, "law").passed is False
    assert row(report, "greedy").passed  # at temperature 0 this slip does no harm
    assert report.verdict.startswith("not lossless: law of token 1")


def test_a_wrong_rule_that_does_no_harm_is_called_not_visible(pair, monkeypatch):
    two = {name: WRONG_RULES[name] for name in ("no_residual", "argmax_match")}
    monkeypatch.setattr(selfcheck, "WRONG_RULES", two)
    same = Pair("same", pair.target, pair.target, None)  # p = q: a rejection never happens
    report = check(same, draws=600, planted=True, **QUICK)
    harmless, harmful = report.planted
    assert harmless.passed is None
    assert "not visible" in harmless.detail
    assert harmful.passed
    assert report.exit_code == 0


# The false-alarm rate, and the power that is stated


def within_binomial(count, trials, chance):
    return abs(count - trials * chance) < 3.3 * math.sqrt(trials * chance * (1 - chance))


def test_false_alarms_are_as_frequent_as_stated(pair):
    engine, trials = Sampler(laws_of(pair.target)), 200
    tests = [check_law(pair, PROMPTS, engine.draw(900, seed), Sampling(), seed=seed) for seed in range(trials)]
    p_values = torch.tensor([[each.p_value for each in test.tests] for test in tests])
    assert p_values.shape == (trials, 6)
    for level in (0.05, 0.3, 0.7):
        assert all(within_binomial(count, trials, level) for count in (p_values < level).sum(0).tolist()), level
    together = sum(test.p_value < 0.05 for test in tests)
    assert together < trials * 0.05 + 3.3 * math.sqrt(trials * 0.05)


def shifted(laws, amount):
    """``laws`` with this much mass moved from the likelier half of the vocabulary to the other."""
    rare = laws * (laws.argsort(-1).argsort(-1) < VOCAB // 2)
    common = laws - rare
    return laws + amount * (rare / rare.sum(-1, keepdim=True) - common / common.sum(-1, keepdim=True))


def test_a_shift_of_the_stated_size_is_seen_as_often_as_stated(pair):
    laws, draws = laws_of(pair.target), 3000
    stated = check_law(pair, PROMPTS, Sampler(laws).draw(draws, 0), Sampling()).visible_shift
    moved = shifted(laws, stated)
    assert ((moved - laws).abs().sum(-1) / 2).tolist() == pytest.approx([stated] * VOCAB)
    found = [check_law(pair, PROMPTS, Sampler(moved).draw(draws, s), Sampling()).p_value < 1e-3 for s in range(40)]
    assert sum(found) >= 39


def test_more_draws_see_smaller_shifts(pair):
    def visible(draws):
        return ChiSquare(2, "p", draws, 0.0, 9).visible_shift(1e-3 / 6)

    assert visible(20_000) == pytest.approx(visible(5000) / 2)
    assert 0.02 < visible(20_000) < 0.03


@pytest.mark.parametrize(
    ("statistic", "df", "tail"), [(3.841459, 1, 0.05), (18.307038, 10, 0.05), (27.877165, 9, 1e-3)]
)
def test_the_tail_of_the_chi_square_is_that_of_the_tables(statistic, df, tail):
    assert chi_square_tail(statistic, df) == pytest.approx(tail, rel=1e-5)


def test_the_noncentral_tail_is_that_of_shifted_squares():
    normal = torch.randn(200_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    squares = ((normal + torch.tensor([2.0, 1.0, 0.0])) ** 2).sum(-1)
    for statistic in (2.0, 8.0, 20.0):
        assert chi_square_tail(statistic, 3, 5.0) == pytest.approx(
            float((squares > statistic).double().mean()), abs=0.005
        )


def test_tests_together_reject_at_the_total_rate():
    test = LawTest(tuple(ChiSquare(i, "p", 100, 30.0, 9) for i in (1, 2)))
    assert test.level == FALSE_ALARM / 2
    assert test.p_value == pytest.approx(2 * chi_square_tail(30.0, 9))
    assert LawTest(test.tests, "token 3").p_value == 0


# The parts of the law test, by hand


def test_buckets_follow_the_order_and_each_holds_enough():
    p = torch.tensor([0.5, 0.05, 0.05, 0.3, 0.1], dtype=torch.float64)
    assert coarse_buckets(p, p, 0.1).tolist() == [3, 0, 0, 2, 1]
    assert coarse_buckets(p, -p, 0.15).tolist() == [0, 2, 2, 1, 2]
    assert coarse_buckets(p, -p, 0.25).tolist() == [0, 1, 1, 1, 1]  # what is left over joins the last one
    assert coarse_buckets(p, p, 2.0).tolist() == [0] * 5


def test_the_transform_places_a_token_behind_all_of_lower_key():
    p = torch.tensor([[[0.5, 0.1, 0.1, 0.3]]], dtype=torch.float64)
    for token, below, mass in [(0, 0.5, 0.5), (3, 0.2, 0.3), (1, 0.0, 0.2), (2, 0.0, 0.2)]:  # 1 and 2 tie
        found = interval(p, p, torch.tensor([[token]]))
        assert [float(x) for x in found] == pytest.approx([below, mass])


def test_the_order_by_ratio_sees_what_the_order_by_p_cannot():
    """Where p is flat its order says nothing; a draw that leans towards the draft is still seen."""
    p, q = [0.25] * 4, [0.1, 0.4, 0.1, 0.4]
    pair = Pair("flat", TableModel(p), TableModel(q), None)
    leaning = torch.tensor([[0.2, 0.3, 0.2, 0.3]] * 4)
    test = check_law(pair, PROMPTS[:1], Sampler(leaning).draw(6000, 0)[::3], Sampling())
    by_order = {each.order: each.p_value for each in test.tests if each.position == 2}
    assert by_order["p"] > 0.01
    assert by_order["p/q"] < 1e-4


def test_laws_are_scored_the_same_in_blocks_of_any_size_and_memory_is_bounded(pair, monkeypatch):
    tokens, rows = Sampler(laws_of(pair.target)).draw(600, 0), []
    monkeypatch.setattr(pair.target, "new_cache", lambda capacity, n: rows.append(n) or TableCache())
    whole = check_law(pair, PROMPTS, tokens, Sampling())
    assert max(rows) == 64  # at most
    monkeypatch.setattr("specdec_lite.lawtest.MOST_NUMBERS", 7 * 3 * VOCAB)
    rows.clear()
    assert check_law(pair, PROMPTS, tokens, Sampling()) == whole
    assert rows == [7, 7, 7]


def test_a_draft_that_is_unknown_or_too_short_leaves_the_order_by_p(pair):
    tokens = Sampler(laws_of(pair.target)).draw(600, 0)
    short = TableModel(laws_of(pair.draft), context=3)
    for draft in (None, short):
        test = check_law(Pair("x", pair.target, draft, None), PROMPTS[2:], tokens[2::3], Sampling())
        assert {each.order for each in test.tests} == {"p"}


def test_a_token_outside_of_top_k_is_named_at_once(pair):
    engine = Sampler(laws_of(pair.target))
    tokens = engine.draw(600, 0, sampling=Sampling(top_k=3))
    assert check_law(pair, PROMPTS, tokens, Sampling(top_k=3)).impossible is None
    rarest = int(laws_of(pair.target)[PROMPTS[0][-1]].argmin())
    tokens[0, 0] = rarest
    test = check_law(pair, PROMPTS, tokens, Sampling(top_k=3))
    assert test.impossible == f"new token 1 of prompt 1 was {rarest}, of probability 0"
    assert test.p_value == 0


def test_an_engine_that_ignores_top_k_is_caught_by_its_first_impossible_token(pair):
    free = Sampler(laws_of(pair.target))

    def ignores(prompt, *, sampling, **options):
        return free.generate(prompt, sampling=Sampling() if sampling.temperature else sampling, **options)

    report = check(pair, ignores, draws=300, sampling=Sampling(top_k=2), **QUICK)
    assert report.exit_code == 1
    assert "of probability 0" in row(report, "law").detail


def test_rounding_may_let_in_a_token_at_the_edge_of_top_k_and_no_other():
    target = TableModel([0.4, 0.3, 0.2, 0.1])
    gap = math.log(0.3 / 0.2)
    tokens = torch.zeros(3, 2, dtype=torch.long)
    tokens[1, 1] = 2
    pair = Pair("edge", target, None, None)
    for noise, named in [(0.0, True), (0.4 * gap, True), (0.6 * gap, False)]:
        found = check_law(pair, [[0]], tokens, Sampling(top_k=2), rounding=Rounding(noise)).impossible
        assert (found is not None) == named
    tokens[1, 1] = 3
    assert check_law(pair, [[0]], tokens, Sampling(top_k=2), rounding=Rounding(0.6 * gap)).impossible


def test_rounding_may_let_in_the_next_token_at_the_edge_of_top_p():
    pair = Pair("edge", TableModel([0.5, 0.3, 0.2]), None, None)
    tokens = torch.tensor([[0, 0], [0, 2]])
    for noise, named in [(0.0, True), (0.01, True), (0.03, False)]:  # 0.75 is 0.05 short of what would let token 2 in
        found = check_law(pair, [[0]], tokens, Sampling(top_p=0.75), rounding=Rounding(noise)).impossible
        assert (found is not None) == named


def test_buckets_are_as_many_as_the_draws_allow(pair):
    def tests(draws):
        tokens = Sampler(laws_of(pair.target)).draw(3 * draws, 0)[::3]
        return {each.position: each.df for each in check_law(pair, PROMPTS[:1], tokens, Sampling()).tests}

    assert tests(30) == {}
    assert set(tests(60)) == {1}
    assert tests(60)[1] <= 2 < tests(600)[1]  # 20 draws are expected in each bucket, so 60 fill three
    assert tests(600) == {1: tests(600)[1], 2: 9, 3: 9}


def test_rounding_of_the_law_is_allowed_for(pair):
    """In half precision the engine's law is not quite the one that is computed here; that is no fault of the engine."""
    laws = laws_of(pair.target)
    moved = shifted(laws, 0.03)
    tokens, known = Sampler(moved).draw(20_000, 0), Rounding(law=float(divergence(laws, moved).max()))
    assert check_law(pair, PROMPTS, tokens, Sampling()).p_value < FALSE_ALARM
    assert check_law(pair, PROMPTS, tokens, Sampling(), rounding=known).p_value > 0.01


def test_the_check_hands_what_it_measured_of_rounding_to_the_law_test(pair, monkeypatch):
    laws = laws_of(pair.target)
    moved = shifted(laws, 0.1)

    def law_row():
        return row(check(pair, Sampler(moved), draws=1280, **QUICK), "law")

    assert law_row().passed is False
    monkeypatch.setattr(
        examine, "measure_rounding", lambda *arguments: Rounding(9.0, float(divergence(laws, moved).max()))
    )
    assert law_row().passed is not False


def test_the_divergence_of_two_laws_is_finite_and_bounds_what_buckets_show():
    p, other = torch.tensor([0.5, 0.3, 0.2, 0.0]), torch.tensor([0.5, 0.2, 0.2, 0.1])
    assert float(divergence(p, p)) == 0
    assert float(divergence(p, other)) == pytest.approx(2 * (0.01 / 0.5 + 0.01 / 0.1))
    assert divergence(p, other) >= divergence(p[:2] + p[2:], other[:2] + other[2:])


# Other engines


def test_a_plain_function_can_be_checked(pair):
    loop = Loop(pair, 2)

    def anything(prompt, *, max_new_tokens, sampling, seed):
        return torch.tensor(loop.generate(prompt, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed))

    report = check(pair, anything, draws=700, **QUICK)
    assert report.exit_code == 0, table(report)
    assert report.engine == "anything"
    assert row(report, "drafting").passed is None  # it does not say what it drafts; the verdict does not wait for that


def test_an_engine_that_takes_many_prompts_at_once_gets_them(pair):
    report = check(pair, Sampler(laws_of(pair.target)), draws=3000, **QUICK)
    assert report.exit_code == 0, table(report)


def test_samples_of_the_draft_are_caught_though_greedy_output_is_right(pair):
    """The case that was seen in an engine: right at temperature 0, and not at all at temperature 1."""
    right, wrong = Sampler(laws_of(pair.target)), Sampler(laws_of(pair.draft))

    def broken(prompt, *, sampling, **options):
        return (wrong if sampling.temperature else right).generate(prompt, sampling=sampling, **options)

    report = check(pair, broken, draws=900, **QUICK)
    assert report.exit_code == 1
    assert row(report, "greedy").passed
    assert report.verdict.startswith("not lossless: law of token 1")


def test_a_greedy_fault_is_named_with_its_place_and_gap(pair):
    loop = Loop(pair, 2)

    def off_by_one(prompt, *, sampling, **options):
        tokens = loop.generate(prompt, sampling=sampling, **options)
        if sampling.temperature == 0 and prompt == PROMPTS[1] and len(tokens) > 4:
            tokens[4] = (tokens[4] + 1) % VOCAB
        return tokens

    report = check(pair, off_by_one, draws=300, **QUICK)
    assert report.exit_code == 1
    assert row(report, "greedy").passed is False
    assert "prompt 2, new token 5 is not the target's" in report.verdict
    assert "identical on 2 of 3" in report.verdict


def test_a_near_tie_may_tip_and_is_shown(pair, monkeypatch):
    """Where rounding is known to move logits by 1, the second-best token within 2 of the best is no fault."""

    def runner_up(prompt, *, max_new_tokens, sampling, seed):
        tokens = list(prompt)
        for _ in range(max_new_tokens):
            p = sampling.probs(laws_of(pair.target)[tokens[-1]].log())
            second = laws_of(pair.target)[tokens[-1]].topk(2).indices[1]
            tokens.append(int(second if sampling.temperature == 0 else p.multinomial(1)))
        return tokens[len(prompt) :]

    assert row(check(pair, runner_up, draws=0, **QUICK), "greedy").passed is False
    monkeypatch.setattr(examine, "measure_rounding", lambda *arguments: Rounding(1.0))
    found = row(check(pair, runner_up, draws=0, **QUICK), "greedy")
    assert found.passed is True
    assert "near-tie" in found.detail
    assert "0 of 3" in found.detail


def test_rounding_is_what_a_block_and_single_tokens_differ_by():
    class Uneven(TableModel):
        def __call__(self, tokens, cache, last=None):
            return super().__call__(tokens, cache, last) + torch.tensor([0.25, 0]) * (tokens.shape[1] == 3)

    found = examine.measure_rounding(Uneven([0.5, 0.5]), [([0], [1, 0, 1]), ([0], [1, 0])], Sampling())
    bent = torch.tensor([0.25, 0]).softmax(0)
    assert found.logits == 0.25
    assert found.law == pytest.approx(float(divergence(bent, torch.tensor([0.5, 0.5]))) / 2)  # the mean of two texts


def test_hugging_face_assisted_generation_passes(small_gpt2s):
    report = check(small_gpt2s, HuggingFace(small_gpt2s, 1), K=1, draws=360, prompts=[[1, 2]], max_new_tokens=6)
    assert report.exit_code == 0, table(report)
    assert "accepted" in row(report, "drafting").detail
    assert row(report, "seeds").passed


@pytest.fixture
def small_gpt2s():
    """Two random GPT-2s with weights large enough for laws that are not flat."""
    config = GPT2Config(vocab_size=30, positions=32, width=16, layers=1, heads=2)
    models = [GPT2.random(config, seed=seed) for seed in (0, 1)]
    for model in models:
        model.token_embedding.weight.data *= 15
    return Pair("small", *models, None)


def test_half_precision_passes_and_what_rounding_may_do_is_said():
    half = load_pair("tiny", dtype="bfloat16")
    report = check(half, Batch(half, 2), draws=420, prompts=["Once upon a time"], max_new_tokens=16)
    assert report.exit_code == 0, table(report)
    assert "rounding may add" in row(report, "law").detail


def test_a_hugging_face_model_is_scored_like_our_own(small_gpt2s):
    models = [HFModel(transformers_model(model), name="t") for model in (small_gpt2s.target, small_gpt2s.draft)]
    twin = Pair("twin", *models, None)
    prompts = [[1, 2], [3, 4, 5]]
    tokens = torch.randint(30, (400, 3), generator=torch.Generator().manual_seed(0))
    ours, theirs = (check_law(pair, prompts, tokens, Sampling()) for pair in (small_gpt2s, twin))
    assert [t.df for t in ours.tests] == [t.df for t in theirs.tests]
    assert [t.statistic for t in ours.tests] == pytest.approx([t.statistic for t in theirs.tests], rel=1e-3)


@pytest.mark.parametrize("vocab", [VOCAB - 1, VOCAB + 2])
def test_a_draft_with_fewer_or_padded_ids_is_no_obstacle(pair, vocab, random_table):
    other = Pair("padded", pair.target, TableModel(random_table(vocab, vocab, seed=9)), None)
    report = check(other, draws=600, **QUICK)
    assert report.exit_code == 0, table(report)


# When nothing can be said


def test_a_test_in_which_nothing_was_drafted_is_noticed(pair):
    short = Pair("short", pair.target, TableModel(laws_of(pair.draft), context=0), None)
    report = check(short, draws=700, **QUICK)
    assert report.exit_code == 2
    assert "nothing was drafted" in report.verdict
    assert row(report, "law").passed  # plain decoding is lossless; that is not what was asked


def test_no_draws_or_too_few_leave_the_verdict_open(pair):
    for draws in (0, 20, 150):
        report = check(pair, draws=draws, **QUICK)
        assert report.exit_code == 2
        assert "too few" in report.verdict
        assert row(report, "greedy").passed


def test_an_engine_that_raises_is_named_and_the_rows_so_far_are_kept(pair):
    loop, calls = Loop(pair, 2), []

    def tired(prompt, **options):
        calls.append(prompt)
        if len(calls) == 60:
            raise RuntimeError("out of pages\nand a long story")
        return loop.generate(prompt, **options)

    report = check(pair, tired, draws=700, **QUICK)
    number = PROMPTS.index(calls[-1]) + 1
    assert report.error == f"tired raised RuntimeError on prompt {number}: out of pages"
    assert report.verdict == f"could not tell: {report.error}"
    assert report.exit_code == 2
    assert [r.name for r in report.rows] == ["tokenizers", "greedy", "seeds", "stops"]


def test_an_engine_that_exits_does_not_end_the_check_with_its_own_exit_code(pair):
    def leaves(prompt, **options):
        raise SystemExit(0)

    report = check(pair, leaves, draws=0, **QUICK)
    assert report.exit_code == 2
    assert "leaves raised SystemExit on prompt 1" in report.verdict


def test_a_temperature_near_zero_can_be_tested():
    sharp = Pair("sharp", TableModel([0.6, 0.4]), None, None)
    test = check_law(sharp, [[0]], torch.zeros(30, 1, dtype=torch.long), Sampling(1e-12), rounding=Rounding(1e-6))
    assert test.impossible is None


def test_a_fault_that_was_seen_counts_even_if_the_engine_raises_later(pair):
    def wrong_then_raises(prompt, *, max_new_tokens, sampling, seed):
        if sampling.temperature:
            raise RuntimeError("boom")
        return [0] * max_new_tokens

    report = check(pair, wrong_then_raises, draws=300, **QUICK)
    assert report.exit_code == 1
    assert "greedy" in report.verdict


def test_an_engine_without_seeds_is_told_so_and_may_still_pass(pair, global_generators):
    global_generators.seed(0)

    def unseeded(prompt, *, max_new_tokens, sampling, seed):
        tokens = list(prompt)
        for _ in range(max_new_tokens):
            p = sampling.probs(laws_of(pair.target)[tokens[-1]].log())
            tokens.append(int(p.multinomial(1)))
        return tokens[len(prompt) :]

    report = check(pair, unseeded, draws=700, **QUICK)
    assert report.exit_code == 0, table(report)
    seeds = row(report, "seeds")
    assert seeds.passed is None
    assert "same seed" in seeds.detail
    assert "global generators" in seeds.detail


def test_our_own_loop_must_follow_its_seed(pair):
    class Forgetful(Loop):
        def generate(self, prompt, *, seed, **options):
            torch.rand(1)  # the global generator
            return super().generate(prompt, seed=None if seed == 0 else seed, **options)

    found = row(check(pair, Forgetful(pair, 2), draws=0, **QUICK), "seeds")
    assert found.passed is False


def test_an_engine_that_never_varies_is_caught_by_the_law(pair):
    def greedy_always(prompt, *, sampling, **options):
        return Loop(pair, 2).generate(prompt, sampling=Sampling(0), **options)

    report = check(pair, greedy_always, draws=700, **QUICK)
    assert row(report, "seeds").passed is None
    assert report.exit_code == 1


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ([0] * 11, "prompt 1: 11 tokens came back, 12 were asked for"),
        ([0] * 13, "13 tokens came back"),
        ([0] * 11 + [VOCAB], f"token {VOCAB} came back"),
        ([-1] * 12, "token -1 came back"),
        (None, "a NoneType came back"),
        ("abcdefghijkl", "a str came back"),
        ([math.inf] * 12, "a list came back"),
        (({}[i] for i in range(12)), "a generator came back"),  # raises when it is read
    ],
)
def test_output_that_is_not_what_was_asked_for_is_a_fault(pair, output, words):
    report = check(pair, lambda prompt, **options: output, draws=300, **QUICK)
    assert report.exit_code == 1
    assert words in report.verdict
    assert report.rows[-1].name == "output"


def test_many_prompts_must_give_as_many_outputs(pair):
    class Forgets(Sampler):
        def generate_many(self, prompts, **options):
            return super().generate_many(prompts, **options)[:2]

    report = check(pair, Forgets(laws_of(pair.target)), draws=300, **QUICK)
    assert "did not return a list of 3 outputs" in report.verdict
    assert report.exit_code == 1


def test_an_early_stop_in_our_own_loop_is_a_fault(pair):
    class Early(Loop):
        def generate(self, prompt, *, eos_token_id=(), **options):
            tokens = super().generate(prompt, eos_token_id=eos_token_id, **options)
            return tokens[:-1] if eos_token_id else tokens

    assert row(check(pair, Early(pair, 2), draws=0, **QUICK), "stops").passed is False


def test_an_engine_with_another_tokenizer_is_refused():
    class Words:
        def __init__(self, *words):
            self.words = words
            self.bos_token_id = self.eos_token_id = self.unk_token_id = None

        def get_vocab(self):
            return {word: i for i, word in enumerate(self.words)}

        def encode(self, text):
            return [0]

    table_of_two = TableModel([0.5, 0.5])
    engine = Loop(Pair("words", table_of_two, table_of_two, None), 2)
    pair = Pair("words", table_of_two, table_of_two, Words("a", "b"))
    engine.tokenizer = Words("a", "b")
    assert examine.tokenizer_row(pair, engine).passed is True
    engine.tokenizer = Words("b", "a")
    assert examine.tokenizer_row(pair, engine).passed is False


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"K": 0}, "nothing would be drafted"),
        ({"K": -1}, "K is -1"),
        ({"draws": -5}, "draws is -5"),
        ({"draws": 1e4}, "draws is 10000.0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": "a text"}, "must be a list"),
        ({"prompts": [[VOCAB]]}, f"token id {VOCAB}"),
        ({"prompts": [[]]}, "prompt is empty"),
        ({"prompts": ["words"]}, "no tokenizer"),
        ({"sampling": Sampling(0.0)}, "temperature is 0"),
        ({"engine": 3}, "engine is 3"),
        ({"draws": 0, "planted": True}, "draws is 0"),
    ],
)
def test_bad_input_is_a_clear_error(pair, bad, words):
    with pytest.raises(ValueError, match=words) as caught:
        check(pair, **(QUICK | bad))
    assert "\n" not in str(caught.value)


def test_a_prompt_that_leaves_no_room_is_refused(pair):
    small = Pair("small", TableModel(laws_of(pair.target), context=14), pair.draft, None)
    with pytest.raises(ValueError, match="longest prompt has 3 tokens and 12 are to follow"):
        check(small, **QUICK)


def test_a_pair_without_a_draft_needs_an_engine(pair):
    alone = Pair("alone", pair.target, None, None)
    with pytest.raises(ValueError, match="no draft"):
        check(alone, **QUICK)
    assert check(alone, Sampler(laws_of(pair.target)), draws=900, **QUICK).exit_code == 0


def test_logits_that_are_not_numbers_are_reported(pair):
    broken = TableModel(laws_of(pair.target), name="broken")
    engine = Sampler(laws_of(pair.target))
    tokens = engine.draw(300, 0)
    broken.log_table = broken.log_table * math.nan
    with pytest.raises(FloatingPointError, match="broken gave NaN"):
        check_law(Pair("x", broken, None, None), PROMPTS, tokens, Sampling())


def test_counts_come_from_the_law_test_alone(pair):
    class Counting(Sampler):
        statistics = Statistics(rounds=1, tokens=3, drafted=2, accepted=1, rejections=1)

    report = check(pair, Counting(laws_of(pair.target)), draws=640, **QUICK)
    assert row(report, "drafting").detail.startswith("20 tokens drafted")  # ten calls of 64 draws
