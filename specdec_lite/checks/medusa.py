"""Checks for the exercises of notebook 11: offsets, the loss, what a head cannot see, trees by numbers, typical."""

import math
import random
from collections.abc import Callable
from functools import partial
from itertools import accumulate

import torch
from jaxtyping import Float
from torch import Tensor

from ..lossy import typical
from ..randomness import enumerate_outcomes
from ..tree import Tree
from .core import CheckFailed, Given, Slip, attempting, check, dice, kind, law, laws, like, part_of, same

Law = Float[Tensor, " vocab"]
Accuracy = Float[Tensor, "heads ranks"]
entropy = lambda law: float(torch.special.entr(law).sum())  # noqa: E731


def given(variant: int = 0) -> Given:
    """A run to follow by hand, two laws, the beginning of a text, and what nodes cost on some machine."""
    chance = dice("11", variant)
    p, q = ([float(x) for x in law(chance, 5)] for _ in range(2))
    while min(p) > 0.09 or p == q:
        p = [float(x) for x in law(chance, 5)]
    return Given(
        prompt=chance.randrange(12, 40), accepted=[chance.randrange(4) for _ in range(4)], heads=3,
        text=chance.choice(["The old woman said to the", "There was a king who had"]), p=p, q=q,
        slope=chance.choice([0.06, 0.07, 0.08, 0.09]), drafting=chance.choice([0.12, 0.15, 0.18]),
    )  # fmt: skip


def check_timeline(answer: Callable, given: Given) -> None:
    """For each round: the feature that is read, the positions that are guessed."""

    def rounds(written: int = 1, feature: int = -2, first: int = 0, extra: int = 1, all_guess: bool = True):
        length, found = given.prompt + written, []
        for accepted in given.accepted:
            guessing = given.heads if all_guess else accepted
            found.append((length + feature, [length + first + i for i in range(guessing)]))
            length += accepted + extra
        return found

    slips = [
        like("this is the feature of the last token written. That token has not been read yet, so it has none",
             lambda: rounds(feature=-1)),
        like("head 1 guesses the last token written, which is there already. Which is the first position still open?",
             lambda: rounds(first=-1)),
        like("feature and positions are each one too early. The first round drafts nothing: does it write nothing?",
             lambda: rounds(written=0)),
        like("the first entry is right, then the text grows too slowly: a round writes one more than it accepts",
             lambda: rounds(extra=0)),
        like("every head guesses in every round, also in one that accepts few", lambda: rounds(all_guess=False)),
        Slip("the first entry is right, a later one is not. How many tokens does the round before it write?",
             lambda found, right: len(found) == len(right) and same(found[0], right[0])),
        Slip("not yet. When the first of these rounds begins: how many tokens are written, and how many of them read?",
             lambda found, right: kind(found) == kind(right) and isinstance(found[0], tuple)),
    ]  # fmt: skip
    check(answer, rounds, [()], slips, name="timeline")


def right_loss(
    own: Float[Tensor, "length vocab"], guesses: Float[Tensor, "length heads vocab"], decay: float,
    *, step: int = 1, offset: int = 0, power: int = 0, even: bool = False, reverse: bool = False, common: bool = False,
    entropy: bool = True,
) -> Float[Tensor, ""]:  # fmt: skip
    """The loss that is wanted; the options are slips."""
    log_p, heads, total = own.detach().log_softmax(-1), guesses.shape[1], own.new_zeros(())
    for i in range(1, heads + 1):
        p = log_p[step * i + offset :][: len(own) - heads if common else None]
        q = guesses[: len(p), i - 1].log_softmax(-1)
        a, b = (q, p) if reverse else (p, q)
        total = total + (1 if even else decay ** (i + power)) * (a.exp() * (entropy * a - b)).sum(-1).mean()
    return total


def check_medusa_loss(answer: Callable, seed: int = 0) -> None:
    """The value of the loss, then who learns from it."""
    drawn = partial(torch.randn, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    cases = [(drawn(n, vocab), drawn(n, heads, vocab), 0.8) for n, heads, vocab in ((7, 1, 4), (9, 2, 5), (12, 3, 3))]
    wrong = {
        "head 1 is held against the law that its own feature makes. The target has said that already": {"offset": -1},
        "every head is held against the law that its own feature makes; head i guesses a later token": {"step": 0},
        "the heads look one too far. Of which token is the law that feature t makes? Of t + 1": {"offset": 1},
        "this is KL(q || p); p is the law to be learned, so the mean goes over p": {"reverse": True},
        "head 1 counts in full here; it is to count decay, head 2 decay squared": {"power": -1},
        "all heads count in full; the later ones are to count less": {"even": True},
        "head i has a partner at all places but the last i; here the last head's limit holds for all": {"common": True},
        "this is the cross-entropy. KL is smaller, by the entropy of p: a perfect head has 0": {"entropy": False},
    }  # fmt: skip
    slips = [like(says, partial(right_loss, **options)) for says, options in wrong.items()]  # type: ignore[arg-type]
    leaves = [each.clone().requires_grad_() for each in cases[1][:2]]
    with attempting("medusa_loss"):
        loss = answer(*(each * 1 for each in leaves), 0.8)
        if (led := isinstance(loss, Tensor)) and loss.dim():
            raise CheckFailed(f"medusa_loss: returned {kind(loss)}; the loss is one number")
        learns = torch.autograd.grad(loss, leaves, allow_unused=True) if led and loss.requires_grad else (None, None)
    target_learns, heads_learn = (each is not None and bool(each.any()) for each in learns)
    if same(loss, right_loss(*cases[1]), 1e-6):  # else the value comes first
        says = "the target would learn from it, too. Freeze it" if heads_learn else "the heads get no gradient from it"
        if target_learns or not heads_learn:
            raise CheckFailed(f"medusa_loss: the value is right, but {says}")
    check(answer, right_loss, cases, slips, tolerance=1e-6, name="medusa_loss")


def right_ceilings(joint: Float[Tensor, "between next"]) -> tuple[float, float, float]:
    x, y = joint.sum(1), joint.sum(0)
    return float(y.max()), float(joint.max(1).values.sum()), entropy(x) + entropy(y) - entropy(joint)


def check_ceilings(answer: Callable, seed: int = 0) -> None:
    """Accuracy without and with the token in between, and the floor of the loss."""
    slips = [
        Slip("the third is NaN: 0 log 0 counts as 0, as in torch.special.entr", lambda found, *_: math.isnan(found[2])),
        part_of(0, "blind: this counts one x only. The guess is right if y comes, after any x", lambda t: t.max()),
        part_of(0, "blind: this guesses x. It is y, the column, that is to be guessed", lambda t: t.sum(1).max()),
        part_of(1, "told: this names an x for every y. Told x, it is y that is named", lambda t: t.max(0).values.sum()),
        part_of(1, "told: every x counts the same; weigh it by p(x)", lambda t: (t / t.sum(1)[:, None]).amax(1).mean()),
        part_of(2, "the floor is in bits; KL in this course is in nats", lambda t: right_ceilings(t)[2] / math.log(2)),
        part_of(2, "the third is H(y). What is uncertain about y even when x is told costs no KL: take it off",
             lambda t: entropy(t.sum(0))),
        part_of(2, "the third is H(y | x), what stays uncertain when x is told. The floor is the rest of H(y)",
             lambda t: entropy(t) - entropy(t.sum(1))),
    ]  # fmt: skip
    tables = [laws(seed + 7 + n, n * (n + 1)).view(n, n + 1) for n in (2, 3, 4)]
    cases = [(t,) for t in (torch.eye(2).double() / 2, torch.outer(laws(seed, 3), laws(seed + 1, 2)), *tables)]
    check(answer, right_ceilings, cases, slips, tolerance=1e-6, name="ceilings")


def products(accuracy: Accuracy) -> Float[Tensor, " nodes"]:
    """The chance of every node that there can be, depth by depth."""
    return torch.cat([*accumulate(accuracy, lambda level, row: torch.outer(level, row).flatten())])


def speedups(
    accuracy: Accuracy, v: dict, d: float, largest: int,
    *, gains: Callable = products, ordered: bool = True, ahead: int = 0, root: int = 1, base: float = 1.0,
) -> list[float]:  # fmt: skip
    """Of the best tree of every size from 0 on, if the heads err independently; the options are slips."""
    values = gains(accuracy).sort(descending=True).values if ordered else gains(accuracy)
    E = (base + values.cumsum(0)).tolist()[ahead : largest + ahead]
    return [1.0] + [each / (v[n + root] + d) for n, each in enumerate(E, start=1)]


def sized(first: int = 0, **options) -> Callable:
    """(n, speedup) of the largest, among sizes from ``first`` on."""
    return lambda *case: max(enumerate(speedups(*case, **options)[first:], first), key=lambda pair: pair[1])


def check_best_size(answer: Callable, seed: int = 0) -> None:
    """The size of tree that pays best."""

    def first_fall(*case) -> tuple[int, float]:
        found = speedups(*case)
        return next((n, found[n]) for n in range(len(found)) if n + 1 == len(found) or found[n + 1] < found[n])

    slips = [
        like("this stops where it gets worse. v may rise in steps, and a larger tree be better again", first_fall),
        like("v[n] for n nodes: the pass also reads the token that the tree hangs on", sized(root=0)),
        like("what do the heads cost? d is missing", lambda table, v, d, most: sized()(table, v, 0, most)),
        like("a round writes one token that is not drafted, too: E begins at 1", sized(base=0.0)),
        like("no tree is a choice as well, with a speedup of 1", sized(first=1)),
        like("depth 2 counts with its own accuracy; its parent must be right as well", sized(gains=torch.flatten)),
        like("these are the first nodes, not the best: sort the products of all depths together", sized(ordered=False)),
        like("E is one node ahead of n: with n nodes the first n products count", sized(ahead=1)),
        like("a tree has a depth for each head, not two alone", sized(gains=lambda t: products(t[:2]))),
        like("only first choices are here; a node may be any choice", sized(gains=lambda t: t[:, 0].cumprod(0))),
    ]  # fmt: skip
    slope, flat = {n: 1 + 0.06 * (n - 1) for n in range(1, 26)}, dict.fromkeys(range(1, 26), 1.0)
    stairs = flat | dict.fromkeys(range(3, 17), 1.3) | dict.fromkeys(range(17, 26), 3.0)
    right = torch.tensor([[0.85], [0.7], [0.9]])
    tables = [right[:n] * laws(seed + 3 * n, n, 5).sort(-1, descending=True).values for n in (2, 3)]
    machines = ((slope, 0.15, 12), (flat, 0.1, 9), (stairs, 0.1, 20), (slope, 1.5, 10))
    cases = [(table, *machine) for table in tables for machine in machines]
    check(answer, sized(), cases, slips, tolerance=1e-6, name="best_size")


def right_typical(p: Law, q: Law, tries: int, epsilon: float, delta: float) -> Law:
    """The shipped rule, run down every branch."""
    rule, tree = typical(epsilon, delta), Tree.branching((tries,))

    def play(chance) -> int:
        siblings = torch.tensor([chance.categorical(q) for _ in range(tries)])
        outcome = rule(tree, siblings, q.expand(tries, -1), p.expand(tries + 1, -1), chance)
        return int(siblings[outcome.path[0]] if outcome.path else outcome.next_token)

    law = enumerate_outcomes(play)
    return torch.tensor([law.get(x, 0.0) for x in range(len(p))], dtype=torch.float64)


def check_typical_law(answer: Callable, seed: int = 0) -> None:
    """The law under typical acceptance."""
    usual = lambda e, d, H: min(e, d * math.exp(-H))  # noqa: E731

    def by(limit=usual, rest=lambda p, q, fails: p, strict=True, H=lambda p, q: entropy(p)) -> Callable:
        def law(p: Law, q: Law, tries: int, epsilon: float, delta: float) -> Law:
            least = limit(epsilon, delta, H(p, q))
            passes = p > least if strict else p >= least
            F, last = q[~passes].sum(), rest(p, q, ~passes)
            return q * passes * sum(F**i for i in range(tries)) + F**tries * last / last.sum().clamp(min=1e-30)

        return law

    slips = [
        like("the smaller of the two is the threshold, not the larger", by(lambda e, d, H: max(e, d * math.exp(-H)))),
        like("exp(+H): where the target is undecided LESS should do", by(lambda e, d, H: min(e, d * math.exp(H)))),
        like("the entropy is in bits; exp(-H) wants nats", by(lambda e, d, H: usual(e, d, H / math.log(2)))),
        like("epsilon alone is the threshold here. Where is the entropy?", by(lambda e, d, H: e)),
        like("this is the entropy of q; but it is the target that may be undecided", by(H=lambda p, q: entropy(q))),
        like("-p log p is NaN where p is 0: torch.special.entr", by(H=lambda p, q: float(-(p * p.log()).sum()))),
        like("tokens with p(x) = 0 pass when epsilon is 0: the comparison is strict", by(strict=False)),
        like("candidates after the first never count", lambda p, q, tries, *rule: right_typical(p, q, 1, *rule)),
        like("all have failed: p is drawn from, not what failed", by(rest=lambda p, q, fails: q * fails)),
        like("all have failed: all of p may come, not only what passes", by(rest=lambda p, q, fails: p * ~fails)),
        Slip("there is NaN. When nothing that is drafted can pass, F is 1: do not divide by 1 - F",
             lambda found, *_: found.isnan().any()),
        Slip("right where p has no zeros. With one, -p log p is NaN: torch.special.entr takes 0 log 0 as 0",
             lambda found, right, p, *_: not p.all() and not same(found, right, 1e-6)),
        Slip("the result does not sum to 1. When is candidate 2 looked at? What is written when all have failed?",
             lambda found, *_: not same(found.sum(), 1.0, 1e-6)),
    ]  # fmt: skip
    edges = ([0, 1, 0], [0.5, 0, 0.5], [0.3, 0.3, 0.2, 0.2, 0], [0.03, 0.9, 0.04, 0.03])
    sure, never, holed, narrow = (torch.tensor(law, dtype=torch.float64) for law in edges)
    a, b, c, d = (laws(seed + i, n) for i, n in enumerate((4, 4, 3, 5)))
    cases = [(a, b, 1, 0.2, 0.9), (a, b, 3, 0.2, 0.9), (a, b, 2, 0.25, 0.3), (a, b, 2, 0.35, 0.05),
             (a, narrow, 4, 0.5, 0.9), (sure, c, 2, 0.09, 0.3), (sure, never, 2, 0.09, 0.3), (holed, d, 2, 0.0, 0.0),
             (holed, d, 2, 0.35, 0.9)]  # fmt: skip
    check(answer, right_typical, cases, slips, tolerance=1e-6, name="typical_law")


class Toy:
    """A target of seven tokens. Its feature says which token was read last, and nothing of those before."""

    def __init__(self, chance: random.Random):
        way = chance.sample(range(7), 7)
        self.law = 0.25 * laws(chance.randrange(10**6), 7, 7)
        self.law[way, way[1:] + way[:1]] += 0.75
        tokens = [0]
        for _ in range(600):
            tokens += chance.choices(range(7), self.law[tokens[-1]].tolist())
        self.features = torch.eye(7, dtype=torch.float64)[tokens]

    def logits(self, features: Float[Tensor, "*batch 7"]) -> Float[Tensor, "*batch 7"]:
        return features @ self.law.log()


def suspects(variant: int = 0) -> Given:
    """Five heads, each trained for some offset; their losses on the way; a target, and features to measure on."""
    chance = dice("11 suspects", variant)
    target, heads, losses = Toy(chance), {}, {}
    kinds = chance.sample([(0, 90), (1, 90), (2, 90), (2, 25), (3, 90)], 5)
    for name, each in zip("ABCDE", kinds, strict=True):
        heads[name], losses[name] = trained(target, *each)
    return Given(target=target, features=target.features[300:], heads=heads, losses=losses)


def trained(target: Toy, offset: int, steps: int) -> tuple[Callable, list[float]]:
    """A head that is one matrix, and its losses on the way."""
    matrix, losses = torch.zeros(7, 7, dtype=torch.float64, requires_grad=True), []
    optimizer = torch.optim.Adam([matrix], lr=0.05)
    for _ in range(steps):
        loss = distance(target, target.features[:300] @ matrix, target.features[:300], offset)
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return lambda features: features @ matrix.detach(), losses


def distance(target: Toy, guesses: Tensor, features: Tensor, offset: int) -> Tensor:
    """KL(p || q): guess t against the law that feature t + offset makes; an offset below 0 looks back."""
    p, q = (target.logits(each).log_softmax(-1) for each in (features, guesses))
    p, q = (p[offset:], q[: len(q) - offset]) if offset >= 0 else (p[:offset], q[-offset:])
    return (p.exp() * (p - q)).sum(-1).mean()


def best_offsets(heads: dict, target: Toy, features: Tensor, choose=min, sign=1, more=0) -> dict[str, int]:
    """For each head the offset from 0 to 4 with the smallest distance; the options are slips."""
    kl = {name: [float(distance(target, head(features), features, sign * offset)) for offset in range(5)]
          for name, head in heads.items()}  # fmt: skip
    return {name: choose(range(5), key=each.__getitem__) + more for name, each in kl.items()}


def check_learned_offsets(answer: Callable, variant: int = 0) -> None:
    """What every suspect was trained for."""
    slips = [
        like("the laws run the wrong way: the guess at t belongs to a LATER law", partial(best_offsets, sign=-1)),
        like("these fit worst. An offset that was trained for fits best", partial(best_offsets, choose=max)),
        like("one too large: offset 0 is the law that the very same feature makes", partial(best_offsets, more=1)),
        Slip("offset 0 is never tried: a head may repeat the target",
             lambda found, right, *_: all(found[name] == right[name] for name in right if right[name])),
        Slip("one entry for each head is wanted", lambda found, right, *_: found.keys() != right.keys()),
        Slip("not all are right. Is q read off head(features) by target.logits? Are its partners at t + o?",
             lambda found, right, *_: {kind(each) for each in found.values()} == {"a number"}),
    ]  # fmt: skip
    case = suspects(variant)
    check(answer, best_offsets, [(case.heads, case.target, case.features)], slips, name="learned_offsets")
