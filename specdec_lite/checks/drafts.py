"""Checks for the exercises of notebook 08: what a draft learns, where it comes from, and which one to take."""

from collections.abc import Callable
from functools import cache, partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ..distributions import overlap
from ..drafters import Draft
from ..randomness import Randomness, enumerate_outcomes
from ..theory import predicted_speedup
from ..verify import verify
from .core import CheckFailed, Given, Slip, ask, check, dice, laws, like, same

Law = Float[Tensor, " vocab"]
Laws = Float[Tensor, "K vocab"]
DraftRule = Callable[[Laws, Randomness], Draft]
Drafts = dict[str, tuple[dict[str, float], float]]  # name -> (alpha on each kind of text, c)

RHYMES = (
    "Fee, fi, fo, fum, I smell the blood of an Englishman. Be he alive, or be he dead, I will have his bones. ",
    "Run, run, as fast as you can! You can't catch me, I'm the gingerbread man. ",
)


def given(variant: int = 0) -> Given:
    """Drafts, a load and v to choose by, such that the draft that agrees best is not the fastest; and a rhyme."""
    chance, kinds = dice("08", variant), ("code", "chat", "stories")

    def alphas(middle: int) -> dict[str, float]:
        return {kind: (middle + chance.randint(-15, 15)) / 100 for kind in kinds}

    while True:
        drafts = {"tiny": (alphas(35), 0.02), "small": (alphas(65), 0.06), "large": (alphas(83), 0.3)}
        code, chat = chance.randint(2, 4), chance.randint(2, 4)
        load = dict(zip(kinds, (code / 10, chat / 10, (10 - code - chat) / 10), strict=True))
        slope = chance.randint(3, 9) / 100
        v = {n: round(1 + slope * (n - 1), 2) for n in range(1, 10)}
        if right_choice(drafts, load, v)[0] in ("tiny", "small"):
            return Given(drafts=drafts, load=load, v=v, rhyme=chance.choice(RHYMES))


def pairs_of_laws(seed: int, *edges: tuple[list[float], list[float]]) -> list[tuple[Law, Law]]:
    """Pairs (p, q): those given, then random ones over 2 to 5 tokens."""
    pairs = [(torch.tensor(p, dtype=torch.float64), torch.tensor(q, dtype=torch.float64)) for p, q in edges]
    return pairs + [(laws(10 * seed + n, n), laws(10 * seed + n + 5, n)) for n in range(2, 6)]


def check_losses(answer: Callable, seed: int = 0) -> None:
    """Forward KL, reverse KL and total variation of two laws, with zeros in them."""

    def right(p: Law, q: Law) -> Float[Tensor, " 3"]:
        forward, reverse = ((torch.xlogy(a, a) - torch.xlogy(a, b)).sum() for a, b in ((p, q), (q, p)))
        return torch.stack([forward, reverse, 1 - overlap(p, q)])

    edges = [([0.5, 0.3, 0.2], [0.0, 0.7, 0.3]), ([0.0, 0.6, 0.4, 0.0], [0.5, 0.3, 0.2, 0.0]), ([0.0, 1.0], [1.0, 0.0])]
    slips = [
        Slip("NaN: what has weight 0 counts as 0 here. torch.xlogy does that for the logarithm of 0, but not for 0/0",
             lambda found, right, *_: bool(found.isnan().any())),
        Slip("right, but rounded: was it calculated in float32?", lambda found, right, *_: same(found, right, 1e-6)),
        like("the KLs have changed places: the forward one weighs with p", lambda p, q: right(p, q)[[1, 0, 2]]),
        like("the third number is twice the total variation: every difference is counted from both sides",
             lambda p, q: right(p, q) * torch.tensor([1, 1, 2])),
        like("the third is alpha; the loss is 1 - alpha", lambda p, q: torch.stack([*right(p, q)[:2], overlap(p, q)])),
        like("bits, not nats: take the natural logarithm",
             lambda p, q: right(p, q) / torch.tensor([2, 2, torch.e], dtype=torch.float64).log()),
        Slip("finite where it is infinite: a token with weight is missing in the other law. Was a small number added?",
             lambda found, right, *_: bool((found.isfinite() & right.isinf()).any()) or same(found, right, 1e-6)),
        like("this is the cross-entropy; a KL is that less the entropy of the law that weighs", lambda p, q:
             torch.stack([-torch.xlogy(p, q).sum(), -torch.xlogy(q, p).sum(), 1 - overlap(p, q)])),
    ]  # fmt: skip
    check(answer, right, pairs_of_laws(seed, *edges), slips, name="losses")


def right_pull(p: Law, q: Law) -> Law:
    short = (q < p).to(q.dtype)
    return q * ((q * short).sum() - short)


def check_pull(answer: Callable, seed: int = 0) -> None:
    """The derivative of 1 - sum min(p, q) by each logit of the draft."""
    edges = [([0.5, 0.3, 0.2], [0.0, 0.7, 0.3]), ([0.0, 0.6, 0.4], [0.5, 0.3, 0.2]), ([0.7, 0.3], [1e-6, 0.999999])]
    slips = [
        like("that is q - p, the pull of the forward KL", lambda p, q: q - p),
        like("the sign is turned round: so alpha changes, and the loss is 1 - alpha", lambda p, q: -right_pull(p, q)),
        like("this is the derivative by q itself. A logit moves all of q: multiply with dq/dz",
             lambda p, q: -(q < p).to(q.dtype)),
        like("raising one logit also lowers every other probability, as the softmax sums to 1: that part is missing",
             lambda p, q: -q * (q < p)),
        like("only the token's own dq/dz, q (1 - q), is counted. It has an effect on the other tokens too",
             lambda p, q: -q * (1 - q) * (q < p)),
        like("twice as much: that is the derivative of sum |p - q|", lambda p, q: 2 * right_pull(p, q)),
    ]  # fmt: skip
    check(answer, right_pull, pairs_of_laws(seed, *edges), slips, name="pull")


def looked_up(context: Int[Tensor, " length"], K: int, max_n: int = 3, slip: str = "") -> list[int]:
    """What the exercise asks for, or what a slip makes of it."""
    text = context.tolist()
    lengths = range(min(max_n, len(text) - 1), {"two": 1, "longest": max_n - 1}.get(slip, 0), -1)
    for n in reversed(lengths) if slip == "shortest" else lengths:
        starts = range(slip == "not 0", len(text) - n + {"at the end": 1, "apart": 1 - n}.get(slip, 0))
        for start in starts if slip == "first" else reversed(starts):
            if text[start : start + n] == text[-n:]:
                source = start if slip == "itself" else start + n
                copied = list(text)
                for i in range(K if source < len(text) else 0):
                    copied.append(copied[source + i])
                return copied[len(text) :][: len(text) - source if slip == "short" else K]
    return []


def check_look_up(answer: Callable, seed: int = 0) -> None:
    """A draft copied from the most recent place of the longest n-gram."""

    def plainly(context: Int[Tensor, " length"], K: int, max_n: int) -> list[int]:
        draft = ask(answer, context, K, max_n, name="look_up")
        tokens = draft.tokens if isinstance(draft, Draft) else None
        if not isinstance(tokens, Tensor) or tokens.is_floating_point():
            raise CheckFailed("look_up: return a Draft; its tokens are a tensor of whole numbers, context[:0] if empty")
        if draft.probs is not None:
            raise CheckFailed("look_up: it reports probs, but nothing was drawn. For chosen tokens probs is None")
        return tokens.tolist()

    chance = dice("08 look_up", seed)
    texts = [[2, 3, 7, 1, 2, 3, 9, 1, 2, 3, 8, 2, 3, 6, 1, 2, 3], [1, 2, 1, 2, 1, 2], [1, 2, 7, 6, 5, 2, 8, 8, 1, 2],
             [5, 5, 5], [4], [3, 1, 4, 1, 5, 9, 3, 1, 4, 2, 4], [7, 7, 7, 3, 7, 7, 7, 4, 7, 7, 7, 7]]  # fmt: skip
    texts += [[chance.randrange(3) for _ in range(chance.randint(4, 14))] for _ in range(8)]
    cases = [(torch.tensor(text), K, max_n) for text in texts for K, max_n in ((4, 3), (1, 2))]
    says = {
        "first": "it takes the first place of the n-gram; the most recent one is wanted",
        "shortest": "it begins with the shortest n-gram; try the longest first, shorten it if there is no place",
        "apart": "an earlier place may overlap with the end of the text: 7 7 is found in 7 7 7, one place back",
        "longest": "only n-grams of max_n tokens are tried: where such a one has no place, try a shorter one",
        "not 0": "place 0, the very first, is never looked at",
        "two": "n-grams of a single token are never tried: go down to n = 1",
        "at the end": "it finds the n-gram at the very end, which is the one it looks for. Nothing follows there",
        "short": "it stops where the text ends; the next token to copy is then the first one just proposed",
        "itself": "it proposes the n-gram itself; what FOLLOWED it is wanted",
    }
    slips = [like(text, partial(looked_up, slip=slip)) for slip, text in says.items()]
    check(plainly, looked_up, cases, slips, name="look_up")


def suspects(variant: int = 0) -> dict[str, DraftRule]:
    """Seven ways to draft, under letters; some bend the law. A token is unsure if q gives it less than 0.3."""

    def drawn(q: Laws, chance: Randomness) -> Draft:
        return Draft(torch.tensor([int(chance.categorical(row)) for row in q], dtype=torch.long), q)

    def sure(draft: Draft) -> Bool[Tensor, " K"]:
        return draft.probs[torch.arange(len(draft.tokens)), draft.tokens] >= 0.3  # type: ignore[index]

    def cut(draft: Draft, n: int) -> Draft:
        return Draft(draft.tokens[:n], draft.probs[:n])  # type: ignore[index]

    def stops_at_flat_law(q: Laws, chance: Randomness) -> Draft:
        return drawn(q[: int((q.amax(-1) >= 0.5).int().cumprod(0).sum())], chance)  # looks at q before it draws

    def stops_after_unsure(q: Laws, chance: Randomness) -> Draft:
        one = drawn(q[:1], chance)
        return Draft(torch.cat([one.tokens, drawn(q[1:], chance).tokens]), q) if sure(one).all() else one

    def drops_from_unsure(q: Laws, chance: Randomness) -> Draft:
        draft = drawn(q, chance)
        return cut(draft, int(sure(draft).int().cumprod(0).sum()))

    def drops_unsure_end(q: Laws, chance: Randomness) -> Draft:
        draft = drawn(q, chance)
        return cut(draft, len(q) if sure(draft)[-1] else len(q) - 1)

    def draws_one_too_many(q: Laws, chance: Randomness) -> Draft:
        return cut(drawn(q, chance), len(q) - 1)

    def draws_again(q: Laws, chance: Randomness) -> Draft:
        tries = [(drawn(row[None], chance), row[None]) for row in q]
        return Draft(torch.cat([(t if sure(t).all() else drawn(row, chance)).tokens for t, row in tries]), q)

    def draws_again_and_says_so(q: Laws, chance: Randomness) -> Draft:
        doubtful = q * (q < 0.3)
        return Draft(draws_again(q, chance).tokens, q - doubtful + doubtful.sum(-1, keepdim=True) * q)

    rules = [stops_at_flat_law, stops_after_unsure, drops_from_unsure, drops_unsure_end,
             draws_one_too_many, draws_again, draws_again_and_says_so]  # fmt: skip
    dice("08 suspects", variant).shuffle(rules)
    return dict(zip("ABCDEFG", rules, strict=True))


def right_bend(rule: DraftRule, p: Float[Tensor, "K+1 vocab"], q: Laws, length: int) -> float:
    """Total variation between the law of the first tokens when the rule's round begins the text, and the target's."""

    def play(chance: Randomness) -> tuple[int, ...]:
        draft = rule(q, chance)
        found = verify(draft.tokens, draft.probs, p[: len(draft.tokens) + 1], chance)
        text = [*draft.tokens.tolist()[: int(found.accepted)], int(found.next_token)]
        return tuple([*text, *(int(chance.categorical(row)) for row in p[len(text) : length])][:length])

    plain = enumerate_outcomes(lambda chance: tuple(int(chance.categorical(row)) for row in p[:length]))
    found = enumerate_outcomes(play)
    return sum(abs(float(found.get(text, 0) - plain.get(text, 0))) for text in found.keys() | plain.keys()) / 2


P, Q = laws(4, 3, 3), torch.tensor([[0.55, 0.25, 0.2], [0.15, 0.4, 0.45]], dtype=torch.float64)


@cache
def bends(variant: int, length: int) -> dict[str, float]:
    """The bend of each suspect: counted once, as it takes a while."""
    return {name: right_bend(rule, P, Q, length) for name, rule in suspects(variant).items()}


def check_bend(answer: Callable, variant: int = 0) -> None:
    """The total variation between the target's law of a text and that under each of the suspects."""
    rules, right = suspects(variant), bends(variant, len(P))
    slips = [
        like("only the first token is compared. Some rules bend the second one", bends(variant, 1).get),
        like("that is twice the total variation: halve the sum", lambda name: 2 * right[name]),
        Slip("a draft that is exact comes out bent. Was it verified with its own probs? They need not be rows of q",
             lambda found, right, name: isinstance(found, float) and right < 1e-12 and found > 1e-3),
        Slip("far too large. Has each text K + 1 tokens, those behind the round drawn from p? Are they plain numbers?",
             lambda found, right, name: isinstance(found, float) and found > right + 0.1),
        Slip("close, and not exact: was it counted over many runs? Walk down every branch with enumerate_outcomes",
             lambda found, right, name: same(found, right, 0.03)),
    ]  # fmt: skip
    found = {name: ask(answer, rule, P, Q, name="bend") for name, rule in rules.items()}
    check(found.get, right.get, [(name,) for name in rules], slips, name="bend")


def right_report(a: Laws, b: Laws, tokens: Int[Tensor, " K"], w: float, slip: str = "") -> Laws:
    a, b, rows, first = (b, a, [], w) if slip == "swapped" else (a, b, [], w)
    for a_row, b_row, token in zip(a, b, tokens, strict=True):
        both = w * a_row + (1 - w) * b_row
        before = {"last": first, "even": 0.5}.get(slip, w)
        new = float(before * a_row[token] / (before * a_row[token] + (1 - before) * b_row[token]))
        new = w * float(a_row[token]) if slip == "undivided" else new
        rows.append(new * a_row + (1 - new) * b_row if slip == "early" else both)
        w = w if slip == "same" else new
    return torch.stack(rows)


def check_reported(answer: Callable, seed: int = 0) -> None:
    """What to report when a hidden coin chose which of two drafters drew the whole draft."""
    chance, cases = dice("08 reported", seed), []
    for i, (K, vocab) in enumerate([(1, 3), (2, 3), (3, 4), (4, 2)]):
        a, b, w = laws(9 * seed + i, K, vocab), laws(9 * seed + i + 50, K, vocab), chance.choice([0.2, 0.35, 0.7])
        cases.append((a, b, torch.tensor([chance.randrange(vocab) for _ in range(K)]), w))
        sure = torch.nn.functional.one_hot(torch.tensor([chance.randrange(vocab) for _ in range(K)]), vocab).double()
        cases += [(sure, b, (sure.argmax(-1) + miss) % vocab, w) for miss in (0, 1)]  # a looks up: was it at work?
    says = {
        "same": "every row gives a the same share. Earlier tokens say something about who draws: let the share learn",
        "early": "a row knows its own token already. Row i is the law of token i BEFORE it is drawn",
        "undivided": "the new share of a is not divided by the token's chance under both: the shares must sum to 1",
        "last": "only the token just before the row counts. The share keeps what it has learned before",
        "even": "a and b start from equal shares again after each token; weigh with the share that there was before it",
    }
    slips = [like(text, partial(right_report, slip=slip)) for slip, text in says.items()]
    slips.append(like("w and 1 - w have changed places: w is the chance of a", partial(right_report, slip="swapped")))
    sums = Slip("a row does not sum to 1; the shares of a and b must", lambda found, right, *_:
                found.shape == right.shape and not same(found.sum(-1), right.sum(-1)))  # fmt: skip
    check(answer, right_report, cases, [*slips, sums], name="reported")


def right_choice(drafts: Drafts, load: dict[str, float], v: dict[int, float], slip: str = "") -> tuple[str, int, float]:
    """The draft and K that take least time over the load, plain decoding among them; or what a slip takes."""
    means = {name: sum(share * alphas[kind] for kind, share in load.items()) for name, (alphas, _) in drafts.items()}
    found = {("none", 0): 1.0}
    for name, (alphas, c) in drafts.items():
        if slip == "most alike" and means[name] < max(means.values()):
            continue
        if slip == "mean alpha":
            alphas = dict.fromkeys(alphas, means[name])
        for K in range(1, max(v)):
            cost = c, 1.0 if slip == "free" else v[K if slip == "one early" else K + 1]
            each = [(share, predicted_speedup(alphas[kind], K, *cost)) for kind, share in load.items()]
            mean = sum(share * speedup for share, speedup in each)
            found[name, K] = mean if slip == "mean speedup" else 1 / sum(share / speedup for share, speedup in each)
    name, K = max(found, key=found.__getitem__)
    return name, K, found[name, K]


def check_choose(answer: Callable, numbers: Given, seed: int = 0) -> None:
    """The draft and the K that are fastest over a load of several kinds of text."""
    others = [given(10 * seed + 3001 + i) for i in range(4)]
    cases = [(each.drafts, each.load, each.v) for each in (numbers, *others)]
    cases.append((numbers.drafts, {"chat": 1.0}, {n: numbers.v[n] for n in range(1, 8)}))  # one kind, a short v
    dear = {name: (alphas, 3 * max(alphas.values())) for name, (alphas, _) in numbers.drafts.items()}
    says = {
        "most alike": "it takes the draft with the highest alpha; take the one that is fastest over all",
        "mean speedup": "speedups are averaged. Shares are shares of the TOKENS: what adds up over tokens is time, 1/S",
        "mean alpha": "alphas are averaged first, and E is no straight line in alpha: take each kind of text by itself",
        "one early": "K draft tokens make a target pass over K + 1 tokens: v is looked up one place too early",
        "free": "v is not used: a target pass over K + 1 tokens takes longer than one over a single token",
    }
    slips = [like(text, partial(right_choice, slip=slip)) for slip, text in says.items()]
    none = "when every draft is slower than plain decoding, the answer is ('none', 0, 1.0)"
    slips.append(Slip(none, lambda found, right, *_: right[0] == "none"))
    slips.append(Slip("this is time; the speedup is 1 over it", lambda found, right, *_: same(found[2], 1 / right[2])))
    check(answer, right_choice, [*cases, (dear, numbers.load, numbers.v)], slips, name="choose")
