"""The training loop: an ordinary one, with `stenograd.distribute` around model and optimizer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from itertools import islice
from typing import Any

import torch

from stenograd import tasks
from stenograd.catalog.method import Method
from stenograd.checkpoint.api import Loaded
from stenograd.cli.epoch import Progress
from stenograd.cli.rows import Row, Score
from stenograd.cli.setup import Setup
from stenograd.cli.step_times import StepTimes
from stenograd.comm.agreement import sum_over_ranks
from stenograd.comm.driver import Driver
from stenograd.comm.traffic import moved_bytes
from stenograd.data.requests import Op
from stenograd.kernels.hash import hash_tensor
from stenograd.sync.distribute import distribute
from stenograd.sync.replica_guard import ReplicaGuard
from stenograd.tracing import Phases

__all__ = ["Trainer"]

_EVAL_BATCH = 256
_STEPS_TIMED = 10_000  # enough for a median; a list of all would grow for as long as the run takes


class Trainer:
    """One rank's training under one method.

    Gradients are means over the ranks of means over each rank's batch. Where the last batches of an epoch
    differ in size (by at most one sample a step), a sample of the smaller batch weighs a little more.

    Args:
        setup: what to train; equal on every rank.
        method: how gradients travel.
        driver: for scores, which are not part of the method's traffic.

    Attributes:
        step_s: seconds of the newest 10,000 training steps of this rank, without evaluation.
        times: the same steps phase by phase.
        taken: number of steps taken, skipped ones included.
        progress: of the epoch under way.
    """

    def __init__(self, setup: Setup, method: Method, driver: Driver) -> None:
        self.setup, self.driver = setup, driver
        self.model = setup.task.model(setup.options.seed).to(setup.device)
        self.optimizer = setup.recipe.make_optimizer(self.model)
        self._total_steps = setup.recipe.epochs * setup.steps
        self.scheduler = setup.recipe.make_scheduler(self.optimizer, self._total_steps)
        self.step_s: deque[float] = deque(maxlen=_STEPS_TIMED)
        self.taken = 0
        self.progress = Progress(epoch=0)
        opt = setup.options
        self.sync = distribute(
            self.model, self.optimizer, method, bucket_bytes=opt.bucket_bytes, timeout_s=opt.timeout_s
        )
        self._guard = ReplicaGuard(self.model, driver)
        self.times = StepTimes()
        self._phases = Phases(self.model, [self.optimizer], self.times.note)

    def begin_epoch(self, epoch: int) -> int:
        """Begin an epoch, or go on with it where `go_on` found it begun; return the steps to go."""
        if self.progress.epoch != epoch:
            self.progress = Progress(epoch=epoch)
        self.progress.join(self.driver.world_size)
        return self.progress.steps_left(self.setup)

    def run_epoch(self, epoch: int, on_step: Callable[[], None] = lambda: None) -> Row:
        """Train for one epoch, or what is left of it, and evaluate.

        Args:
            epoch: its number, from 1.
            on_step: called after every step.

        Raises:
            ReplicaDivergence: the ranks' parameters are no longer equal.
        """
        self.begin_epoch(epoch)
        now = self.progress
        self._phases.watch()
        try:
            self._train(now, on_step)
        finally:
            self._phases.close()
        start = time.perf_counter()
        trained = self._score([now.loss, now.correct, now.count])
        # What is evaluated and compared is the model to use: between rounds the ranks' own models differ.
        with self.sync.consensus():
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

    def warm_up(self, steps: int) -> None:
        """Do some of everything once, so that what is made or loaded at first use is there; keeps no account.

        Args:
            steps: to take, at most an epoch.
        """
        self.begin_epoch(1)
        for indices in islice(self.progress.batches(self.setup, self.driver.rank), steps):
            self._step(indices)
        with self.sync.consensus():
            self.evaluate(most=1)
            self.check_equal()

    @torch.no_grad()
    def evaluate(self, most: int | None = None) -> Score:
        """Judge the model by every evaluation sample, each on one rank; or by so many batches on each."""
        task, device = self.setup.task, self.setup.device
        self.model.eval()
        sums = [0.0, 0.0, 0.0]
        pieces = tasks.eval_batches(task.eval_size, self.driver.rank, self.driver.world_size, _EVAL_BATCH)
        for indices in islice(pieces, most):
            inputs, targets = task.eval_batch(indices)
            loss, correct, count = task.loss(self.model, inputs.to(device), targets.to(device))
            sums = [sums[0] + loss.item() * count, sums[1] + correct, sums[2] + count]
        self.model.train()
        return self._score(sums)

    def check_equal(self) -> str:
        """Check that all ranks have equal parameters, and return their hash in 16 hexadecimal digits.

        Raises:
            ReplicaDivergence: they differ; names tensors and ranks.
        """
        with self.sync.consensus():
            self._guard.check(self.taken)
            hashes = torch.stack([hash_tensor(parameter).cpu() for parameter in self.model.parameters()])
        return f"{int(hash_tensor(hashes)) % (1 << 64):016x}"

    def parts(self) -> dict[str, Any]:
        """Return what a checkpoint holds, as `save_checkpoint` and `load_checkpoint` take it."""
        named = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {**named, "sync": self.sync, "timeout_s": self.setup.options.timeout_s}

    def position(self) -> dict[str, Any]:
        """Return where the training stands, for a checkpoint's `extra`; all ranks call it."""
        now = self.progress
        sums = sum_over_ranks(self.driver, [now.loss, now.correct, now.count])
        return {"progress": asdict(now), "sums": sums, "total_steps": self._total_steps}

    def go_on(self, loaded: Loaded) -> None:
        """Take the position of a checkpoint whose parts were loaded.

        With another number of ranks, rank 0 takes the sums of all ranks' samples and the others none, the
        learning rate's schedule goes on at the same share of all its steps, and `Progress.batches` says who
        trains on the rest of the epoch.
        """
        self.taken, self.progress = loaded.step, Progress(**loaded.extra["progress"])
        if loaded.resharded:
            sums = loaded.extra["sums"] if self.driver.rank == 0 else (0.0, 0.0, 0.0)
            self.progress.loss, self.progress.correct, self.progress.count = sums
        before, scheduler = loaded.extra["total_steps"], self.scheduler
        if scheduler is not None and before != self._total_steps and scheduler.last_epoch > 0:
            # step() adds 1
            scheduler.last_epoch = round(scheduler.last_epoch / before * self._total_steps) - 1
            scheduler.step()  # sets the rates that belong to the place

    def _train(self, now: Progress, on_step: Callable[[], None]) -> None:
        """Take the epoch's remaining steps, and keep account of them."""
        dense = self._dense_bytes_per_step()
        for indices in now.batches(self.setup, self.driver.rank):
            start = time.perf_counter()
            before = self._bytes()
            loss, correct, count = self._step(indices)
            seconds = time.perf_counter() - start
            self.step_s.append(seconds)
            self.times.step(seconds)
            now.seconds += seconds
            now.loss, now.correct = now.loss + loss * count, now.correct + correct
            now.count, now.skipped = now.count + count, now.skipped + (not count)
            after = self._bytes()
            now.payload_bytes += after[0] - before[0]
            now.moved_bytes += after[1] - before[1]
            now.dense_bytes += dense
            now.legs[-1][1] += 1
            self.taken += 1
            on_step()

    def _step(self, indices: torch.Tensor) -> tuple[float, int, int]:
        """Take one step; a count of 0 says that it was skipped: on all ranks, or on this one in a round."""
        task, device = self.setup.task, self.setup.device
        inputs, targets = task.train_batch(indices)
        self.optimizer.zero_grad()
        loss, correct, count = task.loss(self.model, inputs.to(device), targets.to(device))
        loss.backward()
        finite = self.sync.finite
        if finite:
            self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()  # all the same: in rounds, other ranks did not skip, and rates stay equal
        return (loss.item(), correct, count) if finite else (0.0, 0, 0)

    def _bytes(self) -> tuple[int, int]:
        traffic = self.sync.traffic
        return traffic.payload_bytes, traffic.moved_bytes

    def _score(self, sums: list[float]) -> Score:
        loss, correct, count = sum_over_ranks(self.driver, sums)
        return Score(loss / count, correct / count) if count else Score(float("nan"), float("nan"))

    def _dense_bytes_per_step(self) -> int:
        model_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        world_size = self.driver.world_size
        return moved_bytes(Op.MEAN, model_bytes, world_size) if world_size > 1 else model_bytes
