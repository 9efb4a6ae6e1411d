"""Checks for the exercises of notebook 05: a draw, the recipe of a law, and tests that can fail."""

import math
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..distributions import Sampling, overlap
from ..distributions import residual as right_residual
from ..lawtest import bisect, chi_square_tail
from ..randomness import token_at
from .core import CheckFailed, Given, Slip, ask, check, dice, law, laws, like, passed

Law = Float[Tensor, " vocab"]
Engine = Callable[[int, int], Int[Tensor, "n 3"]]
LAST = 1 - 2**-53  # below 1
KINDS = ("plain", "cold draft", "resampled", "shy", "draft's bonus", "one number")  # of engines; two are right


def given(variant: int = 0) -> Given:
    """p and q over three tokens, in fractions: unlike each other, but not too much."""
    p, q = unlike(dice("05", variant))
    return Given(p=p, q=q)


def unlike(chance: random.Random) -> tuple[list, list]:
    while True:
        p, q = law(chance, 3), law(chance, 3)
        if 0.55 <= sum(map(min, p, q)) <= 0.8:
            return p, q


def tensor(numbers: list) -> Law:
    return torch.tensor([float(number) for number in numbers], dtype=torch.float64)


def check_token_of(answer: Callable, seed: int = 0) -> None:
    """The token that one uniform number draws."""
    gaps = tensor([0, 0.5, 0, 0.25, 0.25, 0])
    cases: list[tuple] = [(gaps, u) for u in (0.0, 0.25, 0.5, 0.6, 0.75, LAST)]
    cases += [(tensor([0.1] * 10 + [0, 0]), LAST), (tensor([0.5, 0.25, 0.25]), 0.5)]
    chance = dice("05 token_of", seed)
    cases += [(laws(10 * seed + i, 3 + i % 4), chance.random()) for i in range(20)]
    end = "ten tenths add up to just below 1, and u is no smaller. "
    slips = [
        like("u falls on an edge, and the token before the edge was drawn, even one with p = 0. A token owns its left "
             "edge, not its right one", lambda p, u: int((p.cumsum(0) < u).sum())),
        like(end + "The answer is no token: whose is the rest?", lambda p, u: int((p.cumsum(0) <= u).sum())),
        like(end + "The rest went to the last of all tokens; it belongs to the last that has a chance",
             lambda p, u: min(int((p.cumsum(0) <= u).sum()), len(p) - 1)),
        like(end + "It went to token 0, as no edge is larger", lambda p, u: int((p.cumsum(0) > u).int().argmax())),
        Slip("a u just below 1 became 1: keep to float64", lambda found, right, p, u: u == LAST and found == len(p)),
    ]  # fmt: skip

    def found(p: Law, u: float) -> int:
        try:
            token = answer(p, u)
        except (IndexError, StopIteration):
            if u < LAST:
                raise
            token = None
        return len(p) if token is None and u == LAST else token  # no edge is larger: as if it were one behind the last

    check(found, lambda p, u: int(token_at(p, torch.tensor(u, dtype=torch.float64))), cases, slips, name="token_of")


def scaled(p: Law) -> Law:
    return p / p.sum()


def above(p: Law, min_p: float) -> Law:
    return scaled(p.masked_fill(p < min_p * p.max(), 0))


def shaped(logits: Law, temperature: float, top_p: float, min_p: float) -> Law:
    return above(Sampling(temperature, top_p=top_p).probs(logits), min_p)


def check_shape(answer: Callable, seed: int = 0) -> None:
    """Temperature, then top-p, then min-p: a law from logits."""

    def without_crossing(logits: Law, temperature: float, top_p: float, min_p: float, edge: float = 1e-12) -> Law:
        p = Sampling(temperature).probs(logits)
        reached = (p * (p >= p[:, None])).sum(1)  # the mass down to each token, itself included
        return above(scaled(p * (reached <= top_p + edge)), min_p) if temperature else p

    def frozen(at_zero: Callable) -> Callable:
        return lambda logits, t, *cuts: shaped(logits, t, *cuts) if t else at_zero(logits)

    def absolute(logits: Law, temperature: float, top_p: float, min_p: float) -> Law:
        return scaled(shaped(logits, temperature, top_p, 0.0) * (shaped(logits, temperature, top_p, 0.0) >= min_p))

    def min_p_first(logits: Law, temperature: float, top_p: float, min_p: float) -> Law:
        return Sampling(top_p=top_p).probs(above(Sampling(temperature).probs(logits), min_p).log())

    settings = [(1, 0.6, 0), (1, 1, 0.3), (0.6, 0.9, 0.2), (1.6, 0.7, 0.3), (0, 0.9, 0.1), (0.7, 1, 0), (1, 1, 1)]
    cases: list[tuple] = [(laws(7 * seed + i, 7).log(), *each) for i in range(4) for each in settings]
    cases += [(tensor([0.1, 0.38, 0.32, 0.2]).log(), 1.0, 0.75, 0.6), (tensor([1, 3, 3, 2]), 0.0, 1.0, 0.5)]
    slips = [
        like("NaN at temperature 0. It is a limit: all on the favourite", frozen(lambda logits: logits * math.nan)),
        like("at temperature 0 equals share the mass here. It goes to the first of them",
             frozen(lambda logits: scaled((logits == logits.max()).double()))),
        Slip("the result does not sum to 1. What is cut has to be given to others",
             lambda found, right, *_: torch.allclose(scaled(found), right)),
        like("NaN at min_p = 1: it drops what has LESS than the favourite, and that leaves the favourite itself",
             lambda logits, t, top_p, min_p: shaped(logits, t, top_p, min_p) * (math.nan if min_p == 1 else 1)),
        *(like("the token with which the sum reaches top_p is missing. It stays, or a sure favourite is cut", each)
          for each in (without_crossing, partial(without_crossing, edge=-1e-12))),
        like("this is in falling order. The vocabulary has an order of its own",
             lambda *case: shaped(*case).sort(descending=True).values),
        like("min_p was taken as a probability. It is a share of the favourite's", absolute),
        like("min_p came before top_p. Then top_p finds fewer tokens to be enough: the order is part of the law",
             min_p_first),
        like("the cuts came before the temperature: the order is part of the law",
             lambda logits, t, top_p, min_p: Sampling(t).probs(shaped(logits, 1.0, top_p, min_p).log())),
        like("logits are divided by the temperature: a small one makes the law sharper",
             lambda logits, t, top_p, min_p: shaped(logits * t * t, t, top_p, min_p)),
    ]  # fmt: skip
    check(answer, shaped, cases, slips, name="shape", tolerance=1e-7)


def kept(p: Law, q: Law, floor: float = 0.0) -> Law:
    """How often each token is drafted and kept, when one number does both."""
    ends = q.cumsum(0)
    return (torch.minimum(ends, p / q) - (ends - q)).clamp(min=floor)


def check_one_number(answer: Callable, given: Given) -> None:
    """The law of the written token when the draft's draw and its judge use one number."""

    def written(stay: Law, p: Law, q: Law) -> Law:
        return stay + (1 - stay.sum()) * right_residual(p, q)

    slips = [
        like("this is p, the law of two separate numbers. Here, a token that was drawn says something about u",
             lambda p, q: p),
        like("a token whose stretch lies above its ratio is never kept: that is a length of 0, not less",
             lambda p, q: written(kept(p, q, floor=-math.inf), p, q)),
        like("x is drafted only where u lies in its own stretch, and that does not begin at 0",
             lambda p, q: written(torch.minimum(q.cumsum(0), p / q), p, q)),
        like("it is the draft that draws with u: the stretches are those of q",
             lambda p, q: written((torch.minimum(p.cumsum(0), p / q) - p.cumsum(0) + p).clamp(min=0), p, q)),
        like("kept tokens only. The recovered ones are missing: ANY rejection leads to them", kept),
        like("the recovered token comes from the residual, not from p",
             lambda p, q: kept(p, q) + (1 - kept(p, q).sum()) * p),
        like("what is missing to 1 was rejected: it goes to the residual", lambda p, q: scaled(kept(p, q))),
        like("residual(p, q) is what q has too little of; this is the other way round",
             lambda p, q: kept(p, q) + (1 - kept(p, q).sum()) * right_residual(q, p)),
    ]  # fmt: skip
    cases: list[tuple] = [(tensor(given.p), tensor(given.q)), (laws(3, 4), laws(3, 4))]
    cases += [(laws(i, 2 + i), laws(i + 9, 2 + i)) for i in range(5)]
    cases += [(tensor([0.4, 0.3, 0.2, 0.1]), tensor([0.1, 0.2, 0.3, 0.4]))]
    check(answer, lambda p, q: written(kept(p, q), p, q), cases, slips, name="one_number")


def chi_square(
    counts: Tensor, p: Law, least: float, over: str = "expected", rare_by: str = "expected", always: bool = False
) -> tuple[float, int]:
    """The statistic and its degrees of freedom, the rare cells merged; or, by other settings, a slip."""
    values = {"seen": counts.double(), "expected": counts.sum() * p}
    rare = values[rare_by] < least
    if rare.any() or always:
        values = {name: torch.cat([each[~rare], each[rare].sum()[None]]) for name, each in values.items()}
    squares = (values["seen"] - values["expected"]) ** 2 / values[over]
    return float(squares.sum()), len(squares) - 1


def check_chi_square(answer: Callable, seed: int = 0) -> None:
    """Chi-square of counts, rare cells merged, and its degrees of freedom."""

    def thrown_away(counts: Tensor, p: Law, least: float) -> tuple[float, int]:
        often = counts.sum() * p >= least
        return float(((counts - counts.sum() * p) ** 2 / (counts.sum() * p))[often].sum()), int(often.sum()) - 1

    def with_df(df: Callable[[Law, int], int]) -> Callable:
        return lambda counts, p, least: (chi_square(counts, p, least)[0], df(p, chi_square(counts, p, least)[1]))

    cases: list[tuple] = []
    for n, draws, least in ((4, 400, 5.0), (9, 60, 5.0), (12, 200, 20.0), (6, 30, 5.0)):
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.multinomial(laws(seed + n + 1, n), draws, True, generator=generator)
        cases.append((drawn.bincount(minlength=n), laws(seed + n, n), least))
    cases.append((torch.tensor([9, 6, 1]), tensor([0.5, 0.375, 0.125]), 6.0))  # exactly 6 are not fewer than 6
    slips = [
        like("rare cells are not merged. A draw where 0.1 is expected adds 8", lambda c, p, _: chi_square(c, p, 0.0)),
        like("rare cells are thrown away. Their draws belong into one cell of their own", thrown_away),
        like("the statistic is right. The counts add up to n, so one cell is not free", with_df(lambda p, df: df + 1)),
        like("the statistic is right. How many cells are left AFTER merging?", with_df(lambda p, df: len(p) - 1)),
        like("the statistic is right. How many cells are left AFTER merging?", with_df(lambda p, df: len(p))),
        like("a cell is rare if few draws are EXPECTED. Here the counts decide", partial(chi_square, rare_by="seen")),
        like("each square is divided by what was seen; divide by what was expected", partial(chi_square, over="seen")),
        like("this is a chi-square of shares. With counts it is n times as much",
             lambda counts, *rest: (chi_square(counts, *rest)[0] / int(counts.sum()), chi_square(counts, *rest)[1])),
        like("NaN where no cell is rare: nothing is merged then, so add no cell", partial(chi_square, always=True)),
    ]  # fmt: skip
    check(answer, chi_square, cases, slips, name="chi_square", tolerance=1e-6)


def needed(p: Law, wrong: Law, level: float, power: float, df: int = -1, effect: Any = None, floor: Any = None) -> int:
    """Draws with which a test at ``level`` sees ``wrong`` with chance ``power``; or, by other settings, a slip."""
    df = len(p) + df
    critical = bisect(lambda x: chi_square_tail(x, df) <= level, 1_000)
    added = floor(critical, df) if floor else bisect(lambda x: chi_square_tail(critical, df, x) >= power, 1_000)
    return math.ceil(added / float(effect(p, wrong) if effect else ((wrong - p) ** 2 / p).sum()))


def check_draws_needed(answer: Callable, seed: int = 0) -> None:
    """The number of draws with which a test sees a given fault, to about one in a hundred."""
    cases: list[tuple] = []
    for cells, level, power in ((2, 0.05, 0.8), (5, 0.001, 0.99), (10, 0.001, 0.9)):
        p, other = laws(seed + cells, cells), laws(seed + cells + 50, cells)
        moved = 0.1 * math.sqrt(needed(p, 0.9 * p + 0.1 * other, level, power) / 2_000)  # so that 2,000 are about right
        cases.append((p, (1 - moved) * p + moved * other, level, power))

    def slip(says: str, **settings: Any) -> Slip:
        return like(says, partial(needed, **settings), tolerance=20)

    half = "so many draws put the AVERAGE of chi-square at the line; half of the runs stay below. Where is `power`?"
    slips = [
        slip("that many cells have one degree of freedom less", df=0),
        slip("each square is divided by p: rare cells show more", effect=lambda p, w: ((w - p) ** 2).sum()),
        slip("4 d^2 for each draw is the worst case. This fault is known cell by cell: sum delta^2 / p",
             effect=lambda p, wrong: 4 * (1 - overlap(p, wrong)) ** 2),
        slip("each shift is squared before it is divided by p", effect=lambda p, wrong: ((wrong - p).abs() / p).sum()),
        slip("each square is divided by p: the test knows only p", effect=lambda p, w: ((w - p) ** 2 / w).sum()),
        *(slip(half, floor=lambda line, df, less=less: line - less * df) for less in (0, 1)),
    ]  # fmt: skip
    check(answer, needed, cases, slips, name="draws_needed", tolerance=20)


def suspects(variant: int = 0) -> tuple[dict[str, Engine], Float[Tensor, "3 vocab"]]:
    """Engines under letters; ``engine(n, seed)`` gives n texts. And the target's law of each of their three tokens."""
    return line_up(variant)[:2]


def line_up(variant: int) -> tuple[dict[str, Engine], Float[Tensor, "3 vocab"], dict[str, str]]:
    chance = dice("05 suspects", variant)
    p, q = (torch.stack(rows) for rows in zip(*(map(tensor, unlike(chance)) for _ in range(3)), strict=True))
    kind_of = dict(zip("ABCDEF", chance.sample(KINDS, len(KINDS)), strict=True))

    def engine(kind: str) -> Engine:  # a function: it equals its copy
        return lambda n, seed: texts(kind, p, q, n, seed)

    return {name: engine(kind) for name, kind in kind_of.items()}, p, kind_of


def texts(kind: str, p: Float[Tensor, "3 vocab"], q: Float[Tensor, "3 vocab"], n: int, seed: int) -> Int[Tensor, "n 3"]:
    """n texts of three tokens: a round with K = 2, then plain. kind: what is special about the engine."""
    generator = torch.Generator().manual_seed(seed)

    def draw(rows: Float[Tensor, "3 vocab"]) -> Int[Tensor, "n 3"]:
        return torch.stack([torch.multinomial(row, n, True, generator=generator) for row in rows], 1)

    if kind == "plain":
        return draw(p)
    if kind == "one number":  # for all three tokens
        u = torch.rand(n, dtype=torch.float64, generator=generator)
        return torch.stack([token_at(row, u) for row in p], 1)
    q = q**2 / (q**2).sum(-1, keepdim=True) if kind == "cold draft" else q
    drafted = draw(q)
    accept = (p / q).clamp(max=1)[torch.arange(3), drafted] * (0.92 if kind == "shy" else 1)
    accepted = (torch.rand(n, 2, generator=generator) < accept[:, :2]).int().cumprod(1).sum(1, keepdim=True)
    recovered, own = draw(p if kind == "resampled" else right_residual(p, q)), draw(p)
    place = torch.arange(3)
    own = torch.where((accepted == 2) & (place == 2), draw(q), own) if kind == "draft's bonus" else own
    return torch.where(place < accepted, drafted, torch.where((place == accepted) & (place < 2), recovered, own))


def check_guilty(answer: Callable, variant: int = 0) -> None:
    """Which engines do not have the target's law. Any test will do that finds them, and no others."""
    free: set[str] = set()
    accused: list[str] = []
    for number in (variant, variant + 1):
        engines, p, kind_of = line_up(number)
        found = ask(answer, engines, p, name="guilty")
        if not isinstance(found, set | list | tuple | str) or not set(found) <= engines.keys():
            raise CheckFailed(f"guilty: return a set of letters, of {', '.join(engines)}")
        found = set(found)
        wrong = {name for name, kind in kind_of.items() if kind not in KINDS[:2]}
        free |= {kind_of[name] for name in wrong - found}
        accused += [kind_of[name] for name in found - wrong]
    for applies, message in (
        (len(accused) == 4 and len(free) == 4, "the right engines are accused, and only these. Who is guilty?"),
        (len(accused) == 4, "all right engines are accused. Are the cells of their law in the order of your counts?"),
        (accused and free, "right engines are accused and wrong ones go free. What law do three tokens together have?"),
        (accused, "an engine with exactly the target's law is accused. How often does your level accuse a right one?"),
        (free == {"shy"}, "one goes free that is off by only a few hundredths. How many draws show that?"),
        (free == {"one number"}, "one goes free that is right at EACH position. Look at the three tokens together"),
        ({"draft's bonus", "one number"} <= free and "resampled" not in free,
         "those go free whose FIRST token is right. Look at all three tokens, together"),
        (free, f"{len(free)} of the 4 kinds of fault are not found. Too few draws, or a level too strict?"),
    ):  # fmt: skip
        if applies:
            raise CheckFailed(f"guilty: {message}")
    passed("guilty", "2 line-ups")
