"""The draft-then-verify loop. Plain decoding is the same loop with nothing drafted."""

from collections.abc import Callable, Generator, Iterator, Sequence
from numbers import Integral
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

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
    K: int = 4,
    sampling: Sampling = Sampling(),
    seed: int | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    stop_strings: str | Sequence[str] | None = None,
    drafter: Drafter | None = None,
    verify: Verify = verify,
) -> Generator[Round, None, Result]:
    """Yield each round as it commits; the generator's return value is the whole ``Result``.

    prompt: text, or token ids. max_new_tokens: exact, unless a stop or the target's context comes first.
    K: tokens drafted per round. seed: the same tokens for the same seed (``None``: different each time).
    eos_token_id: one or more ids that end the output (default: the tokenizer's; ``[]``: none). stop_strings: texts that
    end it. The token that ends the output is its last.
    drafter: what proposes (default: the pair's draft model). verify: the acceptance rule.

    Raises ``ValueError`` for bad input and ``FloatingPointError`` for NaN logits; the first before any work is done.
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
    K: int,
    sampling: Sampling,
    randomness: Randomness,
    ends: Callable[[list[int]], bool] = never,
    verify: Verify = verify,
) -> Iterator[Round]:
    """The loop on token ids: yields rounds until max_new_tokens are written, the output ends or the target is full.

    ends: is called with the output up to and including each new token; True makes that token the last.
    """
    check_lengths(target, prompt, max_new_tokens, K)
    # The last token need not be fed, so a full context still yields one token.
    limit = min(len(prompt) + max_new_tokens, target.context + 1)
    state = Continuation(target, drafter, prompt, limit)
    output: list[int] = []
    ended = False
    while state.length < limit and not ended:
        watch = Stopwatch(target.device)
        watch.mark()
        wanted = min(K, limit - state.length - 1)  # a token from the target always follows the accepted ones
        room = drafter.limit(state.length) if drafter else 0
        draft_tokens, accepted, next_token = state.draft_and_verify(
            min(wanted, room), sampling, randomness, verify, watch
        )
        block, origins = block_of(draft_tokens, accepted, next_token)
        kept, ended = keep_until(ends, output, block)
        state.commit(block[:kept])
        watch.mark()
        draft_seconds, target_seconds, other_seconds = watch.seconds()
        full = None if state.length < limit else "length" if len(output) == max_new_tokens else "context"
        yield Round(
            tuple(draft_tokens),
            tuple(block[:kept]),
            tuple(origins[:kept]),
            draft_seconds,
            target_seconds,
            other_seconds,
            draft_limited=drafter is not None and room < wanted,
            finish_reason="stop" if ended else full,
        )


class Continuation:
    """One growing text: its tokens on the device, and the caches of both models, which follow it."""

    def __init__(self, target: LanguageModel, drafter: Drafter | None, prompt: Sequence[int], limit: int):
        self.target, self.drafter = target, drafter
        self.tokens = torch.zeros(limit, dtype=torch.long, device=target.device)
        self.tokens[: len(prompt)] = torch.tensor(prompt)
        self.length = len(prompt)
        self.cache = target.new_cache(limit - 1)
        if drafter:
            drafter.start(limit - 1)

    def draft_and_verify(
        self, K: int, sampling: Sampling, randomness: Randomness, verify: Verify, watch: Stopwatch
    ) -> tuple[list[int], int, int]:
        """(draft tokens, how many are accepted, the token after them); marks the end of drafting and of the target."""
        with torch.inference_mode():
            context = self.tokens[: self.length]
            empty = Draft(context[:0], None)
            draft = self.drafter.propose(context, K, sampling, randomness) if self.drafter and K else empty
            watch.mark()
            end = self.length + len(draft.tokens)
            self.tokens[self.length : end] = draft.tokens
            # Not yet in the cache: the last committed token (at first, the whole prompt) and the draft.
            feed = self.tokens[None, self.cache.length : end]
            target_probs = sampling.probs(self.target(feed, self.cache, last=len(draft.tokens) + 1)[0])
            watch.mark()
            outcome = verify(draft.tokens, draft.probs, target_probs, randomness)
            return self.fetch(draft, target_probs, outcome)

    def fetch(
        self, draft: Draft, target_probs: Float[Tensor, "K+1 vocab"], outcome: Verification
    ) -> tuple[list[int], int, int]:
        """The round's numbers on the host: the only place of a round that waits for the device.

        Raises ``FloatingPointError`` naming the model whose logits held a NaN.
        """
        draft_probs = target_probs[:0] if draft.probs is None else draft.probs
        numbers = [outcome.accepted, outcome.next_token, target_probs.sum().isnan(), draft_probs.sum().isnan()]
        head = torch.stack([torch.as_tensor(number, dtype=torch.long, device=self.tokens.device) for number in numbers])
        accepted, next_token, target_nan, draft_nan, *draft_tokens = torch.cat([head, draft.tokens]).tolist()
        if target_nan or draft_nan:
            name = self.drafter.name if self.drafter and not target_nan else self.target.name
            raise FloatingPointError(f"{name} gave NaN logits; try float32, and check that its weights are whole")
        return draft_tokens, accepted, next_token

    def commit(self, block: list[int]) -> None:
        """Take in what was kept of a round, and let the caches forget the rest."""
        self.length += len(block)
        self.tokens[self.length - 1] = block[-1]  # those before it are draft tokens, and in place
        self.cache.rollback(self.length - 1)  # the last token is fed with the next round
        if self.drafter:
            self.drafter.commit(self.length)


def check_lengths(target: LanguageModel, prompt: Sequence[int], max_new_tokens: int, K: int) -> None:
    check_K(K)
    if not prompt:
        raise ValueError("the prompt is empty: a model needs at least one token to go on from")
    if not (isinstance(max_new_tokens, Integral) and max_new_tokens >= 0):
        raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be a whole number, 0 or more")
    if len(prompt) > target.context:
        raise ValueError(
            f"the prompt has {len(prompt)} tokens, but {target.name} can read {target.context}: shorten it"
        )


def block_of(draft_tokens: list[int], accepted: int, next_token: int) -> tuple[list[int], list[str]]:
    """The tokens that a round yields, and the origin of each."""
    last = "bonus" if accepted == len(draft_tokens) else "recovered"
    return [*draft_tokens[:accepted], next_token], ["accepted"] * accepted + [last]


def keep_until(ends: Callable[[list[int]], bool], output: list[int], block: list[int]) -> tuple[int, bool]:
    """Append ``block`` to ``output`` up to the first token that ends it: (tokens kept, whether it ended)."""
    for kept, token in enumerate(block, start=1):
        output.append(token)
        if ends(output):
            return kept, True
    return len(block), False
