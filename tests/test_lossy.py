"""Typical acceptance: what it keeps, and how far its law is from the target's."""

import math

import pytest
import torch

from specdec_lite.decoding import decode
from specdec_lite.distributions import GREEDY, Sampling
from specdec_lite.drafters import Draft
from specdec_lite.lossy import typical
from specdec_lite.randomness import TorchRandomness, enumerate_outcomes
from specdec_lite.table import TableModel
from specdec_lite.tree import Tree, verify_tree

P = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
TWO = Tree.branching((2,))


def law_of(rule, tree, tokens, p):
    """The law of the first token that comes out."""

    def first(randomness):
        outcome = rule(tree, torch.tensor(tokens), None, p, randomness)
        return int(tokens[outcome.path[0]] if outcome.path else outcome.next_token)

    return enumerate_outcomes(first)


def total_variation(law, p):
    return sum(abs(law.get(token, 0) - p[token].item()) for token in range(len(p))) / 2


def accepts(rule, p):
    """Does the rule keep token 0 of ``p``?"""
    p = torch.tensor(p, dtype=torch.float64).expand(2, -1)
    return rule(Tree.chain(1), torch.tensor([0]), None, p, TorchRandomness.seeded(0)).path == (0,)


def test_a_candidate_is_kept_when_p_is_above_the_threshold_and_not_at_it():
    assert accepts(typical(0.2499, 0.99), [0.25, 0.75])
    assert not accepts(typical(0.25, 0.99), [0.25, 0.75])
    # Two even tokens: exp(-H) is 1/2. Four: 1/4.
    assert accepts(typical(0.9, 0.99), [0.5, 0.5])
    assert accepts(typical(0.9, 0.99), [0.25, 0.25, 0.25, 0.25])


def test_the_threshold_falls_where_the_target_is_undecided():
    assert not accepts(typical(), [0.05, 0.95])  # the threshold is 0.09
    assert accepts(typical(), [0.05] * 20)  # exp(-H) is 1/20, so it is 0.3 / 20


def test_delta_is_the_root_of_epsilon_unless_given():
    p = [0.1, 0.9]  # exp(-H) = 0.722: delta = sqrt(0.25) gives 0.361, delta = 0.1 gives 0.072
    assert not accepts(typical(0.25), p)
    assert accepts(typical(0.25, 0.1), p)


@pytest.mark.parametrize(("tokens", "expected"), [([0, 1], [1, 0, 0]), ([2, 1], [0, 0, 1]), ([1, 2], [0, 1, 0])])
def test_the_first_plausible_candidate_always_comes_out_so_the_law_is_not_p(tokens, expected):
    """H(P) = 0.898, so the threshold is min(0.09, 0.3 * 0.407) = 0.09, and every token of P passes."""
    law = law_of(typical(), TWO, tokens, P.expand(3, 3))
    assert [law.get(token, 0) for token in range(3)] == pytest.approx(expected, abs=1e-12)
    chosen = tokens[0]
    assert total_variation(law, P) == pytest.approx(1 - P[chosen].item(), abs=1e-12)


def test_a_candidate_that_fails_leaves_p_as_it_is():
    """An implausible candidate is not subtracted: the token is drawn from p, which is a second, smaller loss of law."""
    law = law_of(typical(0.2, 0.9), Tree.chain(1), [2], P.expand(2, 3))
    assert [law[token] for token in range(3)] == pytest.approx(P.tolist(), abs=1e-12)


def test_the_exact_rule_has_distance_0_where_typical_has_not(random_table):
    p = random_table(3, 3, seed=4)
    assert total_variation(law_of(verify_tree, TWO, [0, 1], p), p[0]) < 1e-12
    assert total_variation(law_of(typical(), TWO, [0, 1], p), p[0]) > 0.1


def test_it_is_exact_where_p_is_one_hot():
    p = torch.eye(3, dtype=torch.float64)
    for tokens in ([0, 1], [1, 2], [2, 0], [1, 0]):
        assert law_of(typical(), TWO, tokens, p[[0, 1, 2]]) == {0: 1.0}


def test_the_deepest_plausible_path_wins_and_of_two_the_first():
    #            0: 2      1: 1     2: 0 (under 0: implausible)   3: 0 (under 1)   4: 1 (under 1)
    tree = Tree((-1, -1, 0, 1, 1))
    p = torch.tensor([[0.2, 0.4, 0.4], [0.01, 0.49, 0.5], [0.5, 0.49, 0.01], [1, 0, 0], [0, 0, 1], [0, 1, 0]])
    outcome = typical()(tree, torch.tensor([2, 1, 0, 0, 1]), None, p.double(), TorchRandomness.seeded(0))
    assert outcome.path == (1, 3)
    assert int(outcome.next_token) == 2 and outcome.complete  # drawn from the row after node 3


def test_a_plausible_node_under_an_implausible_one_is_not_kept():
    p = torch.tensor([[0.98, 0.02], [0.5, 0.5], [0.5, 0.5]], dtype=torch.float64)
    outcome = typical()(Tree.chain(2), torch.tensor([1, 0]), None, p, TorchRandomness.seeded(0))
    assert outcome.path == () and not outcome.complete


class Candidates:
    """Proposes the same tree of tokens each time."""

    name = "candidates"

    def __init__(self, tree, tokens):
        self.tree, self.tokens, self.nodes = tree, torch.tensor(tokens), len(tree)

    def start(self, capacity): ...

    def limit(self, length):
        return 100

    def propose(self, context, K, sampling, randomness):
        return Draft(self.tokens, None, self.tree) if self.tree.depth <= K else Draft(self.tokens[:0], None)

    def commit(self, length, kept): ...


def texts(target, rule, sampling):
    """The law of a whole output of three tokens."""

    def run(randomness):
        drafter = Candidates(Tree.branching((2, 1)), [0, 1, 1, 0])
        rounds = decode(
            target, drafter, [0], max_new_tokens=3, K=2, sampling=sampling, randomness=randomness, verify_tree=rule
        )
        return tuple(token for round in rounds for token in round.tokens)

    return enumerate_outcomes(run)


def test_a_whole_output_drifts_from_the_targets_law_and_greedy_output_does_not(random_table):
    target = TableModel(random_table(3, 3, seed=1))
    own = texts(target, verify_tree, Sampling())
    typically = texts(target, typical(), Sampling())
    drift = sum(abs(own.get(text, 0) - typically.get(text, 0)) for text in own.keys() | typically.keys()) / 2
    one_token = 1 - max(sum(p for text, p in own.items() if text[0] == token) for token in range(3))
    assert drift > one_token  # the loss grows with every token
    assert texts(target, typical(), GREEDY) == texts(target, verify_tree, GREEDY)


@pytest.mark.parametrize(("epsilon", "delta"), [(-0.1, None), (1.0, 0.3), (0.09, 1.5), (math.nan, 0.3)])
def test_thresholds_outside_0_to_1_are_refused(epsilon, delta):
    with pytest.raises(ValueError, match="must lie in"):
        typical(epsilon, delta)
