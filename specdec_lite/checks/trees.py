"""Checks for the exercises of notebook 10: masks, several candidates for one place, and which tree to grow."""

from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from math import prod

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..distributions import overlap, residual
from ..randomness import Randomness, enumerate_outcomes
from ..tree import Tree, draw_children, drawn_child
from ..tree_gallery import full_q_for_every_sibling, repeated_siblings_skipped, siblings_against_one_p
from .core import CheckFailed, Given, Slip, ask, check, check_parts, dice, law, like, passed, same, show
from .exactness import pairs_of_laws

Law = Float[Tensor, " vocab"]


def given(variant: int = 0) -> Given:
    """p and q of a place where only q's favourite can be rejected; and what guesses and passes are worth where."""
    chance = dice("10", variant)
    p = q = [Fraction(0)] * 3
    while len({*q}) < 3 or any(a == b or (b > a) != (b == max(q)) for a, b in zip(p, q, strict=True)):
        p, q = law(chance, 3), law(chance, 3)
    bounds = ((0.55, 0.7), (0.12, 0.18), (0.06, 0.09), (0.02, 0.04), (0.05, 0.08), (0.2, 0.3))
    *ranks, slope, d = (round(chance.uniform(*each), 2) for each in bounds)
    return Given(p=p, q=q, ranks=ranks, laptop_slope=slope, gpu_room=chance.randrange(24, 49), drafting=d)


def check_by_hand(answer: Callable, given: Given) -> None:
    """The chance that one of two candidates is accepted, for three ways to get them, in fractions."""
    p, q = given.p, given.q
    alpha, often = sum(map(min, p, q)), q.index(max(q))
    left = [max(a - b, Fraction(0)) / (1 - alpha) for a, b in zip(p, q, strict=True)]
    cut = [Fraction(0) if x == often else q[x] for x in range(3)]
    rest = [each / sum(cut) for each in cut]
    likeliest = sorted(range(3), key=q.__getitem__)[1:]

    def after(law: Sequence[Fraction], wanted: Sequence[Fraction] = left) -> Fraction:
        return alpha + (1 - alpha) * sum(map(min, wanted, law))

    def generally(law: Sequence[Fraction]) -> list[Slip]:
        second = sum(map(min, left, law))
        unscaled = sum(min(a * (1 - alpha), b) for a, b in zip(left, law, strict=True))
        return [
            like("this is the second trial alone; the first counts too, and a rejection comes before", lambda: second),
            like("what is left of p does not sum to 1 yet", lambda: alpha + (1 - alpha) * unscaled),
        ]

    parts = {
        "with replacement": (lambda: after(q), [
            like("the second candidate is judged as the first was. It follows a rejection: what is to be written then?",
                 lambda: 1 - (1 - alpha) ** 2),
            *generally(q),
        ]),
        "without": (lambda: after(rest), [
            like("the second candidate is judged against p; left to write is the residual", lambda: after(rest, p)),
            like("the second is drawn from q less the first, and that does not sum to 1 yet", lambda: after(cut)),
            *generally(rest),
        ]),
        "chosen": (lambda: sum(p[x] for x in likeliest), [
            like("this is how much of *q* they have; the target's p decides", lambda: sum(q[x] for x in likeliest)),
            like("these are the two likeliest of *p*; the draft, which knows only q, chooses", lambda: 1 - min(p)),
            like("judged as if drawn from q; no dice chose them", lambda: alpha + (1 - alpha) * left[likeliest[0]]),
            like("p is drawn from once, and cannot be both tokens: their shares simply add up",
                 lambda: 1 - prod(1 - p[x] for x in likeliest)),
        ]),
    }  # fmt: skip
    check_parts(lambda: ask(answer, name="by_hand"), "by_hand", [()], parts)


def shapes(seed: int) -> Iterator[tuple[list[int], int, int]]:
    """(parents, cached, length): a chain, a star, a parent behind its child, no node at all, and random trees."""
    yield from (([-1, 0, 1], 4, 5), ([-1, -1, -1], 4, 5), ([2, 0, -1], 2, 4), ([], 1, 3))
    chance = dice("10 trees", seed)
    for n in (5, 6, 7, 8):
        parents = [chance.randrange(-1, node) for node in range(n)]
        new = [*chance.sample(range(n), n), -1]  # new[-1] is the root's
        moved = dict(zip(new[:-1], (new[parent] for parent in parents), strict=True))
        length = chance.randrange(2, 6)
        yield [moved[node] for node in range(n)], chance.randrange(0, length), length


def ways(parents: Sequence[int], sweep: bool = False) -> list[list[int]]:
    """For each node the nodes on its way, itself the last. sweep: a parent that comes later is not found."""

    def way(node: int) -> list[int]:
        return [] if node == -1 else [*([] if sweep and parents[node] >= node else way(parents[node])), node]

    return [way(node) for node in range(len(parents))]


def right_pass(parents: Sequence[int], cached: int, length: int) -> tuple[Tensor, Tensor]:
    """``Tree.topology`` for nodes in any order: sorted by depth, told, and put back."""
    deep = [len(way) for way in ways(parents)]
    order = sorted(range(len(parents)), key=deep.__getitem__)
    new = {-1: -1} | {node: i for i, node in enumerate(order)}
    told = Tree(tuple(new[parents[node]] for node in order)).topology(cached, length, torch.device("cpu"))
    rows = [*range(length - cached), *(length - cached + new[node] for node in range(len(parents)))]
    columns = [*range(length), *(length + new[node] for node in range(len(parents)))]
    return told["positions"][0, rows], told["mask"][0, 0][rows][:, columns]


def mask_with(sees: Callable[[list[list[int]], int, int], bool]) -> Callable:
    """A mask that is right for the text; node i sees node j when ``sees(ways, i, j)``."""

    def wrong(parents: Sequence[int], cached: int, length: int) -> Bool[Tensor, "fed end"]:
        mask, nodes = right_pass(parents, cached, length)[1], range(len(parents))
        for i in nodes:
            mask[length - cached + i, length:] = torch.tensor([sees(ways(parents), i, j) for j in nodes])
        return mask

    return wrong


def check_pass_inputs(answer: Callable, seed: int = 0) -> None:
    """Positions and mask of a pass that feeds the last tokens of the text and a tree."""

    def told(*case):
        found = ask(answer, *case, name="pass_inputs")
        if not isinstance(found, tuple | list) or [getattr(each, "ndim", 0) for each in found] != [1, 2]:
            raise CheckFailed("pass_inputs: return two tensors, the positions in a row and the mask, a table")
        return found

    parts = {"positions": (lambda *case: right_pass(*case)[0], POSITION_SLIPS),
             "mask": (lambda *case: right_pass(*case)[1], MASK_SLIPS)}  # fmt: skip
    check_parts(told, "pass_inputs", list(shapes(seed)), parts)


def at(place: Callable) -> Callable:
    return lambda parents, cached, length: torch.tensor([*range(cached, length), *place(parents, length)])


LATE = "a node may come before its parent in the list. Walk up from each node; do not copy from what is done so far"
POSITION_SLIPS = [
    like("these count on through the pass; siblings share a position. Count by depth",
         at(lambda parents, length: range(length, length + len(parents)))),
    like("the nodes are one too high: the root is the text's last token, at length - 1, and its children come next",
         at(lambda parents, length: [length + len(way) for way in ways(parents)])),
    like("the nodes are one too low: the root itself has depth 0, and its children 1",
         at(lambda parents, length: [length - 2 + len(way) for way in ways(parents)])),
    like(LATE, at(lambda parents, length: [length - 1 + len(way) for way in ways(parents, sweep=True)])),
    Slip("there must be one position for each token that is fed: the text's that are not cached, then the nodes",
         lambda found, right, *_: found.shape != right.shape),
]  # fmt: skip
MASK_SLIPS = [
    like("this is the ordinary mask: each sees all before it. A node must not see siblings and cousins",
         mask_with(lambda way, i, j: j <= i)),
    like("a node does not see itself here", mask_with(lambda way, i, j: j in way[i][:-1])),
    like("a node sees its parent and itself, but the way goes on, up to the root",
         mask_with(lambda way, i, j: j in way[i][-2:])),
    like("a node sees everything that is less deep; only its own ancestors are in its past",
         mask_with(lambda way, i, j: i == j or len(way[j]) < len(way[i]))),
    like("the table is turned round: ancestors see their descendants. Rows look, columns are seen",
         mask_with(lambda way, i, j: i in way[j])),
    Slip("the other way round: True is where a token may look", lambda found, right, *_: same(found, ~right)),
    like(LATE, mask_with(lambda way, i, j: j in ways([each[-2] if each[1:] else -1 for each in way], sweep=True)[i])),
    Slip("there must be a row for each token that is fed, and a column for *every* token, the cached ones included",
         lambda found, right, *_: found.shape != right.shape),
    Slip("the nodes are right, the rows of the text are not: it sees no node, and nothing that comes after it",
         lambda found, right, _, cached, length: same(found[length - cached :], right[length - cached :])),
    Slip("the nodes among themselves are right; but each of them sees the whole text, cached or not",
         lambda found, right, _, cached, length: same(found[:, length:], right[:, length:])),
]  # fmt: skip


def one_accepted(p: Law, q: Law, m: int, weight: Callable, wanted: Callable, following: Callable) -> float:
    """``one_of`` with its three parts open: how often a token x leads on, what is to be written, what is drawn from."""
    if m == 0 or float(q.sum()) <= 0:
        return 0.0
    found = float(torch.minimum(p, q).sum())
    for x in range(len(q)):
        if (often := float(weight(p, q, x))) > 0:
            found += often * one_accepted(wanted(p, q), following(q, x), m - 1, weight, wanted, following)
    return found


def less(q: Law, x: int, share: bool = True) -> Law:
    """q without token x, made to sum to 1 where anything is left and ``share`` asks for it."""
    left = q.index_fill(0, torch.tensor([x]), 0)
    return left / left.sum() if share and left.sum() > 0 else left


def check_one_of(answer: Callable, seed: int = 0) -> None:
    """The exact chance that one of m candidates is accepted that were drawn without replacement."""
    cases = [(p, q, m) for p, q in pairs_of_laws(seed)[:8] for m in (1, 2, 3)]
    slip = partial(one_accepted, weight=lambda p, q, x: max(0, q[x] - p[x]), wanted=residual, following=less)
    slips = [
        like("every trial is judged like the first, 1 - (1 - alpha)^m. After a rejection the residual is wanted, "
             "and q has changed too", lambda p, q, m: 1 - (1 - float(overlap(p, q))) ** m),
        like("this is drawing *with* replacement: take the rejected token out of q, and scale the rest",
             lambda p, q, m: slip(p, q, m, following=lambda q, x: q)),
        like("q less a token does not sum to 1; candidates are drawn from a law, so scale it",
             lambda p, q, m: slip(p, q, m, following=partial(less, share=False))),
        like("each candidate is judged against the same p; after a rejection its residual is to be written",
             lambda p, q, m: slip(p, q, m, wanted=lambda p, q: p)),
        like("the next trial is weighed with q(x), how often x is drawn. It is made only when x is *rejected* too",
             lambda p, q, m: slip(p, q, m, weight=lambda p, q, x: q[x])),
        like("each way on is weighed with all of 1 - alpha; its share is how often just this x is rejected",
             lambda p, q, m: slip(p, q, m, weight=lambda p, q, x: (1 - overlap(p, q)) * (q[x] > p[x]))),
    ]  # fmt: skip
    check(answer, slip, cases, slips, name="one_of")


def suspects(variant: int = 0) -> dict[str, Callable]:
    """Six ways, f(p, q, m, chance), to draw m candidates and write a token, under letters: two are exact."""

    def place(step: Callable, replacement: bool) -> Callable:
        def write(p: Law, q: Law, m: int, chance: Randomness) -> int:
            drawn = draw_children(q[None], m, chance, replacement=replacement)
            _, tokens, laws = map(torch.cat, zip(*drawn, strict=True))
            return int(step(range(len(tokens)), tokens, laws, p, chance)[1])

        return write

    def likeliest(p: Law, q: Law, m: int, chance: Randomness) -> int:
        return int(drawn_child(range(m), q.topk(m).indices, q.expand(m, -1), p, chance)[1])

    rules = [place(drawn_child, True), place(drawn_child, False), place(siblings_against_one_p, True)]
    rules += [place(full_q_for_every_sibling, False), place(repeated_siblings_skipped, True), likeliest]
    dice("10 suspects", variant).shuffle(rules)
    return dict(zip("ABCDEF", rules, strict=True))


def biases(rules: dict[str, Callable], p: Law, q: Law, m: int) -> dict[str, float]:
    """For each rule the total variation between the law of its token and p."""
    p, q = (law.double() / law.double().sum() for law in (p, q))
    laws = {name: enumerate_outcomes(partial(rule, p, q, m)) for name, rule in rules.items()}
    return {name: sum(abs(law.get(x, 0.0) - float(p[x])) for x in range(len(p))) / 2 for name, law in laws.items()}


def check_witness(answer: Callable, variant: int = 0) -> None:
    """p, q and m that show the bias of every biased rule: many are right, so they are judged by what they do."""
    found = ask(answer, name="witness")
    laws = isinstance(found, tuple | list) and len(found) == 3 and all(map(isinstance, found, (Tensor, Tensor, int)))
    if not laws or not 2 <= len(found[0]) == len(found[1]) <= 4 or found[2] not in range(1, min(3, len(found[0])) + 1):
        raise CheckFailed("witness: return p, q and m: two tensors over the same 2 to 4 tokens, and m from 1 to 3")
    p, q, m = found[0].double(), found[1].double(), found[2]
    if min(*p.tolist(), *q.tolist()) <= 0 or max(abs(float(each.sum()) - 1) for each in (p, q)) > 1e-6:
        raise CheckFailed(f"witness: {show(p)} and {show(q)} must be laws: entries above 0 that sum to 1")
    here, usual = biases(suspects(variant), p, q, m), biases(suspects(variant), *USUAL)
    free = [name for name, bias in usual.items() if bias > 1e-6 and here[name] < 0.05]
    if float((p - q).abs().sum()) < 1e-9:
        raise CheckFailed("witness: where p = q every candidate is accepted at once, and no rule can go wrong")
    if free:
        worst = min(free, key=here.__getitem__)
        why = ("Give the place at least two: with one candidate most of these slips cannot happen" if m == 1 else
               "Over two tokens a second candidate has no choice left" if len(p) == 2 else
               "The slips are in the second trial: how often is there one, and are both laws uneven then?")  # fmt: skip
        raise CheckFailed(f"witness: not caught: {', '.join(free)}; {worst} has a bias of {here[worst]:.3f}. {why}")
    passed("witness", f"{sum(bias > 1e-6 for bias in here.values())} convicted")


USUAL = (torch.tensor([0.4, 0.1, 0.3, 0.2]), torch.tensor([0.1, 0.5, 0.15, 0.25]), 2)


def check_best_size(answer: Callable, given: Given) -> None:
    """How many nodes give the highest speedup, and that speedup; 0 is plain decoding."""
    ranks, d, slope, room = given.ranks, given.drafting, given.laptop_slope, given.gpu_room
    costs = (lambda n: 1 + slope * (n - 1), lambda n: max(1.0, n / room), float, lambda n: 1 + n // 8 / 10)
    machines = [[0.0, *map(cost, range(1, 62))] for cost in costs]  # v[0] is not used

    def best(speed: Callable) -> Callable:
        def choose(ranks: list[float], v: list[float], d: float, most: int) -> tuple[int, float]:
            chances = products(ranks, most)
            speeds = [1.0, *(speed(1 + sum(chances[:n]), v, d, n, ranks) for n in range(1, most + 1))]
            return speeds.index(max(speeds)), max(speeds)

        return choose

    slips = [
        like("the pass also feeds the root: it is over n + 1 tokens", best(lambda E, v, d, n, _: E / (v[n] + d))),
        like("the time of the drafting is missing", best(lambda E, v, d, n, _: E / v[n + 1])),
        like("this is the tree that yields most; it is the dearest too", best(lambda E, v, d, n, _: E)),
        like("this counts accepted tokens only; every round gives one more",
             best(lambda E, v, d, n, _: (E - 1) / (v[n + 1] + d))),
        like("this is the best chain. A second guess near the root may be reached more often than a deep first one",
             best(lambda E, v, d, n, ranks: sum(ranks[0] ** i for i in range(n + 1)) / (v[n + 1] + d))),
        Slip("no tree at all, n = 0, is a choice too: plain decoding, speedup 1, and nothing is drafted",
             lambda found, right, *_: right == (0, 1.0)),
        like("multiply along a node's way: it is accepted only when all before it were",
             best(lambda E, v, d, n, ranks: (1 + sum((ranks * n)[:n])) / (v[n + 1] + d))),
        like("all nodes hang on the root here", best(lambda E, v, d, n, ranks: (1 + sum(ranks[:n])) / (v[n + 1] + d))),
    ]  # fmt: skip
    cases = [*((ranks, v, d, 60) for v in machines), ([0.9, 0.05], machines[0], d, 4)]
    check(answer, best(lambda E, v, d, n, _: E / (v[n + 1] + d)), cases, slips, name="best_size")


def products(ranks: Sequence[float], n: int) -> list[float]:
    """The n largest chances that a node of any tree is accepted; a node's is the product of the ranks on its way."""
    reach, rooms = [1.0], [0]
    for _ in range(n):
        gains = [chance * (*ranks, 0)[room] for chance, room in zip(reach, rooms, strict=True)]
        best = gains.index(max(gains))
        rooms[best] += 1
        reach, rooms = [*reach, gains[best]], [*rooms, 0]
    return reach[1:]
