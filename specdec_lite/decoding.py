"""The draft-then-verify loop. Plain decoding is the same loop with nothing drafted."""

from collections.abc import Callable, Generator, Iterator, Sequence
from numbers import Integral
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from .adaptive import KPolicy, policy_of
from .distributions import Sampling
from .drafters import Draft, Drafter
from .drafters.model import ModelDrafter
from .models import LanguageModel
from .pairs import Pair
from .randomness import Randomness, TorchRandomness
from .record import Result, Round
from .text import TextStream, encode_prompt, stop_condition
from .theory import check_K
from .timing import Stopwatch
from .tree import TreeVerification, VerifyTree, verify_tree
from .verify import Verification, Verify, verify


def autoregressive(pair: Pair, prompt: str | Sequence[int], **options: Any) -> Result:
    """Plain decoding with the pair's target, one token per forward pass. Options: as in ``stream``, less K, drafter."""
    return speculative(pair, prompt, K=0, **options)


def speculative(pair: Pair, prompt: str | Sequence[int], **options: Any) -> Result:
    """Speculative decoding with the pair's target and draft; see ``stream`` for the options.

    The output has the law of plain decoding (and, at temperature 0, the tokens), whatever the draft is.
    """
    rounds = stream(pair, prompt, **options)
    while True:
        try:
            next(rounds)
        except StopIteration as end:
            return end.value


def stream(
    pair: Pair,
    prompt: str | Sequence[int],
    *,
    max_new_tokens: int = 128,
    K: int | str | KPolicy = 4,
    sampling: Sampling = Sampling(),
    seed: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    stop_strings: str | Sequence[str] | None = None,
    drafter: Drafter | None = None,
    verify: Verify = verify,
    verify_tree: VerifyTree = verify_tree,
) -> Generator[Round, None, Result]:
    """Yield each round as it commits; the generator's return value is the whole ``Result``.

    prompt: text, or token ids. max_new_tokens: exact, unless a stop or the target's context comes first.
    K: tokens drafted per round (of a tree: its depth); ``"auto"`` or a policy (``adaptive``) chooses anew for each.
    seed: the same tokens for the same seed, except with K = "auto" (``None``: different each time).
    eos_token_id: one or more ids that end the output (default: the tokenizer's; ``[]``: none). stop_strings: texts that
    end it. The token that ends the output is its last.
    drafter: what proposes (default: the pair's draft). verify, verify_tree: the rules for chains and for token trees.

    Raises ``ValueError`` for bad input, before any work, and ``FloatingPointError`` for NaN logits.
    """
    target = pair.target
    prompt_tokens = encode_prompt(pair.tokenizer, prompt, target.vocab_size)
    if eos_token_id is None and pair.tokenizer is not None:
        eos_token_id = pair.tokenizer.eos_token_id
    if drafter is None and K:
        drafter = ModelDrafter(pair.draft, target.vocab_size)
    result = Result(prompt_tokens)
    text = TextStream(pair.tokenizer)
    rounds = decode(
        target,
        drafter if K else None,
        prompt_tokens,
        max_new_tokens=max_new_tokens,
        K=K,
        sampling=sampling,
        randomness=TorchRandomness.seeded(seed, target.device),
        ends=stop_condition(pair.tokenizer, eos_token_id, stop_strings),
        verify=verify,
        verify_tree=verify_tree,
    )
    for round in rounds:
        round.text = text.push(round.tokens, final=round.finish_reason is not None)
        result.add(round)
        yield round
    return result


def never(output: list[int]) -> bool:
    return False


def decode(
    target: LanguageModel,
    drafter: Drafter | None,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    K: int | str | KPolicy,
    sampling: Sampling,
    randomness: Randomness,
    ends: Callable[[list[int]], bool] = never,
    verify: Verify = verify,
    verify_tree: VerifyTree = verify_tree,
) -> Iterator[Round]:
    """The loop on token ids: yields rounds until max_new_tokens are written, the output ends or the target is full.

    ends: is called with the output up to and including each new token; True makes that token the last.
    """
    policy = policy_of(K)
    check_lengths(target, prompt, max_new_tokens)
    # The last token need not be fed, so a full context still yields one token.
    limit = min(len(prompt) + max_new_tokens, target.context + 1)
    state = Continuation(target, drafter, prompt, limit)
    output: list[int] = []
    ended = False
    while state.length < limit and not ended:
        watch = Stopwatch(target.device)
        watch.mark()
        check_K(chosen := policy.choose())
        wanted = min(chosen, limit - state.length - 1)  # a token from the target follows the accepted ones
        room = drafter.limit(state.length) if drafter else 0
        drafted = state.draft_and_verify(min(wanted, room), sampling, randomness, verify, verify_tree, watch)
        block, origins = block_of(drafted.accepted, drafted.next_token, drafted.complete)
        kept, ended = keep_until(ends, output, block)
        state.commit(block[:kept], drafted.path)
        watch.mark()
        draft_seconds, target_seconds, other_seconds = watch.seconds()
        full = None if state.length < limit else "length" if len(output) == max_new_tokens else "context"
        round = Round(
            tuple(drafted.tokens),
            tuple(block[:kept]),
            tuple(origins[:kept]),
            draft_seconds,
            target_seconds,
            other_seconds,
            draft_limited=drafter is not None and room < wanted,
            finish_reason="stop" if ended else full,
            parents=drafted.parents,
        )
        policy.learn(round)
        yield round


class Verified(NamedTuple):
    """A round's draft after its verification, on the host. path: the tokens that are accepted, by index, in order."""

    tokens: list[int]
    parents: tuple[int, ...] | None
    path: list[int]
    next_token: int
    complete: bool  # the path could go no further: nothing was drafted behind it

    @property
    def accepted(self) -> list[int]:
        return [self.tokens[node] for node in self.path]


class Continuation:
    """One growing text: its tokens on the device, and the caches of both models, which follow it."""

    def __init__(self, target: LanguageModel, drafter: Drafter | None, prompt: Sequence[int], limit: int):
        if drafter and hasattr(drafter, "observe"):
            target = drafter.observe(target)
        self.target, self.drafter = target, drafter
        self.tokens = torch.zeros(limit, dtype=torch.long, device=target.device)
        self.tokens[: len(prompt)] = torch.tensor(prompt)
        self.length = len(prompt)
        # A tree lies in the cache with all its nodes, of which few stay.
        self.cache = target.new_cache(limit - 1 + getattr(drafter, "nodes", 0))
        if drafter:
            drafter.start(limit - 1)

    def draft_and_verify(
        self,
        K: int,
        sampling: Sampling,
        randomness: Randomness,
        verify: Verify,
        verify_tree: VerifyTree,
        watch: Stopwatch,
    ) -> Verified:
        """One draft and its verification; marks the end of drafting and of the target."""
        with torch.inference_mode():
            context = self.tokens[: self.length]
            empty = Draft(context[:0], None)
            draft = self.drafter.propose(context, K, sampling, randomness) if self.drafter and K else empty
            watch.mark()
            # Not yet in the cache: the last committed token (at first, the whole prompt) and the draft.
            feed = torch.cat([context[self.cache.length :], draft.tokens])[None]
            topology = {}  # a chain needs no word of it
            if draft.tree is not None:
                topology = draft.tree.topology(self.cache.length, self.length, self.tokens.device)
            logits = self.target(feed, self.cache, last=len(draft.tokens) + 1, **topology)
            target_probs = sampling.probs(logits[0])
            watch.mark()
            if draft.tree is None:
                return self.fetch(draft, target_probs, verify(draft.tokens, draft.probs, target_probs, randomness))
            outcome = verify_tree(draft.tree, draft.tokens, draft.probs, target_probs, randomness)
            return self.fetch(draft, target_probs, outcome)

    def fetch(
        self, draft: Draft, target_probs: Float[Tensor, "n+1 vocab"], outcome: Verification | TreeVerification
    ) -> Verified:
        """The round's numbers on the host. For a chain it is the only place of a round that waits for the device.

        Raises ``FloatingPointError`` naming the model whose logits held a NaN.
        """
        draft_probs = target_probs[:0] if draft.probs is None else draft.probs
        numbers = [outcome.accepted, outcome.next_token, target_probs.sum().isnan(), draft_probs.sum().isnan()]
        head = torch.stack([torch.as_tensor(number, dtype=torch.long, device=self.tokens.device) for number in numbers])
        accepted, next_token, target_nan, draft_nan, *tokens = torch.cat([head, draft.tokens]).tolist()
        if target_nan or draft_nan:
            name = self.drafter.name if self.drafter and not target_nan else self.target.name
            raise FloatingPointError(f"{name} gave NaN logits; try float32, and check that its weights are whole")
        if isinstance(outcome, TreeVerification):
            parents = draft.tree.parents if draft.tree else None
            return Verified(tokens, parents, list(outcome.path), next_token, outcome.complete)
        return Verified(tokens, None, list(range(accepted)), next_token, accepted == len(tokens))

    def commit(self, block: list[int], path: list[int]) -> None:
        """Take in what was kept of a round, and let the caches forget the rest."""
        kept = path[: len(block) - 1]  # the last token is fed with the next round
        if kept == list(range(len(kept))):  # they lie where they belong
            self.cache.rollback(self.length + len(kept))
        else:
            self.cache.keep(self.length, kept)
        self.tokens[self.length : self.length + len(block)] = torch.tensor(block)
        self.length += len(block)
        if self.drafter:
            self.drafter.commit(self.length, kept)


def check_lengths(target: LanguageModel, prompt: Sequence[int], max_new_tokens: int) -> None:
    if not prompt:
        raise ValueError("the prompt is empty: a model needs at least one token to go on from")
    if not (isinstance(max_new_tokens, Integral) and max_new_tokens >= 0):
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be a whole number, 0 or more")
    if len(prompt) > target.context:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, but {target.name} can read {target.context}: shorten it"
        )


def block_of(accepted: list[int], next_token: int, complete: bool) -> tuple[list[int], list[str]]:
    """The tokens that a round yields, and the origin of each."""
    return [*accepted, next_token], ["accepted"] * len(accepted) + ["bonus" if complete else "recovered"]


def keep_until(ends: Callable[[list[int]], bool], output: list[int], block: list[int]) -> tuple[int, bool]:
    """Append ``block`` to ``output`` up to the first token that ends it: (tokens kept, whether it ended)."""
    for kept, token in enumerate(block, start=1):
        output.append(token)
        if ends(output):
            return kept, True
    return len(block), False
