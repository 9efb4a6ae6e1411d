"""What the checks of the exercises share: asking, comparing, and naming the likeliest slip."""

import random
from fractions import Fraction
from functools import partial

import numpy as np
import pytest
import torch

from specdec_lite.checks.core import (
    CheckFailed,
    Given,
    NotAttempted,
    Slip,
    ask,
    attempting,
    check,
    dice,
    law,
    laws,
    like,
    same,
)

CASES = [(0, 2), (3, 4), (-1, 5)]


def product(a, b):
    return a * b


SLIPS = [like("you add", lambda a, b: a + b), like("you square", lambda a, b: a * a)]


def message(answer, slips=SLIPS, cases=CASES, reference=product):
    with pytest.raises(CheckFailed) as failed:
        check(answer, reference, cases, slips)
    return str(failed.value)


def test_a_right_answer_prints_one_line(capsys):
    check(product, product, CASES)
    assert capsys.readouterr().out == "product: right (3 cases)\n"


def test_the_slip_that_an_answer_makes_is_named():
    assert "you add" in message(lambda a, b: a + b)
    assert "you square" in message(lambda a, b: a * a)


def test_of_two_slips_that_explain_every_wrong_case_the_one_that_fits_more_cases_is_named():
    """As with answers that are only true or false: whoever is wrong agrees with every wrong answer there."""
    slips = [like("always no", lambda x: False), like("looks at the sign", lambda x: x > 5)]
    cases = [(x,) for x in range(-3, 9)]
    assert "looks at the sign" in message(lambda x: x > 5, slips, cases, lambda x: x > 2)


def test_a_slip_that_does_not_explain_every_wrong_case_is_not_named():
    assert "you" not in message(lambda a, b: a + b if a else 7)


def test_a_slip_that_stops_with_an_error_was_not_made():
    assert "should be" in message(lambda a, b: 99, [like("divides by zero", lambda a, b: a // 0)])


def test_a_sign_is_a_slip_too():
    assert "negative" in message(lambda a, b: -1 - a * a, [Slip("negative", lambda found, right, *case: found < 0)])


def test_an_unknown_mistake_is_shown_with_its_arguments():
    assert "the answer is 6; it should be 0, for the arguments 0, 2" in message(lambda a, b: 6)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (lambda a, b: None, "is its `return` missing?"),
        (lambda a, b: [a, b], "returned a list of 2; a number is wanted"),
        (lambda a, b: float("nan"), "there is NaN"),
        (lambda a, b: 1 // 0, "ZeroDivisionError"),
        (lambda a, b: a * b == 0, "returned a bool; a number is wanted"),
        (lambda a, b: torch.tensor([a, b]), "returned a tensor of shape (2,); a number is wanted"),
        (lambda a, b: np.array([a, b]), "returned a ndarray; a number is wanted"),
        (lambda a, b: a * b * (1 + 1e-7), "not exact (rounded?"),
        (lambda a, b: exit(), "SystemExit"),
    ],
)
def test_what_is_no_answer_is_said(answer, says):
    assert says in message(answer)


def test_of_a_dictionary_the_first_wrong_entry_is_shown():
    said = message(lambda: {"a": 1, "b": 2.0}, (), [()], lambda: {"a": 1, "b": 3.0})
    assert said.endswith(": at 'b', the answer is 2; it should be 3")


def test_arguments_that_have_no_text_are_not_shown():
    assert "arguments" not in message(lambda f: 6, (), [(product,)], lambda f: 7)


def test_an_empty_answer_is_not_attempted_yet():
    def empty(a, b):
        raise NotImplementedError()

    with pytest.raises(NotAttempted, match="^empty: not attempted yet$"):
        check(empty, product, CASES)
    with pytest.raises(NotAttempted, match="^Cache: not attempted yet$"), attempting("Cache"):
        empty(1, 2)


def test_an_answer_may_not_change_its_arguments():
    def careless(law):
        law += 1
        return law

    before = torch.zeros(2)
    with pytest.raises(CheckFailed, match="work on a copy"):
        ask(careless, before)
    assert before.tolist() == [0, 0]


def test_functions_and_objects_may_be_among_the_arguments():
    named = {"a": partial(product, 2), "b": [object()]}
    assert ask(lambda given: given["a"](3), named) == 6


def test_jupyter_shows_the_message_without_a_traceback():
    assert CheckFailed("upside down")._render_traceback_() == ["CheckFailed: upside down"]


def test_arguments_that_wear_out_are_made_anew_for_each_call():
    check(lambda draws: next(draws), lambda draws: 1, [lambda: (iter([1]),)], SLIPS)


@pytest.mark.parametrize(
    ("found", "right", "equal"),
    [
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0 + 1e-12]), True),
        (torch.tensor([1.0, 2.0]), torch.tensor([[1.0, 2.0]]), False),
        ([1.0, 2.0], torch.tensor([1.0, 2.0]), False),
        (torch.tensor([1.0, 0.0]), torch.tensor([True, False]), False),
        (torch.tensor([1, 2]), torch.tensor([1.0, 2.0]), True),
        (torch.tensor(0.5), 0.5, True),
        (0.5, torch.tensor(0.5), True),
        (True, 1, False),
        (np.bool_(True), True, True),
        (np.float64(0.5), 0.5, True),
        (torch.tensor([1, 2]), "x", False),
        (torch.tensor(True), True, True),
        (Fraction(1, 2), 0.5, True),
        ((1, [2.0]), [1, (2.0,)], True),
        ([1], [1, 2], False),
        ({"a": 1.0}, {"a": 1.0 + 1e-12}, True),
        ({"a": 1.0}, {"b": 1.0}, False),
        ("x", "x", True),
        (1e-3, 0.0, False),
    ],
)
def test_what_counts_as_equal(found, right, equal):
    assert same(found, right) == equal


def test_numbers_follow_the_variant_and_nothing_else():
    assert [dice("02", 1).random() for _ in range(2)] == [dice("02", 1).random()] * 2
    assert len({dice("02", 1).random(), dice("02", 2).random(), dice("03", 1).random()}) == 3


@pytest.mark.parametrize("variant", [-1, 1.5, "2027", None])
def test_a_variant_that_is_no_number_is_refused(variant):
    with pytest.raises(ValueError, match="VARIANT is .*whole number"):
        dice("02", variant)


def test_laws_are_laws_without_a_zero():
    assert torch.allclose(laws(0, 3, 5).sum(-1), torch.ones(3, dtype=torch.float64))
    found = law(random.Random(0), 4)
    assert sum(found) == 1 and min(found) > 0 and len(found) == 4


def test_given_numbers_are_shown_a_line_each():
    assert str(Given(p=[Fraction(1, 2)], alpha=0.25)) == "p = [1/2]\nalpha = 0.25"
