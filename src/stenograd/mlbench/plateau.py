"""A warm-up, then a learning rate that falls when a metric stops improving."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau

__all__ = ["ReduceLROnPlateauWithWarmup"]


class ReduceLROnPlateauWithWarmup(ReduceLROnPlateau):
    """Linear warm-up, then `torch.optim.lr_scheduler.ReduceLROnPlateau`.

    Args:
        optimizer: whose groups to set.
        warmup_init_lr: rate at the start.
        scaled_lr: rate after the warm-up.
        warmup_epochs: epochs of warm-up; 0 for none.
        batches_per_epoch: None warms up in `step`, once an epoch; else in `batch_step`, once a batch.
        kwargs: as for ReduceLROnPlateau.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> scheduler = ReduceLROnPlateauWithWarmup(optimizer, 0.0, 4.0, warmup_epochs=2)
        >>> rates = [optimizer.param_groups[0]["lr"]]
        >>> for loss in (3.0, 2.0):
        ...     scheduler.step(loss)
        ...     rates.append(optimizer.param_groups[0]["lr"])
        >>> rates
        [0.0, 2.0, 4.0]
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_init_lr: float,
        scaled_lr: float,
        warmup_epochs: int,
        batches_per_epoch: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.warmup_init_lr, self.scaled_lr = warmup_init_lr, scaled_lr
        self.warmup_duration = max(0, warmup_epochs) * (batches_per_epoch or 1)
        self.per_batch = batches_per_epoch is not None
        self.batch_idx = 0
        self.optimizer = optimizer
        self._set_rate()
        super().__init__(optimizer, **kwargs)

    @property
    def finished_warmup(self) -> bool:
        """Whether the rate has reached scaled_lr."""
        return self.batch_idx >= self.warmup_duration

    def batch_step(self) -> None:
        """Warm up by one step; nothing once warm."""
        if not self.finished_warmup:
            self.batch_idx += 1
            self._set_rate()

    def step(self, metrics: Any, epoch: int | None = None) -> None:  # type: ignore[override]
        """End an epoch: look for a plateau of the metric, once warm."""
        if self.finished_warmup:
            super().step(metrics)
        else:
            self.last_epoch += 1
            if not self.per_batch:
                self.batch_step()

    def _set_rate(self) -> None:
        progress = self.batch_idx / self.warmup_duration if self.warmup_duration else 1.0
        rate = progress * self.scaled_lr + (1 - progress) * self.warmup_init_lr
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._last_lr = [rate for _ in self.optimizer.param_groups]
