"""Many sequences at once, each exactly as if it ran alone.

The rows of a batch accept different numbers of draft tokens, so their lengths drift apart. Nothing is moved to line
them up again: each model has one cache with a length per row. A pass feeds every row what its cache lacks, padded on
the right to the longest feed. Padding lies behind the row's own tokens, where none of them looks. Right after the pass
the cache is rolled back to each row's true length, and the next pass writes over the padding.

A row draws from a generator of its own, in the order in which it would alone. So its tokens do not depend on its batch
mates. (Up to floating point: in a larger pass the last digit may be rounded in another way.)
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from .decoding import block_of, check_lengths, keep_until
from .distributions import Sampling, residual
from .gpt2 import GPT2
from .pairs import Pair
from .randomness import TorchRandomness, categorical_rows, first_failure_rows
from .record import Result, Round
from .text import TextStream, encode_prompt, stop_condition
from .theory import check_K
from .timing import Stopwatch

Outcome = tuple[list[int], int, int]  # draft tokens, how many are accepted, the token after them


def speculative_batch(
    pair: Pair,
    prompts: Sequence[str | Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int] = 128,
    K: int = 4,
    sampling: Sampling = Sampling(),
    seeds: Sequence[int | None] | None = None,
    eos_token_id: int | Sequence[int] | None = None,
    stop_strings: str | Sequence[str] | None = None,
) -> list[Result]:
    """Speculative decoding of many prompts at once, with a pair of this library's own GPT-2s. K = 0: plain decoding.

    Result i is that of ``speculative(pair, prompts[i], seed=seeds[i], ...)``: the same tokens, text and rounds,
    whatever else is in the batch. Only the times differ: the seconds of a round are those of the whole batch's round.

    max_new_tokens: one number, or one per prompt. seeds: one per prompt (``None``: different each time). The other
    options are those of ``stream``.

    What padding costs: in the first round every row takes the time, and the memory of activations, of the longest
    prompt, and in the caches every row takes the room of the longest. So put prompts of like length together. In later
    rounds a row is padded by K tokens at most. A finished row leaves the batch, and takes no time from then on.

    Raises ``ValueError`` for bad input, before any work, and ``FloatingPointError`` when a row's logits are NaN.
    """
    target, draft = own_models(pair, K)
    rows = make_rows(pair, prompts, max_new_tokens, K, seeds)
    if eos_token_id is None and pair.tokenizer is not None:
        eos_token_id = pair.tokenizer.eos_token_id
    ends = stop_condition(pair.tokenizer, eos_token_id, stop_strings)
    decode_rows(target, draft, rows, K, sampling, ends)
    return [row.result for row in rows]


def own_models(pair: Pair, K: int) -> tuple[GPT2, GPT2]:
    """Target and draft (with K = 0 there is none, and the target stands in its place). Refuses other classes."""
    check_K(K)
    models = pair.target, pair.draft if K else pair.target
    for model in models:
        if not isinstance(model, GPT2):
            raise ValueError(
                f"{model.name} is a {type(model).__name__}, and a batch needs this library's own GPT2: "
                "call speculative() for one prompt after the other"
            )
    return cast(tuple[GPT2, GPT2], models)


@dataclass
class Row:
    """One sequence of the batch, on the host. limit: the most tokens it may have, its prompt included."""

    result: Result
    max_new_tokens: int
    limit: int
    randomness: TorchRandomness
    text: TextStream

    @property
    def length(self) -> int:
        return len(self.result.prompt_tokens) + len(self.result.tokens)


def make_rows(
    pair: Pair,
    prompts: Sequence[str | Sequence[int]],
    max_new_tokens: int | Sequence[int],
    K: int,
    seeds: Sequence[int | None] | None,
) -> list[Row]:
    """A row for each prompt. Raises ``ValueError`` for bad input, naming the prompt."""
    if isinstance(prompts, str) or not prompts or isinstance(prompts[0], Integral):
        raise ValueError("prompts must be a list with at least one prompt; for a single one call speculative()")
    each = max_new_tokens if isinstance(max_new_tokens, Sequence) else [max_new_tokens] * len(prompts)
    seeds = [None] * len(prompts) if seeds is None else seeds
    for name, given in (("max_new_tokens", each), ("seeds", seeds)):
        if not isinstance(given, Sequence) or len(given) != len(prompts):
            raise ValueError(f"{name} must be a list with one entry for each of the {len(prompts)} prompts")
    rows = []
    for i, (prompt, most, seed) in enumerate(zip(prompts, each, seeds, strict=True)):
        try:
            tokens = encode_prompt(pair.tokenizer, prompt, pair.target.vocab_size)
            check_lengths(pair.target, tokens, most)
        except ValueError as error:
            raise ValueError(f"prompt {i}: {error}") from None
        limit = min(len(tokens) + most, pair.target.context + 1)  # the last token need not be fed
        randomness = TorchRandomness.seeded(seed, pair.target.device)
        rows.append(Row(Result(tokens), most, limit, randomness, TextStream(pair.tokenizer)))
    return rows


def decode_rows(
    target: GPT2, draft: GPT2, rows: list[Row], K: int, sampling: Sampling, ends: Callable[[list[int]], bool]
) -> None:
    """The loop: fills in the result of every row. ends: as in ``decoding.decode``."""
    growing = [row for row in rows if row.length < row.limit]
    batch = Batch(target, draft, growing, K) if growing else None
    while batch and batch.rows:
        for row, round in batch.round(sampling, ends):
            round.text = row.text.push(round.tokens, final=round.finish_reason is not None)
            row.result.add(round)


class Reader:
    """A model, and what it has read of every row."""

    def __init__(self, model: GPT2, rows: int, capacity: int):
        self.model = model
        self.cache = model.new_cache(capacity, rows)

    def read(
        self, tokens: Int[Tensor, "rows width"], ends: list[int], last: list[int]
    ) -> Float[Tensor, "rows n_last vocab"]:
        """Feed row r its tokens from the cache's length up to ``ends[r]``; logits at the last ``last[r]`` of these.

        n_last is the largest of ``last``; a row that wants fewer has its last ones repeated. A row may be fed nothing:
        what it is given then means nothing.
        """
        starts = self.cache.lengths
        counts = [end - start for start, end in zip(starts, ends, strict=True)]
        start, count, wanted = to_device([starts, counts, last], tokens.device).unsqueeze(-1)
        slots = start + torch.arange(max(counts), device=tokens.device)
        feed = tokens.gather(1, slots).clamp_(max=self.model.vocab_size - 1)  # a smaller draft: see ModelDrafter
        # Padding may lie beyond the context. Nothing is read there, so any position will do.
        hidden = self.model.hidden(feed, self.cache, positions=slots.clamp(max=self.model.context - 1))
        self.cache.rollback(ends)
        at = torch.minimum(count - wanted + torch.arange(max(last), device=tokens.device), count - 1).clamp_(min=0)
        return self.model.logits(torch.take_along_dim(hidden, at.unsqueeze(-1), dim=1))


class Batch:
    """The rows that still grow: their tokens on the device, and the caches of both models, which follow them."""

    def __init__(self, target: GPT2, draft: GPT2, rows: list[Row], K: int):
        self.rows, self.K = rows, K
        longest, spare = max(row.limit for row in rows), K + 1  # spare: padding behind the longest row
        self.tokens = torch.zeros(len(rows), longest + spare, dtype=torch.long, device=target.device)
        for row, tokens in zip(rows, self.tokens, strict=True):
            tokens[: row.length] = torch.tensor(row.result.prompt_tokens)
        self.target = Reader(target, len(rows), min(longest - 1, target.context) + spare)
        self.draft = Reader(draft, len(rows), min(longest - 1, draft.context) + spare if K else 0)

    def round(self, sampling: Sampling, ends: Callable[[list[int]], bool]) -> list[tuple[Row, Round]]:
        """One round of every row; the rows that end with it leave the batch."""
        rows, watch = self.rows, Stopwatch(self.tokens.device)
        watch.mark()
        wanted = [min(self.K, row.limit - row.length - 1) for row in rows]  # the target adds one to the accepted
        drafted = [min(n, self.room(row)) for n, row in zip(wanted, rows, strict=True)]
        with torch.inference_mode():
            outcomes = self.draft_and_verify(drafted, sampling, watch)
        rounds = [settle(row, outcome, ends) for row, outcome in zip(rows, outcomes, strict=True)]
        self.commit(rounds)
        watch.mark()
        seconds = watch.seconds()
        for round, n, most in zip(rounds, drafted, wanted, strict=True):
            round.draft_limited = n < most
            round.draft_seconds, round.target_seconds, round.other_seconds = seconds
        return list(zip(rows, rounds, strict=True))

    def room(self, row: Row) -> int:
        """How many tokens can be drafted after the row, as in ``ModelDrafter.limit``."""
        return max(0, self.draft.model.context - row.length + 1)

    def draft_and_verify(self, drafted: list[int], sampling: Sampling, watch: Stopwatch) -> list[Outcome]:
        """Each row's (draft tokens, how many are accepted, the token after them); ``drafted[r]`` are to be drafted."""
        lengths = [row.length for row in self.rows]
        places = to_device(lengths, self.tokens.device)[:, None] + torch.arange(self.K + 1, device=self.tokens.device)
        draft_probs = self.propose(lengths, places, drafted, sampling)
        watch.mark()
        ends = [length + n for length, n in zip(lengths, drafted, strict=True)]
        target_probs = sampling.probs(self.target.read(self.tokens, ends, [n + 1 for n in drafted]))
        watch.mark()
        draft_tokens = self.tokens.gather(1, places[:, : max(drafted)])
        chance = [row.randomness for row in self.rows]
        accepted, next_token = verify_rows(draft_tokens, drafted, draft_probs, target_probs, chance)
        self.tokens.scatter_(1, places.gather(1, accepted[:, None]), next_token[:, None])
        nan = [probs.sum((1, 2)).isnan().long() for probs in (target_probs, draft_probs)]
        # All of the round's numbers go to the host together: the only place that waits for the device.
        numbers = torch.cat([torch.stack([*nan, accepted, next_token], dim=1), draft_tokens], dim=1).tolist()
        self.check_nan(numbers)
        return [(tokens[:n], kept, token) for n, (_, _, kept, token, *tokens) in zip(drafted, numbers, strict=True)]

    def propose(
        self, lengths: list[int], places: Int[Tensor, "rows K+1"], drafted: list[int], sampling: Sampling
    ) -> Float[Tensor, "rows K+1 vocab"]:
        """Draft behind each row's tokens. The q of each draft token; zeros where a row drafts nothing (any more)."""
        model, most = self.target.model, max(drafted)
        dtype = torch.promote_types(model.dtype, torch.float32)
        probs = torch.zeros(len(lengths), most + 1, model.vocab_size, dtype=dtype, device=model.device)
        for step in range(most):
            drawing = [r for r, n in enumerate(drafted) if step < n]
            ends = list(self.draft.cache.lengths)  # the other rows are fed nothing
            for r in drawing:
                ends[r] = lengths[r] + step
            here = to_device(drawing, model.device)
            logits = self.draft.read(self.tokens, ends, [1] * len(ends))[here, 0]
            q = sampling.probs(F.pad(logits, (0, model.vocab_size - logits.shape[-1]), value=-math.inf))
            probs[here, step] = q.to(dtype)
            self.tokens[here, places[here, step]] = categorical_rows(q, [self.rows[r].randomness for r in drawing])
        return probs

    def check_nan(self, numbers: list[list[int]]) -> None:
        for which, reader in enumerate((self.target, self.draft)):
            if any(row[which] for row in numbers):
                raise FloatingPointError(
                    f"{reader.model.name} gave NaN logits; try float32, and check that its weights are whole"
                )

    def commit(self, rounds: list[Round]) -> None:
        """Let the caches forget what was not kept, and the rows leave that have ended."""
        lengths = [row.length + len(round.tokens) for row, round in zip(self.rows, rounds, strict=True)]
        caches = self.target.cache, self.draft.cache
        for cache in caches:
            # The last token is fed with the next round; the last draft token was never fed to the draft.
            cache.rollback([min(held, length - 1) for held, length in zip(cache.lengths, lengths, strict=True)])
        kept = close_ranks([round.finish_reason is None for round in rounds])
        if len(kept) < len(rounds):
            self.rows, self.tokens = [self.rows[r] for r in kept], self.tokens[kept]
            for cache in caches:
                cache.keep_rows(kept)


def close_ranks(stays: list[bool]) -> list[int]:
    """An order of the rows that stay, in which few change place: the last ones fill the gaps."""
    n = sum(stays)
    movers = [r for r in range(n, len(stays)) if stays[r]]
    return [r if stays[r] else movers.pop() for r in range(n)]


def settle(row: Row, outcome: Outcome, ends: Callable[[list[int]], bool]) -> Round:
    """What is kept of a round, as a record (its times are still to come)."""
    draft_tokens, accepted, next_token = outcome
    block, origins = block_of(draft_tokens[:accepted], next_token, complete=accepted == len(draft_tokens))
    output = list(row.result.tokens)
    kept, ended = keep_until(ends, output, block)
    grows = row.length + kept < row.limit
    reason = "stop" if ended else None if grows else "length" if len(output) == row.max_new_tokens else "context"
    return Round(tuple(draft_tokens), tuple(block[:kept]), tuple(origins[:kept]), 0.0, 0.0, 0.0, finish_reason=reason)


def verify_rows(
    draft_tokens: Int[Tensor, "rows K"],
    drafted: list[int],
    draft_probs: Float[Tensor, "rows K+1 vocab"],
    target_probs: Float[Tensor, "rows K+1 vocab"],
    chance: list[TorchRandomness],
) -> tuple[Int[Tensor, " rows"], Int[Tensor, " rows"]]:
    """``verify`` for every row: (how many draft tokens are accepted, the token after them).

    Row r drafted ``drafted[r]`` tokens. ``draft_probs`` is 0 behind them, so the residual after the last is p itself.
    """
    chosen = draft_tokens.unsqueeze(-1)
    K = draft_tokens.shape[1]
    ratios = (target_probs[:, :K].gather(-1, chosen) / draft_probs[:, :K].gather(-1, chosen)).squeeze(-1)
    accepted = first_failure_rows(ratios, drafted, chance)
    each = torch.arange(len(accepted), device=accepted.device)
    return accepted, categorical_rows(residual(target_probs[each, accepted], draft_probs[each, accepted]), chance)


def to_device(numbers: list, device: torch.device) -> Int[Tensor, "*shape"]:
    """Whole numbers as a tensor; on CUDA the host does not wait until the device is ready for them."""
    return torch.tensor(numbers).to(device, non_blocking=device.type == "cuda")
