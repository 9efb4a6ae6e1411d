"""Prompt lookup: what is found, and that a copied draft is verified like any other."""

import pytest
import torch

from specdec_lite import GREEDY, Sampling, autoregressive, speculative
from specdec_lite.decoding import decode
from specdec_lite.drafters.ngram import NGramDrafter
from specdec_lite.pairs import Pair, load_pair
from specdec_lite.randomness import enumerate_outcomes
from specdec_lite.table import TableModel


def lookup(context, min_n=1, max_n=3, K=3, ends=()):
    return NGramDrafter(max_n, min_n, ends).propose(torch.tensor(context), K, Sampling(), None).tokens.tolist()


@pytest.mark.parametrize(
    ("context", "min_n", "max_n", "K", "draft"),
    [
        ([1, 2, 3, 4, 1, 2, 3], 2, 2, 3, [4, 1, 2]),
        ([1, 2, 3, 4, 1, 2, 3], 1, 1, 2, [4, 1]),
        ([1, 2, 3, 4, 1, 2, 3, 5, 6], 2, 2, 3, []),
        ([1, 3, 6, 2, 3, 4, 1, 2, 3], 2, 2, 3, [4, 1, 2]),
        ([1, 3, 6, 2, 3, 4, 1, 2, 3], 1, 1, 2, [6, 2]),
        ([2, 3, 4, 5, 1, 2, 3, 4, 1, 2, 3, 4], 3, 4, 2, [1, 2]),
        ([1, 2, 3, 1, 2], 1, 3, 5, [3, 1, 2]),  # a short continuation counts
        ([7, 7, 7], 1, 3, 3, [7]),
        ([5], 1, 3, 3, []),
    ],
)
def test_the_longest_ngram_and_its_first_place_give_the_draft(context, min_n, max_n, K, draft):
    assert lookup(context, min_n, max_n, K) == draft


def test_nothing_is_drafted_past_an_end_of_sequence():
    assert lookup([1, 2, 9, 4, 1, 2], K=4, ends=[9]) == [9]
    assert lookup([1, 2, 3, 9, 1, 2], K=4, ends=[9]) == [3, 9]


def test_the_draft_is_a_point_mass():
    assert NGramDrafter().propose(torch.tensor([7, 7, 7]), 3, Sampling(), None).probs is None


@pytest.mark.parametrize(("min_n", "max_n"), [(0, 2), (3, 2), (-1, 1)])
def test_lengths_that_cannot_be_are_refused(min_n, max_n):
    with pytest.raises(ValueError, match="1 <= min_n <= max_n"):
        NGramDrafter(max_n, min_n)


def test_the_output_law_is_the_targets(random_table):
    """The whole loop, on a target whose law depends on the token before; the prompt repeats itself, so it drafts."""
    table = random_table(3, 3, seed=5)
    target = TableModel(table)

    def law(drafter, K):
        def run(randomness):
            rounds = decode(
                target, drafter, [0, 1, 0, 1, 0], max_new_tokens=3, K=K, sampling=Sampling(), randomness=randomness
            )
            return tuple(token for round in rounds for token in round.tokens)

        return enumerate_outcomes(run)

    plain, looked_up = law(None, 0), law(NGramDrafter(), 2)
    assert looked_up.keys() == plain.keys()
    assert max(abs(looked_up[tokens] - plain[tokens]) for tokens in plain) < 1e-12


def test_greedy_output_is_the_targets_and_copied_text_is_accepted():
    pair = load_pair("tiny")
    prompt = "The cat sat on the wall. The dog sat on the wall. The hen sat on the wall. The fox"
    plain = autoregressive(pair, prompt, max_new_tokens=40, sampling=GREEDY)
    fast = speculative(pair, prompt, max_new_tokens=40, K=4, sampling=GREEDY, drafter=NGramDrafter())
    assert fast.tokens == plain.tokens
    assert len(fast.rounds) < 40


def test_a_target_that_disagrees_with_the_lookup_is_followed(chain):
    target = chain([1, 1, 1, 5, 0, 0, 0, 0], 6)
    pair = Pair("chain", target, None, None)
    assert speculative(pair, [1, 1, 1], max_new_tokens=1, K=1, drafter=NGramDrafter()).tokens == [5]
    assert speculative(pair, [1, 1, 1], max_new_tokens=3, K=2, drafter=NGramDrafter()).tokens == [5, 0, 0]
