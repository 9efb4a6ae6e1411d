"""Other engines behind one call, to compare with: prompt in, tokens out."""

import copy
import warnings
from typing import Any, Protocol

import torch
from transformers import GenerationConfig, GPT2LMHeadModel, PreTrainedModel
from transformers import GPT2Config as HuggingFaceGPT2Config

from .checkpoints import hugging_face_state
from .distributions import Sampling
from .gpt2 import GPT2
from .hf import HFModel
from .models import LanguageModel
from .pairs import Pair


class Engine(Protocol):
    """Anything that continues a prompt."""

    name: str

    def generate(self, prompt: list[int], *, max_new_tokens: int, sampling: Sampling, seed: int) -> list[int]:
        """The new tokens, without the prompt, and no stop before ``max_new_tokens``."""


class HuggingFace:
    """transformers' own ``generate``, plain (K = 0) or assisted by the pair's draft with a constant K.

    Models of this library's GPT-2 class are copied into transformers' class with the same weights. The draft's
    generation config, through which transformers takes K, is changed on a copy.
    """

    def __init__(self, pair: Pair, K: int = 0):
        self.name = f"Hugging Face generate, assisted, K={K}" if K else "Hugging Face generate"
        self.model: Any = transformers_model(pair.target)  # Any: `generate` is typed too narrowly to be called
        self.options: dict[str, Any] = {}
        if K:
            assistant = copy.copy(transformers_model(pair.draft))
            assistant.generation_config = GenerationConfig(
                num_assistant_tokens=K, num_assistant_tokens_schedule="constant", assistant_confidence_threshold=0.0
            )
            self.options["assistant_model"] = assistant

    def generate(self, prompt: list[int], *, max_new_tokens: int, sampling: Sampling, seed: int) -> list[int]:
        config = GenerationConfig(max_new_tokens=max_new_tokens, do_sample=sampling.temperature > 0, pad_token_id=0)
        if sampling.temperature > 0:
            config.update(temperature=sampling.temperature, top_k=sampling.top_k or 0, top_p=sampling.top_p)
        ids = torch.tensor([prompt], device=self.model.device)
        # transformers draws from the global generator only: it is put back as it was.
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.manual_seed(seed)
            output = self.model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config, **self.options
            )
        return output[0, len(prompt) :].tolist()


def transformers_model(model: LanguageModel) -> PreTrainedModel:
    """The transformers model behind ``model``, or one with the same weights. Raises ``TypeError`` for other models."""
    if isinstance(model, HFModel):
        return model.model
    if not isinstance(model, GPT2):
        raise TypeError(f"{model.name} has no counterpart in transformers: give a GPT-2 or a Hugging Face model")
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
