"""Checks for the exercises of notebook 06: what a round gives, what it costs, and what records of rounds say."""

import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from math import prod, sqrt
from statistics import fmean
from typing import Any

from ..record import Round
from ..theory import best_K, expected_tokens_per_round, predicted_speedup
from .core import Given, Slip, check, dice, kind, like, part_of, same

Recorded = list[tuple[int, str]]  # (drafted, origins of the tokens written: a, r, b) of each round
Curve = dict[int, float]  # v(n) by n
Claims = dict[str, tuple[int, float, float]]  # (K, accepted / drafted, speedup), by a letter


def given(variant: int = 0) -> Given:
    """How often the draft token of each position is accepted once it is judged; some recorded rounds."""
    chance = dice("06", variant)
    rates = [Fraction(tenths, 10) for tenths in chance.sample(range(3, 10), 3)]
    return Given(rates=rates, rounds=recorded(chance, chance.uniform(0.7, 0.85), texts=2))


def recorded(chance: random.Random, alpha: float, texts: int, length: int = 15) -> Recorded:
    """Rounds of texts that are cut at ``length`` tokens, each with a draft length of its own."""
    rounds = []
    for _ in range(texts):
        left = length
        while left > 0:
            K = chance.choice([2, 3, 4, 6])
            accepted = next((i for i in range(K) if chance.random() >= alpha), K)
            origins = ("a" * accepted + ("b" if accepted == K else "r"))[:left]
            rounds.append((K, origins))
            left -= len(origins)
    return rounds


def law(rates: Sequence[float | Fraction]) -> list[float | Fraction]:
    """The chances that a round gives 1, 2, ..., K + 1 tokens."""
    return [here - further for here, further in pairwise([*at_least(rates), 0])]


def at_least(rates: Sequence[float | Fraction]) -> list[float | Fraction]:
    return [prod(rates[:n]) for n in range(len(rates) + 1)]


def check_law_of_round(answer: Callable, given: Given) -> None:
    """The law of the number of tokens that a round gives, from the acceptance at each position."""
    slips = [
        like("one chance is missing: if all are accepted, a bonus token follows", lambda rates: law(rates)[:-1]),
        like("the chance to come this far is that of the positions BEFORE: this one's own rate is in it twice",
             lambda rates: [a - a * r for a, r in zip(at_least(rates)[1:], rates, strict=True)] + [prod(rates)]),
        like("these are the chances of AT LEAST so many tokens; take from each what goes further", at_least),
        like("the chances of all these sizes must sum to 1. To be judged at all, a token needs all before it accepted",
             lambda rates: [1 - rate for rate in rates] + [prod(rates)]),
        like("the rates differ, and an early rejection cuts off more than a late one. Their mean will not do",
             lambda rates: law([sum(rates) / len(rates)] * len(rates)) if rates else [1]),
        like("these differences are right for rates of ALL rounds. Yours are of the rounds that were judged there",
             lambda rates: [a - b for a, b in zip([1, *rates], [*rates, 0], strict=True)]),
    ]  # fmt: skip
    cases = [given.rates, [], [0.8] * 4, [1.0, 1.0], [0.0, 0.9], [0.72, 0.78, 0.83, 0.86]]
    check(answer, law, [(rates,) for rates in cases], slips, name="law_of_round")


def claims(variant: int = 0) -> Claims:
    """Five printed speedups, two of them impossible."""
    chance = dice("06 claims", variant)
    made = []
    for c in (-0.08, -0.03, 0.02, 0.1, 0.3):
        K, rate = chance.choice([3, 4, 5, 6, 8]), round(chance.uniform(0.45, 0.8), 2)
        made.append((K, rate, round((1 + K * rate) / (1 + K * c), 2)))
    chance.shuffle(made)
    return dict(zip("ABCDE", made, strict=True))


def check_room_for_draft(answer: Callable, variant: int = 0) -> None:
    """The largest c that each printed speedup leaves."""

    def each(rule: Callable[[int, float, float], float | None]) -> Callable[[Claims], dict[str, float | None]]:
        return lambda claims: {name: rule(*claim) for name, claim in claims.items()}

    def signed(K: int, rate: float, speedup: float) -> float:
        return ((1 + K * rate) / speedup - 1) / K

    def possible(c: float) -> float | None:
        return c if c >= 0 else None

    slips = [
        like("a draft takes no negative time: where the formula asks for that, the claim is impossible. Say None",
             each(signed)),
        like("a negative c means that the claim is impossible, which is None and not 0",
             each(lambda *it: max(0, signed(*it)))),
        like("c = 0 is possible, if barely: drafts that are copied from the text cost next to nothing",
             each(lambda *it: signed(*it) if signed(*it) > 0 else None)),
        like("accepted / drafted is no alpha, and you need none: the rate and K give the accepted tokens",
             each(lambda K, rate, S: possible((expected_tokens_per_round(rate, K) / S - 1) / K))),
        like("these are the accepted tokens. The target adds one of its own",
             each(lambda K, rate, S: possible((K * rate / S - 1) / K))),
        like("this is the time left for all K drafted tokens; c is for one",
             each(lambda K, rate, S: possible((1 + K * rate) / S - 1))),
        like("a round also has the target's pass in it, which takes one step at least",
             each(lambda K, rate, S: (1 + K * rate) / S / K)),
        like("K tokens were drafted in a round. The pass over K + 1 tokens is the target's",
             each(lambda K, rate, S: possible(((1 + K * rate) / S - 1) / (K + 1)))),
        Slip("a claim has no entry, or None where there is a c that saves it, or a c where there is none",
             lambda found, right, *_: {x: kind(c) for x, c in found.items()} != {x: kind(c) for x, c in right.items()}),
    ]  # fmt: skip
    cases = [claims(variant), claims(variant + 1), {"A": (4, 0.5, 3.0), "B": (1, 1.0, 2.0), "C": (2, 0.5, 0.5)}]
    check(answer, each(lambda *it: possible(signed(*it))), [(case,) for case in cases], slips, name="room_for_draft")


def trials(rounds: Recorded) -> tuple[int, int]:
    """(accepted, judged)"""
    origins = "".join(origins for _, origins in rounds)
    return origins.count("a"), origins.count("a") + origins.count("r")


def alpha_and_error(rounds: Recorded) -> tuple[float, float]:
    """Accepted / judged, and its binomial standard error."""
    accepted, judged = trials(rounds)
    alpha = accepted / judged
    return alpha, sqrt(alpha * (1 - alpha) / judged)


def check_estimate(answer: Callable, given: Given) -> None:
    """alpha and its standard error from recorded rounds, the cut ones included."""

    def error_over(count: Callable[[Recorded], float]) -> Callable[[Recorded], float]:
        return lambda rounds: alpha_and_error(rounds)[1] * sqrt(trials(rounds)[1] / count(rounds))

    def counting_as_rejections(rejected: Callable[[int, str], bool]) -> Callable[[Recorded], float]:
        return lambda rounds: trials(rounds)[0] / (trials(rounds)[0] + sum(rejected(*each) for each in rounds))

    cut = "a round that ends in neither r nor b was cut. What came next in it is not known: no rejection"
    slips = [
        part_of(0, "this is accepted / drafted. What was drafted behind a rejection was never judged: it is no trial",
                lambda rounds: trials(rounds)[0] / sum(K for K, _ in rounds)),
        part_of(0, cut, counting_as_rejections(lambda drafted, origins: not origins.endswith("b"))),
        part_of(0, cut, counting_as_rejections(lambda K, origins: origins.count("a") < K)),
        part_of(0, "a bonus is no trial: nobody judged it", lambda it: trials(it)[0] / sum(len(o) for _, o in it)),
        part_of(0, "a bonus token is the target's own. Nobody judged it, so it was not accepted either",
                lambda rounds: 1 - "".join(o for _, o in rounds).count("r") / sum(len(o) for _, o in rounds)),
        part_of(0, "the cut rounds are left out whole. What was accepted in them was judged, so it counts",
                lambda rounds: alpha_and_error([each for each in rounds if each[1][-1:] in ("r", "b")])[0]),
        part_of(0, "this is a mean of the rounds' rates: one trial weighs as much as six. Sum first, then divide",
                lambda rounds: fmean(a / judged for a, judged in (trials([each]) for each in rounds) if judged)),
        part_of(1, "alpha is right. Its error falls with the trials, and not with the rounds", error_over(len)),
        part_of(1, "alpha is right. Its error falls with the trials, and not every drafted token is one",
                error_over(lambda rounds: sum(K for K, _ in rounds))),
        part_of(1, "alpha is right. This is the variance: take its root", lambda it: alpha_and_error(it)[1] ** 2),
        part_of(1, "alpha is right. This is the scatter of one trial; the mean scatters less", error_over(lambda _: 1)),
    ]  # fmt: skip
    chance = dice("06 estimate", len(given.rounds))
    cases = [given.rounds, [(4, "aaaab"), (4, "r"), (4, "aaaa")], [(2, "aab"), (3, "aa")]]
    cases += [recorded(chance, alpha, texts=20, length=8) for alpha in (0.4, 0.7, 0.9)]
    check(answer, alpha_and_error, [(rounds,) for rounds in cases], slips, name="estimate")


def engine_log(variant: int = 0) -> Given:
    """What an engine printed for K = 8, and what was measured beside it. v(n) has jumps."""
    chance = dice("06 log", variant)
    per_position = [round(float(share), 3) for share in at_least([chance.uniform(0.72, 0.86) for _ in range(8)])[1:]]
    v = {n: round(1 + 0.03 * (n - 1) + {2: 0.55, 3: 0.9}.get(n, 0) + (0.35 if n > 6 else 0), 2) for n in range(1, 10)}
    c, overhead = round(chance.uniform(0.08, 0.2), 2), round(chance.uniform(0.05, 0.15), 2)
    return Given(per_position=per_position, c=c, v=v, overhead=overhead)


def speedups(shares: Sequence[float], c: float, v: Curve, overhead: float, tokens: Callable | None = None) -> list:
    """S at K = 0, 1, ..., where ``tokens(shares, K)`` is what a round gives."""
    tokens = tokens or (lambda shares, K: 1 + sum(shares[:K]))
    return [1.0] + [tokens(shares, K) / (v[K + 1] + K * c + overhead) for K in range(1, len(shares) + 1)]


def best(found: Sequence[float], first: int = 0, last: bool = False) -> tuple[int, float]:
    """(K, S) of the largest, the first of equals, or the last."""
    K = max(range(first, len(found))[:: -1 if last else 1], key=found.__getitem__)
    return K, found[K]


def check_plan(answer: Callable, variant: int = 0) -> None:
    """The best K, and its speedup, from an engine's log and a measured v(n)."""

    def climb(*case: Any) -> tuple[int, float]:
        found = speedups(*case)
        K = next((K for K in range(len(found) - 1) if found[K + 1] <= found[K]), len(found) - 1)
        return K, found[K]

    def with_tokens(tokens: Callable[[Sequence[float], int], Any]) -> Callable:
        return lambda shares, c, v, o: best(speedups(shares, c, v, o, tokens))

    slips = [
        like("this stops where one more does not pay. With a measured v(n) a higher summit may lie behind", climb),
        like("the shares are of ALL rounds: each has the earlier acceptances in it, so do not multiply them",
             with_tokens(lambda shares, K: sum(at_least(shares[:K])))),
        like("this takes the first share as alpha everywhere. The log has a share for each position",
             with_tokens(lambda shares, K: expected_tokens_per_round(shares[0], K))),
        like("the target's own token of a round is missing", with_tokens(lambda shares, K: sum(shares[:K]))),
        like("this takes the mean of the shares as alpha. They are no alphas: each is a share of ALL rounds",
             with_tokens(lambda shares, K: expected_tokens_per_round(fmean(shares), K))),
        like("the pass takes v(K + 1), not 1", lambda s, c, v, o: best(speedups(s, c, dict.fromkeys(v, 1.0), o))),
        like("of two equally fast, take the smaller K", lambda *case: best(speedups(*case), last=True)),
        like("the pass is over K + 1 tokens, the newest one and the K drafted",
             lambda shares, c, v, o: best(speedups(shares, c, {n + 1: v[n] for n in v}, o))),
        like("the overhead is missing in the time of a round", lambda shares, c, v, o: best(speedups(shares, c, v, 0))),
        like("K = 0 is missing: no draft, and a speedup of 1", lambda *case: best(speedups(*case), first=1)),
        like("plain decoding has no rounds, so no overhead: its speedup is 1",
             lambda shares, c, v, o: best([1 / (v[1] + o), *speedups(shares, c, v, o)[1:]])),
    ]  # fmt: skip
    logs = [engine_log(each) for each in (variant, variant + 1, variant + 2)]
    cases: list[tuple] = [(log.per_position, log.c, log.v, log.overhead) for log in logs]
    flat = dict.fromkeys(range(1, 10), 1.0)
    cases += [([0.8, 0.7, 0.6, 0.5], 0.05, {1: 1.0, 2: 1.4, 3: 2.4, 4: 1.6, 5: 1.6}, 0.0), ([0.5, 0.2], 0.4, flat, 0.3),
              ([0.5, 0.25], 0.5, flat, 0.0), ([0.9, 0.8, 0.7], 0.1, flat, 0.1), ([0.02], 0.3, flat, 0.05)]  # fmt: skip
    check(answer, lambda *case: best(speedups(*case)), cases, slips, name="plan")


def bench(variant: int = 0) -> Given:
    """A run that came out slower than plain decoding: its rounds, and the seconds of a plain step."""
    chance = dice("06 bench", variant)
    step, K, alpha = chance.randint(100, 300) / 1e4, chance.choice([4, 5, 6]), chance.uniform(0.6, 0.85)
    accepted = [next((i for i in range(K) if chance.random() >= alpha), K) for _ in range(40)]
    beyond = (1 + fmean(accepted)) / 0.8 - 1  # what a round takes beyond one step
    draft, target, other = chance.choice([(0.75, 0.15, 0.1), (0.2, 0.65, 0.15), (0.15, 0.2, 0.65)])
    steps, rounds = (beyond * draft, 1 + beyond * target, beyond * other), []
    for n in accepted:
        origins = ("accepted",) * n + (("bonus",) if n == K else ("recovered",))
        times = (round(step * each * chance.uniform(0.9, 1.1), 5) for each in steps)
        rounds.append(Round((0,) * K, (0,) * (n + 1), origins, next(times), next(times), next(times)))
    return Given(step=step, rounds=rounds)


def speedups_after_repair(rounds: list[Round], step: float) -> dict[str, float]:
    """The speedup of a run, and what it would be with one thing as good as it can get."""
    tokens, total = sum(len(each.tokens) for each in rounds), sum(each.seconds for each in rounds)
    seconds = {
        "as measured": total,
        "drafting takes no time": total - sum(each.draft_seconds for each in rounds),
        "each target pass takes one step": total - sum(each.target_seconds for each in rounds) + step * len(rounds),
        "nothing else takes time": total - sum(each.other_seconds for each in rounds),
    }
    found = {name: tokens * step / each for name, each in seconds.items()}
    found["every draft is accepted"] = sum(len(each.draft_tokens) + 1 for each in rounds) * step / total
    return found


def check_repairs(answer: Callable, variant: int = 0) -> None:
    """What each repair of a slow run would bring."""
    measured, checking, accepting = "as measured", "each target pass takes one step", "every draft is accepted"
    names = speedups_after_repair(**vars(bench(variant)))
    slips = [
        Slip("return a dictionary with the names " + ", ".join(map(repr, names)),
             lambda found, right, *_: not isinstance(found, dict) or found.keys() != right.keys()),
        part_of(measured, "this is a mean of the rounds' speedups. Sum all tokens and all seconds first, then divide",
                lambda rounds, step: fmean(len(each.tokens) * step / each.seconds for each in rounds)),
        part_of(measured, "upside down: above 1 must mean faster than plain decoding",
                lambda *case: 1 / speedups_after_repair(*case)[measured]),
        part_of(measured, "the accepted tokens are not all that was written: each round adds one of the target's",
                lambda runs, step: sum(each.accepted for each in runs) * step / sum(each.seconds for each in runs)),
        part_of(checking, "the pass is still made, and takes a plain step; only what it costs beyond that is saved",
                lambda rounds, step: sum(len(each.tokens) for each in rounds) * step
                / sum(each.draft_seconds + each.other_seconds for each in rounds)),
        Slip("each target pass takes one step: take the passes out, and put a plain step back for each round",
             lambda found, right, *_: all(same(found[each], right[each]) for each in names if each != checking)),
        part_of(accepting, "with everything accepted, a bonus token follows", lambda rounds, step:
                sum(len(each.draft_tokens) for each in rounds) * step / sum(each.seconds for each in rounds)),
    ]  # fmt: skip
    cases = [(each.rounds, each.step) for each in map(bench, range(variant, variant + 4))]
    cases[-1][0].append(Round((), (0,), ("bonus",), 0.0, cases[-1][1], 0.0))  # not all rounds draft K tokens
    check(answer, speedups_after_repair, cases, slips, name="repairs")


def check_gains(answer: Callable, seed: int = 0) -> None:
    """What half the cost brings, and what five points of alpha bring, each at its own best K."""

    def tuned(alpha: float, c: float, s: float) -> float:
        return best_K(alpha, c, v=lambda n: 1 + s * (n - 1)).speedup

    def gains(more: Callable[[float], float] = lambda alpha: alpha + 0.05, S: Callable = tuned) -> Callable:
        return lambda a, c, s: (S(a, c / 2, s) / S(a, c, s), S(min(1.0, more(a)), c, s) / S(a, c, s))

    def same_K(alpha: float, c: float, s: float) -> tuple[float, float]:
        K = best_K(alpha, c, v=lambda n: 1 + s * (n - 1)).K
        return gains(S=lambda a, d, s: predicted_speedup(a, K, d, 1 + s * K))(alpha, c, s)

    slips = [
        like("K stayed where it was. A cheaper draft, and a better one, each deserve a K of their own", same_K),
        like("these are the new speedups. How many times as fast as before is that?",
             lambda a, c, s: (tuned(a, c / 2, s), tuned(min(1, a + 0.05), c, s))),
        like("a gain is a ratio here: 1.1, not 0.1, for a tenth faster", lambda *case: [x - 1 for x in gains()(*case)]),
        like("five points more means alpha + 0.05, not 5% of alpha", gains(lambda alpha: 1.05 * alpha)),
        like("verification is not free: v(n) = 1 + s (n - 1)", lambda a, c, s: gains()(a, c, 0)),
        like("upside down: a gain is the new speedup over the present one", lambda *it: [1 / x for x in gains()(*it)]),
        like("the two gains are in the other order", lambda *case: gains()(*case)[::-1]),
    ]  # fmt: skip
    chance = dice("06 gains", seed)
    cases = [(chance.randint(40, 90) / 100, chance.randint(3, 40) / 100, s) for s in (0.0, 0.05, 0.1, 0.2)]
    check(answer, gains(), [*cases, (0.97, 0.1, 0.02), (0.3, 0.9, 0.0)], slips, name="gains")
