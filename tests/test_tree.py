"""Token trees by hand: shapes, what a node sees, merged trees; and the verification, enumerated.

The whole loop on trees is in test_specinfer.py.
"""

import math
import random
from itertools import product

import pytest
import torch

from specdec_lite.randomness import enumerate_outcomes
from specdec_lite.tree import Tree, check_candidates, draw_children, merge, verify_tree

#       the text
#      0        1
#    2   3      4
#    5
TREE = Tree((-1, -1, 0, 0, 1, 2))


def random_tree(n, seed):
    chance = random.Random(seed)
    return Tree(tuple(chance.randrange(-1, node) for node in range(n)))


# Shapes


def test_a_tree_knows_its_depths_children_and_paths():
    assert TREE.depths == (1, 1, 2, 2, 2, 3)
    assert (TREE.depth, len(TREE)) == (3, 6)
    assert TREE.children == ((0, 1), (2, 3), (4,), (5,), (), (), ())
    assert [TREE.path_to(node) for node in (-1, 1, 5)] == [(), (1,), (0, 2, 5)]
    assert TREE.visible.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [0, 1, 0, 0, 0, 0],
        [1, 0, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [0, 1, 0, 0, 1, 0],
        [1, 0, 1, 0, 0, 1],
    ]


def test_a_tree_is_pruned_to_a_depth():
    assert TREE.pruned(2) == Tree((-1, -1, 0, 0, 1))
    assert TREE.pruned(1) == Tree((-1, -1))
    assert TREE.pruned(3) == TREE
    assert Tree((-1, 0, -1, 1, 2)).pruned(2) == Tree((-1, 0, -1, 2))  # node 4 follows node 2 there, and becomes node 3


def test_a_chain_is_the_tree_with_one_branch():
    assert Tree.chain(3) == Tree((-1, 0, 1)) == Tree.branching((1, 1, 1)) == Tree.paths([(0,), (0, 0), (0, 0, 0)])
    assert torch.equal(Tree.chain(4).visible, torch.ones(4, 4).tril().bool())


def test_a_branching_tree_has_the_product_of_its_widths_at_each_depth():
    tree = Tree.branching((3, 2, 4))
    assert [tree.depths.count(depth) for depth in (1, 2, 3)] == [3, 6, 24]
    assert [len(children) for children in tree.children] == [3] + 3 * [2] + 6 * [4] + 24 * [0]


def test_medusas_notation_gives_the_same_trees():
    everything = [path for depth in (1, 2, 3) for path in product(*map(range, (3, 2, 2)[:depth]))]
    assert Tree.paths(everything) == Tree.branching((3, 2, 2))
    assert Tree.paths([(0,), (1,), (0, 0), (0, 1), (1, 0), (0, 0, 0)]) == TREE
    assert Tree.paths([(0, 0, 0), (1, 0), (1,), (0, 1), (0, 0), (0,), (0,)]) == TREE  # in any order, each once


def test_a_tree_may_be_empty():
    assert Tree(()) == Tree.chain(0) == Tree.branching(()) == Tree.paths([])
    assert (Tree(()).depth, Tree(()).children) == (0, ((),))
    assert Tree(()).visible.shape == (0, 0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Tree((-1, 2, 1)), "node 1 has parent 2, .* no cycles"),
        (lambda: Tree((0,)), "node 0 has parent 0, .* no cycles"),
        (lambda: Tree((-1, 2, 0)), "node 1 has parent 2, which does not come before it"),
        (lambda: Tree((-1, 7)), "node 1 is an orphan: its parent 7 "),
        (lambda: Tree((-1, -2)), "node 1 is an orphan: its parent -2 "),
        (lambda: Tree.branching((2, 0)), r"widths are \(2, 0\); .* at least 1"),
        (lambda: Tree.branching((-1,)), "at least 1"),
        (lambda: Tree.paths([(0,), (1, 0)]), r"\(1, 0\) is an orphan: the tree lacks \(1,\)"),
        (lambda: Tree.paths([(0,), (2,)]), r"\(2,\) is an orphan: the tree lacks \(1,\)"),
        (lambda: Tree.paths([(0,), (0, 1)]), r"\(0, 1\) is an orphan: the tree lacks \(0, 0\)"),
        (lambda: Tree.paths([(0,), (-1,)]), r"\(-1,\) is an orphan"),
        (lambda: Tree.paths([()]), r"\(\) is an orphan"),
        (lambda: check_candidates(4, 3), "4 candidates .* vocabulary has 3 tokens"),
    ],
)
def test_what_is_no_tree_is_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message) as error:
        make()
    assert "\n" not in str(error.value)


# What a pass over a tree is told


def mask_of(text):
    return [[mark == "x" for mark in line.replace(" ", "")] for line in text.split("\n") if line.strip()]


def test_a_node_sees_the_text_and_its_ancestors_and_stands_at_its_depth():
    topology = TREE.topology(1, 3, torch.device("cpu"))  # of a text of 3 tokens the cache holds 1
    assert topology["positions"].tolist() == [[1, 2, 3, 3, 4, 4, 4, 5]]
    expected = """
        xx. ......
        xxx ......
        xxx x.....
        xxx .x....
        xxx x.x...
        xxx x..x..
        xxx .x..x.
        xxx x.x..x
    """
    assert topology["mask"].tolist() == [[mask_of(expected)]]


def test_nodes_that_the_cache_holds_are_seen_and_not_fed_again():
    whole, rest = (TREE.topology(cached, 3, torch.device("cpu")) for cached in (3, 5))
    assert rest["positions"].tolist() == [[4, 4, 4, 5]]
    assert torch.equal(rest["mask"], whole["mask"][:, :, 2:])


@pytest.mark.parametrize("seed", range(5))
def test_what_any_fed_token_sees_is_a_text_in_its_order(seed):
    tree, length = random_tree(8, seed), 4
    for cached in range(length + 3):
        topology = tree.topology(cached, length, torch.device("cpu"))
        assert topology["mask"].shape == (1, 1, length + 8 - cached, length + 8)
        for row, token in enumerate(range(cached, length + 8)):
            seen = topology["mask"][0, 0, row].nonzero().flatten().tolist()
            path = [length + node for node in tree.path_to(token - length)] if token >= length else []
            assert seen == list(range(min(token + 1, length))) + path
            assert topology["positions"][0, row] == len(seen) - 1


def test_a_chain_is_told_what_it_would_be_without_a_word():
    topology = Tree.chain(3).topology(2, 4, torch.device("cpu"))
    assert topology["positions"].tolist() == [[2, 3, 4, 5, 6]]
    assert torch.equal(topology["mask"][0, 0], torch.ones(5, 7).tril(2).bool())


# Two trees in one


def test_merged_trees_share_the_nodes_that_both_have():
    tree, home = merge(Tree((-1, -1, 0)), [1, 2, 3], Tree.chain(3), [2, 3, 4])
    # The other's 2 is node 1 already: the repetition stays as a leaf, node 3, and 3, 4 follow node 1.
    assert tree == Tree((-1, -1, 0, -1, 1, 4))
    assert home == [1, 4, 5]


def test_merged_with_nothing_a_tree_stays_what_it_is():
    assert merge(TREE, [1, 2, 3, 4, 5, 6], Tree(()), []) == (TREE, [])
    assert merge(Tree(()), [], TREE, [1, 2, 3, 4, 5, 6]) == (TREE, [0, 1, 2, 3, 4, 5])


def test_of_nodes_that_repeat_each_other_the_first_gets_the_children():
    """The first is tried first, and once it has failed the others fail too: what hangs on them is never reached."""
    tree, home = merge(Tree((-1, -1)), [7, 7], Tree((-1, -1, 0, 1)), [7, 7, 8, 9])
    assert home == [0, 0, 4, 5]
    assert tree == Tree((-1, -1, -1, -1, 0, 0))


# Drawing


def test_a_batch_of_rows_is_drawn_row_by_row():
    rows = torch.tensor([[0.2, 0.8], [1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    law = enumerate_outcomes(lambda chance: tuple(chance.categorical(rows).tolist()))
    assert law == pytest.approx({(0, 0, 0): 0.1, (0, 0, 1): 0.1, (1, 0, 0): 0.4, (1, 0, 1): 0.4})
    deep = rows.view(3, 1, 2)
    assert enumerate_outcomes(lambda chance: tuple(chance.categorical(deep).flatten().tolist())) == law


Q = torch.tensor([0.1, 0.2, 0.7], dtype=torch.float64)


def siblings(replacement, width=2, q=Q):
    """The law of the children of one node; an outcome is each token with its reported chance."""

    def play(chance):
        drawn = [(token, law) for _, (token,), (law,) in draw_children(q[None], width, chance, replacement=replacement)]
        return tuple((int(token), round(float(law[token]), 12)) for token, law in drawn)

    return enumerate_outcomes(play)


def test_children_without_replacement_report_q_less_their_earlier_siblings():
    law = siblings(replacement=False)
    assert len(law) == 6
    for ((a, first), (b, second)), chance in law.items():
        assert a != b
        assert (first, second) == (pytest.approx(Q[a]), pytest.approx(Q[b] / (1 - Q[a])))
        assert chance == pytest.approx(first * second)


def test_children_with_replacement_report_q_itself():
    law = siblings(replacement=True)
    assert len(law) == 9
    for ((a, first), (b, second)), chance in law.items():
        assert (first, second) == (pytest.approx(Q[a]), pytest.approx(Q[b]))
        assert chance == pytest.approx(first * second)


def test_a_node_has_no_more_children_than_q_has_tokens():
    q = torch.tensor([[0.0, 1, 0], [0.5, 0, 0.5]], dtype=torch.float64)

    def play(chance):
        return tuple(tuple(nodes.tolist()) for nodes, _, _ in draw_children(q, 2, chance, replacement=False))

    assert list(enumerate_outcomes(play)) == [((0, 1), (1,))]


# Verification


def rows_at(tree, tokens, table):
    """The law after the text, and after each node."""
    after = zip(tree.depths, tokens.tolist(), strict=True)
    return torch.stack([table[0, 0], *(table[depth, token] for depth, token in after)])


def output_law(grow, table):
    """The exact law of the first ``len(table)`` tokens when ``grow(chance)`` drafts and the target does the rest."""

    def play(chance):
        tree, tokens, draft_probs = grow(chance)
        outcome = verify_tree(tree, tokens, draft_probs, rows_at(tree, tokens, table), chance)
        return (*tokens[list(outcome.path)].tolist(), int(outcome.next_token))[: len(table)]

    law = {}
    for written, chance in enumerate_outcomes(play).items():
        for rest in product(range(table.shape[-1]), repeat=len(table) - len(written)):
            output = written + rest
            law[output] = law.get(output, 0) + chance * chance_of(output, table, start=len(written))
    return law


def chance_of(output, table, start=0):
    before = (0, *output)
    return math.prod(float(table[i, before[i], output[i]]) for i in range(start, len(output)))


def worst(law, table):
    outputs = list(product(range(table.shape[-1]), repeat=len(table)))
    assert set(law) <= set(outputs)
    return max(abs(law.get(output, 0) - chance_of(output, table)) for output in outputs)


def different_siblings(tree, vocab, chance):
    tokens = [0] * len(tree)
    for children in tree.children:
        for child, token in zip(children, chance.sample(range(vocab), len(children)), strict=True):
            tokens[child] = token
    return torch.tensor(tokens)


def any_tokens(tree, vocab, chance):
    return torch.tensor([chance.randrange(vocab) for _ in range(len(tree))])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("choose", [different_siblings, any_tokens])
@pytest.mark.parametrize(
    ("tree", "vocab"),
    [(Tree.branching((3, 3, 3)), 3), (Tree.branching((3, 3, 3)), 4), (TREE, 3), (random_tree(9, 2), 4)],
    ids=["everything", "27 of 64 paths", "sparse", "random"],
)
def test_chosen_candidates_keep_the_law(tree, vocab, choose, seed, random_table):
    table = random_table(tree.depth + 1, vocab, vocab, seed=seed)
    tokens = choose(tree, vocab, random.Random(seed))
    assert worst(output_law(lambda chance: (tree, tokens, None), table), table) < 1e-12


@pytest.mark.parametrize(
    ("widths", "replacement", "vocab", "seeds"),
    [
        ((3,), False, 3, 3), ((3,), False, 4, 3), ((3,), True, 3, 3), ((2, 2), False, 3, 1), ((1, 3), False, 3, 3),
        ((3, 1), True, 2, 3), ((1, 2, 1), False, 3, 1), ((2, 2), True, 2, 2), ((1, 1, 1), True, 3, 2),
    ],
)  # fmt: skip
def test_drawn_candidates_keep_the_law(widths, replacement, vocab, seeds, random_table):
    for seed in range(seeds):
        p = random_table(len(widths) + 1, vocab, vocab, seed=seed)
        q = random_table(len(widths), vocab, vocab, seed=100 + seed)
        assert worst(output_law(lambda chance, q=q: grown(widths, q, chance, replacement), p), p) < 1e-12


def grown(widths, q, chance, replacement):
    """A tree with its tokens and their laws, where q goes by the depth and the token before."""
    tree, tokens, laws, level = Tree(()), [], [], [-1]
    for depth, width in enumerate(widths):
        rows = torch.stack([q[depth, tokens[node] if tokens else 0] for node in level])
        first = len(tokens)
        for nodes, drawn, law in draw_children(rows, width, chance, replacement=replacement):
            tree = Tree(tree.parents + tuple(level[i] for i in nodes))
            tokens += drawn.tolist()
            laws.append(law)
        level = list(range(first, len(tokens)))
    return tree, torch.tensor(tokens), torch.cat(laws)


def test_a_drawn_and_a_chosen_candidate_for_one_position_keep_the_law(random_table):
    p, q = random_table(2, 3, 3, seed=0), random_table(3, seed=1)
    chosen = torch.tensor([0.0, 1, 0], dtype=torch.float64)

    def play(order):
        def grow(chance):
            drawn = chance.categorical(q)
            tokens, laws = torch.tensor([drawn, 1]), torch.stack([q, chosen])
            return Tree((-1, -1)), tokens[order], laws[order]

        return grow

    for order in ([0, 1], [1, 0]):
        assert worst(output_law(play(order), p), p) < 1e-12


@pytest.mark.parametrize("seed", range(6))
def test_to_look_whether_ps_own_draw_is_a_candidate_is_recursive_rejection_of_point_masses(seed, random_table):
    tree, vocab = random_tree(8, seed), 4
    tokens = any_tokens(tree, vocab, random.Random(seed))
    p = random_table(9, vocab, seed=seed)
    chosen = verified(tree, tokens, None, p)
    point_masses = torch.eye(vocab, dtype=torch.float64)[tokens]
    assert verified(tree, tokens, point_masses, p) == pytest.approx(chosen, abs=1e-12)


def verified(tree, tokens, draft_probs, p):
    """The law of all that a verification says."""

    def play(chance):
        outcome = verify_tree(tree, tokens, draft_probs, p, chance)
        assert outcome.accepted == len(outcome.path)
        return outcome.path, int(outcome.next_token), outcome.complete

    return enumerate_outcomes(play)


def test_without_replacement_two_candidates_are_accepted_more_often_than_with():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)

    def accepted(replacement):
        def play(chance):
            tree, tokens, laws = grown((2,), Q.expand(1, 3, 3), chance, replacement)
            return len(verify_tree(tree, tokens, laws, p.expand(3, 3), chance).path)

        return enumerate_outcomes(play)[1]

    # The first is accepted with 0.1 + 0.2 + 0.2. After a rejection p is (0.8, 0.2, 0); the second then comes from
    # (1/3, 2/3, 0) or from q again: 1/3 + 0.2 and 0.1 + 0.2 is what the laws have in common.
    assert accepted(replacement=False) == pytest.approx(0.5 + 0.5 * (1 / 3 + 0.2))
    assert accepted(replacement=True) == pytest.approx(0.5 + 0.5 * (0.1 + 0.2))


@pytest.mark.parametrize("draft_probs", [None, torch.eye(7, dtype=torch.float64)[[1, 2, 3, 4, 5, 6]]])
@pytest.mark.parametrize(
    ("rows", "path", "token", "complete"),
    [
        ([1, 3, 0, 6, 0, 0, 0], (0, 2, 5), 0, True),
        ([1, 3, 0, 0, 0, 0, 0], (0, 2), 0, False),
        ([1, 4, 0, 0, 5, 0, 0], (0, 3), 5, True),
        ([2, 3, 5, 0, 0, 6, 0], (1, 4), 6, True),
        ([6, 3, 5, 0, 0, 6, 0], (), 6, False),
    ],
)
def test_greedy_it_follows_the_targets_argmax_down_the_tree(rows, path, token, complete, draft_probs):
    tokens = torch.tensor([1, 2, 3, 4, 5, 6])  # of the nodes of TREE; rows: the argmax after the text and each node
    p = torch.eye(7, dtype=torch.float64)[rows]
    assert verified(TREE, tokens, draft_probs, p) == {(path, token, complete): 1}


def test_a_batch_without_rows_draws_nothing():
    assert enumerate_outcomes(lambda chance: chance.categorical(torch.zeros(0, 3)).dtype) == {torch.long: 1}


def test_an_empty_tree_is_plain_decoding(random_table):
    p = random_table(1, 3, seed=0)
    law = verified(Tree(()), torch.tensor([], dtype=torch.long), None, p)
    assert law == {((), token, True): pytest.approx(float(p[0, token])) for token in range(3)}
