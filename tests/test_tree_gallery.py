"""The gallery's wing for trees: each slip bends the law as it says, checked by hand, and does no harm in a chain."""

import pytest
import torch

from specdec_lite.distributions import Sampling
from specdec_lite.drafters.specinfer import WITH, WITHOUT, TreeDrafter
from specdec_lite.gallery import WrongRule
from specdec_lite.randomness import TorchRandomness
from specdec_lite.table import TableModel
from specdec_lite.tree import Tree, TreeVerification
from specdec_lite.tree_gallery import WRONG_TREE_RULES, WrongTreeRule, node_law

P, Q = [0.5, 0.3, 0.2], [0.1, 0.2, 0.7]
RIGHT = WrongTreeRule("right", "nothing is wrong")
IN_THE_VERIFICATION = [name for name in WRONG_TREE_RULES if name != "top_candidates"]

# The first child is accepted with 0.1, 0.2 and 0.2; it fails, with 0.5, only as token 2, and p is then (0.8, 0.2, 0).
# Without replacement the second comes from (1/3, 2/3, 0), and with it from q.
FINGERPRINTS = [
    # Tried against (0.5, 0.3, 0.2) again. Without: as 0 it is always accepted, as 1 with 0.45; and with 2/3 * 0.55 it
    # fails, which leaves p less its q, (5, 0, 6)/11.
    ("siblings_against_one_p", False, [0.1 + 0.5 * (1 / 3 + 1 / 6), 0.2 + 0.5 * 2 / 3 * 0.45, 0.2 + 0.5 * 1 / 5]),
    # With: as 2 it fails with 5/7, and then (0.8, 0.2, 0) is drawn from.
    ("siblings_against_one_p", True, [0.1 + 0.5 * (0.1 + 0.5 * 0.8), 0.2 + 0.5 * (0.2 + 0.5 * 0.2), 0.2 + 0.5 * 0.2]),
    # Without: it is told (0.1, 0.2, 0.7), of which 0.8 and 0.2 are at least as much: always accepted.
    ("full_q_for_every_sibling", False, [0.1 + 0.5 / 3, 0.2 + 0.5 * 2 / 3, 0.2]),
    ("full_q_for_every_sibling", True, P),
    # With: as 2 it is skipped, and (0.8, 0.2, 0) is drawn from; less q once more it would be (1, 0, 0).
    ("repeated_siblings_skipped", True, [0.1 + 0.5 * (0.1 + 0.7 * 0.8), 0.2 + 0.5 * (0.2 + 0.7 * 0.2), 0.2]),
    ("repeated_siblings_skipped", False, P),
    # Token 2 and then 1 are tried. 2 is accepted with 2/7; then 1, told 2/3, with 0.3; and then 0 is left.
    ("top_candidates", False, [5 / 7 * 0.7, 5 / 7 * 0.3, 2 / 7]),
]


@pytest.mark.parametrize(("name", "replacement", "law"), FINGERPRINTS)
def test_the_fingerprint_of_each_slip_is_the_one_done_by_hand(name, replacement, law):
    found = node_law(
        WRONG_TREE_RULES[name], torch.tensor(P).double(), torch.tensor(Q).double(), 2, replacement=replacement
    )
    assert found.tolist() == pytest.approx(law, abs=1e-7)


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_the_right_rule_gives_p(width, replacement, random_table):
    for seed in range(4):
        p, q = random_table(4, seed=seed), random_table(4, seed=10 + seed)
        assert (node_law(RIGHT, p, q, width, replacement=replacement) - p).abs().max() < 1e-12


@pytest.mark.parametrize("replacement", [False, True])
@pytest.mark.parametrize("name", IN_THE_VERIFICATION)
def test_with_one_candidate_a_slip_in_the_verification_does_no_harm(name, replacement, random_table):
    p, q = random_table(4, seed=1), random_table(4, seed=2)
    assert (node_law(WRONG_TREE_RULES[name], p, q, 1, replacement=replacement) - p).abs().max() < 1e-12


@pytest.mark.parametrize("name", WRONG_TREE_RULES)
def test_every_slip_shows_with_two_candidates_in_one_way_of_drawing_them(name, random_table):
    p, q = random_table(4, seed=1), random_table(4, seed=2)
    gaps = [(node_law(WRONG_TREE_RULES[name], p, q, 2, replacement=how) - p).abs().max() for how in (False, True)]
    assert max(gaps) > 1e-3


@pytest.mark.parametrize("name", IN_THE_VERIFICATION)
def test_chosen_candidates_are_verified_as_they_should_be(name, random_table):
    tree, tokens, p = Tree.branching((2, 2)), torch.tensor([0, 1, 2, 0, 1, 2]), random_table(7, 3, seed=0)
    for seed in range(20):
        right, wrong = (
            rule.verify_tree(tree, tokens, None, p, TorchRandomness.seeded(seed))
            for rule in (RIGHT, WRONG_TREE_RULES[name])
        )
        assert right == wrong


@pytest.mark.parametrize("children", [WITHOUT, WITH])
@pytest.mark.parametrize("name", WRONG_TREE_RULES)
def test_every_slip_runs_where_the_right_rule_runs(name, children, random_table):
    rule = WRONG_TREE_RULES[name]
    drafter = rule.wrap(TreeDrafter(TableModel(random_table(5, 5, seed=0)), 5, (3, 2), children))
    p = random_table(10, 5, seed=1)
    for seed in range(20):
        randomness = TorchRandomness.seeded(seed)
        drafter.start(9)
        draft = drafter.propose(torch.tensor([1]), 2, Sampling(), randomness)
        outcome = rule.verify_tree(draft.tree, draft.tokens, draft.probs, p, randomness)
        assert isinstance(outcome, TreeVerification)
        assert draft.tree.path_to(outcome.path[-1] if outcome.path else -1) == outcome.path
        assert 0 <= int(outcome.next_token) < 5


@pytest.mark.parametrize("name", WRONG_TREE_RULES)
def test_every_slip_says_what_it_is(name):
    rule = WRONG_TREE_RULES[name]
    assert isinstance(rule, WrongRule)
    assert rule.name == name
    assert rule.title
    assert len(rule.why.split()) > 20
    assert len({rule.why for rule in WRONG_TREE_RULES.values()}) == len(WRONG_TREE_RULES)
