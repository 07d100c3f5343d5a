"""What a task is: numbered samples, a model to fit them, and a loss."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn
from torch.nn import functional

from stenograd.tasks.recipe import Recipe

__all__ = ["IGNORE", "Task"]

IGNORE = -1  # a target that is neither learned nor counted


class Task(ABC):
    """Something to train: samples 0..train_size-1 to learn from, 0..eval_size-1 to be judged by.

    Batches and models are made on the CPU; the caller moves them.

    Attributes:
        name: what `load` calls it.
        recipe: the default hyper-parameters.
        unit: what the score counts, for the head of a column.
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
        """Return the mean cross-entropy, how many targets were hit, and how many were counted.

        The model gives one more axis than the targets have, the classes; targets of -1 do not count.
        """
        scores = model(inputs).flatten(0, -2)  # (targets, classes)
        wanted = targets.flatten()
        mean = functional.cross_entropy(scores, wanted, ignore_index=IGNORE)
        correct = int(
            (scores.argmax(dim=-1) == wanted).sum()
        )  # no class is -1, so an ignored target never hits
        return mean, correct, int((wanted != IGNORE).sum())
