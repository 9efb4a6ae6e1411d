"""Checks for the exercises of notebook 09: what a batch gains, keeps apart, and must not mix up."""

import math
import random
from collections.abc import Callable
from copy import deepcopy
from functools import cache, partial
from itertools import product, zip_longest
from statistics import mean
from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ..randomness import Randomness, TorchRandomness, enumerate_outcomes
from ..record import Result, Round
from ..theory import expected_tokens_per_round as E
from ..verify import verify
from .core import Given, Slip, ask, check, check_parts, dice, laws, like, same

END = 0


class Request(NamedTuple):
    prompt: list[int]
    limit: int  # the most tokens to write
    seed: int  # of the request's own generator


def given(variant: int = 0) -> Given:
    """Alphas of some rows, a draft and a machine to plan with, and requests to serve."""
    chance = dice("09", variant)
    alphas = [chance.randint(50, 95) / 100 for _ in range(5)]
    requests = [random_request(chance, 3, 6, 12, 20) for _ in range(7)]
    alpha, c, critical = chance.randint(65, 85) / 100, chance.randint(2, 8) / 100, chance.randint(150, 300)
    return Given(alphas=alphas, K=chance.randint(3, 6), requests=requests, alpha=alpha, c=c, critical=critical)


def random_request(chance: random.Random, *limits: int) -> Request:
    return Request([chance.randint(1, 5)], chance.choice(limits), chance.randint(10, 99))


def named(right: Callable, says: dict[str, str]) -> list[Slip]:
    """Slips that ``right`` can make when it is told to."""
    return [like(text, partial(right, slip=slip)) for slip, text in says.items()]


def check_tokens_per_round(answer: Callable, seed: int = 0) -> None:
    """E of a batch whose rows have alphas of their own: each row its own way, and all cut to the shortest."""

    def both(together: Callable) -> Callable:
        return lambda alphas, K: (mean([E(alpha, K) for alpha in alphas]), E(together(alphas), K))

    slips = [
        like("the row with the worst alpha does not always accept least: ALL rows must get so far", both(min)),
        like("the chance that all rows get so far is a product of alphas, no power of their mean",
             both(lambda alphas: mean(alphas) ** len(alphas))),
        like("E of the mean alpha is not the mean of the E's: E bends upwards",
             lambda alphas, K: (E(mean(alphas), K), E(math.prod(alphas), K))),
    ]  # fmt: skip
    chance = dice("09 alphas", seed)
    cases = [([0.8], 4), ([0.9, 0.5], 3), ([1.0, 1.0], 2), ([0.7, 0.0], 4), ([0.6, 0.6, 0.6], 0)]
    cases += [([chance.random() for _ in range(chance.randint(2, 6))], chance.randint(1, 8)) for _ in range(6)]
    check(answer, both(math.prod), cases, slips, name="tokens_per_round")


def positions_of(lengths: list[int], slip: str = "") -> Int[Tensor, "rows width"]:
    slots = torch.arange(max(lengths)).expand(len(lengths), -1)
    positions = slots - (max(lengths) - torch.tensor(lengths)[:, None])
    return slots if slip == "slots" else positions if slip == "negative" else positions.clamp(min=0)


def mask_of(lengths: list[int], slip: str = "") -> Bool[Tensor, "rows width width"]:
    slots = torch.arange(max(lengths))
    real = slots >= max(lengths) - torch.tensor([max(lengths)] * len(lengths) if slip == "causal" else lengths)[:, None]
    sees = (slots[:, None] >= slots) & real[:, None, :] | torch.eye(len(slots), dtype=torch.bool) & (slip != "nothing")
    return ~sees if slip == "inverted" else sees


def check_left_padded(answer: Callable, seed: int = 0) -> None:
    """Positions and mask of rows that are padded on the left."""
    chance = dice("09 lengths", seed)
    cases = [([3, 5, 2],), ([4],), ([1, 6],), ([2, 2],), ([chance.randint(1, 7) for _ in range(4)],)]
    rule = Slip("padding, on the left, is at 0 and sees itself; real tokens count from 0 and see their row up to "
                "themselves", lambda found, right, *_: same(found * 0, right * 0))  # fmt: skip
    parts = {"positions": (positions_of, [*named(positions_of, {
        "slots": "0, 1, 2, ... in every row count the padding too: it is on the left, and the first real token is at 0",
        "negative": "padding has negative positions, and a model has none: give it 0",
    }), rule]), "mask": (mask_of, [*named(mask_of, {
        "causal": "real tokens see padding: causal order alone does not hide what stands before them",
        "inverted": "the other way round: True is where a slot may look, False is what is hidden",
        "nothing": "a padding slot sees nothing at all, and a softmax over nothing is NaN: let it see itself",
    }), rule])}  # fmt: skip
    check_parts(answer, "left_padded", cases, parts)


def right_places(results: list[Result], slip: str = "") -> tuple[int, int, int]:
    """(kept, thrown away, padding) of all places in the target's passes, or what a slip makes of it."""
    kept = thrown = padding = 0
    pairing = zip if slip == "until the first ends" else zip_longest
    for together in pairing(*(result.rounds for result in results)):
        rows = [each for each in together if each]
        width = max(len(row.draft_tokens) for row in rows) + 1
        fed = sum(len(row.draft_tokens) + 1 for row in rows)
        tokens = sum(row.accepted if slip == "accepted" else len(row.tokens) for row in rows)
        kept, thrown = kept + tokens, thrown + fed - tokens
        padding += width * len(together if slip == "ended rows" else rows) - fed
    return kept, thrown - (sum(len(each.rounds) for each in results) if slip == "newest" else 0), padding


def check_places(answer: Callable, seed: int = 0) -> None:
    """Where the places of the target's passes went, over a run of a batch."""
    chance, cases = dice("09 places", seed), []
    for rows in (1, 2, 3, 5):
        runs = [[random_round(chance.randint(0, 5), chance) for _ in range(chance.randint(1, 6))] for _ in range(rows)]
        cases.append(partial(deepcopy, ([Result([1], rounds=rounds) for rounds in runs],)))
    slips = [*named(right_places, {
        "ended rows": "a row that has ended still takes places here. It leaves the batch, and is not padded any more",
        "until the first ends": "the count stops when the first row ends, as zip does; zip_longest goes on",
        "newest": "the newest token is fed too: a row takes one place more than it drafts",
    }),
        Slip("every row also keeps the token after the accepted ones: kept is what the round wrote",
             lambda found, right, results: found[0] == right_places(results, "accepted")[0]),
        Slip("thrown away is all that was fed and not kept, also where the end of a text has cut the block",
             lambda found, right, _: (found[0], found[2]) == (right[0], right[2])),
    ]  # fmt: skip
    check(answer, right_places, cases, slips, name="places")


def random_round(drafted: int, chance: random.Random) -> Round:
    accepted = chance.randint(0, drafted)
    kept = accepted + 1 - (accepted > 0 and chance.random() < 0.2)  # now and then an end cuts the block
    origins = ("accepted",) * accepted + ("bonus" if accepted == drafted else "recovered",)
    return Round((1,) * drafted, (1,) * kept, origins[:kept], 0.0, 0.0, 0.0)


P, Q = laws(161, 6, 6), (laws(161, 6, 6) + laws(7, 6, 6)) / 2  # END is rare


def play(text: list[int], K: int, chance: Randomness) -> list[int]:
    """One round of one row, for a small target and draft that look at the last token only: 1 to K + 1 tokens."""
    draft: list[int] = []
    for _ in range(K):
        draft.append(int(chance.categorical(Q[[*text, *draft][-1]])))
    before = [text[-1], *draft]
    found = verify(torch.tensor(draft, dtype=torch.long), Q[before[:-1]], P[before], chance)
    return [*draft[: int(found.accepted)], int(found.next_token)]


def right_serve(requests: list[Request], places: int, K: int, play: Callable, slip: str = "") -> tuple[list, int]:
    """(the text of each request, rounds); or what a slip makes of it."""
    chance = [TorchRandomness.seeded(request.seed) for request in requests]
    written: list[list[int]] = [[] for _ in requests]
    waiting, growing, ended, rounds = list(range(len(requests))), list[int](), list[int](), 0
    while waiting or growing:
        while waiting and len(growing) < places and not (slip == "whole batches" and any(written[i] for i in growing)):
            growing.append(waiting.pop(0))
        done = []
        for i in growing:
            left = requests[i].limit - len(written[i])
            most = K if slip == "K" else min(K, left - (slip != "left"))
            anew = TorchRandomness.seeded(requests[i].seed)
            rolls = {"seeded anew": anew, "one generator": chance[0]}.get(slip, chance[i])
            block = play([*requests[i].prompt, *written[i]], most, rolls)[:left]
            end = block.index(END) + 1 if END in block else None
            written[i] += block[: end and end - (slip == "no END")]
            done += [i] if end or len(written[i]) >= requests[i].limit else []
        growing, ended, rounds = [i for i in growing if i not in done], ended + done, rounds + 1
    return [written[i] for i in (ended if slip == "order" else range(len(requests)))], rounds


def check_serve(answer: Callable, given: Given, seed: int = 0) -> None:
    """Continuous batching: the text of each request as if it were alone, in as few rounds as the places allow."""
    chance = dice("09 requests", seed)
    more = [random_request(chance, 1, 2, 5, 9, 16) for _ in range(9)]
    cases = [(given.requests, 3, 4), (more, 4, 3), (more, 1, 2), (more[:3], 8, 3), (more, 2, 0)]
    slips = [*named(right_serve, {
        "one generator": "all rows draw from one generator, so a text depends on its neighbours: one for each request",
        "seeded anew": "the dice are made anew in each round, and fall alike: one generator for all rounds of a row",
        "whole batches": "the texts are right, the rounds too many: a free place waits for the others. Fill it at once",
        "order": "the texts come in the order in which they ended; give them in the order of the requests",
        "no END": "END itself is missing: it still belongs to the text",
        **dict.fromkeys(["K", "left"], "near its limit a row draws more than it would alone: at most left - 1"),
    }),
        Slip("the texts begin with prompts", lambda found, right, all, *_: found[0][0] == all[0].prompt + right[0][0]),
        Slip("a text goes on behind END. Cut the block after END, and let the row leave",
             lambda found, *_: any(END in text[:-1] for text in found[0])),
        Slip("texts grow beyond their limit: draft less near the end. A block must not be longer than what is left",
             lambda found, _, requests, *more: any(len(a) > b.limit for a, b in zip(found[0], requests, strict=True))),
        Slip("the texts are right, the number of rounds is not. A round is one pass for all rows in it, and whoever "
             "waits longest joins first", lambda found, right, *_: same(found[0], right[0])),
        Slip("a text is not the one that its request gets alone. Look at the dice, at what is played, at limit and END",
             lambda found, right, *_: isinstance(found, tuple) and not same(found, right)),
    ]  # fmt: skip
    check(answer, right_serve, [partial(deepcopy, (*case, play)) for case in cases], slips, name="serve")


def suspects(variant: int = 0) -> dict[str, Callable]:
    """Five ways to run a round of two rows with K = 1, under letters, in an order of the variant's."""

    def row(p: Tensor, q: Tensor, chance: Randomness) -> list[int]:
        found = verify(torch.tensor([draft := int(chance.categorical(q[0]))]), q, p, chance)
        return ([draft] if found.accepted else []) + [int(found.next_token)]

    def suspect(name: str, write: Callable) -> Callable:
        def rule(p: Tensor, q: Tensor, chance: Randomness) -> tuple[list[int], list[int]]:
            a, b = row(p, q, chance), row(p, q, chance)
            return write(a, b, lambda: [int(chance.categorical(p[0]))])

        rule.__name__ = name
        return rule

    rules = [
        suspect("each_its_own", lambda a, b, _: (a, b)),
        suspect("cut_to_shortest", lambda a, b, _: (a, b) if len(a) == len(b) else (a[:1], b[:1])),
        suspect("second_row_draws_again", lambda a, b, again: (a, again() if len(a) < len(b) else b)),
        suspect("all_or_nothing", lambda a, b, _: (a, b) if len(a) == len(b) == 2 else ([], [])),
        suspect("same_seed_for_both", lambda a, b, _: (a, a)),
    ]
    dice("09 suspects", variant).shuffle(rules)
    return dict(zip("ABCDE", rules, strict=True))


TARGET, DRAFT = (torch.tensor(rows, dtype=torch.float64) for rows in ([[0.7, 0.3], [0.4, 0.6]], [[0.5, 0.5]]))


@cache
def mixed_up(variant: int) -> dict[str, tuple[float, ...]]:
    """For each suspect what is off: in row 0, row 1, both, both against the rows' own laws, and these against p."""

    def off(law: dict, right: dict) -> float:
        return round(sum(abs(float(law.get(x, 0) - right.get(x, 0))) for x in law.keys() | right.keys()) / 2, 12)

    plain, found = enumerate_outcomes(lambda chance: tuple(int(chance.categorical(row)) for row in TARGET)), {}
    for name, rule in suspects(variant).items():

        def play(chance: Randomness, row: int | slice = slice(2), rule: Callable = rule) -> tuple:
            rows = rule(TARGET, DRAFT, chance)
            return tuple((*text, *(int(chance.categorical(law)) for law in TARGET[len(text) :])) for text in rows)[row]

        both = enumerate_outcomes(play)
        rows = [enumerate_outcomes(partial(play, row=row)) for row in (0, 1)]
        apart = [{(a, b): one[a] * other[b] for a in one for b in other} for one, other in ((plain, plain), rows)]
        found[name] = *(off(law, plain) for law in rows), *(off(both, law) for law in apart), off(apart[1], apart[0])
    return found


def check_examine(answer: Callable, variant: int = 0) -> None:
    """What is off in a row by itself, and in both rows together."""
    rules, known = suspects(variant), mixed_up(variant)

    def of(first: Callable[[float, float], float], together: int, times: int = 1) -> Callable:
        return lambda name: (times * first(*known[name][:2]), times * known[name][together])

    slips = [
        like("the first number misses a fault of row 1; the worse of the two rows is wanted", of(lambda a, b: a, 2)),
        like("the rows' total variations are added up; the worse of the two is wanted", of(lambda a, b: a + b, 2)),
        like("the law of both is made from the rows' own, so they look independent: enumerate pairs", of(max, 4)),
        like("both numbers are twice the total variation: halve the sums", of(max, 2, 2)),
        like("rows are compared with what they are, not with what they should be: two texts of p's", of(max, 3)),
        Slip("close, and not exact: was it counted over many runs? Walk down every branch with enumerate_outcomes",
             lambda found, right, name: same(found, right, 0.03) and not same(found[1], right[1])),
        Slip("far too large. Has each text len(p) tokens, each missing one drawn from its own row of p?",
             lambda found, right, name: found[0] > right[0] + 0.04),
        Slip("the second number is too small: a text that only one of the two laws writes counts as well",
             lambda found, right, name: same(found[0], right[0]) and found[1] < right[1]),
    ]  # fmt: skip
    found = {name: ask(answer, rule, TARGET, DRAFT, name="examine") for name, rule in rules.items()}
    check(found.get, of(max, 2), [(name,) for name in rules], slips, name="examine")


def right_plan(promise: float, alpha: float, c: float, critical: float, slip: str = "") -> tuple[int, int]:
    """(B, K) with the largest throughput that keeps the promise, or what a slip takes."""
    best, found = 0.0, (0, 0)
    for B, K in product(range(1, int(critical) + 1), range(slip == "plain", 13)):
        tokens = {"alone": K + 1, "K": B * max(1, K)}.get(slip, B * (K + 1))
        passes = 1 if slip == "one pass" else K  # each takes c, as B is not above critical
        each = E(alpha, K) / (max(1.0, tokens / critical) + passes * c)
        goal = each if slip == "fastest" else B * each
        if (goal if slip == "total" else each) >= promise and goal > best + 1e-9:
            best, found = goal, (B, K)
    return found


def check_plan(answer: Callable, given: Given, seed: int = 0) -> None:
    """Batch and draft length for the largest throughput under a promise to each user."""
    chance = dice("09 plan", seed)
    cases = [(each, given.alpha, given.c, given.critical) for each in (1.0, 1.5, 2.2, 99.0)] + [(8.4, 0.95, 0.01, 60)]
    cases += [(promise, chance.randint(60, 90) / 100, 0.05, chance.randint(40, 200)) for promise in (1.2, 1.4, 1.8)]
    slips = named(right_plan, {
        "fastest": "this is the fastest for a single user; of those that keep the promise take the largest throughput",
        "total": "the promise is to each user; here the tokens of all rows together keep it",
        "alone": "the target's pass has the tokens of all B rows in it: B (K + 1)",
        "K": "each row has K + 1 tokens in the target's pass, the newest one and its draft",
        "plain": "K = 0 is a setting too, plain decoding, and a speed of just what was promised keeps the promise",
        "one pass": "a round has K draft passes, one after the other, and each takes c",
    })  # fmt: skip
    none = Slip("where no setting keeps the promise it is (0, 0)", lambda found, right, *_: right == (0, 0))
    check(answer, right_plan, cases, [*slips, none], name="plan")
