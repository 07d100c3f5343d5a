"""The base class of tasks: numbered samples, a model and a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from stenograd.tasks.recipe import Recipe

__all__ = ["IGNORE", "Task"]

IGNORE = -1  # a target that neither the loss nor the score counts


class Task(ABC):
    """A training task with samples 0..train_size-1 for training and 0..eval_size-1 for evaluation.

    Batches and models are made on the CPU; the caller moves them.

    Attributes:
        name: the name that `load` accepts.
        recipe: the default hyper-parameters.
        unit: the score's name, for the head of a column.
        train_size: number of training samples.
        eval_size: number of evaluation samples.
    """

    name: str
    recipe: Recipe
    unit: str = "accuracy"
    train_size: int
    eval_size: int

    def model(self, seed: int) -> nn.Module:
        """Build the model; equal seeds give equal weights, and the global random state stays as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.build()

    @abstractmethod
    def build(self) -> nn.Module:
        """Build the model from the global random state."""

    @abstractmethod
    def train_batch(
        self, indices: Tensor, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of training samples.

        Args:
            indices: sample numbers, shape (batch,).
            generator: randomness for a task that alters its samples; the built-in tasks do not.
        """

    @abstractmethod
    def eval_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of evaluation samples, numbered by indices of shape (batch,)."""

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[Tensor, int, int]:
        """Return the mean cross-entropy, the number of correct predictions, and the number of targets.

        The model's scores have one axis more than the targets, the classes; targets of -1 do not count.
        """
        scores = model(inputs).flatten(0, -2)  # (targets, classes)
        wanted = targets.flatten()
        mean = functional.cross_entropy(scores, wanted, ignore_index=IGNORE)
        correct = int(
            (scores.argmax(dim=-1) == wanted).sum()
        )  # no class is -1, so an ignored target never hits
        return mean, correct, int((wanted != IGNORE).sum())
