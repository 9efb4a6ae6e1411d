"""Checks for the exercises of notebook 03: rows, origins, stops, and the law of a whole loop."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial
from itertools import chain, combinations, pairwise, product
from math import prod
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ..bench import PROMPTS
from ..decoding import decode, keep_until
from ..distributions import Sampling
from ..drafters.model import ModelDrafter
from ..models import LanguageModel
from ..randomness import TorchRandomness, enumerate_outcomes
from ..table import TableModel
from .core import CheckFailed, Given, Slip, ask, attempting, check, dice, difference, like, passed, same
from .core import laws as random_laws
from .faulty_loops import FAULTS, Loop, each_alone, law_with, suspects


def given(variant: int = 0) -> Given:
    """The beginning of a text, and a seed."""
    chance = dice("03", variant)
    return Given(prompt=chance.choice(list(PROMPTS.values())), seed=chance.randrange(1000))


def check_judged_by(answer: Callable, seed: int = 0) -> None:
    """Which row of a pass over what is not cached judges drafted token i."""
    chance = dice("03 rows", seed)
    cases = [(length, chance.randrange(length), chance.randint(0, 6)) for length in (1, *range(2, 60, 5))]
    cases = [(5, 0, 0), (5, 4, 0), (5, 4, 3), *cases]
    slips = [
        like("one row too late: that row has already read the token that it should judge",
             lambda committed, cached, i: committed - cached + i),
        like("one row too early: the row wanted is the one that has read all before token i, and not token i itself",
             lambda committed, cached, i: committed - cached + i - 2),
        like("this counts rows from the start of the text; a pass has no rows for what is in the cache",
             lambda committed, cached, i: committed + i - 1),
        like("right only if one token was left to feed; how many committed tokens are fed before the draft?",
             lambda committed, cached, i: i),
    ]  # fmt: skip
    check(answer, lambda committed, cached, i: committed - cached + i - 1, cases, slips, name="judged_by")


def who_wrote(drafted: list[int], written: list[int]) -> list[str]:
    agree = [a == b for a, b in zip(drafted, written, strict=False)]
    kept = [*agree, False].index(False)
    return ["accepted"] * kept + ["bonus" if kept == len(drafted) else "recovered"] * (len(written) - kept)


def check_origins(answer: Callable, seed: int = 0) -> None:
    """The origin of each token of a round, from what was drafted and what was written."""
    cases: list[tuple[list[int], list[int]]] = [
        ([1, 2, 3], [1, 2, 3, 4]), ([1, 2, 3], [1, 9]), ([1, 2, 3], [9]), ([], [5]), ([1, 2, 3], [1, 2]),
        ([1, 2, 3], [1, 2, 3]), ([7, 7, 7], [7, 8]), ([1, 2, 3], [2]), ([4, 4], [4, 4, 4]), ([4, 5, 4], [4, 4]),
    ]  # fmt: skip
    p, q = (TableModel(random_laws(seed + n, 4, 4)) for n in (0, 7))
    options: dict[str, Any] = {"max_new_tokens": 30, "K": 3, "sampling": Sampling()}
    for each in decode(p, ModelDrafter(q, 4), [0], **options, randomness=TorchRandomness.seeded(seed)):
        cases.append((list(each.draft_tokens), list(each.tokens)))
    slips = [
        like("a round that drafted nothing has rejected nothing; its token is drawn from p, as a bonus is",
             lambda d, w: who_wrote(d, w) if d else ["recovered"]),
        Slip("a round that a stop has cut can end with a token of the draft's; the target's own was not written then",
             lambda found, right, d, w: right[-1] == "accepted" and found[: len(w) - 1] == right[:-1]),
        like("a token is not accepted because the draft has it somewhere; it must have it at this place",
             lambda d, w: [("accepted" if token in d else "bonus" if len(w) > len(d) else "recovered") for token in w]),
        like("what comes after a draft kept whole is not recovered: nothing was rejected",
             lambda d, w: [each.replace("bonus", "recovered") for each in who_wrote(d, w)]),
        like("what comes in the place of a rejected token is no bonus",
             lambda d, w: [each.replace("recovered", "bonus") for each in who_wrote(d, w)]),
    ]  # fmt: skip
    check(answer, who_wrote, cases, slips, name="origins")


def right_cut(written: list[int], block: list[int], stops: list[list[int]]) -> tuple[list[int], bool]:
    kept, ended = keep_until(lambda text: any(text[-len(stop) :] == stop for stop in stops), list(written), block)
    return block[:kept], ended


def check_cut(answer: Callable, seed: int = 0) -> None:
    """How much of a block stays, when texts end at sequences of tokens."""
    cases: list[tuple] = [
        ([], [5, 6, 7], [[6]]), ([], [5, 6, 7], [[7]]), ([], [5, 6, 7], []), ([4, 5], [6, 7, 8], [[5, 6]]),
        ([], [1, 2, 3, 4], [[4], [2]]), ([], [1, 2, 3, 4], [[1, 2, 3], [2]]), ([4, 5], [5, 6], [[4, 5, 6]]),
        ([6, 6], [7, 6, 7], [[6, 6, 6]]), ([3], [9, 9, 8], [[9, 8], [9, 9]]), ([1, 2], [3], [[1, 2, 3, 4]]),
        ([8], [42, 1, 7], [[2, 1]]),
    ]  # fmt: skip
    chance = dice("03 stops", seed)
    while len(cases) < 40:
        written, block = ([chance.randrange(3) for _ in range(chance.randint(1, 4))] for _ in range(2))
        stops = [[chance.randrange(3) for _ in range(chance.randint(1, 3))] for _ in range(chance.randint(1, 2))]
        if not right_cut([], written, stops)[1]:
            cases.append((written, block, stops))
    slips = [
        Slip("return two things: the tokens that stay, and True or False: has the text ended?",
             lambda found, *_: [type(each) for each in found] not in ([list, bool], [tuple, bool])),
        like("return what stays of the block; `written` is only there to find the stop",
             lambda written, block, stops: (written + (cut := right_cut(written, block, stops))[0], cut[1])),
        like("tokens are compared, not their digits: 42, 1 does not end with 2, 1",
             lambda written, block, stops: (block[:2], True) if 42 in block else right_cut(written, block, stops)),
        like("a stop can begin in an earlier round and end in this block; look at both together",
             lambda written, block, stops: right_cut([], block, stops)),
        like("only the end of the block is looked at; a stop may come before it",
             lambda written, block, stops: (block, any((written + block)[-len(stop) :] == stop for stop in stops))),
        like("a part of a stop ends nothing; all its tokens must be there, in a row",
             lambda written, block, stops: right_cut(written, block, [[token] for stop in stops for token in stop])),
        Slip("the tokens are right, but not whether the text has ended: a stop can be the block's last token",
             lambda found, right, *_: same(found[0], right[0])),
        like("the stop that is first in the list need not be first in the text; try the tokens one by one",
             lambda written, block, stops: next(
                 (cut for stop in stops if (cut := right_cut(written, block, [stop]))[1]), (block, False))),
        Slip("a token is missing at the end: a stop is part of the text, up to the token that completes it",
             lambda found, right, *_: len(found[0]) < len(right[0]) and right[1]),
    ]  # fmt: skip
    check(answer, right_cut, cases, slips, name="cut")


def laws(model: LanguageModel, tokens: list[int]) -> Float[Tensor, "n vocab"]:
    """One pass over all of ``tokens``. Row i: the law of the token that follows ``tokens[: i + 1]``."""
    return Sampling().probs(model(torch.tensor([tokens]), model.new_cache(len(tokens)))[0])


class Counting(TableModel):
    passes = 0

    def __call__(self, *arguments: Any, **options: Any) -> Tensor:
        self.passes += 1
        if self.passes > 200:
            raise CheckFailed("mended: 200 passes for ten tokens, and no end. Does every round write something?")
        return super().__call__(*arguments, **options)


def check_mended(answer: Callable, seed: int = 0) -> None:
    """A loop that was mended: its length, its stops, its passes, and its law."""
    next_number = torch.eye(30).roll(1, dims=1)

    def write(prompt: list[int], n: int, eos: int | None) -> tuple[list[int], int, int]:
        models = Counting(next_number), Counting(next_number)
        found = ask(answer, *models, prompt, n, 4, eos, TorchRandomness.seeded(seed), name="mended")
        if not isinstance(found, list | tuple):
            raise CheckFailed(f"mended: {difference(found, [0] * n)}")
        if list(found[: len(prompt)]) == prompt:
            raise CheckFailed("mended: it returns the prompt too; only what is written after it is wanted")
        return list(found), models[0].passes, models[1].passes

    for n in (7, 5, 1):
        if (length := len(write([0], n, None)[0])) != n:
            why = "a round writes up to one token more than it drafts" if length > n else "why does it end so early?"
            raise CheckFailed(f"mended: asked for {n} tokens, with K = 4, it wrote {length}; {why}")
    check_law(answer, seed, ("long",) * (write([0], 1, None)[2] > 0))
    for prompt, eos in (([2, 3], 5), ([2, 3], 8), ([6, 7], 6)):
        found, right = write(prompt, 9, eos)[0], list(range(prompt[-1] + 1, prompt[-1] + 10))
        right = right[: right.index(eos) + 1] if eos in right else right
        if eos in found[:-1]:
            raise CheckFailed(f"mended: it wrote {found}, on past the end of the text, {eos}, inside a block")
        if found != right:
            raise CheckFailed(f"mended: after {prompt}, with {eos} as the end, it wrote {found}; it should be {right}")
    if (passes := write([0], 10, None)[1]) != 2:
        raise CheckFailed(f"mended: a perfect draft, K = 4: 10 tokens should take 2 target passes, not {passes}")
    passed("mended", "length, law, stops, passes")


def check_law(answer: Callable, seed: int, long: tuple[str, ...]) -> None:
    """By enumeration: is the law of the learner's loop the target's, or that of known faults, or neither?

    long: ("long",) if it drafts more than it can use, else ().
    """
    target, draft = (TableModel(random_laws(seed + n, 3, 3)) for n in (31, 47))
    with attempting("mended"):
        found = enumerate_outcomes(lambda chance: tuple(map(int, answer(target, draft, [0], 3, 2, None, chance))))
    if len(found) == 1:
        raise CheckFailed("mended: whatever `chance` says, it writes the same; where does it draw?")
    known = [fault for fault in FAULTS if not (long and fault == "rows")]  # no round is short then
    for faults in chain.from_iterable(combinations(known, size) for size in range(len(known) + 1)):
        if same(found, law_with((*faults, *long), seed), 1e-6):
            if not faults:
                return
            raise CheckFailed(f"mended: {FAULTS[faults[0]]}" + " (one of several)" * (len(faults) > 1))
    hint = "Look at the chance of acceptance, at the residual, and at the rows that both use"
    raise CheckFailed(f"mended: the law of the first three tokens is not the target's. {hint}")


def exact_for(loop: Loop, table: list[list[Fraction]]) -> int:
    found = enumerate_outcomes(loop)
    for m in range(1, 5):
        for text in product((0, 1), repeat=m):
            right = prod((table[x][y] for x, y in pairwise((0, *text))), start=Fraction(1))
            if sum(share for each, share in found.items() if each[:m] == text) != right:
                return m - 1
    return 4


def check_exact_for(answer: Callable, variant: int = 0) -> None:
    """For how many tokens each suspect has the target's law."""
    table, loops = suspects(variant)
    other = [[Fraction(1, 2), Fraction(1, 2)], [Fraction(1, 4), Fraction(3, 4)]]
    cases = [*((loop, table) for loop in loops.values()), (partial(each_alone, np.array(other)), other)]
    slips = [
        Slip("each token alone may have the right law, and the text a wrong one: take the first m tokens together",
             lambda found, right, suspect, _: suspect.func is each_alone and found > right),
        Slip("one too many: exact are the tokens BEFORE the first at which the law differs",
             lambda found, right, *_: found == right + 1),
        Slip("a fault need not show in the first token: a loop that is biased later is taken for exact",
             lambda found, right, *_: found == 4 and 0 < right < 4),
        Slip("whole texts of four only say THAT a loop is biased; add up all that begin alike to see from where",
             lambda found, right, *_: found in (0, 3) and right < 4),
        like("after token x the chance of y is table[x][y]",
             lambda suspect, table: exact_for(suspect, [list(each) for each in zip(*table, strict=True)])),
        like("a loop that is right in all its four tokens gives 4", lambda *case: min(3, exact_for(*case))),
        Slip("exact loops are accused too. All that begin alike must be added up; each token's law depends on the one "
             "before it, the first one's on token 0; and fractions must stay fractions",
             lambda found, right, *_: found < right),
    ]  # fmt: skip
    check(answer, exact_for, cases, slips, name="exact_for")


def passes(agrees: list[bool], K: int, forgets: str = "") -> tuple[int, int]:
    """(target passes, draft passes). forgets: a slip, "bonus", "target's token" or "order"."""
    at = rounds = drafted = 0
    while at < len(agrees):
        now = agrees[at : at + min(K, len(agrees) - at - 1)]
        kept = sum(now) if forgets == "order" else [*now, False].index(False)
        own = {"bonus": kept < len(now), "target's token": False}.get(forgets, True)
        at, rounds, drafted = at + max(1, kept + own), rounds + 1, drafted + len(now)
    return rounds, drafted


class Watched(list):
    """A list that ends the patience with a loop that never ends."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        self.looks += 1
        if self.looks > 999:
            raise CheckFailed("cost: it never ends. If nothing is accepted, what does a round write all the same?")
        return super().__getitem__(at)


def check_cost(answer: Callable, seed: int = 0) -> None:
    """Passes of both models, from where the draft agrees with a greedy text."""
    chance = dice("03 cost", seed)
    cases: list[tuple[list[bool], int]] = [([True] * 10, 4), ([False] * 6, 3), ([True] * 7, 0), ([True], 3)]
    cases += [([chance.random() < 0.7 for _ in range(length)], chance.randint(1, 8)) for length in range(5, 40, 2)]
    with attempting("cost"):
        answer(Watched([True, False, False]), 2)
    slips = [
        like("a draft kept whole is followed by a bonus: the next round begins one place further on",
             partial(passes, forgets="bonus")),
        like("every round also writes a token of the target's; this one moves on by the accepted ones alone",
             partial(passes, forgets="target's token")),
        like("agreement behind the first mismatch is lost; a round keeps only what comes before it",
             partial(passes, forgets="order")),
        Slip("the target's passes are right, the draft's are not: a round drafts min(K, left - 1) tokens, kept or not",
             lambda found, right, *_: len(found) == 2 and found[0] == right[0]),
    ]  # fmt: skip
    check(answer, passes, cases, slips, name="cost")
