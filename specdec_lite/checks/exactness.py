"""Checks for the exercises of notebook 02: acceptance, residual, and exact laws."""

from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from ..distributions import overlap
from ..distributions import residual as right_residual
from ..randomness import Randomness, enumerate_outcomes
from .core import CheckFailed, Given, Slip, ask, check, dice, kind, law, laws, like, passed, same, show

Law = Float[Tensor, " vocab"]
Rule = Callable[[Law, Law, Randomness], int | Tensor]

EDGES = {  # what random laws never show
    "equal": ([0.5, 0.3, 0.2], [0.5, 0.3, 0.2]),
    "q is 0 somewhere": ([0.5, 0.3, 0.2], [0.0, 0.7, 0.3]),
    "p is 0 somewhere": ([0.0, 0.6, 0.4], [0.5, 0.3, 0.2]),
    "both one-hot": ([0.0, 1.0, 0.0], [1.0, 0.0, 0.0]),
    "p one-hot": ([0.0, 1.0, 0.0], [0.4, 0.4, 0.2]),
}


def given(variant: int = 0) -> Given:
    """p and q over three tokens, in fractions."""
    chance = dice("02", variant)
    p, q = law(chance, 3), law(chance, 3)
    while p == q:
        q = law(chance, 3)
    return Given(p=p, q=q)


def check_by_hand(answer: Callable, given: Given) -> None:
    """Acceptance, and the law of the recovered token, in fractions, for the numbers of the variant."""
    p, q = given.p, given.q
    alpha = sum(map(min, p, q))
    left = [max(a - b, 0) / (1 - alpha) for a, b in zip(p, q, strict=True)]
    slips = [
        Slip("return two things: alpha, and a list of three chances, one for each token",
             lambda found, right: not (isinstance(found, tuple | list) and [kind(each) for each in found]
                                       == ["a number", "a list of 3"])),
        like("alpha is right; what is left of p does not sum to 1 yet. Divide it by its sum, 1 - alpha",
             lambda: (alpha, [max(a - b, 0) for a, b in zip(p, q, strict=True)])),
        like("alpha is the sum of the smaller ones; this is the rest, the chance of a rejection",
             lambda: (1 - alpha, left)),
        like("alpha is right; recovered is what p has beyond q, and this is what q has beyond p",
             lambda: (alpha, [max(b - a, 0) / (1 - alpha) for a, b in zip(p, q, strict=True)])),
        like("alpha is right; a recovered token is not drawn from p, but from what p has beyond q",
             lambda: (alpha, p)),
        Slip("right, but rounded: write fractions, as Fraction(7, 20)",
             lambda found, right: same(list(found), list(right), 0.006)),
        Slip("alpha is not right yet. Under each token, which of p and q is smaller? Sum these",
             lambda found, right: not same(found[0], alpha)),
        Slip("alpha is right; the recovered token's chances are not. What has p beyond q, token by token, or 0? "
             "Divide each by the sum of the three", lambda found, right: same(found[0], alpha)),
    ]  # fmt: skip
    check(answer, lambda: (alpha, left), [()], slips, name="by_hand")


def pairs_of_laws(seed: int) -> list[tuple[Law, Law]]:
    """Pairs (p, q): the edge cases first, then random ones over 2 to 6 tokens."""
    edges = [tuple(torch.tensor(each, dtype=torch.float64) for each in pair) for pair in EDGES.values()]
    return edges + [(laws(10 * seed + n, n), laws(10 * seed + n + 5, n)) for n in range(2, 7)]  # type: ignore[return-value]


def check_acceptance(answer: Callable, seed: int = 0) -> None:
    """The chance that a drafted token is accepted."""
    slips = [
        like("this is the total variation, the chance of a rejection", lambda p, q: 1 - overlap(p, q)),
        like("this is the sum of p*q: the chance that two separate draws agree", lambda p, q: float((p * q).sum())),
        like("this sums the larger of p and q; accepted and drafted is at most the smaller",
             lambda p, q: float(torch.maximum(p, q).sum())),
        like("this asks whether the favourites agree; that is greedy agreement, not alpha",
             lambda p, q: float(p.argmax() == q.argmax())),
        like("every ratio counts the same here; weigh each by q(x), how often x is drafted",
             lambda p, q: float((p / q).clamp(max=1).mean())),
        like("right, except for a token that neither law has: its ratio is 0/0, NaN. Can you do without the ratio?",
             lambda p, q: float((q * (p / q).clamp(max=1)).sum())),
        Slip("a single number is wanted: sum over the tokens", lambda found, right, p, q: kind(found) != "a number"),
    ]  # fmt: skip
    check(answer, lambda p, q: float(overlap(p, q)), pairs_of_laws(seed), slips, name="acceptance")


def check_accepts(answer: Callable, seed: int = 0) -> None:
    """Whether one drafted token is accepted, given its uniform draw."""
    edges = [(0.0, 0.0, 0.3), (0.0, 0.2, 0.3), (0.5, 0.25, 0.5), (0.99, 0.6, 0.2), (0.7, 0.3, 0.4), (0.8, 0.3, 0.4)]
    chance = dice("02 accepts", seed)
    cases = edges + [(chance.random(), chance.random(), chance.random()) for _ in range(20)]
    slips = [
        like("with u = 0 a token with p = 0 is accepted: the comparison must be strict", lambda u, p, q: u <= p / q),
        like("this is q/p; the ratio is upside down", lambda u, p, q: p > 0 and u < q / p),
        like("u is compared with p alone; a token is accepted with chance p/q", lambda u, p, q: u < p),
        like("this is greedy: it asks only whether p is at least q, and never uses u", lambda u, p, q: p >= q),
        Slip("accepted as often as it should be, but for other u: let the small u accept, not the large ones",
             lambda found, right, u, p, q: found in (1 - u < p / q, 1 - u <= p / q)),
        Slip("this accepts where it should reject, and rejects where it should accept",
             lambda *_: all(bool(answer(u, p, q)) == (u >= p / q) for u, p, q in cases[len(edges) :])),
    ]  # fmt: skip
    check(answer, lambda u, p, q: u < p / q, cases, slips, name="accepts")


def check_residual(answer: Callable, seed: int = 0) -> None:
    """The law of the recovered token."""
    sums = Slip("the result does not sum to 1", lambda found, right, p, q: bool(abs(float(found.sum()) - 1) > 1e-6))
    slips = [
        Slip("NaN where p = q: nothing is left of p, so 0/0. Return p then: nobody is ever rejected there",
             lambda found, right, p, q: bool(found.isnan().any()) and bool((p == q).all())),
        Slip("right, except where p = q: nothing is left of p there, and p itself is to be returned",
             lambda found, right, p, q: bool((p == q).all())),
        like("there are negative entries: cut p - q off at 0 first", lambda p, q: (p - q) / (p - q).sum()),
        like("there are negative entries: cut p - q off at 0 first", lambda p, q: p - q),
        like("this is max(0, q - p); what is missing is where p is larger",
             lambda p, q: (q - p).clamp(min=0) / (q - p).clamp(min=0).sum()),
        like("|p - q| also counts what q has too much of", lambda p, q: (p - q).abs() / (p - q).abs().sum()),
        like("this is p itself: then the draft's taste leaks into the output", lambda p, q: p),
        like("a softmax gives every token a chance, also those that p lacks nothing of",
             lambda p, q: (p - q).clamp(min=0).softmax(-1)),
        sums,
    ]  # fmt: skip
    check(answer, right_residual, pairs_of_laws(seed), slips, name="residual")


def check_written_law(answer: Callable, seed: int = 0) -> None:
    """The law of the first token that any rule of this kind writes: q, what it keeps, what it puts in place."""

    def right(q: Law, keep: Law, recovered: Law) -> Law:
        return q * keep + (1 - (q * keep).sum()) * recovered

    slips = [
        like("accepted tokens only: where are the recovered ones?", lambda q, keep, recovered: q * keep),
        like("each recovered token is weighed with the rejections of that same token; a rejection of ANY token leads "
             "to it, so sum them first", lambda q, keep, recovered: q * keep + q * (1 - keep) * recovered),
        like("1 - keep(x) is a rejection of x once it is drafted; that ANYTHING is rejected has one chance for all x",
             lambda q, keep, recovered: q * keep + (1 - keep) * recovered),
        like("the chance that anything is rejected is one number, the same for all x: sum before you take it from 1",
             lambda q, keep, recovered: q * keep + (1 - q * keep) * recovered),
        like("how often anything is kept is not the sum of keep: a token has to be drafted first, so weigh with q",
             lambda q, keep, recovered: q * keep + (1 - keep.sum()) * recovered),
        like("how often anything is kept is not the mean of keep: weigh with q, how often each is drafted",
             lambda q, keep, recovered: q * keep + (1 - keep.mean()) * recovered),
        like("a token is accepted only if it was drafted first: weigh keep(x) with q(x)",
             lambda q, keep, recovered: keep + (1 - keep) * recovered),
        like("a token is accepted only if it was drafted first: weigh keep(x) with q(x)",
             lambda q, keep, recovered: keep + (1 - keep.sum()) * recovered),
        like("the recovered law is added as if every round ended in a rejection",
             lambda q, keep, recovered: q * keep + recovered),
    ]  # fmt: skip
    cases = [(q, laws(seed + 20 + i, len(q)) * 1.5 % 1, right_residual(p, q))
             for i, (p, q) in enumerate(pairs_of_laws(seed))]  # fmt: skip
    check(answer, right, cases, slips, name="written_law")


def suspects(variant: int = 0) -> dict[str, Rule]:
    """Five rules under letters, in an order of the variant's: some exact, some not."""

    def exact(p: Law, q: Law, chance: Randomness) -> int | Tensor:
        token = chance.categorical(q)
        return token if accepted(chance, p[token] / q[token]) else chance.categorical(right_residual(p, q))

    def from_target(p: Law, q: Law, chance: Randomness) -> int | Tensor:
        return chance.categorical(p)

    def no_residual(p: Law, q: Law, chance: Randomness) -> int | Tensor:
        token = chance.categorical(q)
        return token if accepted(chance, p[token] / q[token]) else chance.categorical(p)

    def two_tries(p: Law, q: Law, chance: Randomness) -> int | Tensor:
        for _ in range(2):
            token = chance.categorical(q)
            if accepted(chance, p[token] / q[token]):
                return token
        return chance.categorical(right_residual(p, q))

    def upside_down(p: Law, q: Law, chance: Randomness) -> int | Tensor:
        token = chance.categorical(q)
        return token if accepted(chance, q[token] / p[token]) else chance.categorical(right_residual(p, q))

    rules = [exact, from_target, no_residual, two_tries, upside_down]
    dice("02 suspects", variant).shuffle(rules)
    for letter, rule in zip("ABCDE", rules, strict=True):
        rule.__qualname__ = f"suspect {letter}"  # what an error message calls it: its name would tell what it does
    return dict(zip("ABCDE", rules, strict=True))


def accepted(chance: Randomness, ratio: Float[Tensor, ""]) -> bool:
    return bool(chance.first_failure(ratio.clamp(max=1).reshape(1)) == 1)


def check_biases(answer: Callable, variant: int = 0) -> None:
    """The total variation between the law of each suspect and the target's."""

    def differences(rule: Rule, p: Law, q: Law) -> Law:
        found = enumerate_outcomes(partial(rule, p, q))
        return (torch.tensor([found.get(x, 0.0) for x in range(len(p))], dtype=torch.float64) - p).abs()

    def each(measure: Callable[[Law], float]) -> Callable:
        return lambda rules, p, q: {name: measure(differences(rule, p, q)) for name, rule in rules.items()}

    def came_out(rules: dict[str, Rule], p: Law, q: Law) -> dict[str, float]:
        laws = {name: enumerate_outcomes(partial(rule, p, q)) for name, rule in rules.items()}
        return {name: sum(abs(law[x] - float(p[x])) for x in law) / 2 for name, law in laws.items()}

    total_variation = each(lambda gap: float(gap.sum() / 2))
    slips = [
        Slip("return a dictionary with a number for every rule that was handed over, under the same names",
             lambda found, right, *_: not isinstance(found, dict) or found.keys() != right.keys()),
        like("a token that never comes out is missing from the law. Its chance is 0, and that is a difference, too",
             came_out),
        like("that is twice the total variation: what is too much in one place is too little in another, so halve it",
             each(lambda gap: float(gap.sum()))),
        like("that is the largest single difference; total variation is half the sum of all",
             each(lambda gap: float(gap.max()))),
        Slip("every rule comes out as exact. With their signs, differences cancel; take each without its sign",
             lambda found, right, *_: all(abs(bias) < 1e-9 for bias in found.values())),
        Slip("close, and not exact: was it counted over many runs? Walk down every branch with enumerate_outcomes",
             lambda found, right, *_: same(found, right, 0.03)),
    ]  # fmt: skip
    rules = {**suspects(variant), "always token 1": lambda p, q, chance: 1}  # the others leave out no token
    check(answer, total_variation, [(rules, laws(variant + 2, 6), laws(variant + 3, 6))], slips, name="biases")


def check_draft_for(answer: Callable, seed: int = 0) -> None:
    """A draft law with a wanted acceptance: many are right, so the answer is judged by what it does."""
    for alpha in (0.3, 0.6, 0.9, 1.0):
        p = laws(seed, 4)
        q = ask(answer, p, alpha, name="draft_for")
        if not isinstance(q, Tensor) or q.shape != p.shape:
            raise CheckFailed("draft_for: return a law over the same tokens as p, a tensor of the same shape")
        if float(q.min()) < 0 or abs(float(q.sum()) - 1) > 1e-9:
            gave = ". A token gave more than it has" if float(q.min()) < 0 else ""
            raise CheckFailed(f"draft_for: {show(q)} is no law: entries of 0 or more that sum to 1{gave}")
        found = float(overlap(p, q))
        if abs(found - alpha) > 1e-9:
            raise CheckFailed(f"draft_for: asked for alpha = {alpha}, your q has {found:.4f}{why(found, alpha)}")
    passed("draft_for", "4 laws")


def why(found: float, alpha: float) -> str:
    """What may be behind a draft law that is accepted too often, as text to append."""
    hints = {
        1 - alpha: ". Alpha was moved, where 1 - alpha is to be moved",
        (1 + alpha) / 2: ". Half of what is needed was moved",
        1.0: ". That is p itself: something has to be moved",
        alpha: ", and a little more or less. Was it calculated in float32? Stay with the dtype of p",
    }
    wide = ". Is the rest spread over tokens of p's? Then a part of it overlaps after all" if found > alpha else ""
    return next((hint for value, hint in hints.items() if abs(found - value) < 1e-6), wide)
