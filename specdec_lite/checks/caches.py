"""Checks for the exercises of notebook 04: what two caches hold, what they cost, and tests that find their faults."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, NoReturn

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..bench import PROMPTS
from ..decoding import autoregressive
from ..distributions import GREEDY, Sampling
from ..drafters import Draft
from ..drafters.model import ModelDrafter
from ..gpt2 import SIZES, GPT2Config
from ..models import LanguageModel
from ..pairs import load_pair
from ..randomness import Randomness
from .core import CheckFailed, Given, Slip, ask, attempting, check, dice, like, number, passed

tiny: Callable[[], Any] = lru_cache(partial(load_pair, "tiny"))


def given(variant: int = 0) -> Given:
    """A prompt; rounds as (K, accepted) after so many tokens; two models and a budget in MiB for their caches."""
    chance = dice("04", variant)
    rounds = [(3, 3), (3, 3), (3, 0), (3, chance.randint(1, 2)), (0, 0), (0, 0), (2, 2), (chance.randint(4, 6), 1)]
    chance.shuffle(rounds)
    prompt, length, budget = chance.choice(list(PROMPTS.values())), chance.randint(4, 9), chance.randint(40, 90)
    target, draft = chance.choice(["gpt2-medium", "gpt2-large", "gpt2-xl"]), chance.choice(["distilgpt2", "gpt2"])
    return Given(prompt=prompt, length=length, rounds=rounds, target=target, draft=draft, budget=budget)


def fail(name: str, says: str) -> NoReturn:
    raise CheckFailed(f"{name}: {says}")


def room(length: int, K: int, left: int, draft: int, target: int, unfed: int = 1, own: int = 1, extra: int = 0) -> int:
    return max(0, min(K, left - own, draft - length + unfed, target - length + extra))


def check_may_draft(answer: Callable, seed: int = 0) -> None:
    """How many tokens a round may draft, near the end of the text and of two contexts."""
    chance = dice("04 room", seed)
    cases: list[tuple] = [
        (10, 4, 20, 64, 64), (10, 4, 3, 64, 64), (10, 4, 1, 64, 64), (62, 4, 20, 64, 512), (64, 4, 20, 64, 512),
        (65, 4, 20, 64, 512), (70, 4, 20, 64, 512), (62, 4, 20, 512, 64), (64, 4, 20, 512, 64), (9, 0, 5, 64, 64),
    ]  # fmt: skip
    for _ in range(15):
        length, K, left, *more = (chance.randint(low, high) for low, high in ((1, 30), (1, 8), (1, 8), (0, 6), (0, 6)))
        cases.append((length, K, left, length + more[0], length + more[1]))
    slips = [
        like("one too few near the draft's limit: it never feeds the last token that it drafts",
             partial(room, unfed=0)),
        like("one too many: the round also writes a token of the target's, so it may draft left - 1",
             partial(room, own=0)),
        like("the target has a limit too, and it reads every token drafted",
             lambda length, K, left, draft, target: room(length, K, left, draft, 10**9)),
        like("the draft has a limit too, and its context is often the shorter",
             lambda length, K, left, draft, target: room(length, K, left, 10**9, target)),
        like("one too many near the target's limit: unlike the draft, it reads all that is drafted, the last one too",
             partial(room, extra=1)),
        like("one too few near the target's limit: its bonus comes out of the last row, and need not fit",
             partial(room, extra=-1)),
        like("a negative number of tokens: where the text is longer than the draft can hold, it drafts none",
             lambda length, K, left, draft, target: min(K, left - 1, draft - length + 1, target - length)),
    ]  # fmt: skip
    check(answer, room, cases, slips, name="may_draft")


def right_lacks(length: int, rounds: list[tuple[int, int]], unfed: int = 1, cached: int = 0) -> list[int]:
    lacks = []
    for K, accepted in rounds:
        cached = min(length + K - unfed if K else cached, length + accepted)
        length += accepted + 1
        lacks.append(length - cached)
    return lacks


def check_draft_lacks(answer: Callable, given: Given) -> None:
    """How many committed tokens the draft has not read after each round."""
    chance = dice("04 lacks", given.length)
    cases = [(given.length, given.rounds), (5, [(4, 4)]), (5, [(4, 3), (4, 0)]), (5, [(0, 0), (0, 0), (3, 2)])]
    for Ks in ([chance.choice((0, 1, 3, 4)) for _ in range(6)] for _ in range(10)):
        cases.append((chance.randint(2, 9), [(K, chance.choice((K, chance.randint(0, K)))) for K in Ks]))
    slips = [
        like("one too few: the newest token, which nobody has read yet, is lacking as well",
             lambda length, rounds: [lacks - 1 for lacks in right_lacks(length, rounds)]),
        Slip("after a draft kept whole it lacks one more: its last token came out of its last pass and was never fed",
             lambda found, _, length, rounds: found in (right_lacks(length, rounds, unfed=0), [1] * len(rounds))),
        like("both caches are empty at first; until the draft drafts, it has read nothing of the text",
             lambda length, rounds: right_lacks(length, rounds, cached=length)),
        like("in a round with K = 0 the draft reads nothing; what it lacks grows by one",
             lambda length, rounds: [2 if K and accepted == K else 1 for K, accepted in rounds]),
        like("rounds with K = 0 add up: each leaves one token more that the draft has not read",
             lambda length, rounds: [2 if accepted == K else 1 for K, accepted in rounds]),
    ]  # fmt: skip
    check(answer, right_lacks, cases, slips, name="draft_lacks")


def check_Memory(answer: type, seed: int = 0) -> None:
    """A cache of the learner's own: contents, addresses, and what it refuses."""
    rows = torch.randn(20, 3, generator=torch.Generator().manual_seed(seed))

    def expect(right: Tensor, says: str) -> None:
        if not isinstance(found := memory.held, Tensor) or (found.shape[1:], found.dtype) != ((3,), right.dtype):
            fail("Memory", "`held` should be a float32 tensor of shape [length, width]")
        if (len(memory.held), len(right)) == (12, 5):
            fail("Memory", "`held` shows every slot, also those that hold nothing valid")
        if not torch.equal(memory.held, right):
            fail("Memory", says)

    def stays(at: int, says: str) -> None:
        if memory.held.data_ptr() != at:
            fail("Memory", says)

    with attempting("Memory"):
        memory = answer(12, 3)
        memory.append(rows[:5])
        expect(rows[:5], "after the first append `held` is not what was appended")
        seen = memory.held
        stays(seen.data_ptr(), "`held` makes a copy at every call; a view costs nothing")
        memory.append(rows[5:7])
        expect(rows[:7], "after the second append `held` is not all that was appended")
        stays(seen.data_ptr(), "append moved what was there. Make the block once, at full size, and write into it")
        seen = memory.held
        memory.rollback(4)
        expect(rows[:4], f"rollback(4) of 7 rows should keep the first 4; it holds {len(memory.held)}")
        if not torch.equal(seen, rows[:7]):
            fail("Memory", "rollback wrote something, so it costs more the more it forgets. Nobody reads those rows")
        memory.rollback(4)
        expect(rows[:4], f"rollback(4) of 4 rows should keep all 4; it holds {len(memory.held)}. Is there a [:-0]?")
        memory.append(rows[10:13])
        kept = torch.cat([rows[:4], rows[10:13]])
        expect(kept, "what is appended after a rollback belongs right behind what was kept")
        stays(seen.data_ptr(), "after the rollback the rows lie elsewhere: something was copied")
    too_much: dict[str, Callable] = {"append of 6 rows to 7 of 12": lambda: memory.append(rows[:6])}
    too_much |= {f"rollback({n}) of 7 rows": partial(memory.rollback, n) for n in (8, -1)}
    for what, call in too_much.items():
        with attempting(f"Memory: {what} should raise a ValueError. It"), suppress(ValueError):
            call()
            fail("Memory", f"{what} should raise a ValueError, and did not")
        expect(kept, f"{what} was refused, but it has changed what is held")
    with attempting("Memory, filled to its last slot,"):
        memory.append(rows[:5])
        expect(torch.cat([kept, rows[:5]]), "the last slot cannot be used")
    passed("Memory", "contents, addresses, refusals")


class Reader:
    """A model that counts its passes and the tokens that it reads."""

    def __init__(self, model: LanguageModel):
        self.model, self.passes, self.read = model, 0, 0

    def __call__(self, tokens: Tensor, *arguments: Any, **options: Any) -> Tensor:
        self.passes, self.read = self.passes + 1, self.read + tokens.shape[-1]
        return self.model(tokens, *arguments, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def check_cached_round(answer: Callable, given: Given) -> None:
    """Rounds with two caches: the text, both lengths, what was read, and whether a target accepts itself."""
    pair = tiny()
    plain = autoregressive(pair, given.prompt, max_new_tokens=48, sampling=GREEDY, eos_token_id=[])
    for draft, Ks in ((pair.draft, (2, 3, 1, 0, 0, 4, 2, 1, 3, 5)), (pair.target, (1, 3, 0, 2, 4))):
        target, draft = Reader(pair.target), Reader(draft)
        text, right = list(plain.prompt_tokens), plain.prompt_tokens + plain.tokens
        caches = target.new_cache(128), draft.new_cache(128)
        for K in Ks:
            text += (new := one_round(answer, target, draft, caches, text, K))
            if text != right[: len(text)]:
                fail("cached_round", f"it wrote {new}, the target something else: wrong rows, or rubbish in its cache?")
            if draft.model is pair.target and len(new) != K + 1:
                fail("cached_round", "a target that drafts for itself gives K + 1 tokens. No bonus? Or a wrong cache?")
    passed("cached_round", "text, lengths, tokens read, self-draft")


def one_round(answer: Callable, target: Reader, draft: Reader, caches: tuple, text: list[int], K: int) -> list[int]:
    """One round of the learner's, and what has to be true after it."""
    before, (held, drafts) = len(text), (cache.length for cache in caches)
    read, passes, drafted, looks = target.read, draft.passes, draft.read, target.passes
    try:
        with attempting("cached_round"):  # it may return what is no list
            new = list(map(int, ask(answer, target, draft, *caches, text, K, name="cached_round")))
    except CheckFailed as error:
        if "cannot roll back" in str(error):
            fail("cached_round", "a rollback to more than a cache holds: the draft's has at most L + K - 1")
        raise
    after, (now, drafts_now) = before + len(new), (cache.length for cache in caches)
    read, passes, drafted = target.read - read, draft.passes - passes, draft.read - drafted
    due, lacked = before + K - held, before - drafts + K - 1 if K else 0
    wrong = {
        f"a round with K = {K} gave {len(new)} tokens; it gives 1 to K + 1": not 1 <= len(new) <= K + 1,
        f"the target made {target.passes - looks} passes; one judges the whole draft": target.passes != looks + 1,
        f"the target read {read} tokens; feed the {due} that were missing, with the draft": read != due,
        f"after {after} tokens the target's cache holds {now}; rejected tokens are still in it": now >= after,
        f"after {after} tokens the target's cache holds {now}; it lacks more than the newest": now < after - 1,
        f"the draft made {passes} passes for K = {K}; its last token need not be fed yet": passes > K,
        f"the draft read {drafted} of {lacked} tokens: after a draft kept whole it lacks two": drafted == lacked - 1,
        f"the draft read {drafted} tokens; {lacked} were missing, or drafted and needed": drafted < lacked,
        f"the draft read {drafted} tokens; feed only the {lacked} that were missing": drafted > lacked,
        "rejected tokens are still in the draft's cache": drafts_now >= after,
        "the draft's cache forgets more than it must": drafts_now < min(drafts + lacked, after - 1),
    }
    for says, is_so in wrong.items():
        if is_so:
            fail("cached_round", says)
    return new


KINDS = {  # of drafters, and what is said of a test that is wrong about one
    "library's": "it calls the library's drafter broken. Is row i about token i + 1? Rounding allowed? All committed?",
    "rereads": "it calls a drafter broken that reads all anew. That is slow, not wrong: compare proposals, not lengths",
    "feeds newest": "it passes a drafter with a hole in its cache. When does it tear? Play a round after that one",
    "forgets nothing": "it passes a drafter that forgets no rejected token. Reject early, then look at the next round",
    "-0": "it passes a drafter that cuts with [: -n]. When is n = 0 for a DRAFT's cache? (Not when all K are kept.)",
    "keeps one": "it passes a drafter that keeps one rejected token. It can when two were read: accept K - 2 or fewer",
    "positions": "it passes a drafter whose position ids are not taken back. Reject early, then look at the next round",
}


class Suspect(ModelDrafter):
    """A drafter that is broken in the way that its kind says."""

    def __init__(self, model: LanguageModel, vocab_size: int, kind: str = "library's"):
        super().__init__(model, vocab_size)
        self.kind = kind

    def start(self, capacity: int) -> None:
        super().start(capacity + 256)  # for those that forget too little
        self.lacks = self.at = 0  # 0: the whole context

    def propose(self, context: Int[Tensor, " n"], K: int, sampling: Sampling, randomness: Randomness) -> Draft:
        feed, tokens, probs, self.K = context[-self.lacks :], [], [], K
        for _ in range(K):
            probs.append(sampling.probs(self.logits(feed)[0]))
            tokens.append(torch.as_tensor(randomness.categorical(probs[-1])))
            feed = tokens[-1].view(1)
        return Draft(torch.stack(tokens), torch.stack(probs))

    def logits(self, tokens: Int[Tensor, " n"], last: int = 1, **tree: Tensor) -> Float[Tensor, "last vocab"]:
        self.at += len(tokens)
        return super().logits(tokens, last, positions=torch.arange(self.at - len(tokens), self.at)[None], **tree)

    def commit(self, length: int, kept: Sequence[int]) -> None:
        self.lacks = 1 + (len(kept) == self.K and self.kind != "feeds newest") if self.kind != "rereads" else 0
        keep = {"forgets nothing": self.cache.length, "keeps one": length, "rereads": 0}.get(self.kind, length - 1)
        if self.kind == "-0" and len(kept) == self.K - 1:
            keep = 0
        self.cache.rollback(min(self.cache.length, keep))
        self.at = self.at if self.kind == "positions" else self.cache.length


def suspects(variant: int = 0) -> dict[str, Callable[[LanguageModel, int], ModelDrafter]]:
    """Makers of drafters under letters, in an order of the variant's. Two are sound."""
    kinds = list(KINDS)
    dice("04 suspects", variant).shuffle(kinds)
    return {letter: partial(Suspect, kind=kind) for letter, kind in zip("ABCDEFG", kinds, strict=True)}


def check_sound(answer: Callable, given: Given) -> None:
    """A test of the learner's: does it pass what is sound, and find each of the broken drafters?"""
    model, context = tiny().draft, torch.tensor(tiny().tokenizer.encode(given.prompt)[:10])
    for kind, says in KINDS.items():
        found = ask(answer, Suspect(model, model.vocab_size, kind), model, context, name="sound")
        if (number(found) is True) != (kind in ("library's", "rereads")):
            fail("sound", says)
    passed("sound", f"2 sound drafters pass, {len(KINDS) - 2} broken ones are found")


def longest(target: GPT2Config, draft: GPT2Config, budget: int, size: int, both=2, cap=True, newest=1) -> int:
    """The most tokens whose caches fit. Slips: both = 1, keys only; cap = False, a draft's cache without end."""
    per_token, of_draft = (both * size * model.layers * model.width for model in (target, draft))
    last, slots = draft.positions if cap else target.positions, range(target.positions + 1)
    return newest + max(n for n in slots if per_token * n + of_draft * min(n, last) <= budget)


def check_longest_text(answer: Callable, given: Given) -> None:
    """The longest text whose two caches fit into a budget of memory."""
    small, short = GPT2Config(500, 96, 64, 2, 4), GPT2Config(500, 32, 48, 1, 2)
    cases: list[tuple] = [(SIZES[given.target], SIZES[given.draft], given.budget * 2**20, size) for size in (2, 4)]
    cases += [(small, short, budget, size) for budget in (7040, 25_000, 40_000, 10**9) for size in (2, 4)]
    slips = [
        like("one too few: the newest token is in neither cache, so N tokens need N - 1 slots",
             partial(longest, newest=0)),
        like("how many bytes does a number take?", lambda t, d, budget, size: longest(t, d, budget, 1)),
        like("the caches may fill all of the budget", lambda t, d, budget, size: longest(t, d, budget - 1, size)),
        like("a layer keeps a key AND a value for each token", partial(longest, both=1)),
        like("the draft has a cache too", lambda t, _, *rest: longest(t, GPT2Config(width=0, layers=0), *rest)),
        like("the draft's cache cannot grow beyond the draft's own context", partial(longest, cap=False)),
        like("when the draft is full the text goes on without it; only the target's context ends it",
             lambda target, draft, *rest: min(draft.positions + 1, longest(target, draft, *rest))),
        Slip("the target's context can end first", lambda found, right, each, *_: found > each.positions + 1),
    ]  # fmt: skip
    check(answer, longest, cases, slips, name="longest_text")
