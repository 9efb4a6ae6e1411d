"""Weights laid out as the CPU's matrix kernels want them, so that scoring a few tokens costs little more than one.

In float32 PyTorch reads a weight matrix row by row. For a few tokens at a time that means several reads of the same
weights, and verification is no longer nearly free. oneDNN (the library below PyTorch on x86) can store a matrix once in
blocks that its kernels multiply with any number of tokens in one read. That costs a little when there is one token, and
for small matrices, which sit in the caches anyway, it does not pay: measure (``specdec bench --mode packed``).
Half-precision weights take such kernels by themselves.
"""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from .gpt2 import GPT2
from .models import LanguageModel


class PackedLinear(nn.Module):
    """``nn.Linear`` with a packed copy of its weights."""

    def __init__(self, weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, " outputs"] | None):
        super().__init__()
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach())
        self.bias = bias

    def forward(self, x: Float[Tensor, "*batch inputs"]) -> Float[Tensor, "*batch outputs"]:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class PackedGPT2(GPT2):
    """A ``GPT2`` whose matrices are packed; embeddings and norms are those of ``model``. The output head is packed too.

    Once ``model`` is dropped, it takes the memory of one model and of one more embedding matrix.
    Raises ``ValueError`` unless ``model`` is a ``GPT2`` in float32 on a CPU that has oneDNN.
    """

    def __init__(self, model: LanguageModel):
        if not isinstance(model, GPT2):
            raise ValueError(f"only this library's own GPT2 can be packed; {model.name} is {type(model).__name__}")
        if model.device.type != "cpu" or model.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
            raise ValueError(
                f"packing is for float32 on a CPU with oneDNN; {model.name} is {model.dtype} on {model.device}. "
                "Half precision and GPUs need no packing: leave the mode out"
            )
        with torch.device("meta"):
            super().__init__(model.config, model.name)
        self.load_state_dict(model.state_dict(), assign=True)
        self.eval().requires_grad_(False)
        for block in self.blocks:
            for name, layer in list(block.named_children()):
                if isinstance(layer, nn.Linear):
                    setattr(block, name, PackedLinear(layer.weight, layer.bias))
        self.head = PackedLinear(model.token_embedding.weight, None)

    def logits(self, hidden: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch vocab"]:
        return self.head(hidden)
