"""Checks for the exercises of notebook 07. Nothing is timed here: all times are records, made from dice."""

import random
from collections.abc import Callable
from dataclasses import astuple, dataclass, fields, replace
from functools import partial
from statistics import mean, median
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..theory import expected_tokens_per_round
from .core import CheckFailed, Given, Slip, ask, check, dice, like, passed, show

Runs = list[tuple[int, float]]  # (tokens, seconds) of each turn
Times = Float[Tensor, "prompts repeats"]


@dataclass(frozen=True)
class Parts:
    """What a speedup is made of. Costs are over t(1), a target pass over one token, measured by itself.

    tokens: of a round. draft, target, other: what a round spends on each. step: a plain step, with all that it needs.
    """

    tokens: float
    draft: float
    target: float
    other: float
    step: float

    @property
    def speedup(self) -> float:
        return self.tokens * self.step / (self.draft + self.target + self.other)


def given(variant: int = 0) -> Given:
    """Recorded turns, and the parts of a speedup below 1 as predicted and as measured."""
    chance = dice("07", variant)
    (plain, ours), (predicted, measured) = turns(chance), disappointment(chance)
    return Given(plain=plain, ours=ours, predicted=predicted, measured=measured)


def turns(chance: random.Random, warmup: int = 2, count: int = 9) -> tuple[Runs, Runs]:
    """Plain and speculative runs in turn, on a machine that warms up, later has a neighbour, and is interrupted."""
    speed, plain, ours = 1.0, Runs(), Runs()
    for turn in range(count):
        speed = speed * chance.choice([1, 1, 1.9]) if turn % 3 == 2 else speed
        for runs, step in ((plain, 0.004), (ours, 0.0025)):
            tokens = chance.randint(20, 40)
            noise = chance.uniform(0.95, 1.05) * (chance.uniform(2, 4) if turn < warmup or chance.random() < 0.1 else 1)
            runs.append((tokens, round(tokens * step * speed * noise, 3)))
    return plain, ours


def disappointment(chance: random.Random) -> tuple[Parts, Parts]:
    """Predicted above 1, measured below it: the tokens came, the draft was far too dear."""

    def near(value: float, low: float, high: float) -> float:
        return round(value * chance.uniform(low, high), 2)

    while True:
        predicted = Parts(near(3.3, 0.95, 1.05), near(0.6, 0.9, 1.1), near(1.2, 0.95, 1.1), near(0.1, 0.8, 1.2), 1.1)
        bounds = (0.95, 0.99), (3.8, 4.6), (1.02, 1.15), (1.5, 2.5), (0.9, 0.97)
        measured = Parts(*(near(value, *each) for value, each in zip(astuple(predicted), bounds, strict=True)))
        if 0.74 <= measured.speedup <= 0.86:
            return predicted, measured


def rate(run: tuple[int, float]) -> float:
    return run[1] / run[0]


def check_paired_speedup(answer: Callable, given: Given) -> None:
    """One speedup from runs that were made in turn."""

    def right(plain: Runs, ours: Runs, warmup: int, each: Callable = rate, middle: Callable = median) -> float:
        return middle(each(a) / each(b) for a, b in zip(plain[warmup:], ours[warmup:], strict=True))

    def apart(plain: Runs, ours: Runs, warmup: int, middle: Callable = median) -> float:
        return middle(map(rate, plain[warmup:])) / middle(map(rate, ours[warmup:]))

    def added_up(plain: Runs, ours: Runs, warmup: int) -> float:
        (n, plain_time), (m, our_time) = (map(sum, zip(*runs[warmup:], strict=True)) for runs in (plain, ours))
        return (plain_time / n) / (our_time / m)

    cases: list[tuple] = [(given.plain, given.ours, 2)]
    cases += [(*turns(dice("07 turns", i), warmup=i % 4), i % 4) for i in range(8)]
    slips = [
        like("upside down: faster is above 1", lambda plain, ours, n: right(ours, plain, n)),
        like("each side's median came first. A slow hour moves one, not the other: divide within each turn", apart),
        like("seconds of whole runs were divided, but the runs have different numbers of tokens",
             partial(right, each=lambda run: run[1])),
        like("the warm-up turns are counted", lambda plain, ours, n: right(plain, ours, 0)),
        *(like("in a mean one interrupted run counts for many", partial(way, middle=mean)) for way in (right, apart)),
        like("all tokens and all seconds were added up: then the slow hours decide", added_up),
    ]  # fmt: skip
    check(answer, right, cases, slips, name="paired_speedup")


def times(seed: int, prompts: int = 6, repeats: int = 3) -> tuple[Times, Times, Int[Tensor, "resamples prompts"]]:
    """Milliseconds per token, plain and ours: prompts differ more than repeats do. And 400 choices of prompts."""
    uniform = partial(torch.rand, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    noise = [1 + 0.1 * uniform(prompts, repeats) + (uniform(prompts, repeats) > 0.9) for _ in range(2)]
    plain = 3 + 4 * uniform(prompts, 1)
    ours = plain * (0.4 + 0.5 * uniform(prompts, 1))
    return plain * noise[0], ours * noise[1], (prompts * uniform(400, prompts)).long()


def check_interval(answer: Callable, seed: int = 0) -> None:
    """A 95% interval of a speedup, by resampling prompts."""

    def right(plain, ours, choice, cut: float = 0.025, typical: Any = None, ratio: Any = None) -> tuple[float, float]:
        plain, ours = (typical(x) if typical else x.median(1).values for x in (plain, ours))
        found = ratio(plain[choice], ours[choice]) if ratio else plain[choice].sum(1) / ours[choice].sum(1)
        low, high = found.quantile(torch.tensor([cut, 1 - cut], dtype=found.dtype)).tolist()
        return low, high

    slips = [
        like("this is a 90% interval: 5% are cut off on each side", partial(right, cut=0.05)),
        like("these are the extremes of all resamples, not their middle 95%", partial(right, cut=0.0)),
        like("these are the prompts' own ratios. How sure is the speedup over ALL of them? Use the choices",
             lambda plain, ours, choice: right(plain, ours, torch.arange(len(plain))[:, None])),
        like("here each speedup is a mean of ratios. One waits for the sum of the times: sum, then divide",
             partial(right, ratio=lambda plain, ours: (plain / ours).mean(1))),
        like("repeats were averaged, so one interruption counts. Take each prompt's median",
             partial(right, typical=lambda runs: runs.mean(1))),
        like("upside down: our time over plain time", lambda plain, ours, choice: right(ours, plain, choice)),
        like("plain is resampled and ours is not. A prompt comes with both of its times",
             lambda a, b, choice: right(a, b, choice, ratio=lambda plain, _: plain.sum(1) / b.median(1).values.sum())),
    ]  # fmt: skip
    check(answer, right, [times(10 * seed + i) for i in range(4)], slips, name="interval", tolerance=1e-6)


def rounds_for(alpha: float, K: int, n: int, bonus: bool = True, spare: int = 1) -> float:
    """Expected rounds until n tokens are written; or, by other settings, a slip."""
    rounds = [0.0]
    for left in range(1, n + 1):
        k = min(K, left - spare)
        chances = [alpha**i * (1 - alpha) for i in range(k)] + [alpha**k * (1 if bonus else 1 - alpha)]
        rounds.append(1 + sum(chance * rounds[left - i - 1] for i, chance in enumerate(chances)))
    return rounds[n]


def check_expected_rounds(answer: Callable, seed: int = 0) -> None:
    """How many rounds a text of n tokens takes, when the last round is short."""
    chance = dice("07 rounds", seed)
    cases: list[tuple] = [(0.8, 4, 1), (0.0, 3, 7), (1.0, 3, 8), (1.0, 3, 9), (0.7, 0, 5), (0.6, 6, 3)]
    for _ in range(10):  # small: it may call itself
        cases.append((round(chance.uniform(0.3, 0.95), 2), chance.randint(1, 6), chance.randint(2, 14)))
    E = expected_tokens_per_round
    slips = [
        like("n / E is what rounds of full length would need. The last one is cut", lambda a, K, n: n / E(a, K)),
        like("n / E, rounded up, is no average", lambda a, K, n: -int(-n // E(a, K))),
        like("one round for the last token, and full ones before? Count backwards, from the tokens that are left",
             lambda a, K, n: 1 + (n - 1) / E(a, K)),
        like("where all k drafts are accepted nothing is left to reject: that chance is alpha**k",
             partial(rounds_for, bonus=False)),
        like("an index below 0 counts from the end of a Python list. How many can be drafted with few tokens left?",
             partial(rounds_for, spare=0)),
    ]  # fmt: skip
    check(answer, rounds_for, cases, slips, name="expected_rounds")


def check_repairs(answer: Callable, given: Given) -> None:
    """The speedup with one part as predicted and all others as measured, for each part."""

    def right(predicted: Parts, measured: Parts, keep: bool = False) -> dict[str, float]:
        found = {}
        for name in (field.name for field in fields(Parts)):
            mended = replace(measured, **{name: getattr(predicted, name)})
            measured, found[name] = mended if keep else measured, mended.speedup
        return found

    slips = [
        Slip("the keys are the names of the five parts, `field.name` of each, whether it came out better or worse",
             lambda found, right, *_: not isinstance(found, dict) or found.keys() != right.keys()),
        like("this starts from the prediction and spoils one part. Start from what was measured, and mend one",
             lambda predicted, measured: right(measured, predicted)),
        like("each repair is kept while the next is made. Mend one part, then put it back", partial(right, keep=True)),
        like("a slower plain step makes the speedup LARGER: it is what ours is compared with",
             lambda predicted, m: right(predicted, m) | {"step": m.speedup * m.step / predicted.step}),
    ]  # fmt: skip
    cases: list[tuple] = [disappointment(dice("07 parts", i)) for i in range(4)]
    cases += [(given.predicted, given.measured), (given.measured, given.predicted)]
    check(answer, right, cases, slips, name="repairs")


def by_K(seed: int, prompts: int = 12) -> dict[int, Float[Tensor, " prompts"]]:
    """Milliseconds per token, for each K on the same prompts. K matters little; prompts matter much, for odd seeds."""
    uniform = partial(torch.rand, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    ease, best = 4 + (4 if seed % 2 else 0.2) * (uniform(prompts) - 0.5), 2 + seed % 4
    gain = 0.25 if seed % 3 else 0.02  # of the best K over plain decoding
    cost = {K: 1 - gain + 0.007 * abs(K - best) * (1 + (best > K)) for K in (1, 2, 3, 4, 6, 8)}
    return {K: ease * factor * (0.93 + 0.14 * uniform(prompts)) for K, factor in ({0: 1.0} | cost).items()}


def choice_of_K(times, errors: float = 2, pick: Callable = min, least: int = 0, error: Callable | None = None) -> int:
    """The smallest K within so many standard errors of the fastest; or, by other settings, a slip."""
    times = {K: times[K] for K in times if least <= K}
    best = min(times.values(), key=lambda ms: float(ms.mean()))
    error = error or (lambda ms, best: (ms - best).std() / len(ms) ** 0.5)
    return pick(K for K, ms in times.items() if (ms - best).mean() <= errors * error(ms, best))


def check_choose_K(answer: Callable, seed: int = 0) -> None:
    """The smallest K that is not measurably slower than the fastest."""
    alone = "prompts differ much, whatever K is. Take the differences prompt by prompt, and the error of their mean"
    slips = [
        like("that is the fastest one. Which smaller K cannot be told from it?", partial(choice_of_K, errors=0)),
        like(alone, partial(choice_of_K, error=lambda ms, best: ((ms.var() + best.var()) / len(ms)).sqrt())),
        *(like(alone, partial(choice_of_K, error=lambda *two, i=i: two[i].std() / len(two[i]) ** 0.5)) for i in (0, 1)),
        like("that is the spread of single prompts. The error of a mean is smaller, by the root of their number",
             partial(choice_of_K, error=lambda ms, best: (ms - best).std())),
        like("K = 0 is a choice too: is the fastest measurably faster than plain?", partial(choice_of_K, least=1)),
        like("that is the largest K that is good enough. A smaller one wastes less", partial(choice_of_K, pick=max)),
        like("two standard errors are allowed, not one", partial(choice_of_K, errors=1)),
        like("divide by the ROOT of the number", partial(choice_of_K, error=lambda ms, a: (ms - a).std() / len(ms))),
        like("the fastest is no slower than itself: 0 is no more than 0",
             partial(choice_of_K, error=lambda ms, best: (ms - best).std() / len(ms) ** 0.5 - 9 * (ms is best))),
    ]  # fmt: skip
    tables = [dict(sorted(by_K(100 * seed + i).items(), reverse=bool(i % 2))) for i in range(24)]
    clear = [table for table in tables if choice_of_K(table, 1.9) == choice_of_K(table, 2.1)]  # n or n - 1: no matter
    check(answer, choice_of_K, [(table,) for table in clear], slips, name="choose_K")


@dataclass(frozen=True)
class Log:
    """A benchmark's record. gigabytes: the target's weights. bandwidth: GB per second that the memory gives at most.
    plain_tokens, our_tokens: of one run. rounds: of one of our runs. prefill: milliseconds of it, in every run. plain,
    ours: milliseconds of five runs each, prefill included. claim: the speedup that is reported, to two decimals."""

    gigabytes: float
    bandwidth: float
    K: int
    plain_tokens: int
    our_tokens: int
    rounds: int
    prefill: float
    plain: tuple[float, ...]
    ours: tuple[float, ...]
    claim: float


FAULTS = {  # and what shows each
    "fine": "its claim follows from medians, per token, without the prefill; and no time in it is impossible. (If both "
    "sides wrote as many tokens, 'length' makes the same claim, and is no fault)",
    "clock": "reading the weights once takes longer than a plain step took. What was timed?",
    "baseline": "a round holds a target pass, and took less time than a plain step. What was it compared with?",
    "length": "one side wrote fewer tokens. Divide the times of whole runs, and you get the claim",
    "prefill": "leave the prefill in both times, and you get the claim",
    "warm-up": "take means over the five runs, the first included, and you get the claim",
}


def claims(log: Log) -> dict[str, float]:
    """The speedup as each way of computing it has it."""

    def ratio(typical: Callable = median, prefill: float = log.prefill, tokens: int = log.plain_tokens) -> float:
        return (typical(log.plain) - prefill) / (typical(log.ours) - prefill) * log.our_tokens / tokens

    length, prefill, warm_up = ratio(tokens=log.our_tokens), ratio(prefill=0), ratio(mean)
    return {"fine": ratio(), "length": length, "prefill": prefill, "warm-up": warm_up}


def make_log(chance: random.Random, fault: str) -> Log:
    between = chance.uniform
    t1, cost, K, n = between(20, 40), between(1.5, 2), chance.randint(3, 5), chance.randint(100, 200)
    step = t1 * cost * between(1.2, 1.6) if fault == "baseline" else t1 * between(1.02, 1.1)
    our_n = round(n * between(0.55, 0.75)) if fault == "length" else n
    rounds, scale, prefill = round(our_n / between(2.6, 3.4)), 0.05 if fault == "clock" else 1, t1 * between(30, 50)
    plain, ours = (
        tuple(round(scale * (prefill + work) * between(0.99, 1.01) * (first if i == 0 else 1), 1) for i in range(5))
        for work, first in ((n * step, between(1.1, 1.3)), (rounds * cost * t1, between(2.5, 4)))
    )
    size = round(between(1, 4), 1)
    log = Log(size, round(size / t1 * 1250), K, n, our_n, rounds, round(scale * prefill, 1), plain, ours, 0)
    return replace(log, claim=round(claims(log).get(fault, claims(log)["fine"]), 2))


def logs(variant: int = 0) -> dict[str, Log]:
    """Six logs under letters, one of each kind."""
    chance = dice("07 logs", variant)
    return {name: make_log(chance, fault) for name, fault in zip("ABCDEF", chance.sample(list(FAULTS), 6), strict=True)}


def check_diagnose(answer: Callable, seed: int = 0) -> None:
    """What is wrong with a log."""
    chance = dice("07 diagnose", seed)
    cases = [(fault, make_log(chance, fault)) for fault in [*FAULTS] * 5]
    cases += [("fine", replace(log, claim=round(claims(log)["fine"], 2))) for fault, log in cases if fault == "length"]
    for fault, log in cases:
        found = ask(answer, log, name="diagnose")
        if not isinstance(found, str) or found not in FAULTS:
            raise CheckFailed(f"diagnose: {show(found)} is none of {', '.join(FAULTS)}")
        if found != fault:
            raise CheckFailed(f"diagnose: {found!r}, it says of a log that is {fault!r}: {FAULTS[fault]}\n{log}")
    passed("diagnose", f"{len(cases)} logs")
