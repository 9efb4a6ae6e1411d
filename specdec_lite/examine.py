"""One engine examined directly: is its greedy output the target's own, does it follow seeds, does it stop in time?

A row for each question. The law of sampled output, which needs statistics, is examined in ``lawtest.py``.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from .decoding import autoregressive
from .distributions import GREEDY, Sampling
from .engines import Batch, Engine, EngineError, HuggingFace, Loop
from .lawtest import Rounding, divergence
from .models import LanguageModel
from .pairs import Pair, check_same_tokenizer

Progress = Callable[[int, int, str], None]  # done, in all, of what


@dataclass(frozen=True)
class Row:
    """passed: None when nothing could be said. optional: the verdict does not wait for it."""

    name: str
    passed: bool | None
    detail: str
    p_value: float | None = None
    optional: bool = False


@dataclass(frozen=True)
class Trial:
    """What is the same for every engine that is examined."""

    pair: Pair
    prompts: list[list[int]]
    draws: int
    K: int
    max_new_tokens: int
    sampling: Sampling
    seed: int
    progress: Progress


class Malformed(Exception):
    """What an engine returned is not what was asked for."""


class Examined:
    """An engine under examination: its output is checked, what it raises is told, what it drafts is added up."""

    def __init__(self, engine: Engine, prompts: list[list[int]], vocab: int):
        self.engine, self.prompts, self.vocab = engine, prompts, vocab
        self.drafted = self.accepted = 0
        self.tells = hasattr(engine, "statistics")
        self.ours = isinstance(engine, Loop | Batch | HuggingFace)  # these promise to follow the seed

    def ask(self, which: Sequence[int], seeds: Sequence[int], new: int, sampling: Sampling) -> list[list[int]]:
        """``new`` tokens for each of the prompts ``which``. Raises ``EngineError`` or ``Malformed``."""
        prompts, options = [self.prompts[i] for i in which], {"max_new_tokens": new, "sampling": sampling}
        names = [f"prompt {i + 1}" for i in which]
        if hasattr(self.engine, "generate_many"):
            outputs = self.call(f"{names[0]} to {names[-1]}", "generate_many", prompts, seeds=list(seeds), **options)
            if not (hasattr(outputs, "__len__") and len(outputs) == len(prompts)):
                raise Malformed(f"generate_many did not return a list of {len(prompts)} outputs, one per prompt")
        else:
            outputs = [
                self.call(name, "generate", prompt, seed=seed, **options)
                for name, prompt, seed in zip(names, prompts, seeds, strict=True)
            ]
        return [self.checked(name, output, new) for name, output in zip(names, outputs, strict=True)]

    def call(self, where: str, method: str, *arguments: Any, **options: Any) -> Any:
        try:
            output = getattr(self.engine, method)(*arguments, **options)
        except (Exception, SystemExit) as error:  # an engine's exit code is not this check's
            said = str(error).strip().splitlines() or ["nothing"]
            raise EngineError(f"{self.engine.name} raised {type(error).__name__} on {where}: {said[0]}") from error
        if statistics := getattr(self.engine, "statistics", None):
            self.drafted += statistics.drafted
            self.accepted += statistics.accepted
        return output

    def checked(self, where: str, output: Any, new: int) -> list[int]:
        try:
            tokens = [int(token) for token in output]
        except Exception:  # what iterates may be the engine's own code, and raise anything
            raise Malformed(f"{where}: a {type(output).__name__} came back, not token ids") from None
        if len(tokens) != new:
            raise Malformed(
                f"{where}: {len(tokens)} tokens came back, {new} were asked for (new ones only, and no earlier stop)"
            )
        unknown = [token for token in tokens if not 0 <= token < self.vocab]
        if unknown:
            raise Malformed(f"{where}: token {unknown[0]} came back; the target's ids are 0 to {self.vocab - 1}")
        return tokens


def tokenizer_row(pair: Pair, engine: Engine) -> Row:
    if pair.tokenizer is None:
        return Row("tokenizers", None, "the pair has none: prompts and output are token ids", optional=True)
    theirs = getattr(engine, "tokenizer", None)
    try:
        if theirs is not None:
            check_same_tokenizer(pair.tokenizer, theirs)
    except ValueError as error:
        return Row("tokenizers", False, str(error))
    models = " and ".join(f"{model.name} ({model.vocab_size:,} ids)" for model in (pair.target, pair.draft) if model)
    compared = "the engine has the same" if theirs is not None else "the engine gets and gives ids"
    return Row("tokenizers", True, f"one for {models}; {compared}")


def greedy_row(trial: Trial, subject: Examined) -> tuple[Row, Rounding]:
    """Greedy output against plain decoding; where they differ, is the token the argmax, or in a near-tie with it?

    What counts as a near-tie is measured: rounding moves each of two logits by its noise at most, so a gap of twice the
    noise can tip.
    """
    target, new, N = trial.pair.target, trial.max_new_tokens, len(trial.prompts)
    plain = [autoregressive(trial.pair, p, max_new_tokens=new, sampling=GREEDY, eos_token_id=[]) for p in trial.prompts]
    rounding = measure_rounding(target, [(run.prompt_tokens, run.tokens) for run in plain], trial.sampling)
    outputs = subject.ask(range(N), [trial.seed] * N, new, GREEDY)
    same = sum(output == run.tokens for output, run in zip(outputs, plain, strict=True))
    limit, widest = 2 * rounding.logits, 0.0
    for i, (prompt, output) in enumerate(zip(trial.prompts, outputs, strict=True), start=1):
        if output == plain[i - 1].tokens:
            continue
        logits = read_at_once(target, prompt, output)
        gaps = logits.amax(-1) - logits.gather(-1, torch.tensor(output)[:, None])[:, 0]
        faults = (~(gaps <= limit)).nonzero()
        if len(faults):
            where = int(faults[0])
            return Row(
                "greedy", False,
                f"prompt {i}, new token {where + 1} is not the target's: its logit is {gaps[where]:.3g} below the "
                f"largest, and rounding can tip {limit:.2g} (identical on {same} of {N} prompts)",
            ), rounding  # fmt: skip
        widest = max(widest, float(gaps.max()))
    detail = f"identical to plain decoding on {same} of {N} prompts, {new} tokens each"
    if same < N:
        detail += f"; the others part at a near-tie (gap {widest:.2g}; rounding can tip {limit:.2g})"
    return Row("greedy", True, detail), rounding


def measure_rounding(
    target: LanguageModel, runs: Sequence[tuple[list[int], list[int]]], sampling: Sampling
) -> Rounding:
    logits, law = 0.0, []
    for prompt, tokens in runs:
        at_once, singly = read_at_once(target, prompt, tokens), read_singly(target, prompt, tokens)
        logits = max(logits, float((at_once - singly).nan_to_num(0).abs().max()))
        law.append(float(divergence(sampling.probs(at_once), sampling.probs(singly)).mean()))
    return Rounding(logits, sum(law) / len(law))


def read_at_once(target: LanguageModel, prompt: list[int], tokens: list[int]) -> Float[Tensor, "n vocab"]:
    """The logits that each of ``tokens`` was chosen by, from one pass."""
    fed = torch.tensor([[*prompt, *tokens[:-1]]], device=target.device)
    with torch.inference_mode():
        return target(fed, target.new_cache(fed.shape[1]), last=len(tokens))[0].float().cpu()


def read_singly(target: LanguageModel, prompt: list[int], tokens: list[int]) -> Float[Tensor, "n vocab"]:
    """The same from one pass over the prompt and one over each token."""
    fed = torch.tensor([[*prompt, *tokens[:-1]]], device=target.device)
    cache = target.new_cache(fed.shape[1])
    with torch.inference_mode():
        pieces = fed.split([len(prompt), *[1] * (len(tokens) - 1)], dim=1)
        return torch.cat([target(piece, cache, last=1)[0] for piece in pieces]).float().cpu()


def global_generators() -> tuple:
    state: Any = np.random.get_state()  # noqa: NPY002
    return torch.get_rng_state().tolist(), random.getstate(), state[1].tolist()


def seeds_row(trial: Trial, subject: Examined) -> Row:
    """Same seed, same tokens; another seed, other tokens; the global generators untouched."""
    before = global_generators()
    seeds = [trial.seed, trial.seed, *range(trial.seed + 1, trial.seed + 5)]
    new = min(trial.max_new_tokens, 16)
    first, again, *others = (subject.ask([0], [seed], new, trial.sampling)[0] for seed in seeds)
    faults = []
    if first != again:
        faults.append("the same seed gave other tokens")
    if global_generators() != before:
        faults.append("the global generators were used")
    if faults:  # an engine that cannot be seeded may still be lossless
        return Row("seeds", False if subject.ours else None, "; ".join(faults), optional=True)
    if all(other == first for other in others):
        detail = f"{len(others) + 1} seeds gave the same {new} tokens: it does not sample, or the law leaves no choice"
        return Row("seeds", None, detail, optional=True)
    return Row("seeds", True, "a seed repeats its tokens, others give others; global generators untouched")


def stops_row(trial: Trial, subject: Examined) -> Row:
    """max_new_tokens is exact (``ask`` sees to that). This library's own loops also end at an end-of-sequence id."""
    lengths = (1, 2, min(2 * trial.K + 3, 15))  # the last one is run again for each of its tokens
    for new in lengths:
        output = subject.ask([0], [trial.seed], new, GREEDY)[0]
    exact = f"max_new_tokens is exact for {', '.join(map(str, lengths))}"
    if not isinstance(subject.engine, Loop | Batch):
        return Row("stops", True, exact)
    for end in output:
        options = {"max_new_tokens": len(output), "sampling": GREEDY, "seed": trial.seed, "eos_token_id": [end]}
        found = subject.call("prompt 1", "generate", trial.prompts[0], **options)
        if found != output[: output.index(end) + 1]:
            return Row("stops", False, f"with token {end} as end of sequence the output was {found}, not cut at it")
    return Row("stops", True, f"{exact}; an end of sequence cuts the block at every position")


def drafting_row(subject: Examined) -> Row:
    """A law test in which nothing was drafted tests plain decoding, and says nothing about speculation."""
    if not subject.tells:
        return Row("drafting", None, "the engine does not tell what it drafts", optional=True)
    if subject.drafted == 0:
        return Row("drafting", None, "nothing was drafted, so only plain decoding was tested")
    share = subject.accepted / subject.drafted
    return Row("drafting", True, f"{subject.drafted:,} tokens drafted in the law test, {share:.0%} accepted")
