"""Checks for the exercises of notebook 13: blocks, honest stops, lenience, Jacobi iteration, and auditing a claim."""

from collections.abc import Callable
from fractions import Fraction
from functools import partial, reduce
from itertools import product
from math import prod
from types import SimpleNamespace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ..distributions import overlap, residual
from ..gallery import first_token_law
from ..randomness import Randomness, enumerate_outcomes
from ..theory import expected_tokens_per_round
from ..verify import verify
from .core import CheckFailed, Given, Slip, ask, attempting, check, check_parts, dice, laws, like, passed, same, show
from .exactness import pairs_of_laws

Law = Float[Tensor, " vocab"]


def given(variant: int = 0) -> Given:
    """p and q over two tokens, the same at both places; and what a made-up paper reports."""
    chance = dice("13", variant)
    pairs = [(a, b) for a, b in product((1, 2, 4, 5), repeat=2) if a != b and a + b != 6]
    p, q = ([Fraction(each, 6), Fraction(6 - each, 6)] for each in chance.choice(pairs))
    return Given(p=p, q=q, report=report(chance.randrange(10_000)))


def report(seed: int) -> dict[str, float]:
    """Figures of a paper that nobody wrote."""
    chance = dice("13 report", seed)
    K, length, cached = chance.randrange(4, 8), round(chance.uniform(3.6, 4.4), 1), round(chance.uniform(35, 60), 1)
    return {
        "plain, no cache, tokens/s": round(cached * chance.uniform(0.5, 0.65), 1),
        "plain, tokens/s": cached,
        "method, temperature 0, tokens/s": round(cached * length / chance.uniform(2.0, 2.4), 1),
        "mean acceptance length, temperature 0": length,
        "K": K,
        "accepted/drafted, temperature 1": round(chance.uniform(1.3, 1.9) / K, 2),
        "a round at batch 32, plain steps": round(chance.uniform(2.7, 3.6), 1),
    }


def cut_product(r, ratio):
    return min(1, r * ratio)


# From the ratios p/q of a prefix to the chance that all of it is kept.
CAPS: dict[str, tuple[str, Callable]] = {
    "standard": ("cuts every ratio at 1, and multiplies", lambda ratios: prod(min(1, each) for each in ratios)),
    "block": ("multiplies, and cuts at 1 after each token", lambda ratios: reduce(cut_product, ratios, 1)),
    "ceiling": ("multiplies all ratios, and cuts at 1 at the end", lambda ratios: min(1, prod(ratios))),
}  # fmt: skip


def average(cap: Callable, p, q, chances=(), last_only: bool = False):
    """The sum over all prefixes of what ``cap`` makes of their ratios, averaged over all drafts."""
    rows = (p, q, chances if len(chances) else q)
    p, q, chances = (law.tolist() if isinstance(law, Tensor) else law for law in rows)
    total = 0
    for draft in product(range(len(q[0])), repeat=len(q)):
        ratios = [p[i][x] / q[i][x] for i, x in enumerate(draft)]
        terms = [cap(ratios[: i + 1]) for i in range(len(ratios))]
        total += prod(chances[i][x] for i, x in enumerate(draft)) * sum(terms[-1:] if last_only else terms)
    return total


def part_of(name: str) -> tuple[Callable, list[Slip]]:
    """The average that a rule gives, and what is likely to be found in its place."""
    does, cap = CAPS[name]
    wanted = f"This one {does}"
    others = [CAPS[other] for other in CAPS if other != name]
    return partial(average, cap), [
        *(like(f"what you have {does}. {wanted}", partial(average, other)) for does, other in others),
        like(f"nothing is cut at 1 here. {wanted}", partial(average, prod)),
        like("this is the last term alone, the whole draft; a draft that is kept in part counts as well",
             partial(average, cap, last_only=True)),
        like("this is one too high: accepted tokens are wanted, without the one that follows them",
             lambda p, q: average(cap, p, q) + 1),
        like("weighed with p; it is the draft model that makes the drafts", lambda p, q: average(cap, p, q, p)),
        like("the ratio is upside down, q/p", lambda p, q: average(cap, q, p, q)),
        like("a token counts only if all before it were kept; this counts each place by itself",
             lambda p, q: sum(sum(map(min, *rows)) for rows in zip(p, q, strict=True))),
        like("all drafts count the same here; weigh each with the chance that the draft model makes it",
             lambda p, q: average(cap, p, q, [[Fraction(1, len(row))] * len(row) for row in q])),
    ]  # fmt: skip


def check_by_hand(answer: Callable, given: Given) -> None:
    """Expected accepted tokens of two, by the standard rule and by blocks, in fractions."""
    case = [given.p] * 2, [given.q] * 2
    check_parts(lambda p, q: answer(), "by_hand", [case], {name: part_of(name) for name in ("standard", "block")})


def check_three_mins(answer: Callable, seed: int = 0) -> None:
    """Expected accepted tokens by the standard rule, by blocks, and what no exact rule can exceed."""
    sizes = [(1, 3), (2, 2), (2, 3), (3, 2), (3, 3), (4, 2)]
    cases = [(laws(100 * seed + n, *size), laws(100 * seed + n + 50, *size)) for n, size in enumerate(sizes)]
    check_parts(answer, "three_mins", cases, {name: part_of(name) for name in CAPS})


def drop(judge: Callable, after_drop: Callable) -> Callable:
    """``drop_unsure`` with its parts open: the law that a sure token is judged by, and what follows a dropped one."""

    def play(p: Law, q: Law, least: float, chance: Randomness) -> tuple[int, bool]:
        x = chance.categorical(q)
        if q[x] < least:
            return int(chance.categorical(after_drop(p, q))), False
        accepting, subtracted = judge(q, q * (q >= least))
        if int(chance.first_failure((p[x] / accepting[x]).reshape(1))):
            return int(x), True
        return int(chance.categorical(residual(p, subtracted))), False

    return play


def outcomes(rule: Callable) -> Callable:
    """The law of what a rule returns as a table: a row for each token, and whether it is an accepted draft."""

    def tabled(p: Law, q: Law, least: float) -> Float[Tensor, "vocab 2"]:
        law = enumerate_outcomes(lambda chance: rule(p, q, least, chance))
        table = [[law.get((x, kept), 0.0) for kept in (True, False)] for x in range(len(p))]
        return torch.tensor(table, dtype=p.dtype)

    return tabled


def check_drop_unsure(answer: Callable, seed: int = 0) -> None:
    """A draft token that is dropped when unsure, in a way that leaves the law alone."""
    cases = [(p, q, least) for p, q in pairs_of_laws(seed) for least in (0.0, 0.2, 0.25, 0.9)]

    def play(p: Law, q: Law, least: float, chance: Randomness) -> tuple[int, bool]:
        draws = iter(range(3))

        def categorical(law: Law) -> Any:
            if next(draws, None) is None:
                raise CheckFailed("drop_unsure draws on and on. Draw once: a dropped token is the target's to write")
            if not abs(float(law.sum()) - 1) < 1e-3:
                raise CheckFailed(f"drop_unsure draws from {show(law)}, which is no law. When is no token of q sure?")
            return chance.categorical(law)

        dice = SimpleNamespace(categorical=categorical, first_failure=chance.first_failure)
        found = ask(answer, p, q, least, dice, name="drop_unsure")
        if not (isinstance(found, tuple | list) and len(found) == 2):
            raise CheckFailed("drop_unsure: return two things: the token, and whether it is an accepted draft")
        with attempting("drop_unsure"):
            return int(found[0]), bool(found[1])

    def rule_with(judge: Callable, after_drop: Callable = lambda p, q: p) -> Callable:
        return outcomes(drop(judge, after_drop))

    slips = [
        like("the law is bent by the dropping: a token that is handed over was not drawn from q, but from q *given "
             "that it is sure*", rule_with(lambda q, cut: (q, q))),
        like("q is cut to the sure tokens, and does not sum to 1 yet: some of the draws were dropped",
             rule_with(lambda q, cut: (cut, cut))),
        like("the acceptance is right; the residual has to subtract the same law, not q",
             rule_with(lambda q, cut: (cut / cut.sum(), q))),
        like("the residual is right; the ratio has to divide by the same law, not by q",
             rule_with(lambda q, cut: (q, cut / cut.sum()))),
        like("after a dropped token nothing was judged, so nothing may be subtracted: the target writes from p",
             rule_with(lambda q, cut: (cut / cut.sum(),) * 2, residual)),
        like("exact, but nothing is ever dropped: every token is judged",
             lambda p, q, least: rule_with(lambda q, cut: (q, q))(p, q, 0.0)),
        Slip("a token is dropped when its q is *below* least; at least itself it stays",
             lambda found, right, p, q, least: bool((q == least).any())),
        Slip("no draft token is ever accepted here: judge a sure one, and say True when its trial succeeds",
             lambda found, *_: float(found[:, 0].sum()) == 0),
        Slip("the token is right, and what is said of it is not: True if it was drafted, judged and kept, else False",
             lambda found, right, *_: same(found.sum(1), right.sum(1)) and not same(found, right)),
        Slip("the law of what is written is not p",
             lambda found, right, p, q, least: not same(found.sum(1), p)),
    ]  # fmt: skip
    check(outcomes(play), rule_with(lambda q, cut: (cut / cut.sum(),) * 2), cases, slips, name="drop_unsure")


def check_price_of_lenience(answer: Callable, seed: int = 0) -> None:
    """What lenience buys in acceptance, and what it pays in total variation."""
    cases = [(p, q, share) for p, q in pairs_of_laws(seed) for share in (1.0, 0.8, 0.5, 0.2)]

    def kept(p: Law, q: Law, share: float) -> Law:
        return torch.minimum(q, p / share)

    def bought(p: Law, q: Law, share: float) -> float:
        return float(kept(p, q, share).sum()) - float(overlap(p, q))

    def paid(p: Law, q: Law, share: float) -> float:
        def rule(d, q, p, chance):
            return verify(d, share * q, p, chance)

        return round(float((first_token_law(rule, p, q) - p).abs().sum()) / 2, 12)

    buying = [
        like("this is the whole acceptance; bought is what it has above alpha",
             lambda p, q, share: float(kept(p, q, share).sum())),
        like("with min(1, share * p/q) less is accepted, not more: lenience divides by the share",
             lambda p, q, share: float(torch.minimum(q, p * share).sum() - overlap(p, q))),
        like("a token is drafted with all of q; only in the ratio is q made smaller",
             lambda p, q, share: float(torch.minimum(share * q, p).sum() - overlap(p, q))),
    ]  # fmt: skip
    paying = [
        like("that is twice the total variation; halve the sum of the differences", lambda *case: 2 * paid(*case)),
        like("this is what was bought. It would be so with the residual of p and q; the rule's takes the smaller q "
             "too: max(0, p - share * q)", bought),
        like("this is how far the *draft* is from p; what is written?", lambda p, q, share: float(1 - overlap(p, q))),
    ]  # fmt: skip
    check_parts(answer, "price_of_lenience", cases, {"bought": (bought, buying), "paid": (paid, paying)})


def check_jacobi(answer: Callable, seed: int = 0) -> None:
    """The greedy text as a fixed point, and the passes that it took, counted here as well."""
    chance = dice("13 jacobi", seed)
    for vocab, n in ((5, 1), (1, 4), (7, 6), (30, 8), (50, 12)):
        table = [[chance.randrange(vocab) for _ in range(vocab)] for _ in range(vocab)]
        prompt, fed = [chance.randrange(vocab) for _ in range(3)], list[int]()

        def favourites(tokens: list[int], table=table) -> list[int]:
            return [table[tokens[max(0, i - 1)]][token] for i, token in enumerate(tokens)]

        def predict(tokens: list[int], n=n, fed=fed, favourites=favourites) -> list[int]:
            fed.append(len(tokens))
            if len(fed) > 2 * n + 9:
                raise CheckFailed(f"jacobi: {len(fed) - 1} passes with n = {n}, and no end. Stop when a pass gives the "
                                  "guess back, as a list. Does none? Output i is what follows input i, and each guess "
                                  "has n tokens: which n outputs are they?")  # fmt: skip
            return favourites(tokens)

        judge_jacobi(ask(answer, predict, prompt, n, name="jacobi"), fed, *fixed_point(favourites, prompt, n), prompt)
    passed("jacobi", "5 texts")


def fixed_point(favourites: Callable, prompt: list[int], n: int) -> tuple[list[int], int]:
    guess, passes = [prompt[-1]] * n, 1
    while (wanted := favourites(prompt + guess)[len(prompt) - 1 : -1]) != guess:
        guess, passes = wanted, passes + 1
    return guess, passes


def judge_jacobi(found, fed: list[int], text: list[int], passes: int, prompt: list[int]) -> None:
    if not (isinstance(found, tuple | list) and len(found) == 2 and isinstance(found[0], list)):
        raise CheckFailed("jacobi: return two things: the list of new tokens, and the number of passes")
    new, counted = found
    for wrong, says in (
        (new == prompt + text, "return the new tokens alone, without the prompt"),
        (len({*fed}) == len(fed) > 1, "each pass feeds more than the one before: plain decoding. Guess all n at once"),
        (new != text and len(fed) < passes, f"tokens still change after {len(fed)} passes; {passes} are needed"),
        (new != text, f"{show(new)} is not the greedy text {show(text)}. Output i follows input i"),
        (counted != len(fed), f"{len(fed)} passes were made, {counted} reported. Every call counts, the last one too"),
        (len(fed) != passes, f"{len(fed)} passes, and {passes} would do: guess the prompt's last token, n times, and "
                             "stop as soon as a pass changes nothing"),
    ):  # fmt: skip
        if wrong:
            raise CheckFailed(f"jacobi: {says}")


def check_audit(answer: Callable, given: Given) -> None:
    """What a claim is worth: against a fair baseline, at temperature 1, and on a loaded machine."""
    uncached, cached, method, length, K, rate, loaded = given.report  # the names, in their order

    def fair(r: dict[str, float]) -> float:
        return r[method] / r[cached]

    def tokens(r: dict[str, float]) -> float:
        return 1 + r[K] * r[rate]

    first = [
        like("this is the claim itself: the baseline without a cache reads the text anew for each token",
             lambda r: r[method] / r[uncached]),
    ]  # fmt: skip
    second = [
        like("tokens per round include the target's own one: 1 + K * rate at temperature 1, as the length at 0 has it",
             lambda r: fair(r) * r[K] * r[rate] / r[length]),
        like("here both lengths lack the target's own token; time is paid per round, and a round gives that one too",
             lambda r: fair(r) * r[K] * r[rate] / (r[length] - 1)),
        like("the mean acceptance length counts the target's own token already; you add it once more",
             lambda r: fair(r) * tokens(r) / (r[length] + 1)),
        like("accepted/drafted is no alpha: no formula for E is needed, K * rate tokens are accepted in a round",
             lambda r: fair(r) * expected_tokens_per_round(r[rate], int(r[K])) / r[length]),
        like("the rate is of K drafted tokens in each round; you took it as accepted tokens per round",
             lambda r: fair(r) * (1 + r[rate]) / r[length]),
        like("these are tokens per round. How does the first result change with them?", tokens),
    ]  # fmt: skip
    third = [
        like("take the tokens per round of temperature 1", lambda r: r[length] / r[loaded]),
        like("the speedup at batch 1 already has the time of a round in it; begin anew from tokens per round",
             lambda r: fair(r) * tokens(r) / r[length] / r[loaded]),
        like("the first result is of batch 1; begin anew from tokens per round", lambda r: fair(r) / r[loaded]),
        like("plain decoding has the 32 rows too: no factor of 32 is left", lambda r: 32 * tokens(r) / r[loaded]),
        like("upside down: tokens are gained, plain steps are paid", lambda r: r[loaded] / tokens(r)),
    ]  # fmt: skip
    parts = {"fair baseline": (fair, first), "temperature 1": (lambda r: fair(r) * tokens(r) / r[length], second),
             "batch 32": (lambda r: tokens(r) / r[loaded], third)}  # fmt: skip
    check_parts(answer, "audit", [(each,) for each in (given.report, report(1), report(2))], parts)
