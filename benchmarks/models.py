"""What the benchmark trains: each model with a batch of its own and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from stenograd.tasks.models import CharGPT, mnist_cnn

__all__ = ["WORKS", "Work"]

_CHARACTERS = 65  # different characters of tiny Shakespeare


@dataclass(frozen=True)
class Work:
    """A model to train for time, not for accuracy: the same random batch in every step.

    Attributes:
        build: makes the model from the global random state.
        batch: makes inputs and class numbers from the global random state.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[], tuple[Tensor, Tensor]]

    def make(self, rank: int) -> tuple[nn.Module, Tensor, Tensor]:
        """Return a model equal on all ranks, and this rank's inputs and targets."""
        torch.manual_seed(0)
        model = self.build()
        torch.manual_seed(1 + rank)
        return model, *self.batch()


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy; the scores have one more axis than the targets, the classes."""
    return functional.cross_entropy(scores.flatten(0, -2), targets.flatten())


def _mlp() -> nn.Module:
    sizes = [784, 2048, 2048, 2048, 10]
    layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def _images(batch_size: int, *shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch_size, *shape), torch.randint(10, (batch_size,))


def _text(batch_size: int, context: int) -> tuple[Tensor, Tensor]:
    windows = torch.randint(_CHARACTERS, (batch_size, context + 1))
    return windows[:, :-1], windows[:, 1:]


WORKS = {
    # Apache SINGA's MNIST example, 0.43 M parameters, with its batch size
    "cnn": Work(mnist_cnn, lambda: _images(64, 1, 28, 28)),
    # 10.0 M parameters and little arithmetic: the exchange weighs most here
    "mlp": Work(_mlp, lambda: _images(128, 784)),
    # the same with half of the arithmetic
    "mlp-64": Work(_mlp, lambda: _images(64, 784)),
    # nanoGPT's character model for CPUs, 0.80 M parameters, with its batch size and context
    "gpt-small": Work(lambda: CharGPT(_CHARACTERS), lambda: _text(12, 64)),
    # nanoGPT's character model for GPUs, 10.7 M parameters, with its context; a batch that one core can do
    "gpt": Work(lambda: CharGPT(_CHARACTERS, 256, layers=6, heads=6, width=384), lambda: _text(2, 256)),
}
