"""EAGLE: what the layer reads, what its cache holds after a round, the shapes of its drafts, and its training."""

import json
from functools import partial

import pytest
import torch

from specdec_lite import GREEDY, Sampling, autoregressive, speculative
from specdec_lite.distributions import overlap
from specdec_lite.drafters import Draft
from specdec_lite.drafters.eagle import EagleDrafter, EagleLayer, Growth, embed
from specdec_lite.drafters.eagle_tree import DynamicTree, StaticTree
from specdec_lite.gpt2 import GPT2, GPT2Config
from specdec_lite.randomness import TorchRandomness
from specdec_lite.training import __main__ as command
from specdec_lite.training import corpus, eagle, loop, pretrain
from specdec_lite.tree import Tree

SMALL = GPT2Config(vocab_size=30, positions=40, width=16, layers=2, heads=2)
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
STATIC = Tree.branching((3, 2, 1))
DYNAMIC = DynamicTree(nodes=6, width=3, depth=4)


def models(seed=0, dtype=torch.float64, config=SMALL):
    """A target whose laws are far from uniform, and a layer that nobody trained."""
    target = GPT2.random(config, seed=seed, dtype=dtype)
    layer = eagle.new_layer(target, seed).requires_grad_(False)
    for model, scale in ((target, 20), (layer, 4)):
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.data.mul_(scale)
    return target, layer


def features_of(target, tokens):
    """Of the tokens [length]: the target's features, read in one pass."""
    return target.hidden(tokens[None], target.new_cache(len(tokens)))[0]


def guess_after(target, layer, tokens):
    """From scratch: (the guess of the feature at the last token, the layer's cache), with true features only."""
    cache = layer.new_cache(len(tokens))
    embedded = embed(target, tokens, torch.arange(len(tokens)))
    guesses = layer(features_of(target, tokens)[None, :-1], embedded[None, 1:], cache)
    return guesses[0, -1], cache


def drafted_law(target, layer, text, draft):
    """From scratch, pair by pair: the logits after ``text`` and the drafted tokens ``draft``."""
    guess, _ = guess_after(target, layer, text)
    cache = layer.new_cache(len(text) + len(draft))
    embedded = embed(target, torch.cat([text, draft]), torch.arange(len(text) + len(draft)))
    layer(features_of(target, text)[None, :-1], embedded[None, 1 : len(text)], cache)
    for i in range(len(draft)):
        guess = layer(guess[None, None], embedded[None, [len(text) + i]], cache)[0, 0]
    return target.logits(guess)


def ready(target, layer, shape, text):
    """A drafter that was told all of ``text`` but its last token, as after a round in which nothing was drafted."""
    drafter = EagleDrafter(target, layer, shape)
    observed = drafter.observe(target)
    drafter.start(SMALL.positions)
    observed(text[None, :-1], observed.new_cache(SMALL.positions), last=1)
    drafter.commit(len(text), [])
    return drafter


class Scripted:
    """A shape that drafts a given text, whatever the layer thinks: so a test decides how much of it is accepted."""

    name, nodes, fed, widest = "scripted", 8, 8, 1

    def __init__(self, text, right):
        self.text, self.right, self.roots = text, right, []

    def grow(self, growth, K, sampling, randomness):
        self.roots.append(growth.guesses[0].clone())
        start = growth.text + 1  # the length of the context
        draft = self.text[start : start + K].clone()
        wrong = self.right[len(self.roots) % len(self.right)]
        draft[wrong:] = (draft[wrong:] + 1) % SMALL.vocab_size
        for token in draft[:-1]:
            growth.feed(torch.tensor([0]), token.view(1))
        return Draft(draft, None)


@pytest.mark.parametrize("right", [[0], [4], [2], [4, 0, 2, 1]], ids=["none", "all", "some", "mixed"])
def test_after_every_round_the_cache_holds_true_features_of_the_text_and_nothing_else(right, pair_of):
    target, layer = models()
    plain = autoregressive(pair_of(target, target), PROMPT, max_new_tokens=25, sampling=GREEDY)
    text = torch.tensor([*PROMPT, *plain.tokens])
    drafter = EagleDrafter(target, layer, Scripted(text, right))
    lengths = []
    propose = drafter.propose

    def checked(context, *arguments):
        draft = propose(context, *arguments)
        if drafter.shape.roots:
            expected, cache = guess_after(target, layer, context)
            torch.testing.assert_close(drafter.shape.roots[-1], expected, rtol=0, atol=1e-12)
            assert drafter.cache.length == len(context) - 1
            for mine, scratch in ((drafter.cache.keys, cache.keys), (drafter.cache.values, cache.values)):
                kept = mine[0][:, : len(context) - 1]
                torch.testing.assert_close(kept, scratch[0][:, : len(context) - 1], rtol=0, atol=1e-12)
            lengths.append(len(context))
        return draft

    drafter.propose = checked
    out = speculative(pair_of(target, target), PROMPT, drafter=drafter, max_new_tokens=25, K=4, sampling=GREEDY)
    assert out.tokens == plain.tokens
    rounds = zip([len(PROMPT), *lengths[:-1]], lengths, strict=True)
    steps = [after - before for before, after in rounds]
    assert steps[0] == 1  # nothing can be drafted before the target has read the prompt
    assert steps[1:] == [right[i % len(right)] + 1 for i in range(1, len(steps))]


def test_the_first_round_drafts_nothing():
    target, layer = models()
    for shape in (None, STATIC, DYNAMIC):
        drafter = EagleDrafter(target, layer, shape)
        drafter.observe(target)
        drafter.start(40)
        assert len(drafter.propose(torch.tensor(PROMPT), 4, GREEDY, None).tokens) == 0


def test_a_round_without_a_draft_loses_no_feature():
    """The loop may ask for no draft in a round: the features of several rounds then wait together."""
    target, layer = models()
    text = torch.tensor(PROMPT)
    drafter = EagleDrafter(target, layer)
    observed = drafter.observe(target)
    drafter.start(40)
    cache = observed.new_cache(40)
    for end in range(3, len(text)):
        observed(text[None, cache.length : end], cache, last=1)
        drafter.commit(end + 1, [])
    torch.testing.assert_close(drafter.catch_up(text)[0], guess_after(target, layer, text)[0], rtol=0, atol=1e-12)


# What is drafted


@pytest.mark.parametrize("seed", range(3))
def test_a_chain_reports_the_law_that_each_token_was_drawn_from(seed):
    target, layer = models(seed)
    text, sampling = torch.tensor(PROMPT), Sampling(temperature=0.9, top_k=12)
    drafter = ready(target, layer, None, text)

    drawn = []

    class Spy(TorchRandomness):
        def categorical(self, probs):
            drawn.append(probs)
            return super().categorical(probs)

    draft = drafter.propose(text, 4, sampling, Spy(torch.Generator().manual_seed(seed)))
    assert draft.tree is None
    assert len(draft.tokens) == 4
    assert torch.equal(draft.probs, torch.stack(drawn))
    for i in range(4):
        expected = sampling.probs(drafted_law(target, layer, text, draft.tokens[:i]))
        torch.testing.assert_close(draft.probs[i], expected, rtol=0, atol=1e-12)
        assert draft.probs[i, draft.tokens[i]] > 0


def test_a_static_tree_holds_the_likeliest_tokens_after_each_node():
    target, layer = models()
    text = torch.tensor(PROMPT)
    draft = ready(target, layer, STATIC, text).propose(text, 3, Sampling(), None)
    assert draft.probs is None
    assert draft.tree == STATIC
    for node, family in zip([(), *map(STATIC.path_to, range(len(STATIC)))], STATIC.children, strict=True):
        logits = drafted_law(target, layer, text, draft.tokens[list(node)])
        assert draft.tokens[list(family)].tolist() == logits.argsort(descending=True)[: len(family)].tolist()


def test_a_static_tree_may_list_its_nodes_in_any_order():
    target, layer = models()
    text = torch.tensor(PROMPT)
    by_depth = Tree((-1, -1, 0, 0, 1))
    by_branch = Tree((-1, 0, 0, -1, 3))
    drafts = [ready(target, layer, tree, text).propose(text, 2, GREEDY, None) for tree in (by_depth, by_branch)]
    assert drafts[1].tokens.tolist() == drafts[0].tokens[[0, 2, 3, 1, 4]].tolist()


def test_K_cuts_a_tree_to_its_depth():
    target, layer = models()
    text = torch.tensor(PROMPT)
    assert ready(target, layer, STATIC, text).propose(text, 2, GREEDY, None).tree == Tree.branching((3, 2))
    dynamic = DynamicTree(nodes=20, width=3, depth=4)
    assert ready(target, layer, dynamic, text).propose(text, 4, GREEDY, None).tree.depth > 2
    assert ready(target, layer, dynamic, text).propose(text, 2, GREEDY, None).tree.depth == 2


def brute_force(law, width, depth, nodes):
    """EAGLE-2's rule on paths: {path: confidence} of the nodes that are kept. ``law(path)`` are the probabilities."""
    everything, frontier = {}, {(): 1.0}
    for _ in range(depth):
        level = {}
        for path, confidence in frontier.items():
            p = law(path)
            for token in sorted(range(len(p)), key=lambda token, p=p: -p[token])[:width]:
                level[(*path, token)] = confidence * p[token]
        everything |= level
        frontier = dict(sorted(level.items(), key=lambda item: -item[1])[:width])
    return dict(sorted(everything.items(), key=lambda item: -item[1])[:nodes])


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("nodes", "width", "depth"), [(6, 3, 4), (1, 1, 1), (12, 3, 3), (100, 2, 4), (5, 30, 2)])
def test_a_dynamic_tree_is_what_the_rule_gives_by_brute_force(seed, nodes, width, depth):
    target, layer = models(seed)
    text = torch.tensor(PROMPT)
    shape = DynamicTree(nodes=nodes, width=width, depth=depth)
    # Temperature 0 decides what is accepted; confidence is the layer's own law all the same.
    draft = ready(target, layer, shape, text).propose(text, depth, GREEDY, None)

    def law(path):
        return drafted_law(target, layer, text, torch.tensor(path, dtype=torch.long)).softmax(-1).tolist()

    expected = brute_force(law, width, depth, nodes)
    paths = {tuple(draft.tokens[list(draft.tree.path_to(node))].tolist()) for node in range(len(draft.tree))}
    assert paths == set(expected)
    assert len(draft.tokens) == len(draft.tree) <= nodes
    assert draft.probs is None


class SameLaw:
    """A layer that says the same everywhere, so that confidences tie. It counts what it is fed."""

    def __init__(self, law):
        self.law, self.rows, self.fed = law, 1, 0

    @property
    def logits(self):
        return self.law.expand(self.rows, -1)

    def feed(self, parents, tokens):
        self.rows = len(tokens)
        self.fed += len(tokens)


CERTAIN = torch.tensor([0.0, -torch.inf, -torch.inf])


@pytest.mark.parametrize("law", [torch.zeros(3), CERTAIN], ids=["uniform", "certain"])
@pytest.mark.parametrize("nodes", range(1, 8))
def test_where_confidence_ties_a_parent_comes_before_its_child(law, nodes):
    """A token that is certain is as confident as its parent: the parent must stay for its sake."""
    draft = DynamicTree(nodes=nodes, width=2, depth=4).grow(SameLaw(law), 4, GREEDY, None)
    assert len(draft.tree) == nodes  # cutting it out would have failed on a child without its parent
    if law is CERTAIN:
        assert set(range(1, min(nodes, 4) + 1)) <= set(draft.tree.depths)


@pytest.mark.parametrize("shape", [StaticTree(STATIC), StaticTree(Tree.chain(3)), DynamicTree(20, 3, 4)])
def test_a_shape_feeds_at_most_what_it_says(shape):
    growth = SameLaw(torch.zeros(5))
    draft = shape.grow(growth, 10, GREEDY, None)
    assert growth.fed == shape.fed
    assert len(draft.tokens) == shape.nodes


def test_nodes_of_a_level_do_not_see_each_other():
    """Each node is guessed as if it were alone: sees the text, its ancestors and itself."""
    target, layer = models()
    text = torch.tensor(PROMPT)
    drafter = ready(target, layer, None, text)
    growth = Growth(target, layer, drafter.cache, drafter.catch_up(text))
    growth.feed(torch.tensor([0, 0]), torch.tensor([7, 8]))
    growth.feed(torch.tensor([1, 0, 1]), torch.tensor([9, 10, 11]))
    for row, path in enumerate(([8, 9], [7, 10], [8, 11])):
        expected = drafted_law(target, layer, text, torch.tensor(path))
        torch.testing.assert_close(growth.logits[row], expected, rtol=0, atol=1e-12)


# In the loop


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("shape", [None, STATIC, DYNAMIC, DynamicTree(nodes=20, width=4, depth=2)])
@pytest.mark.parametrize("K", [1, 3, 5])
def test_greedy_tokens_are_those_of_plain_decoding(seed, shape, K, pair_of):
    target, layer = models(seed)
    pair = pair_of(target, target)
    options = {"max_new_tokens": 20, "sampling": GREEDY}
    plain = autoregressive(pair, PROMPT, **options)
    assert speculative(pair, PROMPT, K=K, drafter=EagleDrafter(target, layer, shape), **options).tokens == plain.tokens


@pytest.mark.parametrize("shape", [None, STATIC, DYNAMIC])
def test_the_context_can_be_filled_to_its_last_token(shape, pair_of):
    target, layer = models()
    pair, options = pair_of(target, target), {"max_new_tokens": 100, "sampling": GREEDY}
    plain = autoregressive(pair, PROMPT, **options)
    out = speculative(pair, PROMPT, K=6, drafter=EagleDrafter(target, layer, shape), **options)
    assert out.tokens == plain.tokens
    assert len(PROMPT) + len(out.tokens) == SMALL.positions + 1
    assert out.finish_reason == "context"


def test_one_drafter_serves_one_sequence_after_the_other(pair_of):
    target, layer = models()
    pair, drafter = pair_of(target, target), EagleDrafter(target, layer, DYNAMIC)
    for prompt in (PROMPT, PROMPT[::-1], PROMPT):
        plain = autoregressive(pair, prompt, max_new_tokens=12, sampling=GREEDY)
        assert speculative(pair, prompt, drafter=drafter, max_new_tokens=12, sampling=GREEDY).tokens == plain.tokens


# What is refused


def test_another_target_is_refused(tmp_path, random_table):
    target, layer = models()
    layer.save(tmp_path / "eagle.safetensors", target)
    with pytest.raises(ValueError, match="another target"):
        EagleLayer.load(models(1)[0], tmp_path / "eagle.safetensors")
    with pytest.raises(ValueError, match="made for random"):
        EagleDrafter(target, layer).observe(models(1)[0])


def test_a_saved_layer_comes_back_and_a_file_cut_short_does_not(tmp_path):
    target, layer = models()
    path = tmp_path / "eagle.safetensors"
    layer.save(path, target)
    back = EagleLayer.load(target, path)
    assert all(torch.equal(a.half().double(), b) for a, b in zip(layer.parameters(), back.parameters(), strict=True))
    names = set(dict(layer.named_parameters()))
    assert not any("embedding" in name or "head" in name for name in names)  # the target's are used, not stored
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(ValueError, match="cut short"):
        EagleLayer.load(target, path)


def test_more_candidates_than_tokens_are_refused_at_once():
    target, layer = models()
    for shape in (Tree.branching((31,)), DynamicTree(nodes=4, width=31, depth=2)):
        with pytest.raises(ValueError, match="31 candidates"):
            EagleDrafter(target, layer, shape)


@pytest.mark.parametrize("sizes", [(0, 1, 1), (1, 0, 1), (1, 1, 0)])
def test_a_dynamic_tree_of_nothing_is_refused(sizes):
    with pytest.raises(ValueError, match="1 or more"):
        DynamicTree(*sizes)


# Training

TINY = GPT2Config(vocab_size=20, positions=12, width=16, layers=1, heads=2)


def tokens_of(rows, length, seed):
    return torch.randint(20, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_the_unrolled_guesses_are_those_of_drafting_token_by_token():
    target, layer = models(config=TINY)
    tokens = tokens_of(1, 8, seed=0)
    features = features_of(target, tokens[0])[None]
    for depth, guesses in enumerate(eagle.drafted(layer, target, tokens, features, 4)):
        assert guesses.shape == (1, 7 - depth, 16)
        for i in range(1, 7 - depth):
            text, draft = tokens[0, : i + 2], tokens[0, i + 2 : i + 2 + depth]
            expected = drafted_law(target, layer, text, draft)
            torch.testing.assert_close(target.logits(guesses[0, i]), expected, rtol=0, atol=1e-12)


def test_agreement_is_the_overlap_at_each_depth():
    target, layer = models(config=TINY)
    windows = tokens_of(6, 8, seed=1)  # one and a half batches
    measured = eagle.agreement(layer, target, windows, depths=2)
    overlaps, equal = ([], []), ([], [])
    for row in windows:
        truth = target.logits(features_of(target, row))
        for depth in range(2):
            for last in range(1 + depth, len(row)):
                p, text = truth[last], row[: last + 1 - depth]
                logits = drafted_law(target, layer, text, row[len(text) : last + 1])
                overlaps[depth].append(overlap(p.softmax(-1), logits.softmax(-1)))
                equal[depth].append(float(p.argmax() == logits.argmax()))
    assert measured["alpha"] == pytest.approx([float(torch.stack(rows).mean()) for rows in overlaps], abs=1e-6)
    assert measured["greedy_alpha"] == pytest.approx([sum(rows) / len(rows) for rows in equal], abs=1e-6)


def run(out, steps=20, seed=0):
    target = models(dtype=torch.float32, config=TINY)[0]
    layer = eagle.new_layer(target, seed)
    stream = tokens_of(1, 300, seed=2)[0]
    eagle.train_eagle(layer, target, stream, stream, out=out, steps=steps, rows=2, seed=seed)
    return layer, target


def losses_in(out):
    return {row["step"]: row["loss"] for row in map(json.loads, (out / "log.jsonl").read_text().splitlines())}


def test_training_lowers_the_loss_and_leaves_the_target_alone(tmp_path):
    layer, target = run(tmp_path, steps=80)
    losses = losses_in(tmp_path)
    assert losses[80] < 0.6 * losses[10]
    untouched = models(dtype=torch.float32, config=TINY)[0]
    assert all(torch.equal(a, b) for a, b in zip(target.parameters(), untouched.parameters(), strict=True))
    windows = tokens_of(8, 12, seed=3)  # not seen in training
    before = eagle.agreement(eagle.new_layer(target, 0), target, windows)["alpha"]
    after = eagle.agreement(layer, target, windows)["alpha"]
    assert all(new > old + 0.1 for new, old in zip(after, before, strict=True))


def test_a_killed_run_ends_with_the_same_weights(tmp_path, monkeypatch):
    monkeypatch.setattr(eagle, "train", partial(loop.train, checkpoint_every=5))
    whole, _ = run(tmp_path / "whole")

    def kill(stream, **place):
        if place["step"] == 13:
            raise KeyboardInterrupt
        return corpus.random_windows(stream, **place)

    with monkeypatch.context() as patch:
        patch.setattr(eagle, "random_windows", kill)
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "killed")
    resumed, _ = run(tmp_path / "killed")
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert losses_in(tmp_path / "whole") == losses_in(tmp_path / "killed")


def test_muon_takes_the_matrices_and_adamw_the_embeddings_and_what_is_no_matrix():
    module = torch.nn.ModuleDict({"embedding": torch.nn.Embedding(5, 4), "linear": torch.nn.Linear(4, 4)})
    muon, adam = loop.make_optimizers(module, 0.1, 0.0)
    assert [p is module["linear"].weight for p in muon.param_groups[0]["params"]] == [True]
    assert len(adam.param_groups[0]["params"]) == 2
    module["linear"].requires_grad_(False)
    (adam,) = loop.make_optimizers(module, 0.1, 0.0)
    assert adam.param_groups[0]["params"][0] is module["embedding"].weight


def test_the_stage_trains_for_the_target_in_the_package(tmp_path, monkeypatch):
    stories = [f"Once there was a king who had {number} sons and a blue bird." for number in range(60)]
    text = tmp_path / "corpus.txt"
    text.write_text("".join(f"{corpus.END_OF_TEXT}\n{story}\n" for story in stories), encoding="utf-8")
    tokenizer = corpus.train_tokenizer(stories, 300)
    package = tmp_path / "package"
    tokenizer.save_pretrained(package / "tokenizer")
    small = {"layers": 1, "width": 16, "heads": 2, "positions": 24}
    pretrain.new_model(tokenizer, **small, seed=0).save_pretrained(package / "target")
    monkeypatch.setattr(command, "SHIPPED", package)
    command.main(["eagle", "--corpus", str(text), "--out", str(tmp_path / "runs"), "--steps", "2"])
    target = GPT2.from_pretrained(str(package / "target"))
    layer = EagleLayer.load(target, tmp_path / "runs" / "eagle" / "eagle.safetensors")
    assert EagleDrafter(target, layer).name == "EAGLE chain"


def test_a_nan_deep_in_a_dynamic_tree_leaves_a_tree(pair_of):
    target, layer = models(0)
    passes = []

    def spoil(module, inputs, output):
        passes.append(1)
        return output * float("nan") if len(passes) > 1 else output

    layer.block.register_forward_hook(spoil)
    text = torch.tensor([1, 2, 3, 1])
    draft = ready(target, layer, DynamicTree(nodes=8, width=3, depth=3), text).propose(
        text, 3, GREEDY, TorchRandomness.seeded(0)
    )
    assert all(parent < node for node, parent in enumerate(draft.tree.parents))
