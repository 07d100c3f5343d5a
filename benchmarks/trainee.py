"""One rank's training on a task under one rival, with the task's recipe."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from rivals import Attached, host_bytes
from torch import Tensor

import stenograd
from stenograd import tasks

__all__ = ["Spent", "Trainee"]

_EVAL_BATCH = 500
_SETTLE_S = 0.05  # until the last packets of a piece of training are counted


@dataclass
class Spent:
    """What training took.

    Attributes:
        seconds: of the slowest rank, evaluation excluded.
        host_bytes: sent by rank 0's host, read from its interface.
        counted_bytes: sent by rank 0, by Stenograd's count; None where nobody counts.
        loss: mean over this rank's batches of the last piece.
    """

    seconds: float = 0.0
    host_bytes: int = 0
    counted_bytes: int | None = None
    loss: float = float("nan")


class Trainee:
    """A model with an optimizer and a share of the data; rivals with equal seeds see the same batches.

    Args:
        name: the rival, see `rivals.Attached`.
        task: MNIST, with SINGA's recipe, or text, with nanoGPT's.
        world: this rank's place.
        seed: of the weights, the shards and the order of the samples.
        steps: of an epoch; None for as many as show every sample once, or as the recipe says.
        epochs: after which the learning rate ends; None for the recipe's.
    """

    def __init__(
        self,
        name: str,
        task: tasks.Task,
        world: stenograd.launch.process_group.World,
        seed: int,
        steps: int | None = None,
        epochs: int | None = None,
    ) -> None:
        self.name, self.task, self._world, self._seed = name, task, world, seed
        self.model = task.model(seed)
        if task.name == "mnist":
            self.model.to(memory_format=torch.channels_last)  # faster convolutions on CPU
        self.optimizer: Any = task.recipe.make_optimizer(self.model)
        self.attached = Attached(name, self.model, self.optimizer)
        size, ranks = task.train_size, world.world_size
        self._shard = tasks.shard(size, world.rank, ranks, shuffle=True, seed=seed)
        steps = steps or task.recipe.steps_per_epoch
        self.steps = tasks.steps_per_epoch(size, ranks, task.recipe.batch_size, steps)
        total = self.steps * (epochs or task.recipe.epochs)
        self._scheduler = task.recipe.make_scheduler(self.optimizer, total)
        self.spent = Spent()

    def batches(self, epoch: int) -> Iterator[Tensor]:
        """Return this rank's batches of an epoch, as sample numbers."""
        batch_size = self.task.recipe.batch_size
        return tasks.batches(
            self._shard, batch_size, epoch=epoch, seed=self._seed, shuffle=True, steps=self.steps
        )

    def train(self, batches: Iterable[Tensor]) -> None:
        """Take a step a batch and add what that took to `spent`."""
        before = _settled_bytes()
        start, losses = time.perf_counter(), []
        for indices in batches:
            inputs, targets = self.task.train_batch(indices)
            self.optimizer.zero_grad()
            loss, _, _ = self.task.loss(self.attached.module, inputs, targets)
            loss.backward()
            self.optimizer.step()
            if self._scheduler is not None:
                self._scheduler.step()
            losses.append(loss.item())
        seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
        self.spent.host_bytes += _settled_bytes() - before
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        self.spent.seconds += seconds.item()
        self.spent.counted_bytes = self.attached.moved_bytes
        self.spent.loss = sum(losses) / len(losses)

    @torch.no_grad()
    def scores(self) -> tuple[float, float]:
        """Return the mean loss of evaluation samples and the share that is right, each judged on one rank."""
        rank, ranks = self._world.rank, self._world.world_size
        sums = torch.zeros(3, dtype=torch.float64)
        with self.attached.consensus():
            for indices in tasks.eval_batches(self.task.eval_size, rank, ranks, _EVAL_BATCH):
                loss, right, count = self.task.loss(self.model, *self.task.eval_batch(indices))
                sums += torch.tensor([loss.item() * count, right, count], dtype=torch.float64)
        dist.all_reduce(sums)
        loss_sum, right_sum, count_sum = sums.tolist()
        return loss_sum / count_sum, right_sum / count_sum

    def replicas_equal(self) -> bool:
        """Return whether all ranks have the same parameters, to the bit."""
        mine = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])
        theirs = mine.clone()
        dist.broadcast(theirs, 0)
        differs = torch.tensor(int(not torch.equal(mine, theirs)))
        dist.all_reduce(differs)
        return differs.item() == 0


def _settled_bytes() -> int:
    """Wait until every rank is here and what they sent has arrived; return this host's counter."""
    dist.barrier()
    time.sleep(_SETTLE_S)
    return host_bytes()
