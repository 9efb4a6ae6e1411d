"""The comparison of methods: every number of a row follows from what was written down, and nothing measured is lost."""

import pytest

from specdec_lite.comparison import PLAIN, as_text, compare, forced_rounds, rows_of, write_comparison
from specdec_lite.distributions import GREEDY, Sampling
from specdec_lite.drafters.model import ModelDrafter
from specdec_lite.drafters.specinfer import TOP, TreeDrafter
from specdec_lite.methods import Method, catalogue, without_training
from specdec_lite.pairs import load_pair
from specdec_lite.results import read_results
from specdec_lite.table import TableModel


@pytest.fixture
def small(pair_of, random_table):
    return pair_of(TableModel(random_table(200, 200, seed=1)), TableModel(random_table(200, 200, seed=2)))


def two_methods(pair):
    vocab = pair.target.vocab_size
    return {
        "chain": Method(ModelDrafter(pair.draft, vocab), 2),
        "tree": Method(TreeDrafter(pair.draft, vocab, (2, 1), TOP), 2),
    }


def measured(pair, **options):
    options = {"prompts": [[1, 2], [3]], "max_new_tokens": 12, "repeats": 2} | options
    return compare(pair, two_methods(pair), **options)


def test_every_method_has_a_row_and_plain_decoding_is_the_first(small):
    rows = measured(small)
    assert [row.name for row in rows] == [PLAIN, "chain", "tree"]
    plain, chain, tree = rows
    assert (plain.speedup, plain.tokens_per_round, plain.nodes, plain.drafting) == (1, 1, 0, pytest.approx(0, abs=0.5))
    assert 1 <= chain.nodes <= 2 < tree.nodes <= 4
    assert len(chain.by_depth) == 2 and chain.tokens_per_round > tree.tokens_per_round >= 1  # its guesses are bad


def record(name, K, seconds, tokens, other, numbers, tried, accepted):
    counts = dict(zip(("rounds", "tokens", "drafted", "accepted", "rejections"), numbers, strict=True))
    return {
        "kind": "run", "engine": name, "K": K, "prompt": 0, "repeat": 0, "seconds": seconds, "tokens": tokens,
        "other_seconds": other, "counts": counts, "tried": tried, "accepted": accepted,
    }  # fmt: skip


BY_HAND = [
    {"kind": "settings", "methods": {PLAIN: 0, "tree": 2}},
    {"kind": "costs", "methods": {
        PLAIN: {"draft": 0.0, "target": 2.0, "nodes": 0, "bytes": 0, "trained": 0},
        "tree": {"draft": 1.0, "target": 3.0, "nodes": 4, "bytes": 5_000_000, "trained": 2_000_000},
    }},
    record(PLAIN, 0, 20.0, 8, 2.0, (9, 9, 0, 0, 0), [], []),
    record("tree", 2, 10.0, 8, 0.5, (6, 12, 24, 6, 3), [6, 4], [4, 2]),
]  # fmt: skip


def test_a_row_by_hand():
    row = rows_of(BY_HAND)[1]
    assert row.nodes == 24 / 6
    assert row.tokens_per_round == 12 / 6
    assert row.by_depth == [4 / 6, 2 / 4]
    assert (row.drafting, row.verifying) == (0.5, 1.5)  # over t(1) = 2
    assert row.speedup == (20 / 8) / (10 / 8)
    # The rest of a round: 2/8 of plain decoding and .5/5 of the tree's, over t(1).
    assert row.predicted == pytest.approx(2 * (1 + 0.125) / (0.5 + 1.5 + 0.05))
    assert (row.megabytes, row.megatokens) == (5, 2)


def test_a_block_that_is_not_complete_does_not_count():
    with pytest.raises(ValueError, match="no block of this comparison is complete"):
        rows_of(BY_HAND[:-1])


def test_an_interrupted_comparison_goes_on_where_it_was(small, tmp_path):
    path = tmp_path / "all.jsonl"

    class Interrupted(Exception):
        pass

    def stop_at_the_third_block(done, total, what):
        if done == 7:
            raise Interrupted

    with pytest.raises(Interrupted):
        measured(small, path=path, progress=stop_at_the_third_block)
    before = [r for r in read_results(path) if r["kind"] in ("run", "costs")]
    assert len([r for r in before if r["kind"] == "run"]) == 7
    rows = measured(small, path=path)
    after = [r for r in read_results(path) if r["kind"] in ("run", "costs")]
    assert after[: len(before)] == before and rows == rows_of(read_results(path))
    with pytest.raises(ValueError, match="holds another run: its repeats is 2"):
        measured(small, path=path, repeats=3)


def test_the_page_holds_the_table_and_the_command(small, tmp_path):
    path = tmp_path / "all.jsonl"
    measured(small, path=path, command="specdec methods --out all.jsonl")
    page = write_comparison(path).read_text(encoding="utf-8")
    for row in rows_of(read_results(path)):
        assert f"| {row.name} |" in page and f"{row.speedup:.2f}x" in page
    assert "    specdec methods --out all.jsonl" in page
    assert "chain" in as_text(read_results(path))


def test_forced_rounds_keep_nothing_and_leave_every_method_the_same_text(small, spy_on):
    target = spy_on(small.target)
    small.target = target
    costs = forced_rounds(small, {PLAIN: Method(None, 0), **two_methods(small)}, Sampling())
    assert {name: cost["nodes"] for name, cost in costs.items()} == {PLAIN: 0, "chain": 2, "tree": 4}
    assert {cache.length for cache in target.caches} == {64 + 30 - 1}  # every round added one token


def test_bad_input_is_refused_before_any_work(small):
    with pytest.raises(ValueError, match="max_new_tokens 4 or more"):
        measured(small, max_new_tokens=3)
    with pytest.raises(ValueError, match="at least one K"):
        measured(small, repeats=0)


def test_a_context_too_short_for_the_costs_is_refused_before_the_file_is_begun(pair_of, random_table, tmp_path):
    path = tmp_path / "all.jsonl"
    short = pair_of(TableModel(random_table(9, 9, seed=1), context=60), TableModel(random_table(9, 9, seed=2)))
    with pytest.raises(ValueError, match="can hold 60"):
        measured(short, path=path)
    assert not path.exists()


def test_a_comparison_that_has_measured_nothing_says_so():
    with pytest.raises(ValueError, match="no block of this comparison is complete"):
        as_text(BY_HAND[:1])


def test_a_pair_without_trained_heads_is_offered_what_needs_none(small):
    names = catalogue(small, Sampling())
    assert PLAIN in names and not any("EAGLE" in name or "Medusa" in name for name in names)
    assert names.keys() - {PLAIN} == without_training(small, Sampling()).keys()
    greedy = without_training(small, GREEDY)
    assert not any("drawn" in name or "block" in name for name in greedy)  # they are the same as another row there


def test_the_embedded_pair_is_offered_every_method():
    names = catalogue(load_pair("tiny"), GREEDY)
    for family in ("draft model", "SpecInfer", "n-gram", "early exit", "Medusa chain", "Medusa tree", "EAGLE chain",
                   "EAGLE static tree", "EAGLE dynamic tree"):  # fmt: skip
        assert any(name.startswith(family) for name in names), family
