"""DASO's phases: how many batches it skips in each epoch, and in which it averages inside a node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["BLOCKING", "Plan", "Skips"]

_FIRST_SKIPS = 4  # as in Heat, which uses 4 even where max_global_skips is lower


class Skips(NamedTuple):
    """How often DASO averages until the next epoch.

    global_skip: batches from one exchange between nodes to the next; 0 for an exact one after every batch.
    local_skip: batches from one average of gradients inside the node to the next; 1 for every batch.
    batches_to_wait: batches from sending to merging.
    """

    global_skip: int = 0
    local_skip: int = 0
    batches_to_wait: int = 0

    def is_local_sync(self, batch: int, last_batch: int) -> bool:
        """Return whether gradients are averaged inside the node in a batch.

        They are while an exchange is in flight, in every `local_skip`-th batch, and in the last batch.

        Example:
            >>> [Skips(8, 2, 2).is_local_sync(b, 19) for b in range(9)]
            [True, True, True, False, True, False, True, False, True]
        """
        if self.global_skip == 0 or self.local_skip <= 1 or batch == last_batch:
            return True
        since_sent = batch % self.global_skip
        return since_sent <= self.batches_to_wait or batch % self.local_skip == 0


# Exact averages after every batch. On MNIST (2 hosts of 2 workers, 100 Mbit/s) such an epoch takes 55 to
# 56 s, and an epoch of cycling 20.5 s (docs/heat.md), so it is kept for the start and the end of a training.
BLOCKING = Skips()


@dataclass(frozen=True, slots=True)
class Plan:
    """The phases of a training: warm-up, cycling, cool-down.

    Exchanges are exact and follow every batch in warm-up and cool-down. Cycling starts with
    `Skips(min(4, max_global_skips), 1, 1)`. When the loss stops improving, the skips shrink by
    `skip_reduction_factor` and the wait by one, none below 1. At a global skip of 1 they start over from
    `max_global_skips`, with `max_global_skips // local_skip_factor` (at least 1) as local skip and wait.

    Args:
        total_epochs, warmup_epochs, cooldown_epochs: lengths of the training, its start and its end.
        max_global_skips: where cycles start; 0 for no cycling at all.
        skip_reduction_factor: at least 2.
        local_skip_factor: at least 1.

    Example:
        >>> plan, skips = Plan(40, warmup_epochs=4), Skips()
        >>> for epoch in range(1, 17):  # the loss never improves: a plateau every third time
        ...     skips = plan.after_epoch(epoch, skips, lambda epoch=epoch: epoch in (7, 10, 13, 16))
        ...     if epoch in (3, 4, 7, 10, 13, 16):
        ...         print(epoch, *skips)
        3 0 0 0
        4 4 1 1
        7 2 1 1
        10 1 1 1
        13 8 2 2
        16 4 1 1
    """

    total_epochs: int
    warmup_epochs: int = 4
    cooldown_epochs: int = 4
    max_global_skips: int = 8
    skip_reduction_factor: int = 2
    local_skip_factor: int = 4

    @property
    def cycles(self) -> bool:
        """Whether any epoch lies between warm-up and cool-down."""
        return self.warmup_epochs + self.cooldown_epochs < self.total_epochs

    def first(self) -> Skips:
        """Return the skips of the first epoch."""
        return self._start() if self.warmup_epochs == 0 and self.cycles else BLOCKING

    def after_epoch(self, epoch: int, skips: Skips, is_plateau: Callable[[], bool]) -> Skips:
        """Return the skips for the next epoch.

        Args:
            epoch: number of finished epochs.
            skips: those of the last epoch.
            is_plateau: returns whether the loss stopped improving; called once per epoch, only while cycling.
        """
        if epoch < self.warmup_epochs or epoch >= self.total_epochs - self.cooldown_epochs:
            return BLOCKING
        if self.max_global_skips == 0:
            return BLOCKING
        if epoch == self.warmup_epochs or skips == BLOCKING:  # or the plan was changed meanwhile
            skips = self._start()
        if not is_plateau():
            return skips
        if skips.global_skip > 1:
            fewer = max(1, skips.global_skip // self.skip_reduction_factor)
            local = max(1, skips.local_skip // self.skip_reduction_factor)
            # merged when the next is sent at the latest
            return Skips(fewer, local, min(fewer, max(1, skips.batches_to_wait - 1)))
        again = max(1, self.max_global_skips // self.local_skip_factor)
        return Skips(self.max_global_skips, again, again)

    def _start(self) -> Skips:
        first = min(_FIRST_SKIPS, self.max_global_skips)
        return Skips(first, 1, 1) if first else BLOCKING
