"""Engines behind one call: prompt in, new tokens out. This library's own, Hugging Face's, and anybody's.

The benchmark compares them, and the losslessness check examines them. Anything of ``Engine``'s shape fits.
"""

import copy
import runpy
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import transformers
from transformers import GenerationConfig, GPT2LMHeadModel, PreTrainedModel
from transformers import GPT2Config as HuggingFaceGPT2Config

from .batch import speculative_batch
from .checkpoints import hugging_face_state
from .decoding import speculative
from .distributions import Sampling
from .drafters import Drafter
from .gpt2 import GPT2
from .hf import HFModel
from .models import LanguageModel
from .pairs import Pair
from .record import Statistics
from .tree import VerifyTree, verify_tree
from .verify import Verify, verify


class Engine(Protocol):
    """Anything that continues a prompt. vLLM, for example::

        class VLLM:
            name = "vLLM"

            def __init__(self, target, draft, K):
                speculation = {"method": "draft_model", "model": draft, "num_speculative_tokens": K}
                self.llm = LLM(target, speculative_config=speculation)

            def generate(self, prompt, *, max_new_tokens, sampling, seed):
                s = SamplingParams(temperature=sampling.temperature, top_k=sampling.top_k or 0, top_p=sampling.top_p,
                                   max_tokens=max_new_tokens, ignore_eos=True, seed=seed)
                return self.llm.generate({"prompt_token_ids": prompt}, s, use_tqdm=False)[0].outputs[0].token_ids

    An engine may have two things more. ``statistics``: what was drafted and accepted in the last call.
    ``generate_many(prompts, *, max_new_tokens, sampling, seeds)``: many prompts at once, a seed for each.
    """

    name: str

    def generate(self, prompt: list[int], *, max_new_tokens: int, sampling: Sampling, seed: int) -> Sequence[int]:
        """The new tokens, without the prompt, and no stop before ``max_new_tokens``."""


class EngineError(RuntimeError):
    """An engine failed while it was running; the message names it, the prompt, and what it said."""


class Loop:
    """This library's loop, ``speculative``; K = 0 is plain decoding.

    drafter, verify, verify_tree: another drafter or acceptance rule than the pair's draft and the right ones.
    """

    def __init__(
        self,
        pair: Pair,
        K: int = 4,
        *,
        drafter: Drafter | None = None,
        verify: Verify = verify,
        verify_tree: VerifyTree = verify_tree,
        name: str = "",
    ):
        self.pair = pair
        self.options: dict[str, Any] = {"K": K, "drafter": drafter, "verify": verify, "verify_tree": verify_tree}
        self.name = name or f"speculative, K={K}"
        self.statistics = Statistics.pooled([])

    def generate(
        self, prompt: list[int], *, max_new_tokens: int, sampling: Sampling, seed: int, eos_token_id: Sequence[int] = ()
    ) -> list[int]:
        result = speculative(
            self.pair, prompt, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed, eos_token_id=eos_token_id,
            **self.options,
        )  # fmt: skip
        self.statistics = result.statistics
        return result.tokens


class Batch:
    """This library's ``speculative_batch``: many prompts at once."""

    def __init__(self, pair: Pair, K: int = 4):
        self.pair, self.K = pair, K
        self.name = f"speculative_batch, K={K}"
        self.statistics = Statistics.pooled([])

    def generate_many(
        self,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int,
        sampling: Sampling,
        seeds: Sequence[int],
        eos_token_id: Sequence[int] = (),
    ) -> list[list[int]]:
        results = speculative_batch(
            self.pair, prompts, max_new_tokens=max_new_tokens, K=self.K, sampling=sampling, seeds=seeds,
            eos_token_id=eos_token_id,
        )  # fmt: skip
        self.statistics = Statistics.pooled(results)
        return [result.tokens for result in results]

    def generate(self, prompt: list[int], *, seed: int, **options: Any) -> list[int]:
        return self.generate_many([prompt], seeds=[seed], **options)[0]


class HuggingFace:
    """transformers' own ``generate``, plain (K = 0) or assisted by the pair's draft with a constant K.

    Models of this library's GPT-2 class are copied into transformers' class with the same weights. Settings, those of
    the generation configs included, are changed on shallow copies: the user's models keep theirs.
    """

    def __init__(self, pair: Pair, K: int = 0):
        self.name = f"Hugging Face generate, assisted, K={K}" if K else "Hugging Face generate"
        self.model: Any = copy.copy(transformers_model(pair.target))  # Any: `generate` is typed too narrowly
        self.model.generation_config = GenerationConfig()  # a checkpoint's own would add stops, penalties, ...
        self.options: dict[str, Any] = {}
        self.rounds: list[tuple[int, int]] = []  # (drafted, accepted) of the last call
        if K:
            assistant = copy.copy(transformers_model(pair.draft))
            assistant.generation_config = GenerationConfig(
                num_assistant_tokens=K, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
            )
            self.options["assistant_model"] = assistant
            self._listen()

    def _listen(self) -> None:
        """Have each round's numbers noted: transformers reports none, but tells its candidate generator."""
        make = self.model._get_candidate_generator

        def listening(*arguments: Any, **options: Any) -> Any:
            generator = make(*arguments, **options)
            update = generator.update_candidate_strategy

            def noting(input_ids: Any, scores: Any, num_matches: Any) -> None:
                self.rounds.append((scores.shape[1] - 1, int(num_matches)))
                update(input_ids, scores, num_matches)

            generator.update_candidate_strategy = noting
            return generator

        self.model._get_candidate_generator = listening

    def generate(self, prompt: list[int], *, max_new_tokens: int, sampling: Sampling, seed: int) -> list[int]:
        config = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=sampling.temperature > 0, pad_token_id=0)
        if sampling.temperature > 0:
            config.update(temperature=sampling.temperature, top_k=sampling.top_k or 0, top_p=sampling.top_p)
        ids = torch.tensor([prompt], device=self.model.device)
        self.rounds.clear()
        # transformers draws from the global generator only: it is put back as it was. So is its logger, which warns of
        # settings that its assisted generation has made itself.
        level = transformers.logging.get_verbosity()
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            transformers.logging.set_verbosity_error()
            torch.manual_seed(seed)
            try:
                output = self.model.generate(
                    ids, attention_mask=torch.ones_like(ids), generation_config=config, **self.options
                )
            finally:
                transformers.logging.set_verbosity(level)
        return output[0, len(prompt) :].tolist()

    @property
    def statistics(self) -> Statistics:
        """Of the last call. Plain generation drafts nothing, and its rounds are not counted."""
        drafted, accepted = (sum(counts) for counts in zip((0, 0), *self.rounds, strict=True))
        return Statistics(
            rounds=len(self.rounds),
            tokens=accepted + len(self.rounds),
            drafted=drafted,
            accepted=accepted,
            rejections=sum(kept < proposed for proposed, kept in self.rounds),
        )


# Twins of GPT-2s that are still in use: a twin takes as much memory as its model, so there is one, not one per engine.
TWINS: "WeakKeyDictionary[GPT2, PreTrainedModel]" = WeakKeyDictionary()


def transformers_model(model: LanguageModel) -> PreTrainedModel:
    """The transformers model behind ``model``, or one with the same weights. Raises ``TypeError`` for other models."""
    if isinstance(model, HFModel):
        return model.model
    if type(model) is not GPT2:  # a subclass may hold its weights in another form
        raise TypeError(f"{model.name} has no counterpart in transformers: give a GPT-2 or a Hugging Face model")
    if model not in TWINS:
        TWINS[model] = twin_of(model)
    return TWINS[model]


def twin_of(model: GPT2) -> PreTrainedModel:
    sizes = model.config
    config = HuggingFaceGPT2Config(
        vocab_size=sizes.vocab_size, n_positions=sizes.positions, n_embd=sizes.width, n_layer=sizes.layers,
        n_head=sizes.heads, layer_norm_epsilon=sizes.norm_epsilon, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        twin = GPT2LMHeadModel(config)
    twin.load_state_dict(hugging_face_state(model.state_dict()), strict=False, assign=True)
    twin.tie_weights()
    return twin.eval()


class Function:
    """A function ``(prompt, *, max_new_tokens, sampling, seed) -> new tokens`` as an engine."""

    def __init__(self, function: Callable[..., Sequence[int]], name: str = ""):
        self.generate = function
        self.name = name or getattr(function, "__name__", type(function).__name__)


def as_engine(given: Any) -> Engine:
    """``given`` itself when it is an engine, a function as an engine; ``ValueError`` for anything else."""
    if callable(getattr(given, "generate", None)):
        return given if hasattr(given, "name") else Function(given.generate, type(given).__name__)
    if callable(given):
        return Function(given)
    raise ValueError(
        f"engine is {given!r}; it must have generate(prompt, *, max_new_tokens, sampling, seed), or be such a function"
    )


def engine_by_name(name: str, pair: Pair, K: int) -> Engine:
    """ "loop", "batch", "hugging-face", or "FILE.py:NAME": an engine, or a function, that the file defines.

    The file is run. Raises ``ValueError`` for anything else.
    """
    own: dict[str, Callable[[Pair, int], Engine]] = {"loop": Loop, "batch": Batch, "hugging-face": HuggingFace}
    if name in own:
        return own[name](pair, K)
    path, _, attribute = name.rpartition(":")
    if not path.endswith(".py") or not Path(path).is_file():
        raise ValueError(f"unknown engine {name!r}: give {', '.join(own)} or FILE.py:FUNCTION, with a file that exists")
    try:
        defined = runpy.run_path(path)
    except (Exception, SystemExit) as error:  # whatever the user's file raises
        raise ValueError(f"{path} raised {type(error).__name__} when it was run: {error}") from error
    if attribute not in defined:
        raise ValueError(f"{path} defines no {attribute!r}: give FILE.py:FUNCTION")
    return as_engine(defined[attribute])
