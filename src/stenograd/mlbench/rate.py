"""The base of the schedulers: a learning rate as a function of the step."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

__all__ = ["RateOfStep"]


class RateOfStep(LRScheduler):
    """`lr = value(t, base)`; subclasses write `value`.

    Args:
        optimizer: whose groups to set.
        base: base rate of all groups; None for the rate that each has.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, base: float | None = None) -> None:
        if base is not None:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] = base
        super().__init__(optimizer)

    def value(self, t: int, base: float) -> float:
        """Return the rate of a group with this base rate."""
        raise NotImplementedError

    def get_lr(self) -> list[Any]:
        """Return the rates of all groups, as torch asks for them."""
        return [self.value(self.last_epoch, float(base)) for base in self.base_lrs]
