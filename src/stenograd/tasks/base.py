"""What a task is: numbered samples, a model and a loss, and a recipe of hyper-parameters for them."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from stenograd.errors import bad_value

__all__ = ["IGNORE", "Recipe", "Task"]

IGNORE = -1  # a target that neither the loss nor the score counts


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How long and how fast to train.

    Args:
        epochs: number of passes, at least 1.
        batch_size: samples per worker and step, at least 1.
        lr: peak learning rate, > 0.
        momentum: SGD's momentum in [0, 1); must be 0 for AdamW, which has betas instead.
        weight_decay: at least 0; AdamW leaves out biases, gains and other tensors with fewer than two axes.
        nesterov: SGD with Nesterov's momentum.
        optimizer: "sgd" or "adamw".
        betas: AdamW's two averaging factors, each in [0, 1).
        warmup_steps: steps over which the learning rate rises linearly to lr.
        min_lr: learning rate of the last step, reached along a half cosine, in [0, lr]; None keeps lr.
        steps_per_epoch: steps that make an epoch; None for one pass over the shard.

    Raises:
        ConfigError: if a value is outside its range.

    Example:
        >>> from dataclasses import replace
        >>> recipe = Recipe(epochs=10, batch_size=64, lr=0.1)
        >>> replace(recipe, epochs=2).epochs
        2
    """

    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False
    optimizer: str = "sgd"
    betas: tuple[float, float] = (0.9, 0.999)
    warmup_steps: int = 0
    min_lr: float | None = None
    steps_per_epoch: int | None = None

    def __post_init__(self) -> None:
        self._check_counts()
        self._check_rates()
        self._check_optimizer()

    def _check_counts(self) -> None:
        least = {"epochs": 1, "batch_size": 1, "warmup_steps": 0}
        if self.steps_per_epoch is not None:
            least["steps_per_epoch"] = 1
        for name, bound in least.items():
            got = getattr(self, name)
            if not isinstance(got, int) or isinstance(got, bool) or got < bound:
                advice = f"use {max(bound, 1)} or more"
                raise bad_value(name, f"must be a whole number >= {bound}", got, advice)

    def _check_rates(self) -> None:
        if not 0 < self.lr < math.inf:
            raise bad_value("lr", "must be finite and > 0", self.lr, "try 0.1 with sgd, 0.001 with adamw")
        if self.min_lr is not None and not 0 <= self.min_lr <= self.lr:
            advice = "lower min_lr, or use None for a constant learning rate"
            raise bad_value("min_lr", f"must be in [0, lr] = [0, {self.lr}]", self.min_lr, advice)
        if not 0 <= self.weight_decay < math.inf:
            raise bad_value("weight_decay", "must be finite and >= 0", self.weight_decay, "use 0 for none")

    def _check_optimizer(self) -> None:
        if self.optimizer not in ("sgd", "adamw"):
            raise bad_value("optimizer", "must be 'sgd' or 'adamw'", self.optimizer, "choose one of the two")
        if not 0 <= self.momentum < 1:
            raise bad_value("momentum", "must be in [0, 1)", self.momentum, "use 0.9, or 0 for none")
        if self.optimizer == "adamw" and (self.momentum or self.nesterov):
            got = {"momentum": self.momentum, "nesterov": self.nesterov}
            raise bad_value("momentum", "must be 0 and nesterov off with adamw", got, "set betas instead")
        if self.nesterov and not self.momentum:
            raise bad_value("nesterov", "needs momentum > 0", True, "set momentum=0.9, or leave nesterov off")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            raise bad_value("betas", "must be two numbers in [0, 1)", self.betas, "use (0.9, 0.999)")

    def make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Build the optimizer over the model's trainable parameters.

        Example:
            >>> recipe = Recipe(epochs=1, batch_size=1, lr=0.1, weight_decay=0.1, optimizer="adamw")
            >>> [group["weight_decay"] for group in recipe.make_optimizer(nn.Linear(2, 2)).param_groups]
            [0.1, 0.0]
        """
        parameters = [p for p in model.parameters() if p.requires_grad]
        if self.optimizer == "sgd":
            return torch.optim.SGD(
                parameters,
                lr=self.lr,
                momentum=self.momentum,
                weight_decay=self.weight_decay,
                nesterov=self.nesterov,
            )
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": self.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW([group for group in groups if group["params"]], lr=self.lr, betas=self.betas)

    def make_scheduler(self, optimizer: torch.optim.Optimizer, total_steps: int) -> LRScheduler | None:
        """Build the schedule, to be stepped after each optimizer step; None for a constant learning rate.

        Raises:
            ConfigError: if total_steps is not positive.

        Example:
            >>> recipe = Recipe(epochs=1, batch_size=1, lr=0.1, warmup_steps=3, min_lr=0.0)
            >>> optimizer = recipe.make_optimizer(nn.Linear(2, 2))
            >>> recipe.make_scheduler(optimizer, total_steps=10).get_last_lr()
            [0.025]
        """
        if total_steps < 1:
            raise bad_value("total_steps", "must be >= 1", total_steps, "train for at least one step")
        if not self.warmup_steps and self.min_lr is None:
            return None
        return LambdaLR(optimizer, lambda step: self.lr_factor(step, total_steps))

    def lr_factor(self, step: int, total_steps: int) -> float:
        """Return the learning rate at a step as a multiple of lr.

        With w warm-up steps and f = min_lr / lr:

            (step + 1) / (w + 1)                               if step < w
            f + (1 - f) (1 + cos(pi (step - w) / (T - 1 - w))) / 2    after, so f at the last step T - 1

        Example:
            >>> recipe = Recipe(epochs=1, batch_size=1, lr=1.0, warmup_steps=1, min_lr=0.1)
            >>> [round(recipe.lr_factor(step, total_steps=4), 3) for step in range(4)]
            [0.5, 1.0, 0.55, 0.1]
        """
        if step < self.warmup_steps:
            return (step + 1) / (self.warmup_steps + 1)
        if self.min_lr is None:
            return 1.0
        floor = self.min_lr / self.lr
        decay_steps = max(total_steps - 1 - self.warmup_steps, 1)
        progress = min((step - self.warmup_steps) / decay_steps, 1.0)
        return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2


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
        # `torch.manual_seed` would seed CUDA's generators, too, which this fork does not put back.
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            return self.build()

    @abstractmethod
    def build(self) -> nn.Module:
        """Build the model from the global random state."""

    @abstractmethod
    def train_batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of training samples, numbered by indices of shape (batch,)."""

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
        correct = int((scores.argmax(dim=-1) == wanted).sum())  # an ignored target, -1, is no class
        return mean, correct, int((wanted != IGNORE).sum())
