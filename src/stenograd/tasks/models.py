"""The models that the tasks train: two convolutional networks and a character GPT."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["CharGPT", "digits_cnn", "mnist_cnn"]


def digits_cnn() -> nn.Sequential:
    """Build the network for 8x8 images: two convolutions and two linear layers, 71,754 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def mnist_cnn() -> nn.Sequential:
    """Build the network for 28x28 images of Apache SINGA's MNIST example, 431,080 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 20, 5),
        nn.MaxPool2d(2),  # before ReLU: the same numbers, of which ReLU then sees a quarter
        nn.ReLU(),
        nn.Conv2d(20, 50, 5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(800, 500),
        nn.ReLU(),
        nn.Linear(500, 10),
    )


class CharGPT(nn.Module):
    """A decoder-only transformer over characters, in GPT-2's layout without biases.

    The output matrix is the embedding of the characters. Weights start as in GPT-2: N(0, 0.02), and
    N(0, 0.02 / sqrt(2 layers)) where a block adds to the residual stream.

    Args:
        vocabulary: number of different characters.
        context: longest input, in characters.
        layers: number of blocks.
        heads: attention heads per block; divides width.
        width: length of a character's vector.

    Reference:
        A. Radford et al., "Language models are unsupervised multitask learners", 2019; the sizes are those
        of nanoGPT's small character model.
    """

    def __init__(
        self, vocabulary: int, context: int = 64, layers: int = 4, heads: int = 4, width: int = 128
    ) -> None:
        super().__init__()
        self.characters = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(heads, width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim >= 2:
                # As in GPT-2: 2 * layers branches add to the residual stream, so each starts that much
                # smaller.
                std = 0.02 / math.sqrt(2 * layers) if name.endswith("out.weight") else 0.02
                nn.init.normal_(parameter, std=std)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the scores of each next character, shape (batch, time, vocabulary), for (batch, time)."""
        positions = torch.arange(inputs.shape[1], device=inputs.device)
        x = self.characters(inputs) + self.positions(positions)  # (batch, time, width)
        # the embedding is the output layer too, as in GPT-2
        return functional.linear(self.norm(self.blocks(x)), self.characters.weight)


class _Block(nn.Module):
    """Attention, then a two-layer network, each on normalised input and added to the residual stream."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.attention = _Attention(heads, width)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        hidden = functional.gelu(self.mlp_in(self.mlp_norm(x)))
        result: Tensor = x + self.mlp_out(hidden)
        return result


class _Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, heads: int, width: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        split = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)  # each (batch, heads, time, width / heads)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return result
