"""Draws have the law they should, repeat with their seed, and can be enumerated without error."""

from collections import Counter
from fractions import Fraction as F

import numpy as np
import pytest
import torch

from specdec_lite.randomness import (
    BranchLimitError,
    TorchRandomness,
    categorical_rows,
    enumerate_outcomes,
    first_failure_rows,
    token_at,
)

CHI_SQUARE_999 = {2: 13.82, 3: 16.27}  # exceeded by chance once in a thousand, by degrees of freedom


def chi_square(counts, law, draws):
    return sum((counts[i] - draws * chance) ** 2 / (draws * chance) for i, chance in enumerate(law) if chance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_categorical_draws_from_the_law_it_is_given(dtype):
    law, draws = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05], dtype=dtype), 20_000
    chance = TorchRandomness.seeded(0)
    counts = Counter(int(chance.categorical(law)) for _ in range(draws))
    assert counts[1] == 0
    assert chi_square(counts, law.tolist(), draws) < CHI_SQUARE_999[3]


def test_categorical_of_a_one_hot_law_is_certain():
    chance = TorchRandomness.seeded(0)
    assert {int(chance.categorical(torch.tensor([0.0, 0.0, 1.0, 0.0]))) for _ in range(200)} == {2}


def test_first_failure_tries_every_position_with_a_chance_of_its_own():
    law, draws = [0.2, 0.8 * 0.5, 0.8 * 0.5], 20_000
    chance = TorchRandomness.seeded(1)
    counts = Counter(int(chance.first_failure(torch.tensor([0.8, 0.5]))) for _ in range(draws))
    assert chi_square(counts, law, draws) < CHI_SQUARE_999[2]


@pytest.mark.parametrize(
    ("accept_probs", "expected"),
    [([], 0), ([1.0, 1.0], 2), ([0.0, 1.0], 0), ([1.0, 0.0, 1.0], 1), ([7.5, float("inf")], 2)],
)
def test_first_failure_where_nothing_is_left_to_chance(accept_probs, expected):
    assert {int(TorchRandomness.seeded(seed).first_failure(torch.tensor(accept_probs))) for seed in range(50)} == {
        expected
    }
    assert enumerate_outcomes(lambda r: int(r.first_failure(torch.tensor(accept_probs)))) == {expected: 1}


@pytest.fixture
def uniforms_of(monkeypatch):
    """uniforms_of(value): every uniform draw of torch gives this value; the list returned counts the draws."""

    def install(value):
        calls = []

        def rand(shape, **_):
            calls.append(shape)
            return torch.full(shape, value)

        monkeypatch.setattr(torch, "rand", rand)
        return calls

    return install


def test_a_uniform_of_exactly_zero_does_not_accept_a_token_of_probability_zero(uniforms_of):
    calls = uniforms_of(0.0)
    assert int(TorchRandomness.seeded(0).first_failure(torch.tensor([0.25, 0.0, 1.0]))) == 1
    assert calls, "first_failure no longer draws with torch.rand: this test looks at nothing"


def test_the_largest_uniform_still_accepts_what_is_certain(uniforms_of):
    calls = uniforms_of(1 - 2**-24)
    assert int(TorchRandomness.seeded(0).first_failure(torch.tensor([1.0, 1.0, 0.999]))) == 2
    assert calls


def draws(chance, n=30):
    law, accept = torch.full((1000,), 1e-3), torch.full((10,), 0.9)
    return [(int(chance.categorical(law)), int(chance.first_failure(accept))) for _ in range(n)]


def test_a_seed_repeats_its_draws_and_another_seed_gives_others():
    assert draws(TorchRandomness.seeded(5)) == draws(TorchRandomness.seeded(5))
    assert draws(TorchRandomness.seeded(5)) != draws(TorchRandomness.seeded(6))


def test_without_a_seed_two_runs_differ():
    assert draws(TorchRandomness.seeded(None)) != draws(TorchRandomness.seeded(None))


@pytest.mark.parametrize("seed", [0, None])
def test_the_global_generators_are_neither_moved_nor_read(seed, global_generators):
    global_generators.seed(0)
    before = global_generators.state()
    first = draws(TorchRandomness.seeded(seed))
    assert global_generators.state() == before
    global_generators.seed(123)
    assert (draws(TorchRandomness.seeded(seed)) == first) == (seed is not None)


def test_draws_stay_on_the_device_as_tensors_without_a_dimension():
    chance = TorchRandomness.seeded(0)
    for draw in (chance.categorical(torch.tensor([0.5, 0.5])), chance.first_failure(torch.tensor([0.5, 0.5]))):
        assert isinstance(draw, torch.Tensor)
        assert draw.shape == ()
        assert not draw.is_floating_point()


def test_a_categorical_law_is_enumerated_as_it_is():
    law = enumerate_outcomes(lambda r: r.categorical(torch.tensor([0.5, 0.0, 0.375, 0.125])))
    assert law == {0: 0.5, 2: 0.375, 3: 0.125}


def test_the_law_of_first_failure_is_enumerated_exactly():
    accept = np.array([F(1, 2), F(2, 3), F(3, 4)])
    law = enumerate_outcomes(lambda r: r.first_failure(accept))
    assert law == {0: F(1, 2), 1: F(1, 6), 2: F(1, 12), 3: F(1, 4)}


def test_draws_that_depend_on_earlier_draws_are_followed_down_every_branch():
    laws = {0: np.array([F(1, 3), F(2, 3)]), 1: np.array([F(1, 4), F(3, 4)])}

    def two_steps(r):
        first = r.categorical(np.array([F(1, 5), F(4, 5)]))
        return first, r.categorical(laws[first])

    expected = {(0, 0): F(1, 15), (0, 1): F(2, 15), (1, 0): F(1, 5), (1, 1): F(3, 5)}
    assert enumerate_outcomes(two_steps) == expected
    assert all(isinstance(chance, F) for chance in enumerate_outcomes(two_steps).values())


def test_branches_with_the_same_outcome_are_added_up():
    coin = np.array([F(1, 2), F(1, 2)])
    assert enumerate_outcomes(lambda r: r.categorical(coin) + r.categorical(coin)) == {
        0: F(1, 4),
        1: F(1, 2),
        2: F(1, 4),
    }


def test_runs_of_different_length_are_enumerated():
    def until_heads(r):
        tails = 0
        while tails < 5 and r.categorical(np.array([F(1, 2), F(1, 2)])) == 0:
            tails += 1
        return tails

    assert enumerate_outcomes(until_heads) == {**{n: F(1, 2 ** (n + 1)) for n in range(5)}, 5: F(1, 32)}


def test_a_function_that_draws_nothing_has_one_outcome():
    assert enumerate_outcomes(lambda r: "always") == {"always": 1}


def test_branches_of_probability_zero_are_not_entered():
    entered = []

    def play(r):
        entered.append((r.categorical(torch.tensor([0.0, 1.0])), r.first_failure(torch.tensor([1.0, 0.0, 0.5]))))
        return entered[-1]

    assert enumerate_outcomes(play) == {(1, 1): 1}
    assert set(entered) == {(1, 1)}


def test_too_many_branches_end_in_an_error_that_says_so():
    coin = torch.tensor([0.5, 0.5])

    def ten_flips(r):
        return sum(r.categorical(coin) for _ in range(10))

    assert sum(enumerate_outcomes(ten_flips, max_branches=1024).values()) == 1
    with pytest.raises(BranchLimitError, match="more than 1023 branches"):
        enumerate_outcomes(ten_flips, max_branches=1023)
    assert issubclass(BranchLimitError, RuntimeError)


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 1), (1.0, 2)])
def test_a_token_of_probability_zero_is_never_drawn_at_either_end(monkeypatch, uniform, token):
    """0.0 is the least uniform number; 1.0 stands for a product that is rounded up to the whole."""
    monkeypatch.setattr(torch, "rand", lambda shape, **options: torch.full(shape, uniform, dtype=torch.float64))
    draw = TorchRandomness.seeded(0).categorical(torch.tensor([0.0, 0.5, 0.5, 0.0]))
    assert int(draw) == token


def seeded_rows(n):
    return [TorchRandomness.seeded(row) for row in range(n)]


def test_drawing_for_rows_together_is_drawing_for_each_in_turn(random_table):
    """Row by row the same numbers, in the same order, however many the row mates draw."""
    laws, accept, trials = random_table(4, 50, seed=1), random_table(4, 6, seed=2) * 5, [6, 0, 3, 1]
    together, alone = seeded_rows(4), seeded_rows(4)
    for _ in range(50):
        assert categorical_rows(laws, together).tolist() == [
            int(row.categorical(law)) for row, law in zip(alone, laws, strict=True)
        ]
        assert first_failure_rows(accept, trials, together).tolist() == [
            int(row.first_failure(a[:n])) for row, a, n in zip(alone, accept, trials, strict=True)
        ]


def test_what_is_not_tried_fails_even_with_a_chance_beyond_one():
    accept = torch.tensor([[torch.inf, torch.inf, torch.inf], [1.0, torch.nan, 2.0]])
    assert first_failure_rows(accept, [2, 1], seeded_rows(2)).tolist() == [2, 1]
    assert first_failure_rows(accept, [0, 0], seeded_rows(2)).tolist() == [0, 0]
    assert first_failure_rows(accept[:, :0], [0, 0], seeded_rows(2)).tolist() == [0, 0]


def test_a_uniform_number_falls_into_the_share_of_a_token():
    probs = torch.tensor([[0.25, 0.0, 0.5, 0.25], [0.0, 1.0, 0.0, 0.0]])
    for uniform, tokens in [
        (0.0, [0, 1]),
        (0.24, [0, 1]),
        (0.25, [2, 1]),
        (0.74, [2, 1]),
        (0.75, [3, 1]),
        (1.0, [3, 1]),
    ]:
        assert token_at(probs, torch.full((2,), uniform)).tolist() == tokens
