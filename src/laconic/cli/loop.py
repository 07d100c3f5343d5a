"""The training loop: an ordinary one, with `laconic.distribute` around model and optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from laconic import tasks
from laconic.cli.plan import Plan
from laconic.cli.rows import Row, Score, fingerprint
from laconic.drive import Driver
from laconic.engine import distribute
from laconic.errors import CheckpointError, MismatchError
from laconic.parsing import Method
from laconic.totals import everyone, sum_over_ranks
from laconic.traffic import moved_bytes
from laconic.wire import Op

__all__ = ["Trainer"]

_EVAL_BATCH = 256


class Trainer:
    """One rank's training under one method.

    Gradients are means over the ranks of means over each rank's batch. Where the last batches of an epoch
    differ in size (by at most one sample a step), a sample of the smaller batch weighs a little more.

    Args:
        plan: what to train; equal on every rank.
        method: how gradients travel.
        driver: for scores, which are not part of the method's traffic.

    Attributes:
        step_s: seconds of each training step of this rank, without evaluation.
    """

    def __init__(self, plan: Plan, method: Method, driver: Driver) -> None:
        self.plan, self.driver = plan, driver
        self.model = plan.task.model(plan.options.seed).to(plan.device)
        self.optimizer = plan.recipe.make_optimizer(self.model)
        total_steps = plan.recipe.epochs * plan.steps
        self.scheduler = plan.recipe.make_scheduler(self.optimizer, total_steps)
        self.step_s: list[float] = []
        opt, size = plan.options, plan.task.train_size
        shuffle = opt.shards == "shuffled"
        self._shard = tasks.shard(size, driver.rank, driver.world_size, shuffle=shuffle, seed=opt.seed)
        self.sync = distribute(
            self.model, self.optimizer, method, bucket_bytes=opt.bucket_bytes, timeout_s=opt.timeout_s
        )

    def run_epoch(self, epoch: int, on_step: Callable[[], None] = lambda: None) -> Row:
        """Train for one epoch and evaluate.

        Args:
            epoch: its number, from 1.
            on_step: called after every step.

        Raises:
            MismatchError: the ranks' parameters are no longer equal.
        """
        start, traffic = time.perf_counter(), self.sync.traffic
        payload_before, moved_before = traffic.payload_bytes, traffic.moved_bytes
        trained, skipped = self._train(epoch, on_step)
        payload, moved = traffic.payload_bytes - payload_before, traffic.moved_bytes - moved_before
        evaluated = self.evaluate()
        self.check_equal()
        dense = self._dense_bytes_per_step() * self.plan.steps
        sent = moved if self.driver.world_size > 1 else payload
        return Row(
            epoch=epoch,
            train_loss=trained.loss,
            train_accuracy=trained.accuracy,
            eval_loss=evaluated.loss,
            eval_accuracy=evaluated.accuracy,
            seconds=time.perf_counter() - start,
            payload_bytes=payload,
            moved_bytes=moved,
            dense_bytes=dense,
            compression=dense / max(sent, 1),
            steps=self.plan.steps,
            skipped=skipped,
        )

    @torch.no_grad()
    def evaluate(self) -> Score:
        """Judge the model by every evaluation sample, each on one rank."""
        task, device = self.plan.task, self.plan.device
        self.model.eval()
        sums = [0.0, 0.0, 0.0]
        pieces = tasks.eval_batches(task.eval_size, self.driver.rank, self.driver.world_size, _EVAL_BATCH)
        for indices in pieces:
            inputs, targets = task.eval_batch(indices)
            loss, correct, count = task.loss(self.model, inputs.to(device), targets.to(device))
            sums = [sums[0] + loss.item() * count, sums[1] + correct, sums[2] + count]
        self.model.train()
        return self._score(sums)

    def check_equal(self) -> str:
        """Check that all ranks have equal parameters, and return their fingerprint.

        Raises:
            MismatchError: they differ.
        """
        mine = fingerprint(self.model)
        for rank, theirs in enumerate(everyone(self.driver, mine)):
            if theirs != mine:
                raise MismatchError(
                    f"ranks {self.driver.rank} and {rank} have different parameters ({mine} and {theirs}): "
                    "restart from the last checkpoint, and report this"
                )
        return mine

    def state(self) -> dict[str, Any]:
        """Return all that decides the next step on this rank."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict() if self.scheduler is not None else None,
            "sync": self.sync.state_dict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from what `state` returned.

        Raises:
            CheckpointError: it is not this model's, optimizer's or method's.
        """
        try:
            self.sync.load_state_dict(state["sync"])
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.scheduler is not None:
                self.scheduler.load_state_dict(state["scheduler"])
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as cause:
            if isinstance(cause, CheckpointError):
                raise
            reason = " ".join(str(cause).split())[:200]
            raise CheckpointError(
                f"the checkpoint does not fit: {reason}: remove it, or restore a copy"
            ) from cause

    def _train(self, epoch: int, on_step: Callable[[], None]) -> tuple[Score, int]:
        sums, skipped = [0.0, 0.0, 0.0], 0
        for indices in self._batches(epoch):
            start = time.perf_counter()
            loss, correct, count = self._step(indices)
            self.step_s.append(time.perf_counter() - start)
            if count:
                sums = [sums[0] + loss * count, sums[1] + correct, sums[2] + count]
            else:
                skipped += 1
            on_step()
        return self._score(sums), skipped

    def _step(self, indices: torch.Tensor) -> tuple[float, int, int]:
        """Take one step; a count of 0 says that it was skipped, on every rank."""
        task, device = self.plan.task, self.plan.device
        inputs, targets = task.train_batch(indices)
        self.optimizer.zero_grad()
        loss, correct, count = task.loss(self.model, inputs.to(device), targets.to(device))
        loss.backward()
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        if not all(bool(torch.isfinite(grad).all()) for grad in grads):
            return 0.0, 0, 0  # averages are equal on all ranks, so all skip
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        return loss.item(), correct, count

    def _batches(self, epoch: int) -> Iterator[torch.Tensor]:
        size, steps = self.plan.recipe.batch_size, self.plan.steps
        seed = self.plan.options.seed
        return tasks.batches(self._shard, size, epoch=epoch, seed=seed, shuffle=True, steps=steps)

    def _score(self, sums: list[float]) -> Score:
        loss, correct, count = sum_over_ranks(self.driver, sums)
        return Score(loss / count, correct / count) if count else Score(float("nan"), float("nan"))

    def _dense_bytes_per_step(self) -> int:
        model_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        world_size = self.driver.world_size
        return moved_bytes(Op.MEAN, model_bytes, world_size) if world_size > 1 else model_bytes
