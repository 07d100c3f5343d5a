"""How far an epoch has come, and who trains on what is left of it, also with more or fewer workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from stenograd import tasks
from stenograd.cli.setup import Setup

__all__ = ["Progress"]


@dataclass(kw_only=True)
class Progress:
    """The epoch under way. Sums, bytes and seconds are this rank's; the rest is equal on all ranks.

    Attributes:
        epoch: its number, from 1.
        legs: [world size, steps taken] of each stretch trained by one number of workers, the last under way.
        loss: of the samples so far, summed.
        correct: hits among them.
        count: their number.
        skipped: steps that a gradient which is not finite made void.
        seconds: for training.
        payload_bytes: handed to collectives.
        moved_bytes: sent by them.
        dense_bytes: what dense training sends in as many steps.
    """

    epoch: int
    legs: list[list[int]] = field(default_factory=list)
    loss: float = 0.0
    correct: float = 0.0
    count: float = 0.0
    skipped: int = 0
    seconds: float = 0.0
    payload_bytes: int = 0
    moved_bytes: int = 0
    dense_bytes: int = 0

    @property
    def steps(self) -> int:
        """Steps taken in this epoch."""
        return sum(steps for _, steps in self.legs)

    def join(self, world_size: int) -> None:
        """Go on with this number of workers."""
        if not self.legs or self.legs[-1][0] != world_size:
            self.legs.append([world_size, 0])

    def steps_left(self, setup: Setup) -> int:
        """Return the number of steps to go, equal on every rank."""
        return self._legs_steps(setup, _pool(setup, self.epoch, self.legs)) - self.legs[-1][1]

    def batches(self, setup: Setup, rank: int) -> Iterator[Tensor]:
        """Yield this rank's remaining batches.

        Where the number of workers changed, what all of them had seen in this epoch is left out, and the
        rest is shared out anew as a whole epoch is: shards of nearly equal size, each in its own order. Up to
        N - 1 samples that are too few for N workers are left out. An epoch of a given number of steps keeps
        that number.
        """
        pool = _pool(setup, self.epoch, self.legs)
        steps = self._legs_steps(setup, pool)
        if steps == 0:
            return iter(())
        world_size, taken = self.legs[-1]
        return islice(_cut(setup, pool, self.epoch, steps, rank, world_size), taken, None)

    def _legs_steps(self, setup: Setup, pool: Tensor) -> int:
        before = sum(steps for _, steps in self.legs[:-1])
        return _steps(setup, len(pool), before, self.legs[-1][0])


def _pool(setup: Setup, epoch: int, legs: Sequence[Sequence[int]]) -> Tensor:
    """Return the samples that were left when the last leg began."""
    pool, before = torch.arange(setup.task.train_size, device="cpu"), 0
    for world_size, taken in legs[:-1]:
        steps = _steps(setup, len(pool), before, world_size)
        seen = torch.zeros(setup.task.train_size, dtype=torch.bool, device="cpu")
        for rank in range(world_size if steps else 0):
            for batch in islice(_cut(setup, pool, epoch, steps, rank, world_size), taken):
                seen[batch] = True
        left, before = pool[~seen[pool]], before + taken
        # a given number of steps must be taken
        again = setup.recipe.steps_per_epoch is not None and len(left) < legs[-1][0]
        pool = pool if again else left
    return pool


def _steps(setup: Setup, samples: int, before: int, world_size: int) -> int:
    """Return how many steps a leg takes that begins with these samples after `before` steps."""
    fixed = setup.recipe.steps_per_epoch
    if fixed is not None:
        return fixed - before
    if samples < world_size:
        return 0
    return tasks.steps_per_epoch(samples, world_size, setup.recipe.batch_size, None)


def _cut(setup: Setup, pool: Tensor, epoch: int, steps: int, rank: int, world_size: int) -> Iterator[Tensor]:
    """Cut a rank's shard of the pool in batches."""
    options = setup.options
    shuffle = options.shards == "shuffled"
    mine = pool[tasks.shard(len(pool), rank, world_size, shuffle=shuffle, seed=options.seed)]
    return tasks.batches(
        mine, setup.recipe.batch_size, epoch=epoch, seed=options.seed, shuffle=True, steps=steps
    )
