"""Hydra: Medusa's heads, made sequential. Each also reads the tokens before the one that it guesses.

What a Medusa head cannot know is which tokens were drawn between its feature and its own position. A Hydra head is
told: the committed token that the target has not read yet, and then the draft's own tokens. The price is that the heads
run one after the other. Ankner et al. (2024), 2402.05109.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from ..distributions import Sampling
from ..gpt2 import GPT2
from ..randomness import Randomness
from . import Draft
from .observe import FromNewestFeature


class HydraHeads(nn.Module):
    """Head i: ``h + SiLU(W_i [h; e_1; ...; e_i] + b_i)``, e_j the embedding of the j-th token after the feature."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.width, self.heads = width, heads
        self.linears = nn.ModuleList(nn.Linear((i + 2) * width, width) for i in range(heads))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(
        self, features: Float[Tensor, "*batch width"], embedded: Float[Tensor, "*batch i width"]
    ) -> Float[Tensor, "*batch width"]:
        """What the head says that has i >= 1 tokens to read."""
        inputs = torch.cat([features.unsqueeze(-2), embedded], -2).flatten(-2)
        return features + F.silu(self.linears[embedded.shape[-2] - 1](inputs))


class HydraDrafter(FromNewestFeature):
    """Drafts a chain with ``heads``, each token drawn from its head's law. As with Medusa, the first round has none."""

    name = "Hydra"

    def __init__(self, target: GPT2, heads: HydraHeads):
        super().__init__(target)
        self.heads = heads

    def propose(self, context: Int[Tensor, " length"], K: int, sampling: Sampling, randomness: Randomness) -> Draft:
        if self.feature is None:
            return Draft(context[:0], None)
        tokens, probs = context[-1:], []
        for _ in range(min(K, self.heads.heads)):
            guess = self.heads(self.feature, self.target.token_embedding(tokens))
            probs.append(sampling.probs(self.target.logits(guess)))
            token = torch.as_tensor(randomness.categorical(probs[-1]), device=context.device)
            tokens = torch.cat([tokens, token.view(1)])
        return Draft(tokens[1:], torch.stack(probs))
