"""Checks for the exercises of notebook 12: what the layer reads, its loss, confident trees, suspects, and what pays."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from ..randomness import enumerate_outcomes
from .core import CheckFailed, Given, Slip, ask, attempting, check, dice, laws, like, passed, same, show
from .faulty_drafters import Path, Play, suspects


class Method(NamedTuple):
    """A way to draft: how often each depth is accepted, once it is reached, and what a pass costs in plain steps."""

    rates: tuple[float, ...]
    c: float
    parallel: bool = False  # one pass drafts all depths, as Medusa's


def given(variant: int = 0) -> Given:
    """A run to follow by hand, a text, and measured rates on two machines."""
    chance = dice("12", variant)
    draft, eagle, medusa = (round(rate + chance.randrange(-3, 4) / 100, 2) for rate in (0.75, 0.78, 0.36))

    def methods(c_draft: float, c_eagle: float, c_medusa: float) -> dict[str, Method]:
        heads = Method((medusa, round(medusa / 2, 2)), c_medusa, parallel=True)
        return {"draft model": Method((draft,) * 6, c_draft), "EAGLE": Method((eagle,) * 6, c_eagle), "Medusa": heads}

    return Given(
        text=chance.choice(["There was a king who had", "The old woman said to the"]), length=chance.randrange(15, 40),
        K=chance.choice([3, 4, 5]), accepted=[chance.randrange(4) for _ in range(3)],
        slope=chance.choice([0.06, 0.07, 0.08]), here=methods(0.21, 0.31, 0.17), at_70B=methods(0.096, 0.018, 0.012),
    )  # fmt: skip


def check_catching_up(answer: Callable, given: Given) -> None:
    """After each round: how many slots hold guesses, and which true pairs are read next."""

    def rounds(first: int = -1, last: int = 0, ahead: int = 1) -> list[tuple]:
        length, found = given.length, []
        for accepted in given.accepted:
            pairs = [(t, t + ahead) for t in range(length + first, length + accepted + last)]
            found.append((given.K - 1, pairs))
            length += accepted + 1
        return found

    slips = [
        Slip("the pairs are right. The slots: which guesses are fed to draft the next one, accepted later or not?",
             lambda found, right: len(found) and same([each[1] for each in found], [each[1] for each in right])),
        like("a pair is a feature and the token AFTER it, not its own", lambda: rounds(ahead=0)),
        like("the first pair is missing: the last token before a round is read IN the round", lambda: rounds(first=0)),
        like("the last pair is missing: the target's own token, and the feature before it", lambda: rounds(last=-1)),
        like("a pair is too many: the token that the target wrote itself has no feature yet", lambda: rounds(last=1)),
        Slip("the first entry is right, a later one is not. How many tokens does the text have when its round begins?",
             lambda found, right: len(found) == 3 and same(found[0], right[0])),
        Slip("not yet. What did the target read in the first of these rounds?", lambda found, right: len(found) == 3),
    ]  # fmt: skip
    check(answer, rounds, [()], slips, name="catching_up")


def check_eagle_loss(answer: Callable, seed: int = 0) -> None:
    """What the layer is given, then the value of the loss, then who learns."""
    for width, vocab, length in ((3, 5, 6), (4, 7, 9)):
        drawn = partial(torch.randn, generator=torch.Generator().manual_seed(seed + width), dtype=torch.float64)
        head, features, embedded = (drawn(n, width) for n in (vocab, length, length))
        matrix, read = drawn(2 * width, width).requires_grad_(), list[Tensor]()
        frozen = [each.clone().requires_grad_() for each in (head, features)]

        def layer(inputs: Tensor, matrix: Tensor = matrix, read: list = read) -> Tensor:
            read.append(inputs.detach())
            return inputs @ matrix

        with attempting("eagle_loss"):
            loss = answer(layer, *(each * 1 for each in frozen), embedded, 0.3)
            if not isinstance(loss, Tensor) or loss.dim() or not read:
                raise CheckFailed(
                    f"eagle_loss: {'return the loss, a tensor' if read else 'the layer was never called'}"
                )
            learns = torch.autograd.grad(loss, [matrix, *frozen], allow_unused=True) if loss.requires_grad else [None]
        whole = read[0].shape == (length - 1, 2 * width)  # else each pair may have come alone
        pairs = read[0] if whole else torch.cat([each.view(-1, 2 * width) for each in read])
        fault = input_slip(pairs, features, embedded)
        fault, right = (fault, loss) if fault else value_slip(loss, pairs @ matrix, head, features)
        if not fault:
            if any(each is not None and bool(each.any()) for each in learns[1:]):
                fault = "the value is right, but the target learns, too. Freeze head and features"
            elif learns[0] is None or not same(learns[0], torch.autograd.grad(right, matrix)[0], 1e-6):
                fault = "the value is right, but a part of it teaches the layer nothing. Did you detach too much?"
        if fault:
            raise CheckFailed(f"eagle_loss: {fault}")
    passed("eagle_loss", "2 layers")


def input_slip(read: Tensor, f: Tensor, e: Tensor) -> str:
    """What is wrong with what the layer was given, "" for nothing."""
    slips = {
        "": (f[:-1], e[1:]),
        "each feature comes with its own token. The layer has to be told the one after it": (f[:-1], e[:-1]),
        "the layer is given the very feature that it has to guess": (f[1:], e[1:]),
        "the last feature has no partner: no token comes after it, and no feature": (f, e),
        "first the feature, then the token: the layer tells them by their places": (e[1:], f[:-1]),
    }
    other = "the layer was not given the pairs (feature t, token t + 1), in this order"
    return next((says for says, parts in slips.items() if same(read, torch.cat(parts, -1))), other)


def value_slip(loss: Tensor, guesses: Tensor, head: Tensor, features: Tensor) -> tuple[str, Tensor]:
    """What is wrong with the value of the loss, "" for nothing; and the right one."""
    log_q, wanted = (guesses @ head.T).log_softmax(-1), features[1:]
    p, own = ((f @ head.T).softmax(-1) for f in (wanted, features[:-1]))
    near, cross = F.smooth_l1_loss(guesses, wanted), -(p * log_q).sum(-1).mean()
    early = F.smooth_l1_loss(guesses, features[:-1]) - 0.3 * (own * log_q).sum(-1).mean()
    hard, kl = F.nll_loss(log_q, p.argmax(-1)), F.kl_div(log_q, p, reduction="batchmean")
    slips = {
        "": near + 0.3 * cross,
        "guess t is of feature t + 1; here it is held against feature t, which the layer was given": early,
        "the distance is squared everywhere; smooth L1 is linear far out": F.mse_loss(guesses, wanted) + 0.3 * cross,
        "the weight is on the distance; it belongs to the cross-entropy": 0.3 * near + cross,
        "only the target's favourite is learned; the cross-entropy is with its whole law": near + 0.3 * hard,
        "this is KL; the cross-entropy is larger, by the entropy of p": near + 0.3 * kl,
    }  # fmt: skip
    other = f"the layer is given the right pairs; the loss is {show(loss)}, and should be {show(slips[''])}"
    return next((says for says, value in slips.items() if same(loss, value, 1e-6)), other), slips[""]


class Confidence:
    """A layer's laws after every path, made up. It counts how often it is asked."""

    def __init__(self, seed: int, vocab: int):
        self.seed, self.vocab, self.asked = seed, vocab, 0

    def __call__(self, path: Path) -> Float[Tensor, " vocab"]:
        self.asked += 1
        weights = laws(hash((self.seed, *path)) % 2**31, self.vocab) ** 2
        return weights / weights.sum()

    def of(self, path: Path) -> float:
        return self.of(path[:-1]) * float(self(path[:-1])[path[-1]]) if path else 1.0


def right_best_first(law_after: Callable, nodes: int) -> dict[Path, float]:
    kept, reach, best, sure = dict[Path, float](), dict[Path, float](), Path(), 1.0
    for _ in range(nodes):
        reach |= {(*best, x): sure * chance for x, chance in enumerate(law_after(best).tolist())}
        best = max(reach, key=reach.__getitem__)
        kept[best] = sure = reach.pop(best)
    return kept


def check_best_first(answer: Callable, seed: int = 0) -> None:
    """The most confident nodes of all, with no more questions than nodes."""
    for vocab, nodes in ((3, 1), (3, 6), (4, 12), (6, 20)):
        layer = Confidence(seed + nodes, vocab)
        found = ask(answer, layer, nodes, name="best_first")
        asked, right = layer.asked, right_best_first(layer, nodes)
        if not isinstance(found, dict) or not all(isinstance(path, tuple) and path for path in found):
            raise CheckFailed("best_first: return {path: confidence}; a path is a tuple of 1 or more tokens")
        if fault := tree_slip(found, right, layer):
            raise CheckFailed(f"best_first: {fault}")
        if asked > nodes:
            raise CheckFailed(f"best_first: right, but {asked} passes for {nodes} nodes. Which are not needed?")
    passed("best_first", "4 trees")


def tree_slip(found: dict[Path, float], right: dict[Path, float], layer: Confidence) -> str:
    """How a tree misses, "" if it does not."""
    if same(found, right, 1e-6):
        return ""
    if len(found) != len(right):
        return f"{len(found)} nodes; {len(right)} are asked for"
    if len(found) > 1 and all(same(sure, float(layer(path[:-1])[path[-1]]), 1e-6) for path, sure in found.items()):
        return "this is the last probability alone; a confidence is the product of all on the way"
    if odd := [path for path, sure in found.items() if not same(sure, layer.of(path), 1e-6)]:
        return f"{odd[0]} has confidence {show(found[odd[0]])} here; the product on its way is {show(layer.of(odd[0]))}"
    missed = max(right.keys() - found.keys(), key=right.__getitem__)
    why = "It is deeper than all you kept" if len(missed) > max(map(len, found)) else "It is better than one you kept"
    return f"{missed}, with confidence {show(right[missed])}, is left out. {why}. No width and no depth is a limit here"


def right_judge(plain: Play, suspects: dict[str, Play], scale: float = 0.5) -> dict:
    """{name: (total variation from plain decoding, mean rounds)}."""

    def laws_of(play: Play) -> tuple[dict, float]:
        texts, mean = dict[Path, float](), 0.0
        for (text, rounds), chance in enumerate_outcomes(play).items():
            texts[text] = texts.get(text, 0) + chance
            mean += rounds * chance
        return texts, mean

    truth, found = laws_of(plain)[0], {}
    for name, play in suspects.items():
        law, rounds = laws_of(play)
        found[name] = scale * sum(abs(law.get(text, 0) - truth.get(text, 0)) for text in law | truth), rounds
    return found


def check_judge(answer: Callable, variant: int = 0) -> None:
    """Bias and rounds of every suspect."""
    slips = [
        like("that is twice the total variation: halve the sum", partial(right_judge, scale=1.0)),
        Slip("one pair for each suspect is wanted: {name: (total variation, mean rounds)}",
             lambda found, right, *_: found.keys() != right.keys()),
        Slip("first the total variation, then the rounds", lambda found, right, *_: same(found["A"], right["A"][::-1])),
        Slip("the rounds are right. As to the laws: a text that comes in 1 round and in 2 is one; one may be missing",
             lambda found, right, *_: all(same(found[name][1], right[name][1]) for name in right)),
        Slip("the distances are right. In the mean number of rounds each outcome counts with its chance",
             lambda found, right, *_: all(same(found[name][0], right[name][0]) for name in right)),
    ]  # fmt: skip
    check(answer, right_judge, [suspects(variant)], slips, tolerance=1e-6, name="judge")


def check_sharpness(answer: Callable, seed: int = 0) -> None:
    """The temperature at which the layer's laws fit a greedy target."""

    def by(score: Callable, choose: Callable = min) -> Callable:
        return lambda logits, f, Ts: choose(Ts, key=lambda T: float(score(logits / T, f)))

    right = by(F.cross_entropy)
    slips = [
        like("this is the worst of them: surprise has to be small", by(F.cross_entropy, max)),
        like("logits are divided by a temperature", lambda logits, f, Ts: 1 / right(logits, f, [1 / T for T in Ts])),
        like("this is the surprise; return the temperature at which it is least",
             lambda x, f, Ts: min(float(F.cross_entropy(x / T, f)) for T in Ts)),
        like("how often the favourites agree is the same at every temperature", by(lambda x, f: 0.0)),
        like("mean chances reward overconfidence; use logarithms", by(lambda x, f: F.nll_loss(x.softmax(-1), f))),
        like("F.cross_entropy makes the softmax itself", by(lambda x, f: F.cross_entropy(x.softmax(-1), f))),
        like("the smallest temperature, whatever the target took. Where are its favourites?", lambda x, f, Ts: min(Ts)),
        like("the largest temperature comes out. Are the logits divided, and then the law taken?",
             lambda x, f, Ts: max(Ts)),
    ]  # fmt: skip
    cases, dice, Ts = [], torch.Generator().manual_seed(seed), [0.5, 0.2, 2.0, 0.35, 1.0, 0.75, 1.5]
    for turn, sharp in enumerate((0.4, 0.7, 1.0, 1.6)):
        logits = 2 * torch.randn(400, 6, generator=dice, dtype=torch.float64)
        drawn = torch.multinomial((logits / sharp).softmax(-1), 1, generator=dice)[:, 0]
        drawn = torch.where(torch.rand(400, generator=dice) < 0.3 * turn, logits.topk(2).indices[:, 1], drawn)
        cases.append((logits, drawn, Ts[turn:] + Ts[:turn]))
    check(answer, right, cases, slips, tolerance=1e-6, name="sharpness")


def right_fastest(
    methods: dict, v: dict, *, root=1, chained=True, each=False, once=False, E=1.0, least=1.0, early=False
) -> tuple:
    """(method, K, speedup); the options are slips."""
    best = ("plain decoding", 0, least)
    for name, (rates, c, parallel) in methods.items():
        tokens, reached, last = E, 1.0, 0.0
        for K, rate in enumerate(rates, start=1):
            reached *= rate
            tokens += reached if chained else rate
            speedup = tokens / (v[K + root] + (c if once or (parallel and not each) else K * c))
            if early and speedup < last:
                break
            best, last = max(best, (name, K, speedup), key=lambda row: row[2]), speedup
    return best


def check_fastest(answer: Callable, given: Given) -> None:
    """Method and draft length of the largest speedup."""
    wrong = {
        "depth 2 is reached only through depth 1: multiply the rates": {"chained": False},
        "the pass reads the drafted tokens and the one before them": {"root": 0},
        "a parallel drafter takes one pass, however many tokens it drafts": {"each": True},
        "EAGLE and a draft model run once for every token; only a parallel drafter runs once": {"once": True},
        "a round writes one token that is not drafted, too: E begins at 1": {"E": 0.0},
        "plain decoding is a choice as well, with a speedup of 1": {"least": 0.0},
        "v may rise in steps: after a K that is worse a larger one may be better": {"early": True},
    }
    slips = [like(says, partial(right_fastest, **options)) for says, options in wrong.items()]  # type: ignore[arg-type]
    flat, line, steep = ({n: 1 + slope * (n - 1) for n in range(1, 10)} for slope in (0, given.slope, 1))
    stairs = flat | dict.fromkeys(range(3, 10), 1.6)
    heads = {"EAGLE": Method((0.9, 0.5, 0.9, 0.2), 0.1), "Medusa": Method((0.8, 0.7, 0.6), 0.2, parallel=True)}
    cases = [(given.here, line), (given.at_70B, flat), (heads, flat), (given.here, steep), (given.at_70B, stairs)]
    check(answer, right_fastest, cases, slips, tolerance=1e-6, name="fastest")
