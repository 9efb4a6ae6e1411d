"""The acceptance rule, in exact fractions: which draft tokens it keeps, what it draws next, and that the law is p's."""

from fractions import Fraction as F
from itertools import product
from math import prod

import numpy as np
import pytest
import torch

from specdec_lite.distributions import overlap
from specdec_lite.randomness import TorchRandomness, enumerate_outcomes
from specdec_lite.verify import verify


def fractions(rows):
    return np.array(rows, dtype=object)


def random_fractions(vocab, seed):
    """A law with a small denominator; some tokens may have probability 0."""
    weights = np.random.default_rng(seed).integers(0, 8, vocab).tolist()
    weights[seed % vocab] += 1
    return [F(weight, sum(weights)) for weight in weights]


def number_of(prefix):
    return sum((token + 1) * 5**i for i, token in enumerate(prefix))


def round_law(p, q, K, reported=lambda d, q_rows: q_rows):
    """Exact law of one round's (draft, accepted, next token); p(prefix), q(prefix) give the laws after a tuple."""

    def play(randomness):
        draft = ()
        for _ in range(K):
            draft += (randomness.categorical(fractions(q(draft))),)
        p_rows = fractions([p(draft[:i]) for i in range(K + 1)])
        q_rows = fractions([q(draft[:i]) for i in range(K)]).reshape(K, p_rows.shape[1])
        outcome = verify(torch.tensor(draft, dtype=torch.long), reported(draft, q_rows), p_rows, randomness)
        return draft, int(outcome.accepted), int(outcome.next_token)

    return enumerate_outcomes(play)


def output_law(rounds, p, n):
    """Law of the first n tokens when each round is followed by tokens drawn from p."""
    law = {}
    vocab = len(p(()))
    for (draft, accepted, following), chance in rounds.items():
        tokens = (*draft[:accepted], following)[:n]
        for rest in product(range(vocab), repeat=n - len(tokens)):
            whole = tokens + rest
            later = prod((p(whole[:i])[whole[i]] for i in range(len(tokens), n)), start=F(1))
            if chance * later:
                law[whole] = law.get(whole, 0) + chance * later
    return law


def law_of(p, n):
    """Law of n tokens drawn from p one after the other."""
    sequences = product(range(len(p(()))), repeat=n)
    law = {s: prod((p(s[:i])[s[i]] for i in range(n)), start=F(1)) for s in sequences}
    return {tokens: chance for tokens, chance in law.items() if chance}


def test_the_two_token_example_in_exact_fractions():
    A, B = 0, 1
    p, q = [F(1, 2), F(1, 2)], [F(9, 10), F(1, 10)]
    law = round_law(lambda _: p, lambda _: q, K=1)
    first = {}
    for (draft, accepted, following), chance in law.items():
        key = ("accepted", draft[0]) if accepted else ("recovered", following)
        first[key] = first.get(key, 0) + chance
    # A is proposed in 9/10 and accepted in 5/9 of these: 1/2, and there is no second source of A. B is proposed in 1/10
    # and always accepted; the other 4/10 are rejected A, for which the residual gives B with certainty.
    assert first == {("accepted", A): F(9, 10) * F(5, 9), ("accepted", B): F(1, 10), ("recovered", B): F(4, 10)}
    assert first["accepted", A] / q[A] == F(5, 9)
    assert output_law(law, lambda _: p, 1) == {(A,): F(1, 2), (B,): F(1, 2)}


def verdict(*arguments):
    outcome = verify(*arguments)
    return int(outcome.accepted), int(outcome.next_token)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("vocab", "K"), [(2, 0), (2, 1), (2, 2), (2, 3), (3, 0), (3, 1), (3, 2), (3, 3), (4, 1), (4, 2)]
)
def test_one_round_has_exactly_the_law_of_the_target(vocab, K, seed):
    def p(prefix):
        return random_fractions(vocab, seed=100 * seed + number_of(prefix))

    def q(prefix):
        return random_fractions(vocab, seed=1000 + 100 * seed + number_of(prefix))

    rounds = round_law(p, q, K)
    assert sum(rounds.values()) == 1
    assert output_law(rounds, p, K + 1) == law_of(p, K + 1)


@pytest.mark.parametrize("token", [0, 1, 2])
def test_a_point_mass_draft_is_accepted_with_p_and_keeps_the_law(token):
    p = [F(1, 2), F(3, 10), F(1, 5)]
    point = [F(int(x == token)) for x in range(3)]
    for reported in (lambda d, rows: rows, lambda d, rows: None):  # probs None says the same as one-hot rows
        law = round_law(lambda _: p, lambda _: point, K=1, reported=reported)
        assert sum(chance for (_, accepted, _), chance in law.items() if accepted) == p[token]
        assert output_law(law, lambda _: p, 1) == {(x,): p[x] for x in range(3)}


@pytest.mark.parametrize("seed", range(5))
def test_a_draft_token_is_accepted_with_the_overlap(seed):
    p, q = random_fractions(4, seed), random_fractions(4, seed + 50)
    law = round_law(lambda _: p, lambda _: q, K=1)
    assert sum(chance for (_, accepted, _), chance in law.items() if accepted) == overlap(fractions(p), fractions(q))


@pytest.mark.parametrize(
    ("p_token", "q_token", "chance"),
    [(0.7, 0.6, 1.0), (0.3, 0.8, 0.375), (0.5, 0.5, 1.0), (0.0, 0.4, 0.0), (0.2, 1.0, 0.2)],
)
def test_a_draft_token_is_accepted_with_the_smaller_of_one_and_p_over_q(p_token, q_token, chance):
    p = torch.tensor([[p_token, 1 - p_token]] * 2, dtype=torch.float64)
    q = torch.tensor([[q_token, 1 - q_token]], dtype=torch.float64)
    law = enumerate_outcomes(lambda r: int(verify(torch.tensor([0]), q, p, r).accepted))
    assert law.get(1, 0) == pytest.approx(chance, abs=1e-15)


def test_after_a_rejection_the_rest_of_the_draft_is_gone():
    # Row 1 rejects for certain; rows 0, 2 and 3 would accept.
    p = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]])
    outcome = verify(torch.tensor([1, 1, 1, 1]), torch.full((4, 2), 0.5), p, TorchRandomness.seeded(0))
    assert (int(outcome.accepted), int(outcome.next_token), outcome.drafted, outcome.origin) == (1, 0, 4, "recovered")


def test_the_bonus_token_is_drawn_from_the_targets_last_row():
    p = fractions([[F(1, 2), F(1, 2)], [F(1, 7), F(6, 7)]])
    law = enumerate_outcomes(lambda r: verdict(torch.tensor([0]), p[:1], p, r))
    assert law == {(1, 0): F(1, 7), (1, 1): F(6, 7)}


def test_without_a_draft_the_next_token_is_the_targets_own():
    p = fractions([[F(1, 5), F(4, 5)]])
    nothing = torch.zeros(0, dtype=torch.long)
    assert enumerate_outcomes(lambda r: verdict(nothing, p[:0], p, r)) == {(0, 0): F(1, 5), (0, 1): F(4, 5)}
    assert enumerate_outcomes(lambda r: verdict(nothing, None, p, r)) == {(0, 0): F(1, 5), (0, 1): F(4, 5)}
    assert verify(nothing, None, torch.tensor([[0.0, 1.0]]), TorchRandomness.seeded(0)).origin == "bonus"


def test_the_arguments_are_left_as_they_were(random_table):
    d, q, p = torch.tensor([2, 0]), random_table(2, 3, seed=1), random_table(3, 3, seed=2)
    before = d.clone(), q.clone(), p.clone()
    verify(d, q, p, TorchRandomness.seeded(0))
    assert all(torch.equal(now, then) for now, then in zip((d, q, p), before, strict=True))


def test_the_result_stays_on_the_device_until_it_is_asked_for(random_table):
    outcome = verify(
        torch.tensor([0]), random_table(1, 3, seed=1), random_table(2, 3, seed=2), TorchRandomness.seeded(0)
    )
    assert isinstance(outcome.accepted, torch.Tensor)
    assert isinstance(outcome.next_token, torch.Tensor)
    assert outcome.origin in ("recovered", "bonus")


def test_real_draws_in_float32_have_the_law_that_the_enumeration_gives():
    p, q = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.3, 0.5]]), torch.tensor([[0.3, 0.6, 0.1]])
    draws, counts, chance = 4_000, {}, TorchRandomness.seeded(0)
    for _ in range(draws):
        draft = chance.categorical(q[0]).view(1)
        outcome = verify(draft, q, p, chance)
        tokens = (int(draft), int(outcome.next_token)) if int(outcome.accepted) else (int(outcome.next_token),)
        counts[tokens] = counts.get(tokens, 0) + 1
    expected = {(0,): 0.3} | {(a, b): min(p[0, a], q[0, a]) * p[1, b] for a in range(3) for b in range(3)}
    statistic = sum((counts.get(t, 0) - draws * float(c)) ** 2 / (draws * float(c)) for t, c in expected.items())
    assert set(counts) <= set(expected)
    assert statistic < 27.88  # exceeded by chance once in a thousand, at 9 degrees of freedom
