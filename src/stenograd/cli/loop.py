"""The training loop: an ordinary one, with `stenograd.distribute` around model and optimizer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch

from stenograd import tasks
from stenograd.catalog.method import Method
from stenograd.checkpoint.reshard import Joint
from stenograd.cli.epoch import Progress, merged
from stenograd.cli.plan import Plan
from stenograd.cli.rows import Row, Score, fingerprint
from stenograd.comm.agreement import everyone, sum_over_ranks
from stenograd.comm.driver import Driver
from stenograd.comm.traffic import moved_bytes
from stenograd.data.requests import Op
from stenograd.errors import CheckpointError, MismatchError
from stenograd.sync.gradient_sync import distribute

__all__ = ["Trainer"]

_EVAL_BATCH = 256
_STEPS_TIMED = 10_000  # enough for a median; a list of all would grow for as long as the run takes


class Trainer:
    """One rank's training under one method.

    Gradients are means over the ranks of means over each rank's batch. Where the last batches of an epoch
    differ in size (by at most one sample a step), a sample of the smaller batch weighs a little more.

    Args:
        plan: what to train; equal on every rank.
        method: how gradients travel.
        driver: for scores, which are not part of the method's traffic.

    Attributes:
        step_s: seconds of the newest 10,000 training steps of this rank, without evaluation.
        taken: number of steps taken, skipped ones included.
        progress: of the epoch under way.
    """

    def __init__(self, plan: Plan, method: Method, driver: Driver) -> None:
        self.plan, self.driver = plan, driver
        self.model = plan.task.model(plan.options.seed).to(plan.device)
        self.optimizer = plan.recipe.make_optimizer(self.model)
        self._total_steps = plan.recipe.epochs * plan.steps
        self.scheduler = plan.recipe.make_scheduler(self.optimizer, self._total_steps)
        self.step_s: deque[float] = deque(maxlen=_STEPS_TIMED)
        self.taken = 0
        self.progress = Progress(epoch=0)
        opt = plan.options
        self.sync = distribute(
            self.model, self.optimizer, method, bucket_bytes=opt.bucket_bytes, timeout_s=opt.timeout_s
        )

    def begin_epoch(self, epoch: int) -> int:
        """Begin an epoch, or go on with it where `restore` found it begun; return the steps to go."""
        if self.progress.epoch != epoch:
            self.progress = Progress(epoch=epoch)
        self.progress.join(self.driver.world_size)
        return self.progress.steps_left(self.plan)

    def run_epoch(self, epoch: int, on_step: Callable[[], None] = lambda: None) -> Row:
        """Train for one epoch, or what is left of it, and evaluate.

        Args:
            epoch: its number, from 1.
            on_step: called after every step.

        Raises:
            MismatchError: the ranks' parameters are no longer equal.
        """
        self.begin_epoch(epoch)
        now = self.progress
        self._train(now, on_step)
        start = time.perf_counter()
        trained = self._score([now.loss, now.correct, now.count])
        evaluated = self.evaluate()
        self.check_equal()
        sent = now.moved_bytes if self.driver.world_size > 1 else now.payload_bytes
        return Row(
            epoch=epoch,
            train_loss=trained.loss,
            train_accuracy=trained.accuracy,
            eval_loss=evaluated.loss,
            eval_accuracy=evaluated.accuracy,
            seconds=now.seconds + time.perf_counter() - start,
            payload_bytes=now.payload_bytes,
            moved_bytes=now.moved_bytes,
            dense_bytes=now.dense_bytes,
            compression=now.dense_bytes / max(sent, 1),
            steps=now.steps,
            skipped=now.skipped,
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
            "taken": self.taken,
            "total_steps": self._total_steps,
            "progress": asdict(self.progress),
        }

    def restore(self, state: dict[str, Any], everyone: Iterable[dict[str, Any]] = ()) -> None:
        """Continue from what `state` returned.

        Args:
            state: this rank's, or rank 0's of another number of ranks.
            everyone: those of all ranks, in rank order; looked at where their number is another one. Then
                residuals are re-sharded (`stenograd.reshard`), the learning rate's schedule goes on at the
                same share of all its steps, and `Progress.batches` says who trains on the rest of the epoch.

        Raises:
            CheckpointError: it is not this model's, optimizer's or method's.
        """
        rank, world_size = self.driver.rank, self.driver.world_size
        try:
            if state["sync"]["world_size"] != world_size:
                joint, progresses = Joint(), list[dict[str, Any]]()
                for other in everyone:
                    joint.add(other["sync"])
                    progresses.append(other["progress"])
                sync, progress = joint.share(rank, world_size), merged(progresses, rank)
                state = {**state, "sync": sync, "progress": progress}
            self.sync.load_state_dict(state["sync"])
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            if self.scheduler is not None:
                self._restore_scheduler(state)
            self.taken = state["taken"]
            self.progress = Progress(**state["progress"])
        except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as cause:
            reason = " ".join(str(cause).split())[:200]
            raise CheckpointError(
                f"the checkpoint does not fit: {reason}: remove it, or restore a copy"
            ) from cause

    def _restore_scheduler(self, state: dict[str, Any]) -> None:
        assert self.scheduler is not None
        self.scheduler.load_state_dict(state["scheduler"])
        if state["total_steps"] != self._total_steps and self.scheduler.last_epoch > 0:
            share = self.scheduler.last_epoch / state["total_steps"]
            self.scheduler.last_epoch = round(share * self._total_steps) - 1
            self.scheduler.step()  # sets the rates that belong to the place

    def _train(self, now: Progress, on_step: Callable[[], None]) -> None:
        """Take the epoch's remaining steps, and keep account of them."""
        traffic, dense = self.sync.traffic, self._dense_bytes_per_step()
        for indices in now.batches(self.plan, self.driver.rank):
            start = time.perf_counter()
            payload_before, moved_before = traffic.payload_bytes, traffic.moved_bytes
            loss, correct, count = self._step(indices)
            seconds = time.perf_counter() - start
            self.step_s.append(seconds)
            now.seconds += seconds
            now.loss, now.correct = now.loss + loss * count, now.correct + correct
            now.count, now.skipped = now.count + count, now.skipped + (not count)
            now.payload_bytes += traffic.payload_bytes - payload_before
            now.moved_bytes += traffic.moved_bytes - moved_before
            now.dense_bytes += dense
            now.legs[-1][1] += 1
            self.taken += 1
            on_step()

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

    def _score(self, sums: list[float]) -> Score:
        loss, correct, count = sum_over_ranks(self.driver, sums)
        return Score(loss / count, correct / count) if count else Score(float("nan"), float("nan"))

    def _dense_bytes_per_step(self) -> int:
        model_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        world_size = self.driver.world_size
        return moved_bytes(Op.MEAN, model_bytes, world_size) if world_size > 1 else model_bytes
