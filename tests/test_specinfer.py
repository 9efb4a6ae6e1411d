"""The shipped loop with token trees: the target's own law, exactly, and greedy its own tokens; caches that stay right.

A tree's whole round is enumerated, and what it leaves open is multiplied out from the target's table, to 1e-12:

    |V| = 3   chosen     (3, 3, 3)  (2, 2, 2)  (3, 2, 1)
              drawn      (3)  (2, 2)  (2, 1, 1)  (1, 2, 1)  (1, 1, 3)  without replacement; (2)  (3)  (2, 1)  with

and short whole outputs, in which several rounds follow each other. The same comparison rejects the slips of the tree
gallery. ``Audited`` models prove the caches: whatever they are fed, each token must see a text, and nothing else.
"""

from itertools import product

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import specdec_lite
from specdec_lite import autoregressive, speculative
from specdec_lite.decoding import decode
from specdec_lite.distributions import GREEDY, Sampling
from specdec_lite.drafters import Draft
from specdec_lite.drafters.model import ModelDrafter
from specdec_lite.drafters.ngram import NGramDrafter
from specdec_lite.drafters.specinfer import TOP, WITH, WITHOUT, Merged, TreeDrafter
from specdec_lite.engines import Loop
from specdec_lite.gpt2 import GPT2, GPT2Config
from specdec_lite.hf import HFModel
from specdec_lite.randomness import TorchRandomness, enumerate_outcomes
from specdec_lite.record import Result, Round
from specdec_lite.selfcheck import LOSSLESS, check
from specdec_lite.static import StaticGPT2
from specdec_lite.table import TableModel
from specdec_lite.tree import Tree, verify_tree
from specdec_lite.tree_gallery import WRONG_TREE_RULES, WrongTreeRule

PROMPT = (1, 0)
SHARP = Sampling(temperature=0.7, top_k=2)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


# The law, on tables


def first_round_law(table, drafter, K, sampling, verify_tree=verify_tree):
    """The exact law of the first K + 1 tokens: of the loop's first round, then of the target alone."""
    target = TableModel(table)

    def play(randomness):
        rounds = decode(
            target, drafter, PROMPT, max_new_tokens=K + 1, K=K, sampling=sampling, randomness=randomness,
            verify_tree=verify_tree,
        )  # fmt: skip
        return next(rounds).tokens

    law = {}
    for written, chance in enumerate_outcomes(play).items():
        for rest in product(range(table.shape[-1]), repeat=K + 1 - len(written)):
            law[written + rest] = law.get(written + rest, 0) + chance * chance_of(rest, written, table, sampling)
    return law


def whole_law(table, drafter, n, K, sampling=Sampling()):
    """The exact law of a whole output of n tokens, over all its rounds."""
    target = TableModel(table)

    def play(randomness):
        rounds = decode(target, drafter, PROMPT, max_new_tokens=n, K=K, sampling=sampling, randomness=randomness)
        return tuple(token for round in rounds for token in round.tokens)

    return enumerate_outcomes(play)


def chance_of(tokens, written, table, sampling):
    """Of ``tokens`` after the prompt and ``written``, by hand from the target's table."""
    text, chance = [*PROMPT, *written], 1.0
    for token in tokens:
        law = table[min(len(text) - 1, len(table) - 1)] if table.ndim == 3 else table
        law = law[text[-1]] if table.ndim >= 2 else law
        chance *= float(sampling.probs(law.log())[token])
        text.append(token)
    return chance


def worst(law, table, sampling=Sampling()):
    outputs = list(product(range(table.shape[-1]), repeat=len(next(iter(law)))))
    assert set(law) <= set(outputs)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    return max(abs(law.get(output, 0) - chance_of(output, (), table, sampling)) for output in outputs)


def tables(random_table, kind, seed, vocab=3):
    shape = {"one law": (vocab,), "by last token": (vocab, vocab), "by position": (5, vocab, vocab)}[kind]
    return random_table(*shape, seed=10 * seed), random_table(*shape, seed=10 * seed + 1)


def grower(table, widths, children):
    return TreeDrafter(TableModel(table), table.shape[-1], widths, children)


@pytest.mark.parametrize(
    ("widths", "children", "kind", "seeds", "sampling"),
    [
        ((3, 3, 3), TOP, "by position", 3, Sampling()),
        ((2, 2, 2), TOP, "by position", 3, Sampling()),
        ((3, 2, 1), TOP, "by last token", 3, SHARP),
        ((2, 2, 2), TOP, "one law", 1, Sampling()),
        ((2, 3), TOP, "by position", 3, GREEDY),
        ((3,), WITHOUT, "by position", 3, Sampling()),
        ((3,), WITHOUT, "one law", 1, Sampling()),
        ((2,), WITHOUT, "by last token", 3, Sampling(0.7)),
        ((2, 2), WITHOUT, "by position", 1, Sampling()),
        ((2, 1, 1), WITHOUT, "by position", 1, Sampling(0.7)),
        ((1, 2, 1), WITHOUT, "by last token", 1, Sampling()),
        ((1, 1, 3), WITHOUT, "by position", 1, Sampling()),
        ((3, 3), WITHOUT, "by position", 2, SHARP),
        ((2, 2), WITHOUT, "by position", 2, GREEDY),
        ((2,), WITH, "by position", 3, Sampling()),
        ((3,), WITH, "by last token", 1, Sampling(0.7)),
        ((2, 1), WITH, "by position", 1, Sampling()),
        ((3, 1), WITH, "one law", 1, SHARP),
        ((2, 2), WITH, "by position", 2, GREEDY),
    ],
)
def test_a_round_with_a_tree_keeps_exactly_the_law_of_the_target(widths, children, kind, seeds, sampling, random_table):
    for seed in range(seeds):
        p, q = tables(random_table, kind, seed)
        law = first_round_law(p, grower(q, widths, children), len(widths), sampling)
        assert worst(law, p, sampling) < 1e-12


@pytest.mark.parametrize(
    ("widths", "children", "n", "vocab"),
    [((2, 2), TOP, 4, 3), ((3, 2, 1), TOP, 4, 3), ((2,), WITHOUT, 3, 3), ((2, 2), WITHOUT, 3, 2), ((2,), WITH, 3, 2)],
)
def test_rounds_that_follow_each_other_keep_it(widths, children, n, vocab, random_table):
    p, q = tables(random_table, "by position", 4, vocab)
    law = whole_law(p, grower(q, widths, children), n, len(widths))
    assert worst(law, p) < 1e-12


def test_greedy_there_is_one_output_and_it_is_certain(random_table):
    p, q = tables(random_table, "by position", 5, 4)
    for children in (TOP, WITHOUT, WITH):
        ((output, chance),) = whole_law(p, grower(q, (2, 2, 1), children), 6, 3, GREEDY).items()
        assert chance == chance_of(output, (), p, GREEDY) == 1


def test_a_draft_that_is_cut_by_its_context_or_by_the_end_keeps_the_law(random_table):
    p, q = tables(random_table, "by last token", 6)
    drafter = TreeDrafter(TableModel(q, context=3), 3, (2, 2), TOP)  # room for 2 levels, then for 1, then for none
    assert worst(whole_law(p, drafter, 4, 2), p) < 1e-12


# A verification that is wrong shows in the same comparison


def gap(rule, random_table):
    found = 0
    for seed, children in [(1, WITHOUT), (1, WITH), (2, WITH)]:
        p, q = tables(random_table, "by last token", 20 + seed)
        law = first_round_law(p, rule.wrap(grower(q, (2,), children)), 1, Sampling(), rule.verify_tree)
        found = max(found, worst(law, p))
    return found


@pytest.mark.parametrize("name", WRONG_TREE_RULES)
def test_every_slip_of_the_tree_gallery_is_caught(name, random_table):
    assert gap(WRONG_TREE_RULES[name], random_table) > 1e-3


def test_the_right_rule_is_not(random_table):
    assert gap(WrongTreeRule("right", ""), random_table) < 1e-12


# A chain is the tree with one branch


class AsTree:
    """The drafter's chains, called trees."""

    def __init__(self, drafter):
        self.drafter = drafter

    def propose(self, *arguments):
        draft = self.drafter.propose(*arguments)
        return Draft(draft.tokens, draft.probs, Tree.chain(len(draft.tokens)))

    def __getattr__(self, name):
        return getattr(self.drafter, name)


def rounds_law(table, drafter, n, K, sampling=Sampling()):
    """The law of what the rounds say: the tokens and their origins."""

    def play(randomness):
        rounds = decode(
            TableModel(table), drafter, PROMPT, max_new_tokens=n, K=K, sampling=sampling, randomness=randomness
        )
        return tuple((round.draft_tokens, round.tokens, round.origins) for round in rounds)

    return enumerate_outcomes(play)


def test_a_chain_and_the_tree_with_one_branch_have_the_same_rounds_with_the_same_chances(random_table):
    p, q = tables(random_table, "by position", 7, 2)
    chain = ModelDrafter(TableModel(q), 2)
    expected = rounds_law(p, chain, 3, 2)
    for other in (AsTree(chain), grower(q, (1, 1), WITHOUT), grower(q, (1, 1), WITH)):
        assert rounds_law(p, other, 3, 2) == pytest.approx(expected, abs=1e-12)


def test_a_chosen_chain_and_its_tree_have_too(random_table, fixed_draft):
    p, _ = tables(random_table, "by position", 8)
    for chosen in ([0], [2, 1], [1, 1, 0]):
        expected = rounds_law(p, fixed_draft(chosen), 3, len(chosen))
        assert rounds_law(p, AsTree(fixed_draft(chosen)), 3, len(chosen)) == pytest.approx(expected, abs=1e-12)


# Two drafters' trees in one


@pytest.mark.parametrize("sampling", [Sampling(), SHARP, GREEDY], ids=["T = 1", "T = 0.7, top-k", "greedy"])
@pytest.mark.parametrize(
    "kinds",
    [
        ("chain", "chain"),
        ("chain", "chosen"),
        ("chosen", "chain"),
        ("tree", "chosen"),
        ("top", "chosen"),
        ("with", "top"),
    ],
    ids=" + ".join,
)
def test_merged_drafts_keep_the_law(kinds, sampling, random_table, fixed_draft):
    p, q = tables(random_table, "by position", 9)
    r = random_table(3, 3, seed=3)
    make = {
        "chain": lambda table: ModelDrafter(TableModel(table), 3),
        "chosen": lambda table: fixed_draft([0, 2]),
        "tree": lambda table: grower(table, (2, 1), WITHOUT),
        "top": lambda table: grower(table, (2, 2), TOP),
        "with": lambda table: grower(table, (2, 1), WITH),
    }
    drafter = Merged([make[kind](table) for kind, table in zip(kinds, (q, r), strict=True)], K=2)
    assert worst(first_round_law(p, drafter, 2, sampling), p, sampling) < 1e-12


# Caches


class AuditedCache:
    """Beside the real cache, in plain lists: the tokens in it and their positions."""

    def __init__(self, cache):
        self.cache, self.tokens, self.positions = cache, [], []

    @property
    def length(self):
        assert self.cache.length == len(self.tokens)
        return self.cache.length

    def rollback(self, length):
        self.cache.rollback(length)
        del self.tokens[length:], self.positions[length:]

    def keep(self, length, nodes):
        self.cache.keep(length, nodes)
        slots = [*range(length), *(length + node for node in nodes)]
        self.tokens, self.positions = ([held[slot] for slot in slots] for held in (self.tokens, self.positions))


class Audited:
    """A model of which every pass is checked: each token must see a text, in its order and whole, that begins with the
    committed one; and the logits must be those that a fresh cache gives for this text."""

    def __init__(self, model):
        self.model = model
        self.text = []  # the test says what is committed
        self.passes = 0

    def new_cache(self, capacity, rows=1):
        self.cache = AuditedCache(self.model.new_cache(capacity, rows))
        return self.cache

    def __call__(self, tokens, cache, last=None, **tree):
        held, n = cache.length, tokens.shape[1]
        positions = tree["positions"][0].tolist() if tree else list(range(held, held + n))
        mask = tree["mask"][0, 0] if tree else torch.ones(n, held + n, dtype=torch.bool).tril(held)
        cache.tokens += tokens[0].tolist()
        cache.positions += positions
        logits = self.model(tokens, cache.cache, last, **tree)
        for row in range(-logits.shape[1], 0):
            seen = mask[row].nonzero().flatten().tolist()
            assert [cache.positions[slot] for slot in seen] == list(range(len(seen)))
            assert len(seen) <= self.context
            text = [cache.tokens[slot] for slot in seen]
            assert text[: len(self.text)] == self.text[: len(text)]
            fresh = self.model(torch.tensor([text]), self.model.new_cache(len(text)), last=1)
            torch.testing.assert_close(logits[:, row], fresh[:, 0], atol=1e-9, rtol=0)
        self.passes += 1
        return logits

    def __getattr__(self, name):
        return getattr(self.model, name)


def small_gpt2(seed, positions=40, vocab=7, like=None):
    """Random weights in float64, large enough for the text to matter; ``like`` another one, to agree now and then."""
    model = GPT2.random(GPT2Config(vocab, positions, 16, 2, 2), seed=seed, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if "norm" not in name:
            parameter.data *= 15
        if like is not None:
            other = like.get_parameter(name).data
            shared = min(len(other), len(parameter))  # they may have contexts of different length
            parameter.data[:shared] = 0.85 * other[:shared] + 0.15 * parameter.data[:shared]
    return model


class Recorded:
    """A drafter of which each draft, and what was kept of it, is remembered."""

    def __init__(self, drafter):
        self.drafter, self.draft, self.kept = drafter, None, None

    def propose(self, *arguments):
        self.draft = self.drafter.propose(*arguments)
        return self.draft

    def commit(self, length, kept):
        self.kept = list(kept)
        self.drafter.commit(length, kept)

    def __getattr__(self, name):
        return getattr(self.drafter, name)


def audited_run(target, drafter, models, *, K, sampling, new=24, seed=0, parts=()):
    """Rounds of a run in which every pass of every model is checked, and after each round every cache.

    parts: the drafters inside a merged one, ``Recorded``: each must keep all that it had drafted of what was accepted.
    """
    text = [3, 1, 4]
    for model in models:
        model.text = text
    rounds = []
    randomness = TorchRandomness.seeded(seed)
    for round in decode(target, drafter, text[:], max_new_tokens=new, K=K, sampling=sampling, randomness=randomness):
        for part in parts if round.draft_tokens else ():
            kept = longest_path(part.draft, round.tokens[: len(round.tokens) - 1])
            assert part.draft.tokens[part.kept].tolist() == kept
        text += round.tokens
        assert target.cache.tokens == text[:-1]  # all but the last, which is fed with the next round
        for model in models:
            assert model.cache.tokens == text[: model.cache.length]
            assert model.cache.positions == list(range(model.cache.length))
        rounds.append(round)
    return rounds


def longest_path(draft, tokens):
    """As many of ``tokens`` as the draft holds in a row from its root."""
    tree, own, paths = draft.tree or Tree.chain(len(draft.tokens)), draft.tokens.tolist(), [-1]
    for depth, token in enumerate(tokens):
        paths = [child for node in paths for child in tree.children[node + 1] if own[child] == token]
        if not paths:
            return list(tokens[:depth])
    return list(tokens)


def moved(rounds):
    """Rounds whose accepted tokens were not the first of their draft, so that something had to be gathered."""
    return [r for r in rounds if r.accepted and r.draft_tokens[: r.accepted] != r.tokens[: r.accepted]]


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()], ids=["greedy", "T = 1"])
@pytest.mark.parametrize("children", [TOP, WITHOUT, WITH])
def test_caches_hold_the_committed_text_and_nothing_else_after_every_round(children, sampling):
    target = Audited(small_gpt2(0))
    draft = Audited(small_gpt2(1, like=target.model))
    drafter = Recorded(TreeDrafter(draft, 7, (2, 2, 1), children))
    rounds = audited_run(target, drafter, [target, draft], K=3, sampling=sampling, parts=[drafter])
    assert len(moved(rounds)) > 1 or (sampling is GREEDY and children != TOP)
    assert target.passes == len(rounds)


def llama(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=7, max_position_embeddings=40, **sizes)).double()
        for parameter in model.parameters():
            parameter.data *= 10 if parameter.ndim > 1 else 1
    return HFModel(model)


@pytest.mark.parametrize(
    "form", [llama, lambda seed: StaticGPT2(small_gpt2(seed))], ids=["transformers", "static passes"]
)
def test_caches_of_other_models_do_too(form):
    target, draft = Audited(form(0)), Audited(form(1))
    drafter = Recorded(TreeDrafter(draft, 7, (3, 2, 1), TOP))
    rounds = audited_run(target, drafter, [target, draft], K=3, sampling=Sampling(), parts=[drafter])
    assert moved(rounds)


def test_a_draft_model_keeps_the_accepted_path_and_reads_no_token_twice():
    target, draft = Audited(small_gpt2(0)), Audited(small_gpt2(1, like=small_gpt2(0)))
    drafter = TreeDrafter(draft, 7, (2, 2, 1), TOP)
    before = 3
    randomness = TorchRandomness.seeded(0)
    for round in decode(target, drafter, [3, 1, 4], max_new_tokens=24, K=3, sampling=GREEDY, randomness=randomness):
        read = max(0, Tree(round.parents).depth - 1)  # the deepest level is drafted, and not read
        assert draft.cache.length == before + min(len(round.tokens) - 1, read)
        before += len(round.tokens)


@pytest.mark.parametrize("sampling", [GREEDY, Sampling()], ids=["greedy", "T = 1"])
@pytest.mark.parametrize(
    "kinds", [(WITHOUT, TOP), ("chain", TOP), (WITH, "chain"), (TOP, "n-gram"), ("n-gram", "chain")]
)
def test_of_merged_drafters_each_keeps_what_it_had_drafted_of_the_committed_path(kinds, sampling):
    target = Audited(small_gpt2(0))
    drafts = [Audited(small_gpt2(seed, like=target.model)) for seed in (1, 2)]

    def make(kind, draft):
        if kind == "n-gram":
            return NGramDrafter()
        return ModelDrafter(draft, 7) if kind == "chain" else TreeDrafter(draft, 7, (2, 2, 1), kind)

    parts = [Recorded(make(kind, draft)) for kind, draft in zip(kinds, drafts, strict=True)]
    models = [target, *(draft for kind, draft in zip(kinds, drafts, strict=True) if kind != "n-gram")]
    rounds = audited_run(target, Merged(parts, K=3), models, K=3, sampling=sampling, parts=parts)
    assert any(round.accepted for round in rounds)


def test_an_enumerated_run_of_real_models_has_the_law_of_the_target():
    target = small_gpt2(0, vocab=3)
    drafter = TreeDrafter(small_gpt2(1, vocab=3), 3, (2, 1))

    def law(drafter, K):
        def run(randomness):
            options = {"max_new_tokens": 3, "K": K, "sampling": SHARP, "randomness": randomness}
            return tuple(token for round in decode(target, drafter, [0, 2], **options) for token in round.tokens)

        return enumerate_outcomes(run)

    own, drafted = law(None, 0), law(drafter, 2)
    assert drafted == pytest.approx(own, abs=1e-12)


@pytest.mark.parametrize(("children", "sampling"), [(TOP, GREEDY), (WITHOUT, Sampling()), (WITH, Sampling())])
def test_a_draft_that_is_the_target_is_accepted_at_every_level(children, sampling):
    """So each child is drawn from the law after its own parent. (Any other law would be lossless too.)"""
    target = small_gpt2(0)
    drafter = TreeDrafter(small_gpt2(0), 7, (2, 3, 2), children)
    randomness = TorchRandomness.seeded(0)
    for round in decode(target, drafter, [3], max_new_tokens=36, K=3, sampling=sampling, randomness=randomness):
        assert round.origins == ("accepted", "accepted", "accepted", "bonus")


# Ends and limits


@pytest.fixture(scope="module")
def models():
    target = small_gpt2(0)
    return target, small_gpt2(1, like=target)


@pytest.mark.parametrize("children", [TOP, WITHOUT])
@pytest.mark.parametrize("new", range(6))
def test_max_new_tokens_is_exact_below_and_above_the_depth(new, children, models, pair_of):
    target, draft = models
    drafter = TreeDrafter(draft, 7, (2, 2, 1), children)
    options = {"max_new_tokens": new, "sampling": GREEDY}
    result = speculative(pair_of(target, draft), [3, 1, 4], K=3, drafter=drafter, **options)
    assert result.tokens == autoregressive(pair_of(target, draft), [3, 1, 4], **options).tokens
    assert len(result.tokens) == new
    assert all(Tree(round.parents).depth <= len(round.tokens) + 3 for round in result.rounds if round.parents)


def test_no_level_is_drafted_that_could_not_be_written(models, pair_of):
    drafter = TreeDrafter(models[1], 7, (2, 2, 1), TOP)
    result = speculative(pair_of(*models), [3, 1, 4], max_new_tokens=9, K=3, sampling=GREEDY, drafter=drafter)
    left = 9
    for round in result.rounds:
        assert (Tree(round.parents).depth if round.parents else 0) == min(3, left - 1)
        left -= len(round.tokens)


@pytest.fixture
def second_best(chain, pair_of):
    """A target that surely says 1, 2, 3, 4, 5 after 0, and a draft for which each of these is second best."""
    target = chain([0, 1, 2, 3, 4, 5], 6)
    table = torch.full((6, 6, 6), 0.0, dtype=torch.float64)
    table[..., 0], table[torch.arange(5), :, torch.arange(1, 6)], table[5, :, 1] = 0.7, 0.3, 0.3
    return target, TreeDrafter(TableModel(table), 6, (2, 2, 2), TOP)


@pytest.mark.parametrize("stop", [1, 2, 3, 4])
def test_a_stop_inside_a_path_ends_tokens_origins_and_caches_there(stop, second_best, pair_of):
    target, drafter = second_best
    result = speculative(pair_of(target, None), [0], max_new_tokens=5, K=3, drafter=drafter, eos_token_id=stop)
    assert result.tokens == [1, 2, 3, 4][:stop]
    assert result.finish_reason == "stop"
    assert result.rounds[0].origins == ("accepted", "accepted", "accepted", "bonus")[:stop]
    assert (result.statistics.accepted, result.statistics.rejections) == (min(stop, 3), 0)
    assert drafter.cache.length <= 1 + stop


def test_a_stop_string_ends_inside_a_path(second_best, pair_of, tokenizer_of):
    target, drafter = second_best
    tokenizer = tokenizer_of([b"a", b"b", b"c", b"d", b"e", b"f"])
    options = {"max_new_tokens": 5, "K": 3, "drafter": drafter, "eos_token_id": []}
    result = speculative(pair_of(target, None, tokenizer), [0], stop_strings="bc", **options)
    assert (result.text, result.tokens, result.finish_reason) == ("bc", [1, 2], "stop")


@pytest.mark.parametrize("children", [TOP, WITHOUT])
@pytest.mark.parametrize("sampling", [GREEDY, Sampling()], ids=["greedy", "T = 1"])
def test_a_tree_near_the_end_of_the_targets_context_does_not_pass_it(children, sampling, pair_of):
    target = Audited(small_gpt2(0, positions=12))  # its position table has no row beyond, and the audit looks too
    draft = Audited(small_gpt2(1, like=target.model))
    drafter = TreeDrafter(draft, 7, (2, 2, 1), children)
    result = speculative(pair_of(target, draft), [3, 1, 4], max_new_tokens=50, K=3, sampling=sampling, drafter=drafter)
    assert result.finish_reason == "context"
    assert len(result.tokens) == 12 + 1 - 3
    assert result.draft_stopped_at is None
    if sampling is GREEDY:
        assert result.tokens == autoregressive(pair_of(target, draft), [3, 1, 4], sampling=GREEDY).tokens


@pytest.mark.parametrize("merged", [False, True])
def test_a_draft_of_a_shorter_context_stops_and_the_text_goes_on(merged, models, pair_of):
    target = models[0]
    draft = Audited(small_gpt2(1, positions=10, like=target))
    drafter = TreeDrafter(draft, 7, (2, 2, 1), TOP)
    drafter = Merged([drafter, NGramDrafter()], K=3) if merged else drafter
    options = {"max_new_tokens": 20, "sampling": GREEDY}
    result = speculative(pair_of(target, draft), [3, 1, 4], K=3, drafter=drafter, **options)
    assert result.tokens == autoregressive(pair_of(target, draft), [3, 1, 4], **options).tokens
    assert 0 < result.draft_stopped_at <= 10
    assert all(round.draft_tokens == () for round in result.rounds[-5:])


# Records


@pytest.mark.parametrize("children", [TOP, WITHOUT, WITH])
def test_a_round_says_what_its_tree_was_and_what_became_of_it(children, models, pair_of):
    drafter = TreeDrafter(models[1], 7, (2, 2), children)
    result = speculative(pair_of(*models), [3, 1, 4], max_new_tokens=37, K=2, drafter=drafter, seed=1)
    assert set(result.origins) == {"accepted", "recovered", "bonus"}
    for round in result.rounds:
        if round.parents is None:
            assert (round.draft_tokens, round.origins) == ((), ("bonus",))
            continue
        tree = Tree(round.parents)
        assert len(tree) == len(round.draft_tokens)
        assert round.origins[:-1] == ("accepted",) * (len(round.tokens) - 1)
        node = -1
        for token in round.tokens[:-1]:  # the first of equal siblings can be accepted, and no other
            node = next(child for child in tree.children[node + 1] if round.draft_tokens[child] == token)
        tried = [round.draft_tokens[child] for child in tree.children[node + 1]]
        assert round.origins[-1] == ("recovered" if tried else "bonus")
        assert round.tokens[-1] not in tried


def test_alpha_is_the_share_of_levels_that_were_passed():
    times = (0.0, 0.0, 0.0)
    result = Result([0])
    # Two levels of three are passed; then all of two; then the first of them fails.
    result.add(
        Round((1, 2, 3, 4, 5), (2, 5, 9), ("accepted", "accepted", "recovered"), *times, parents=(-1, -1, 0, 1, 1))
    )
    result.add(Round((1, 2, 3), (1, 3, 9), ("accepted", "accepted", "bonus"), *times, parents=(-1, -1, 0)))
    result.add(Round((1, 2, 3), (9,), ("recovered",), *times, parents=(-1, -1, 0)))
    assert result.alpha == 4 / (4 + 2)
    assert result.acceptance_rate == 4 / 11  # of all nodes, of which one for each level is the most
    assert result.tokens_per_round == 7 / 3


def test_merged_drafters_go_no_deeper_than_they_were_made_for(models, pair_of):
    """Their nodes would find no room at the end of the target's cache."""
    drafter = Merged([ModelDrafter(models[1], 7) for _ in range(3)], K=1)
    result = speculative(pair_of(*models), [3, 1, 4], max_new_tokens=20, K=4, sampling=GREEDY, drafter=drafter)
    assert result.tokens == autoregressive(pair_of(*models), [3, 1, 4], max_new_tokens=20, sampling=GREEDY).tokens
    assert {len(round.draft_tokens) for round in result.rounds} <= {0, 3}


# Bad input


class Untouched:
    """A model that must not be asked for anything."""

    name, vocab_size, context = "untouched", 3, 100


class Observing:
    name = "medusa"

    def observe(self, target): ...


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TreeDrafter(Untouched(), 3, (2, 0)), "at least 1"),
        (lambda: TreeDrafter(Untouched(), 3, (-2,)), "at least 1"),
        (lambda: TreeDrafter(Untouched(), 3, ()), "widths is empty"),
        (lambda: TreeDrafter(Untouched(), 3, (1, 4)), "4 candidates .* vocabulary has 3"),
        (lambda: TreeDrafter(Untouched(), 3, (2,), "best"), "children is 'best'; it must be 'without replacement'"),
        (lambda: Merged([NGramDrafter(), Observing()], K=2), "medusa observes the target and cannot be merged"),
    ],
)
def test_bad_input_is_one_clear_line_before_any_work(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


# The embedded pair


@pytest.fixture(scope="module")
def tiny():
    return specdec_lite.load_pair("tiny")


@pytest.fixture(scope="module")
def prompts(tiny):
    """Fifty, of 4 to 16 tokens, from text that the pair has written itself."""
    text = speculative(tiny, "Once upon a time", max_new_tokens=220, seed=0, eos_token_id=[]).tokens
    return [text[4 * i : 4 * i + 4 + i % 13] for i in range(50)]


NEW = 16
DRAFTERS = {
    "top (4, 2, 2, 1)": lambda draft, vocab: TreeDrafter(draft, vocab, (4, 2, 2, 1), TOP),
    "without replacement (2, 2, 1)": lambda draft, vocab: TreeDrafter(draft, vocab, (2, 2, 1), WITHOUT),
    "top (2, 2, 1) + n-gram": lambda draft, vocab: Merged(
        [TreeDrafter(draft, vocab, (2, 2, 1), TOP), NGramDrafter()], K=4
    ),
}


@pytest.fixture(scope="module")
def plain(tiny, prompts):
    options = {"max_new_tokens": NEW, "sampling": GREEDY, "eos_token_id": []}
    return [autoregressive(tiny, prompt, **options).tokens for prompt in prompts]


@pytest.mark.parametrize("name", DRAFTERS)
def test_fifty_greedy_texts_of_the_embedded_target_are_its_own(name, tiny, prompts, plain):
    drafter = DRAFTERS[name](tiny.draft, tiny.target.vocab_size)
    options = {"max_new_tokens": NEW, "sampling": GREEDY, "eos_token_id": [], "K": 4, "drafter": drafter}
    results = [speculative(tiny, prompt, **options) for prompt in prompts]
    assert [result.tokens for result in results] == plain
    assert sum(len(result.rounds) for result in results) < 0.7 * 50 * NEW  # and in fewer passes


def test_sampled_texts_of_the_embedded_pair_have_the_targets_law(tiny):
    drafter = TreeDrafter(tiny.draft, tiny.target.vocab_size, (2, 2), WITHOUT)
    engine = Loop(tiny, 2, drafter=drafter, name="tree")
    report = check(tiny, engine, prompts=["The wolf said to the"], draws=400, K=2, max_new_tokens=8)
    assert report.exit_code == LOSSLESS, report.verdict


def test_what_cannot_be_merged_is_refused(random_table):
    model = ModelDrafter(TableModel(random_table(3, seed=1)), 3)
    for drafters, K in (([], 2), ([model], 0), ([model, model], 2)):
        with pytest.raises(ValueError, match="merging needs K >= 1"):
            Merged(drafters, K)
