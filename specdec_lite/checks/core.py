"""What the checks share: ask the learner's answer, compare it with the reference, name the likely slip.

A check is a call of ``check``: an answer, a reference, cases, and slips. A slip is a mistake that others made before,
written down as the function that makes it. An answer that agrees with that function wherever it is wrong made the
same mistake, so its message is the one to show.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from numbers import Number
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

Case = tuple | Callable[[], tuple]  # the arguments, or what makes them anew for each call (generators, caches)


class CheckFailed(AssertionError):
    """An answer is wrong. The message says how, and Jupyter shows it alone, without a traceback."""

    def _render_traceback_(self) -> list[str]:
        return [f"{type(self).__name__}: {self}"]


class NotAttempted(CheckFailed):
    """There is no answer yet."""


@dataclass(frozen=True)
class Slip:
    """A likely mistake. ``made(found, right, *case)``: does the answer ``found`` show it, where it is wrong?"""

    says: str
    made: Callable[..., Any]

    def shows(self, found: Any, right: Any, case: Case) -> bool:
        """Whether an answer shows it in one case. If looking for it stops with an error, it was not that."""
        try:
            return bool(self.made(found, right, *fresh(case)))
        except Exception:
            return False


def like(says: str, wrong: Callable, tolerance: float = 1e-9) -> Slip:
    """The slip that ``wrong(*case)`` makes."""
    return Slip(says, lambda found, right, *case: same(found, wrong(*case), tolerance))


def part_of(key: Any, says: str, wrong: Callable, tolerance: float = 1e-9) -> Slip:
    """A slip in one part of an answer that has several: what stands at ``key`` is what ``wrong(*case)`` gives."""

    def made(found: Any, right: Any, *case: Any) -> bool:
        return same(found[key], wrong(*case), tolerance) and not same(found[key], right[key], tolerance)

    return Slip(f"{key}: {says}" if isinstance(key, str) else says, made)


class Given(SimpleNamespace):
    """The numbers of one variant of a notebook; ``print`` shows them, a line each."""

    def __str__(self) -> str:
        return "\n".join(f"{name} = {show(value)}" for name, value in vars(self).items())


def dice(notebook: str, variant: int) -> random.Random:
    """The source of a variant's numbers. ``ValueError`` if the variant is no whole number from 0 on."""
    if not isinstance(variant, int) or variant < 0:
        raise ValueError(f"VARIANT is {variant!r}; it must be a whole number, 0 or more")
    return random.Random(f"{notebook}, variant {variant}")


def law(chance: random.Random, vocab: int, parts: int = 20) -> list[Fraction]:
    """A distribution over ``vocab`` tokens with no zero in it, every entry a multiple of 1/parts."""
    cuts = [0, *sorted(chance.sample(range(1, parts), vocab - 1)), parts]
    return [Fraction(high - low, parts) for low, high in pairwise(cuts)]


def laws(seed: int, *shape: int) -> torch.Tensor:
    """Random distributions along the last axis, in float64: what a check compares answers on."""
    weights = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 2 + 0.02
    return weights / weights.sum(-1, keepdim=True)


@contextmanager
def attempting(name: str) -> Iterator[None]:
    """Around code of the learner's: what it raises becomes a message that says where."""
    try:
        yield
    except CheckFailed:
        raise
    except NotImplementedError:
        raise NotAttempted(f"{name}: not attempted yet") from None
    except (Exception, SystemExit) as error:
        raise CheckFailed(f"{name} stopped with {type(error).__name__}: {error}{place(error)}") from error


def place(error: BaseException) -> str:
    """The innermost line of a notebook's cell that an error went through, as text to append."""
    trace, found = error.__traceback__, ""
    while trace is not None:
        if "ipykernel" in (file := trace.tb_frame.f_code.co_filename) or file.startswith("<"):
            found = f" (line {trace.tb_lineno} of {trace.tb_frame.f_code.co_name})"
        trace = trace.tb_next
    return found


def ask(answer: Callable, *arguments: Any, name: str | None = None) -> Any:
    """What the learner's function returns. Errors, a missing ``return`` and changed arguments become messages."""
    name = called(answer, name)
    handed = own(arguments)
    with attempting(name):
        found = answer(*handed)
    if found is None:
        raise CheckFailed(f"{name} returned None: is its `return` missing?")
    for before, after in zip(arguments, handed, strict=True):
        if isinstance(before, torch.Tensor | list | dict | set) and not same(after, before, 0):
            raise CheckFailed(f"{name} changed what it was given; work on a copy")
    return found


def check(
    answer: Callable,
    reference: Callable,
    cases: Iterable[Case],
    slips: Sequence[Slip] = (),
    *,
    tolerance: float = 1e-9,
    name: str | None = None,
) -> None:
    """Compare ``answer(*case)`` with ``reference(*case)`` for every case, and print one line if they agree.

    Raises ``NotAttempted``, or ``CheckFailed`` with the likeliest slip; if none explains every wrong case, with what
    was wanted and what was found for the first of them.
    """
    name = called(answer, name)
    tried = [(ask(answer, *fresh(case), name=name), reference(*fresh(case)), case) for case in cases]
    wrong = [each for each in tried if not same(each[0], each[1], tolerance)]
    if not wrong:
        passed(name, f"{len(tried)} cases" if len(tried) > 1 else "")
        return
    if slip := likeliest(slips, wrong, tried):
        raise CheckFailed(f"{name}: {slip.says}")
    found, right, case = wrong[0]
    raise CheckFailed(f"{name}: {difference(found, right)}{asked(fresh(case))}")


def check_parts(answer: Callable, name: str, cases: list[tuple], parts: dict[str, tuple[Callable, list[Slip]]]) -> None:
    """``check`` for an answer of several parts, each judged by itself. parts: name -> (its reference, its slips)."""
    found = [ask(answer, *case, name=name) for case in cases]
    for each in found:
        if not (isinstance(each, tuple | list) and len(each) == len(parts)):
            raise CheckFailed(f"{name}: return {len(parts)} things: {', '.join(parts)}")
    for index, (part, (right, slips)) in enumerate(parts.items()):
        results = iter([each[index] for each in found])
        check(lambda *_, each=results: next(each), right, cases, slips, name=f"{name}, {part}")


def likeliest(slips: Sequence[Slip], wrong: list[tuple], tried: list[tuple]) -> Slip | None:
    """Of the slips that show in every wrong case, the one that shows in most cases of all; the first of equals."""
    explaining = [slip for slip in slips if all(slip.shows(*each) for each in wrong)]
    return max(explaining, key=lambda slip: sum(slip.shows(*each) for each in tried), default=None)


def called(answer: Callable, name: str | None) -> str:
    return name or str(getattr(answer, "__name__", "your answer"))


def passed(name: str, detail: str = "") -> None:
    """The line that a check prints when the answer is right."""
    print(f"{name}: right" + (f" ({detail})" if detail else ""))


def fresh(case: Case) -> tuple:
    return case() if callable(case) else own(case)


def own(value: Any) -> Any:
    """A copy of what a learner's code could change: tensors and containers. All else is handed on as it is."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) in (list, tuple, set):
        return type(value)(map(own, value))
    return {key: own(each) for key, each in value.items()} if type(value) is dict else value


def same(found: Any, right: Any, tolerance: float = 1e-9) -> bool:
    """Equal in kind, shape and value, numbers up to ``tolerance``. NaN equals NaN: two may make the same mistake."""
    found, right = number(found), number(right)
    if isinstance(right, torch.Tensor):
        if kind(found) != kind(right):
            return False
        return bool(torch.allclose(found.double(), right.double(), rtol=0, atol=tolerance, equal_nan=True))
    if isinstance(right, bool) or isinstance(found, bool):
        return found is right
    if isinstance(right, Number) and isinstance(found, Number):
        return bool(abs(found - right) <= tolerance) or (found != found and right != right)  # type: ignore[operator]
    if isinstance(right, list | tuple):
        alike = isinstance(found, list | tuple) and len(found) == len(right)
        return alike and all(same(a, b, tolerance) for a, b in zip(found, right, strict=True))
    if isinstance(right, dict):
        return (
            isinstance(found, dict)
            and found.keys() == right.keys()
            and all(same(found[key], right[key], tolerance) for key in right)
        )
    return kind(found) == kind(right) and bool(found == right)


def number(value: Any) -> Any:
    """A number in a tensor is a number, and so is one of NumPy's."""
    return value.item() if isinstance(value, torch.Tensor | np.generic | np.ndarray) and value.ndim == 0 else value


def difference(found: Any, right: Any) -> str:
    """How an answer misses, in one sentence."""
    if kind(found) != kind(right):
        return f"returned {kind(found)}; {kind(right)} is wanted"
    if isinstance(right, dict) and found.keys() == right.keys():
        key = next(key for key in right if not same(found[key], right[key]))
        return f"at {show(key)}, {difference(found[key], right[key])}"
    if "nan" in show(found):
        return f"there is NaN in the answer, {show(found)}. Is something divided by 0?"
    if show(found) == show(right):
        return f"the answer is {show(found)} to four digits, and not exact (rounded? made in float32?)"
    return f"the answer is {show(found)}; it should be {show(right)}"


def kind(value: Any) -> str:
    value = number(value)
    if isinstance(value, torch.Tensor):
        return f"a {'bool ' if value.dtype == torch.bool else ''}tensor of shape {tuple(value.shape)}"
    if isinstance(value, Number) and not isinstance(value, bool):
        return "a number"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return "None" if value is None else f"a {type(value).__name__}"


def asked(case: tuple) -> str:
    """The arguments of a case, as text to append, if they are short enough to help."""
    text = ", ".join(show(value) for value in case)
    helps = text and len(text) <= 200 and " at 0x" not in text  # a function's address helps nobody
    return f", for the arguments {text}" if helps else ""


def show(value: Any) -> str:
    """A value in few characters."""
    if isinstance(value, torch.Tensor):
        return show(value.tolist())
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, Fraction):
        return str(value)
    if isinstance(value, list | tuple):
        return ("[{}]" if isinstance(value, list) else "({})").format(", ".join(show(each) for each in value))
    if isinstance(value, dict):
        return "{" + ", ".join(f"{show(key)}: {show(each)}" for key, each in value.items()) + "}"
    return repr(value)
