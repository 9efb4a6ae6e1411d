"""Checks for the exercises of notebook 01: weights, bytes, operations, and what a round must yield."""

import math
import operator
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from ..gpt2 import GPT2, SIZES, GPT2Config
from ..roofline import DEVICES
from .core import CheckFailed, Given, Slip, ask, check, dice, like, part_of, passed, same, show

Seconds = Callable[[int, int], float]  # (n, batch): a pass over n tokens in each of so many sequences
Milliseconds = dict[int, float]  # of a pass over n tokens, by n

PARTS = {"token_emb": "token embedding", "position_emb": "position embedding", "query": "attention",
         "attention": "attention", "mlp": "mlp", "norm": "norms"}  # piece of a tensor's name: its part  # fmt: skip


def given(variant: int = 0) -> Given:
    """A stopwatch's table for a model of so many weights, and the time of a step of its draft."""
    chance = dice("01", variant)
    weights = SIZES[chance.choice(["gpt2-medium", "gpt2-large", "gpt2-xl"])].parameters
    milliseconds = stopwatch(chance, weights)
    c = chance.uniform(0.15, 0.4)
    return Given(weights=weights, number_bytes=2, milliseconds=milliseconds, draft_ms=round(c * milliseconds[1], 2))


def stopwatch(chance: random.Random, weights: int) -> Milliseconds:
    """A roofline whose kernels are not always at their best: made up, with the flaws of measured ones."""
    bandwidth, peak = chance.uniform(0.6e12, 1e12), chance.uniform(30e12, 60e12)
    best, table = (chance.choice([4, 5, 6]), 128), {}
    for n in (*range(1, 9), 16, 32, 64, 128, 256):
        roof = max(2 * weights / bandwidth, 2 * n * weights / peak)
        slow = {1: 1.1, 2: chance.uniform(1.8, 2), 3: chance.uniform(2.7, 3)}.get(n, chance.uniform(1.15, 1.3))
        table[n] = round(1e3 * roof * (1.0 if n in best else slow), 2)
    return table


def right_parts(config: GPT2Config) -> dict[str, int]:
    """The numbers that the library's own GPT-2 of this size holds, by part."""
    with torch.device("meta"):
        model = GPT2(config)
    counts = dict.fromkeys(PARTS.values(), 0)
    for name, parameter in model.named_parameters():
        counts[next(part for piece, part in PARTS.items() if piece in name)] += parameter.numel()
    return counts


def check_weights_by_part(answer: Callable, seed: int = 0) -> None:
    """How many numbers each part of a GPT-2 holds."""
    chance = dice("01 weights", seed)
    sizes = [GPT2Config(chance.randint(50, 99), chance.randint(9, 40), 4 * i, i, i) for i in (2, 3, 5)]
    biases = "the matrices are all there. But each product also adds a bias, one number per output"
    slips = [
        Slip("name the parts " + ", ".join(map(repr, dict.fromkeys(PARTS.values()))) + ", and no others. (The output "
             "head is the token embedding once more, and is held once)",
             lambda found, right, m: not isinstance(found, dict) or found.keys() != right.keys()),
        part_of("attention", biases, lambda m: 4 * m.layers * m.width**2),
        part_of("attention", "heads share the width: each works on its own slice of it. Their number does not multiply",
                lambda m: m.heads * m.layers * (4 * m.width**2 + 4 * m.width)),
        part_of("mlp", biases, lambda m: 8 * m.layers * m.width**2),
        part_of("norms", "one is missing: after the last layer comes one more", lambda m: 4 * m.layers * m.width),
        part_of("norms", "each norm has a scale and a shift, so two vectors", lambda m: (2 * m.layers + 1) * m.width),
    ]  # fmt: skip
    check(answer, right_parts, [(size,) for size in sizes], slips, name="weights_by_part")


def check_proven(answer: Callable, given: Given) -> None:
    """The bandwidth and the peak that a table of recorded passes proves."""

    def bandwidth_at(n: int, ms: Milliseconds, weights: int, number_bytes: int) -> float:
        return weights * number_bytes / ms[n] / 1e6

    def peak_at(n: int, ms: Milliseconds, weights: int, number_bytes: int) -> float:
        return 2 * n * weights / ms[n] / 1e9

    def right(ms: Milliseconds, *case: int) -> tuple[float, float]:
        return max(bandwidth_at(n, ms, *case) for n in ms), max(peak_at(n, ms, *case) for n in ms)

    def powers_of_ten(found: tuple, right: tuple, *_: object) -> bool:
        off = [math.log10(a / b) for a, b in zip(found, right, strict=True)]
        return all(abs(x - round(x)) < 1e-6 for x in off)

    slips = [
        part_of(0, "the bandwidth is taken from n = 1. Any pass fetches all weights; another one may prove more",
                lambda ms, *case: bandwidth_at(1, ms, *case), 1e-6),
        part_of(0, "the bandwidth counts the weights n times. They are fetched once in a pass, whatever n is",
                lambda ms, *case: max(n * bandwidth_at(n, ms, *case) for n in ms), 1e-6),
        part_of(1, "the peak is taken from the longest pass. It did the most work, but perhaps not the most per second",
                lambda ms, *case: peak_at(max(ms), ms, *case), 1e-6),
        part_of(1, "the peak has half the operations: each weight is multiplied and added, for each token",
                lambda ms, *case: right(ms, *case)[1] / 2, 1e-6),
        Slip("mind the units: milliseconds in, 10^9 bytes and 10^12 operations per second out", powers_of_ten),
        Slip("the bandwidth comes first, then the peak", lambda found, right, *_: same(found[::-1], right, 1e-6)),
    ]  # fmt: skip
    cases = [(given.milliseconds, given.weights, given.number_bytes)]
    cases += [(stopwatch(dice("01", b), weights), weights, b) for weights, b in ((10**8, 2), (10**9, 4), (10**10, 1))]
    check(answer, right, cases, slips, tolerance=1e-6, name="proven")


def check_must_yield(answer: Callable, given: Given) -> None:
    """The tokens that a round must yield at each K, from recorded times."""

    def right_cost(ms: Milliseconds, d: float, K: int) -> float:
        return (ms[K + 1] + K * d) / ms[1]

    def rule(cost: Callable[..., float] = right_cost, too_few: Callable[[float, int], bool] = operator.gt) -> Callable:
        def yields(milliseconds: Milliseconds, draft_ms: float) -> dict[int, float | None]:
            costs = {n - 1: cost(milliseconds, draft_ms, n - 1) for n in milliseconds if n > 1}
            return {K: None if too_few(needed, K + 1) else needed for K, needed in costs.items()}

        return yields

    slips = [
        Slip("the keys are K: each n in the table, except 1, answers for K = n - 1, be it with None",
             lambda found, right, *_: not isinstance(found, dict) or found.keys() != right.keys()),
        like("with all K drafts accepted a round yields K + 1 tokens. Where even that is too few, say None",
             rule(too_few=lambda needed, most: False)),
        like("where K + 1 tokens are just enough, it is not None", rule(too_few=operator.ge)),
        like("at the best a round yields K + 1 tokens, not K: None only above that",
             rule(too_few=lambda needed, most: needed > most - 1)),
        like("this is the pass over K tokens. The target also reads the newest token of the text: K + 1",
             rule(lambda ms, d, K: (ms.get(K, ms[1]) + K * d) / ms[1])),
        like("this is the target's pass alone. The draft takes time too", rule(lambda ms, d, K: ms[K + 1] / ms[1])),
        like("the draft writes one token per step, so K in a round", rule(lambda ms, d, K: (ms[K + 1] + d) / ms[1])),
        like("the draft's milliseconds are added to plain steps: divide them by the target's step first",
             rule(lambda ms, d, K: ms[K + 1] / ms[1] + K * d)),
    ]  # fmt: skip
    chance = dice("01 must yield", len(given.milliseconds))
    cases: list[tuple] = [(given.milliseconds, given.draft_ms), ({1: 10.0, 2: 15.0, 3: 26.0}, 5.0)]  # a tie at K = 1
    cases += [(table, table[1] * share) for share in (0.05, 0.3, 0.9) for table in [stopwatch(chance, 10**8)]]
    check(answer, rule(), cases, slips, name="must_yield")


def numbers(config: GPT2Config, context: int) -> tuple[int, int, int]:
    """How many numbers the model holds, how many are in its matrices, and how many in the cache of one sequence."""
    matrices = 12 * config.layers * config.width**2 + config.vocab_size * config.width
    return config.parameters, matrices, 2 * config.layers * config.width * context


def pass_work(config: GPT2Config, n: int, context: int, batch: int, number_bytes: int = 2) -> tuple[int, int]:
    """(bytes fetched, operations) of a pass over n tokens in each of ``batch`` sequences."""
    held, matrices, cached = numbers(config, context)
    return number_bytes * (held + batch * cached), 2 * n * batch * (matrices + cached)


def check_work_of_pass(answer: Callable, seed: int = 0) -> None:
    """Bytes and operations of a pass, the cache and attention included."""
    chance = dice("01 work", seed)
    cases = [(config, chance.randint(2, 9), chance.choice([0, 100, 1000]), chance.randint(2, 99), b)
             for config, b in zip(SIZES.values(), (2, 4, 2, 1, 2), strict=True)]  # fmt: skip
    cases += [(SIZES["gpt2"], 1, 500, 1, 2), (SIZES["gpt2"], 5, 1000, 8, 2)]

    def fetched(says: str, way: Callable[..., float]) -> Slip:
        return part_of(0, f"bytes: {says}", lambda m, n, L, B, b: b * way(*numbers(m, L), n, B), 0.5)

    def used(says: str, way: Callable[..., float]) -> Slip:
        return part_of(1, f"operations: {says}", lambda m, n, L, B, b: 2 * way(*numbers(m, L), n, B), 0.5)

    slips = [
        fetched("the cache is missing", lambda P, W, kv, n, B: P),
        fetched("every sequence has a cache of its own", lambda P, W, kv, n, B: P + kv),
        fetched("one fetch of a cache serves all its n tokens", lambda P, W, kv, n, B: P + n * B * kv),
        fetched("the weights are fetched once for all sequences", lambda P, W, kv, n, B: B * (P + kv)),
        fetched("the cache keeps a key AND a value of each token", lambda P, W, kv, n, B: P + B * kv / 2),
        fetched("more than matrices is fetched: see config.parameters", lambda P, W, kv, n, B: W + B * kv),
        used("attention is missing. It uses each cached number for each new token", lambda P, W, kv, n, B: n * B * W),
        used("biases and positions hardly count, the matrices do", lambda P, W, kv, n, B: n * B * (P + kv)),
        used("what is fetched once is used for every sequence of the batch", lambda P, W, kv, n, B: n * (W + kv)),
        used("what is fetched once is used for each of the n tokens", lambda P, W, kv, n, B: B * (W + kv)),
        used("keys AND values are used, each like a weight", lambda P, W, kv, n, B: n * B * (W + kv / 2)),
        used("each of the n tokens uses the cache anew", lambda P, W, kv, n, B: B * (n * W + kv)),
        used("a multiplication and an addition each time", lambda P, W, kv, n, B: n * B * (W + kv) / 2),
        part_of(1, "operations: the output head is a matrix too, of width times vocabulary", lambda m, n, L, B, b:
                pass_work(m, n, L, B)[1] - 2 * n * B * m.vocab_size * m.width, 0.5),
    ]  # fmt: skip
    check(answer, pass_work, cases, slips, tolerance=0.5, name="work_of_pass")


# What a line of the fact sheet is about: the sentence, the right number, the one that people print, and a pointer.
FACTS: dict[str, tuple[str, Callable, Callable, str]] = {
    "step": ("a step of one sequence takes at least {} ms", lambda d, m: 1e3 * d.seconds_per_pass(m.parameters, 2),
             lambda d, m: 2e3 * m.parameters / d.peak, "In ms. Which takes longer at n = 1, fetching or computing?"),
    "ridge8": ("with weights of one byte and the same peak, the ridge is at {}", lambda d, m: d.critical_tokens(1),
               lambda d, m: d.critical_tokens(4), "Half the bytes, the same operations: which is done sooner now?"),
    "share": ("one sequence uses at most {} % of the peak", lambda d, m: 100 / d.critical_tokens(2),
              lambda d, m: 50 / d.critical_tokens(2), "In %. At the ridge all of the peak is used. At one token?"),
    "past": ("a pass over twice as many tokens as the ridge takes {} times as long as over one", lambda d, m: 2.0,
             lambda d, m: 1.0, "Past the ridge a further token is no longer free."),
    "users": ("32 users at once get at most {} tokens per second in all",
              lambda d, m: 32 / d.seconds_per_pass(m.parameters, 2), lambda d, m: d.bandwidth / m.parameters / 2,
              "One pass serves all of them. How long does it take, and how many tokens come out?"),
    "cache": ("1,000 tokens of context take {} MB of cache", lambda d, m: 4e-3 * m.layers * m.width,
              lambda d, m: 2e-3 * m.layers * m.width, "A key and a value, in each layer, two bytes for each number."),
}  # fmt: skip


def fact_sheet(variant: int = 0, wrong: int = 3) -> Given:
    """A machine, a model, and six facts about them under letters; ``wrong`` of them are not so."""
    chance = dice("01 facts", variant)
    device, (model, config) = chance.choice(list(DEVICES.values())), chance.choice(list(SIZES.items())[2:])
    abouts = chance.sample(list(FACTS), len(FACTS))
    says = {about: FACTS[about][1] for about in abouts}
    says |= {about: FACTS[about][2] for about in chance.sample(abouts, wrong)}
    lines = ((about, float(f"{says[about](device, config):.4g}")) for about in abouts)
    facts = dict(zip("ABCDEF", lines, strict=True))
    told = [f"{letter} ({about}): {FACTS[about][0].format(f'{x:,g}')}" for letter, (about, x) in facts.items()]
    return Given(device=device, model=model, config=config, facts=facts, told="\n".join(told))


def check_corrections(answer: Callable, variant: int = 0) -> None:
    """The wrong lines of several fact sheets, and what they should say."""
    sheets = [fact_sheet(variant), *(fact_sheet(variant + 1 + i, wrong) for i, wrong in enumerate((0, 6, 4, 3)))]
    for sheet in sheets:
        found = ask(answer, sheet.facts, sheet.device, sheet.config, name="corrections")
        for mistake in mistakes(found, sheet):
            raise CheckFailed(f"corrections, {sheet.model} on the {sheet.device.name}: {mistake}")
    passed("corrections", f"{len(sheets)} sheets")


def mistakes(found: dict, sheet: Given) -> Iterator[str]:
    """What is wrong with an answer to one sheet."""
    if not isinstance(found, dict) or not found.keys() <= sheet.facts.keys():
        yield "return a dictionary, {letter of a wrong line: the right number}"
    for letter, (about, number) in sheet.facts.items():
        right, yours = FACTS[about][1](sheet.device, sheet.config), found.get(letter)
        pointer, lies = FACTS[about][3], not same(number, right, right / 100)
        if lies and letter not in found:
            yield f"the sheet says {show(number)} about {about!r}, and you let it pass. {pointer}"
        elif lies and not same(yours, right, right / 100):
            yield f"{about!r} is wrong on the sheet, but {show(yours)} is not right either. {pointer}"
        elif not lies and letter in found and same(yours, number, right / 100):
            yield f"{about!r} is right. The sheet is rounded: let pass what is within 1%, return only what is wrong"
        elif not lies and letter in found:
            yield f"{show(number)} is right about {about!r}; you would print {show(yours)}. {pointer}"


def check_pays_until(answer: Callable, seed: int = 0) -> None:
    """The largest batch at which a round still pays."""

    def last(time: Callable[..., float], enough: Callable = operator.gt) -> Callable:
        def rule(target: Seconds, draft: Seconds, K: int, tokens: float, largest: int = 256) -> int:
            gains = (enough(tokens * target(1, B), time(target, draft, K, B)) for B in range(1, largest + 1))
            return max((B for B, gain in enumerate(gains, start=1) if gain), default=0)

        return rule

    def of_round(t: Seconds, d: Seconds, K: int, B: int) -> float:
        return t(K + 1, B) + K * d(1, B)

    def to_first_loss(t: Seconds, d: Seconds, K: int, tokens: float, largest: int = 256) -> int:
        return next((B for B in range(largest) if tokens * t(1, B + 1) <= of_round(t, d, K, B + 1)), largest)

    grows = "the draft's steps grow with the batch too: ask draft(1, batch), not draft(1, 1)"
    slips = [
        like("this stops at the first batch that loses. Past a change of kernels a larger one may pay", to_first_loss),
        like(grows, last(lambda t, d, K, B: t(K + 1, B) + K * d(1, 1) / t(1, 1) * t(1, B))),
        like("the draft's steps are missing in the time of a round", last(lambda t, d, K, B: t(K + 1, B))),
        like("the target's pass is over K + 1 tokens: the newest one of the text, and the K drafted",
             last(lambda t, d, K, B: t(K, B) + K * d(1, B))),
        like("this compares with a plain step of one sequence. Plain decoding has the same batch to serve",
             last(lambda t, d, K, B: of_round(t, d, K, B) / t(1, 1) * t(1, B))),
        like("where a round takes exactly as long as plain decoding, nothing is gained", last(of_round, operator.ge)),
        like("the draft takes K steps over one token each, not one pass over K: it needs each token for the next",
             last(lambda t, d, K, B: t(K + 1, B) + d(K, B))),
        like("`largest` itself may be the answer. A range ends one before its end",
             lambda t, d, K, tokens, largest=256: last(of_round)(t, d, K, tokens, largest - 1)),
    ]  # fmt: skip
    check(answer, last(of_round), machines(150 + 10 * seed), slips, name="pays_until")


@dataclass(frozen=True)
class Roof:
    """The time of a pass: that of its starts, of its bytes (1 and the caches) or of its operations, times a size."""

    ridge: float
    start: float = 0.0
    cache: float = 0.0
    size: float = 1.0

    def __call__(self, n: int, batch: int) -> float:
        return self.size * max(self.start, 1 + self.cache * batch, n * batch / self.ridge)


def machines(ridge: float) -> list[tuple]:
    """Arguments of ``pays_until``: rooflines with and without a cache, a kernel that changes, a draw."""

    def changing(n: int, batch: int) -> float:  # another kernel from 9 tokens in a pass on, and again from 16
        return 1 + n * batch / 10 if n * batch < 9 else n * batch / 4 if n * batch < 16 else 2 + n * batch / 100

    return [
        (Roof(ridge), Roof(ridge, size=0.05), 4, 2.5),
        (Roof(ridge), Roof(ridge / 9, start=3, size=0.05), 4, 3.1, 200),  # first layers to start, then much to compute
        (Roof(ridge, cache=0.05), Roof(ridge, size=0.1), 4, 2.5),
        *((changing, Roof(ridge, size=0.1), 3, 2.2, largest) for largest in (5, 200)),  # only a batch of 3 loses early
        (Roof(64), Roof(1e9, size=0.125), 4, 1.5, 100),  # a draw at every batch up to 12
    ]
