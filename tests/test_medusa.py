"""Medusa: heads that look further ahead, the tree of their candidates, and how they are trained and kept."""

import json
from functools import partial
from itertools import product

import pytest
import torch

from specdec_lite.decoding import decode
from specdec_lite.distributions import GREEDY, Sampling, overlap
from specdec_lite.drafters.early_exit import ExitHead
from specdec_lite.drafters.medusa import MedusaDrafter, MedusaHeads, best_tree, candidates, rank_accuracies, ranks
from specdec_lite.gpt2 import GPT2, GPT2Config
from specdec_lite.pairs import load_pair
from specdec_lite.randomness import TorchRandomness, enumerate_outcomes
from specdec_lite.training import __main__ as command
from specdec_lite.training import heads as training
from specdec_lite.training import loop
from specdec_lite.tree import Tree

CONFIG = GPT2Config(vocab_size=11, positions=40, width=16, layers=2, heads=2)
SHAPES = [None, Tree.chain(3), Tree.branching((3, 2, 1)), Tree.paths([(0,), (1,), (0, 0), (0, 1), (0, 0, 0), (2,)])]


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def small_target(seed=0, **sizes):
    """Random weights, large enough for the text to matter, in float64."""
    target = GPT2.random(GPT2Config(**(vars(CONFIG) | sizes)), seed=seed, dtype=torch.float64)
    for name, parameter in target.named_parameters():
        if "norm" not in name:
            parameter.data *= 15
    return target


def random_heads(width=16, heads=3, seed=0):
    made = MedusaHeads(width, heads).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return made.requires_grad_(False)


def text_of(target, drafter, *, K, sampling=GREEDY, seed=0, new=20, prompt=(3, 1, 4)):
    randomness = TorchRandomness.seeded(seed)
    return [*decode(target, drafter, prompt, max_new_tokens=new, K=K, sampling=sampling, randomness=randomness)]


def tokens_of(rounds):
    return [token for round in rounds for token in round.tokens]


# Drafting


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tree", SHAPES, ids=["drawn", "chain", "branching", "sparse"])
def test_greedy_text_is_that_of_plain_decoding(tree, seed):
    target = small_target(seed)
    drafter = MedusaDrafter(target, random_heads(seed=seed), tree)
    plain = tokens_of(text_of(target, None, K=0))
    for K in (1, 2, 3, 5):
        rounds = text_of(target, drafter, K=K)
        assert tokens_of(rounds) == plain
        assert rounds[0].draft_tokens == ()  # no feature yet
        assert not any(round.draft_limited for round in rounds)


@pytest.mark.parametrize("tree", [None, Tree.branching((2, 1))], ids=["drawn chain", "tree of choices"])
def test_the_law_of_the_text_is_the_targets(tree):
    target = small_target(1, vocab_size=3)

    def law(drafter, K):
        def run(randomness):
            options = {"sampling": Sampling(), "randomness": randomness}
            return tuple(tokens_of(decode(target, drafter, [0, 2], max_new_tokens=4, K=K, **options)))

        return enumerate_outcomes(run)

    own, drafted = law(None, 0), law(MedusaDrafter(target, random_heads(heads=2), tree), 2)
    assert max(abs(own[text] - drafted.get(text, 0)) for text in own) < 1e-12


class Watched(MedusaDrafter):
    """Remembers, for every draft, its context and the feature that it was made from."""

    def start(self, capacity):
        super().start(capacity)
        self.seen = []

    def propose(self, context, K, sampling, randomness):
        self.seen.append((context.clone(), self.feature))
        return super().propose(context, K, sampling, randomness)


@pytest.mark.parametrize("tree", SHAPES[::2], ids=["drawn", "branching"])
def test_a_draft_is_made_from_the_feature_at_the_last_position_but_one(tree):
    """Position length - 2 is the newest that the target has read: the last token is fed with the next pass."""
    target = small_target(2)
    heads = MedusaHeads(16, 3).double()  # untrained heads often guess right when the text repeats itself
    drafter = Watched(target, heads, tree)
    rounds = text_of(target, drafter, K=3, new=24)
    assert any(round.accepted for round in rounds) and any(round.rejected for round in rounds)
    for context, feature in drafter.seen[1:]:
        from_scratch = target.hidden(context[None], target.new_cache(len(context)))[0]
        assert torch.allclose(feature, from_scratch[-2], atol=1e-12, rtol=0)
        assert not torch.allclose(feature, from_scratch[-1], atol=1e-3)


def test_head_i_gives_the_ith_token_of_a_chain_and_the_ith_level_of_a_tree():
    target, heads = small_target(), random_heads()
    feature = torch.randn(16, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    by_rank = torch.stack([target.logits(heads(feature)[i]) for i in range(3)]).argsort(-1, descending=True)
    tree = Tree.branching((2, 3, 1))
    tokens = candidates(tree, target.logits(heads(feature)))
    paths = [rank for depth in (1, 2, 3) for rank in product(*[range(n) for n in (2, 3, 1)[:depth]])]
    assert tokens.tolist() == [by_rank[len(path) - 1, path[-1]] for path in paths]

    drafter = MedusaDrafter(target, heads)
    drafter.start(10)
    drafter.feature = feature
    assert drafter.propose(torch.tensor([1]), 2, GREEDY, TorchRandomness.seeded(0)).tokens.tolist() == [
        by_rank[0, 0],
        by_rank[1, 0],
    ]


def test_rank_is_a_nodes_place_among_its_siblings():
    assert ranks(Tree((-1, -1, 0, -1, 0, 1))) == [0, 1, 0, 2, 1, 0]


def test_a_chain_reports_the_laws_that_its_tokens_were_drawn_from():
    target, heads = small_target(), random_heads()
    drafter = MedusaDrafter(target, heads)
    drafter.start(10)
    drafter.feature = torch.ones(16, dtype=torch.float64)
    sampling = Sampling(temperature=0.7, top_k=4)
    expected = sampling.probs(target.logits(heads(drafter.feature)))

    def draft(randomness):
        made = drafter.propose(torch.tensor([1]), 3, sampling, randomness)
        assert torch.equal(made.probs, expected)
        return tuple(made.tokens.tolist())

    for tokens, probability in enumerate_outcomes(draft).items():
        assert probability == pytest.approx(expected[[0, 1, 2], list(tokens)].prod().item(), abs=1e-12)


def test_untrained_heads_say_what_the_target_says_of_the_next_token():
    features = torch.randn(5, 16)
    assert torch.equal(MedusaHeads(16, 3)(features), features[:, None].expand(5, 3, 16))


# The tree


def test_the_best_tree_of_a_small_table_is_the_one_done_by_hand():
    accuracies = torch.tensor([[0.5, 0.3, 0.1], [0.4, 0.1, 0.05]])
    # (0,) .5   (1,) .3   (0, 0) .2   (1, 0) .12   (2,) .1   (0, 1) .05 ...
    assert best_tree(accuracies, 1) == Tree.chain(1)
    assert best_tree(accuracies, 3) == Tree.paths([(0,), (1,), (0, 0)])
    assert best_tree(accuracies, 5) == Tree.paths([(0,), (1,), (0, 0), (1, 0), (2,)])
    assert best_tree(accuracies, 12) == Tree.branching((3, 3))


def test_no_tree_of_that_size_is_expected_to_have_more_accepted():
    accuracies = torch.rand(2, 2, generator=torch.Generator().manual_seed(3)).sort(-1, descending=True).values

    def expected(tree):
        place = ranks(tree)
        return sum(
            torch.prod(torch.stack([accuracies[tree.depths[step] - 1, place[step]] for step in tree.path_to(node)]))
            for node in range(len(tree))
        )

    everything = Tree.branching((2, 2))
    all_paths = [tuple(ranks(everything)[step] for step in everything.path_to(node)) for node in range(6)]
    for size in range(1, 7):
        trees = []
        for kept in product([False, True], repeat=6):
            if sum(kept) == size:
                try:
                    trees.append(Tree.paths([path for path, keep in zip(all_paths, kept, strict=True) if keep]))
                except ValueError:  # a node without its parent
                    continue
        assert expected(best_tree(accuracies, size)) == max(map(expected, trees))


def test_a_rank_is_as_accurate_as_p_says_of_its_token_i_positions_later():
    target, heads = small_target(3), random_heads()
    windows = torch.randint(11, (2, 8), generator=torch.Generator().manual_seed(0))
    features = training.features_of(target, windows)
    found = rank_accuracies(target, heads, features, Sampling(), ranks=4)
    for i, rank in product(range(3), range(4)):
        chances = []
        for row, t in product(range(2), range(5)):
            token = target.logits(heads(features[row, t])[i]).argsort(descending=True)[rank]
            later = target(windows[row : row + 1, : t + i + 2], target.new_cache(8))[0, -1]
            chances.append(later.softmax(-1)[token])
        assert found[i, rank].item() == pytest.approx(torch.stack(chances).mean().item(), abs=1e-12)


# Bad input


def test_what_does_not_fit_is_refused_before_any_work():
    target = small_target()
    with pytest.raises(ValueError, match="heads read features of width 8, and those of random have 16"):
        MedusaDrafter(target, MedusaHeads(8, 2))
    with pytest.raises(ValueError, match="the tree has depth 3, and there are 2 heads"):
        MedusaDrafter(target, MedusaHeads(16, 2), Tree.chain(3))
    with pytest.raises(ValueError, match="12 candidates for one position, and the vocabulary has 11"):
        MedusaDrafter(target, MedusaHeads(16, 2), Tree.branching((12,)))
    with pytest.raises(ValueError, match="12 candidates"):
        rank_accuracies(target, random_heads(), torch.zeros(1, 8, 16), GREEDY, ranks=12)
    with pytest.raises(ValueError, match="this drafter was made for random: make one for"):
        text_of(small_target(1), MedusaDrafter(target, random_heads()), K=2)
    for nodes in (0, 13):
        with pytest.raises(ValueError, match=f"nodes is {nodes}; 2 heads with 3 candidates each give 1 to 12"):
            best_tree(torch.rand(2, 3), nodes)


def test_heads_come_back_as_they_were_saved_and_for_their_own_target_only(tmp_path):
    target, heads, path = small_target(), random_heads(), tmp_path / "medusa.safetensors"
    heads.save(path, target)
    back = MedusaHeads.load(target, path)
    assert torch.allclose(back.linears[1].weight, heads.linears[1].weight, atol=1e-3)
    assert back.linears[1].weight.dtype == torch.float64 and not back.linears[1].weight.requires_grad
    with pytest.raises(ValueError, match="trained for another target"):
        MedusaHeads.load(small_target(1), path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(ValueError, match="cut short"):
        MedusaHeads.load(target, path)


# Training


def oracle(features, heads=3):
    """A guess that is never wrong: the features of the later positions themselves."""
    n = features.shape[1] - heads
    return torch.stack([features[:, 1 + i : 1 + i + n] for i in range(heads)], 2)


@pytest.fixture
def learned_from():
    """Features of text of a small target in float32: (training, held out)."""
    target = small_target(4).float()
    features = training.features_of(target, training.sample_text(target, 0, rows=60, length=24, seed=0))
    return target, features[:48], features[48:]


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch):
    monkeypatch.setattr(training, "LENGTH", 12)


def test_the_law_that_head_i_learns_is_the_targets_i_positions_later(learned_from):
    target, features, held_out = learned_from
    found = training.agreement(oracle, target, held_out, held_out, first=1)
    assert found["alpha"] == pytest.approx([1, 1, 1], abs=1e-5) and found["greedy_alpha"] == [1, 1, 1]
    module = MedusaHeads(16, 1)  # takes no part, so its gradients are zero
    rows = training.fit(
        module, lambda features: oracle(features) + 0 * module(features).sum(), target, (features, features),
        (held_out, held_out), first=1, steps=1,
    )  # fmt: skip
    assert rows[-1]["loss"] == pytest.approx(0, abs=1e-3)


def test_training_lowers_the_loss_and_raises_alpha_on_held_out_text(learned_from):
    target, features, held_out = learned_from
    heads = MedusaHeads(16, 3)

    def guess(features):
        return heads(features[:, : features.shape[1] - 3])

    before = training.agreement(guess, target, held_out, held_out, first=1)["alpha"]
    log = training.train_medusa(heads, target, features, held_out, steps=60, lr=0.1)
    assert log[-1]["loss"] < 0.8 * log[0]["loss"]
    assert all(after > untrained for after, untrained in zip(log[-1]["alpha"], before, strict=True))
    with torch.no_grad():  # from the feature at t, head i (from 0) is to guess the law at t + 1 + i
        p = target.logits(held_out).softmax(-1)
        q = target.logits(heads(held_out)).softmax(-1)
    by_hand = [overlap(p[:, 1 + i : 22 + i], q[:, :21, i]).mean().item() for i in range(3)]
    assert log[-1]["alpha"] == pytest.approx(by_hand, abs=1e-5)
    assert torch.equal(heads.accuracies, rank_accuracies(target, heads, held_out, GREEDY))  # for the best tree
    assert (heads.accuracies.diff() <= 0).float().mean() > 0.7  # mostly the first choice is the best


def test_a_killed_run_ends_like_one_that_was_not(learned_from, tmp_path, monkeypatch):
    monkeypatch.setattr(training, "train", partial(loop.train, checkpoint_every=5))
    target, *features = learned_from

    def run(name):
        heads = MedusaHeads(16, 3)
        log = training.train_medusa(heads, target, *features, steps=14, out=tmp_path / name)
        return heads, log

    whole, whole_log = run("whole")
    pieces = training.random_pieces

    def kill(states, *, seed, step):
        if step == 8:
            raise KeyboardInterrupt
        return pieces(states, seed=seed, step=step)

    with monkeypatch.context() as patch:
        patch.setattr(training, "random_pieces", kill)
        with pytest.raises(KeyboardInterrupt):
            run("killed")
    resumed, log = run("killed")
    for ours, theirs in zip(resumed.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert {row["step"]: row["loss"] for row in log} == {row["step"]: row["loss"] for row in whole_log}
    assert json.loads((tmp_path / "killed" / "log.jsonl").read_text().splitlines()[-1])["step"] == 14


def test_windows_too_short_to_learn_from_are_refused(learned_from):
    target, features, held_out = learned_from
    with pytest.raises(ValueError, match="the windows have 8 tokens; training cuts pieces of 12"):
        training.train_medusa(MedusaHeads(16, 2), target, features[:, :8], held_out, steps=1)


@pytest.mark.parametrize(("kind", "load"), [("medusa", MedusaHeads.load), ("exit", ExitHead.load)])
def test_a_stage_leaves_a_file_for_the_packages_target(kind, load, tmp_path, monkeypatch, capsys):
    corpus, short = tmp_path / "corpus.txt", tmp_path / "short.txt"
    story = "<|endoftext|>\nOnce there was a king who had {} sons, and the youngest of them rode into the wood.\n"
    corpus.write_text("".join(story.format(number) for number in range(1200)), encoding="utf-8")
    short.write_text("".join(story.format(number) for number in range(30)), encoding="utf-8")
    monkeypatch.setattr(command, "WINDOWS", 2)
    command.main([kind, "--corpus", str(corpus), "--out", str(tmp_path), "--steps", "1"])
    (file,) = tmp_path.glob(f"{kind}-*/{kind}.safetensors")
    load(load_pair("tiny").target, file)
    with pytest.raises(SystemExit) as stop:
        command.main([kind, "--corpus", str(short), "--out", str(tmp_path / "short"), "--steps", "1"])
    assert stop.value.code == 2 and "give a larger corpus" in capsys.readouterr().err


def test_text_sampled_from_the_target_has_the_targets_law():
    target = small_target(5)
    rows = training.sample_text(target, 7, rows=4000, length=2, seed=0)
    assert (rows[:, 0] == 7).all()
    p = target(torch.tensor([[7]]), target.new_cache(1))[0, -1].softmax(-1)
    seen = torch.bincount(rows[:, 1], minlength=11) / 4000
    assert (seen - p).abs().sum() / 2 < 0.03  # noise alone gives about 0.015
    assert torch.equal(rows, training.sample_text(target, 7, rows=4000, length=2, seed=0))
