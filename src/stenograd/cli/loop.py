"""The training loop: an ordinary one with `stenograd.distribute`, and the account that it keeps."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from stenograd import tasks
from stenograd.catalog.method import Method
from stenograd.checkpoint.api import Loaded
from stenograd.cli.setup import Setup
from stenograd.cli.table import counted, fewer, megabytes, percent
from stenograd.kernels.hash import hash_tensors
from stenograd.launch.local_workers import usable_cores
from stenograd.sync.distribute import distribute
from stenograd.sync.replica_guard import ReplicaGuard
from stenograd.tracing import Phases
from stenograd.wire.agreement import everyone, sum_over_ranks
from stenograd.wire.driver import Driver
from stenograd.wire.drivers import AnyDriver
from stenograd.wire.requests import Op
from stenograd.wire.traffic import Traffic, moved_bytes

__all__ = ["Progress", "Row", "Score", "StepTimes", "Trainer", "endless", "machine", "report"]

_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95)
_PARTS = ("step", "forward", "backward", "wait", "optimizer")
_STEPS_KEPT = 10_000  # enough for quantiles; a list of all would grow for as long as the run takes
_EVAL_BATCH = 256


@dataclass(frozen=True, slots=True)
class Score:
    """Mean loss and accuracy over all ranks' samples; NaN where no sample counted."""

    loss: float
    accuracy: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One epoch, as rank 0 tells it. All but `seconds` is equal in a repeated or resumed run.

    Attributes:
        epoch: number of epochs trained, from 1.
        seconds: for training and evaluation.
        payload_bytes: what this rank handed to collectives.
        moved_bytes: what those made it send.
        dense_bytes: what dense training sends in as many steps (hands over, for a world of one).
        compression: how many times less was sent; infinite where nothing was.
        steps: number of steps.
        skipped: steps among them that a gradient which is not finite made void.
    """

    epoch: int
    train_loss: float
    train_accuracy: float
    eval_loss: float
    eval_accuracy: float
    seconds: float
    payload_bytes: int
    moved_bytes: int
    dense_bytes: int
    compression: float
    steps: int
    skipped: int

    def line(self, epochs: int) -> str:
        """Say it in one line, as one of so many epochs."""
        skipped = f"  {counted(self.skipped, 'step')} skipped (not finite)" if self.skipped else ""
        return (
            f"epoch {self.epoch:>{len(str(epochs))}}/{epochs}"
            f"  train loss {self.train_loss:.4f} accuracy {percent(self.train_accuracy)}"
            f"  eval loss {self.eval_loss:.4f} accuracy {percent(self.eval_accuracy)}"
            f"  {self.seconds:.2f} s  sent {megabytes(self.moved_bytes)}"
            f"  compression {fewer(self.compression)}{skipped}"
        )


class StepTimes:
    """Seconds of the newest 10,000 steps: the whole, and its phases.

    `backward` leaves out `wait`, the part of the exchange that backward did not hide. `optimizer` holds the
    rounds of schedules that meet after a step. Fetching the batch is in `step` only.

    Attributes:
        kept: seconds by phase, the oldest first.
        steps: number of all that were taken.
        moved_bytes: that all of them made this rank send; evaluation between them sends more.

    Example:
        >>> times = StepTimes()
        >>> times.note("backward", 0.0, 3.0), times.note("wait", 2.0, 3.0)
        (None, None)
        >>> times.step(4.0)
        >>> times.quantiles()["backward"]["0.5"], times.quantiles()["wait"]["0.5"]
        (2.0, 1.0)
    """

    def __init__(self) -> None:
        self._now: dict[str, float] = {}
        self.kept: dict[str, deque[float]] = {part: deque(maxlen=_STEPS_KEPT) for part in _PARTS}
        self.steps = self.moved_bytes = 0

    def note(self, kind: str, start: float, end: float) -> None:
        """Add a phase to the step under way; kinds are those of `tracing.Phases`."""
        part = "optimizer" if kind == "step" else kind
        self._now[part] = self._now.get(part, 0.0) + end - start

    def step(self, seconds: float, moved_bytes: int = 0) -> None:
        """End a step that took so long in all, and made this rank send so much."""
        now, self._now = self._now, {}
        # waiting happens in hooks within backward; each second counts once
        now["backward"] = now.get("backward", 0.0) - now.get("wait", 0.0)
        for part, kept in self.kept.items():
            kept.append(seconds if part == "step" else now.get(part, 0.0))
        self.steps += 1
        self.moved_bytes += moved_bytes

    def means(self) -> dict[str, float]:
        """Return each phase's mean in seconds, which holds the rounds of methods that send rarely.

        The first step is left out where there are others: it loads and allocates what later ones find.

        Example:
            >>> times = StepTimes()
            >>> for seconds in (60.0, 1.0, 1.0, 7.0):
            ...     times.step(seconds)
            >>> times.means()["step"], times.quantiles()["step"]["0.5"]
            (3.0, 4.0)
        """
        # Beyond so many steps the first has left the deque by itself.
        first = int(1 < self.steps <= _STEPS_KEPT)
        found = {part: list(kept)[first:] for part, kept in self.kept.items()}
        return {part: statistics.fmean(kept) for part, kept in found.items() if kept}

    def quantiles(self) -> dict[str, dict[str, float]]:
        """Return the quantiles of each phase in seconds; empty before the first step."""
        if not self.steps:
            return {}
        levels = torch.tensor(_QUANTILES, dtype=torch.float64, device="cpu")
        found = {
            part: torch.tensor(kept, dtype=torch.float64, device="cpu") for part, kept in self.kept.items()
        }
        return {
            part: dict(zip(map(str, _QUANTILES), values.quantile(levels).tolist(), strict=True))
            for part, values in found.items()
        }


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


def endless(setup: Setup, rank: int, epoch: int) -> Iterator[Tensor]:
    """Yield a worker's batches of an open run, for ever: its shard in another order in each epoch from this.

    A worker that is numbered beyond those of the start has the shard of the rank that many before, in an
    order of its own: without a launcher each is the start of one, and all would train on the same batches.
    """
    everything, size = torch.arange(setup.task.train_size, device="cpu"), setup.world_size
    turn, own = divmod(rank, size)
    while True:
        yield from _cut(setup, everything, epoch, setup.steps, own, size, turn)
        epoch += 1


def _pool(setup: Setup, epoch: int, legs: Sequence[Sequence[int]]) -> Tensor:
    """Return the samples that were left when the last leg began."""
    pool, before = torch.arange(setup.task.train_size, device="cpu"), 0
    # Batches follow from seed, epoch and rank, so what ranks saw is worked out anew and not saved.
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


def _cut(
    setup: Setup, pool: Tensor, epoch: int, steps: int, rank: int, world_size: int, turn: int = 0
) -> Iterator[Tensor]:
    """Cut a rank's shard of the pool in batches; workers that share it take turns of their own."""
    options = setup.options
    shuffle = options.shards == "shuffled"
    own = pool[tasks.shard(len(pool), rank, world_size, shuffle=shuffle, seed=options.seed)]
    return tasks.batches(
        own, setup.recipe.batch_size, epoch=epoch, seed=options.seed + turn, shuffle=True, steps=steps
    )


class Trainer:
    """One rank's training under one method.

    Gradients are means over the ranks of means over each rank's batch. Where the last batches of an epoch
    differ in size (by at most one sample a step), a sample of the smaller batch weighs a little more.

    Args:
        setup: what to train; equal on every rank.
        method: how gradients travel.
        driver: for scores, which are not part of the method's traffic.

    Attributes:
        times: of the newest 10,000 training steps of this rank, without evaluation.
        taken: number of steps taken, skipped ones included.
        progress: of the epoch under way.
        by_time: whether rounds go by time, so that ranks are at one step only where all of them meet.
    """

    def __init__(self, setup: Setup, method: Method, driver: Driver) -> None:
        self.setup, self.method, self.driver = setup, method, driver
        self.by_time = getattr(method.schedule, "seconds", 0) > 0
        self.model = setup.task.model(setup.options.seed).to(setup.device)
        self.optimizer = setup.recipe.make_optimizer(self.model)
        self._total_steps = setup.recipe.epochs * setup.steps
        self.scheduler = setup.recipe.make_scheduler(self.optimizer, self._total_steps)
        self.taken = 0
        self.progress = Progress(epoch=0)
        opt = setup.options
        self.sync = distribute(
            self.model, self.optimizer, method, bucket_bytes=opt.bucket_bytes, timeout_s=opt.timeout_s
        )
        # By the scores' driver, so that the method's ledger holds no bytes of the guard.
        self._guard = ReplicaGuard(self.model, driver)
        self.times = StepTimes()
        self._phases = Phases(self.model, [self.optimizer], self.times.note)

    @property
    def headline(self) -> str:
        """Says in one line what is trained."""
        task, parameters = self.setup.task, sum(p.numel() for p in self.model.parameters())
        sizes = f"{task.train_size:,} training and {task.eval_size:,} evaluation samples"
        workers = counted(self.setup.world_size, "worker")
        return f"{task.name}: {sizes}, {parameters:,} parameters, {workers}, method {self.method.text}"

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
        # What is evaluated and compared is the model to use: between rounds the ranks' own models differ.
        # And first of all: by time, ranks that have steps to take may wait for this one in a round.
        with self.sync.consensus():
            trained = self._score([now.loss, now.correct, now.count])
            evaluated = self.evaluate()
            self.check_equal()
        # A world of one moves nothing, so its compression is that of the payload.
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
            compression=now.dense_bytes / sent if sent else math.inf,
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
            self.take_step(indices)
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
            return f"{hash_tensors(self.model.parameters()) % (1 << 64):016x}"

    def parts(self) -> dict[str, Any]:
        """Return what a checkpoint holds, as `save_checkpoint` and `load_checkpoint` take it."""
        named = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        return {**named, "sync": self.sync, "timeout_s": self.setup.options.timeout_s}

    def position(self) -> dict[str, Any]:
        """Return where the training stands, for a checkpoint's `extra`; all ranks call it."""
        self.sync.before_save()  # first of all, as in `run_epoch`
        now = self.progress
        # For `go_on`: with another number of ranks only rank 0's `extra` is read, and so no other's sums.
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
        dense = self.dense_bytes_per_step(self.driver.world_size)
        for indices in now.batches(self.setup, self.driver.rank):
            start = time.perf_counter()
            before = self._bytes()
            loss, correct, count = self.take_step(indices)
            seconds, after = time.perf_counter() - start, self._bytes()
            self.times.step(seconds, after[1] - before[1])
            now.seconds += seconds
            now.loss, now.correct = now.loss + loss * count, now.correct + correct
            now.count, now.skipped = now.count + count, now.skipped + (not count)
            now.payload_bytes += after[0] - before[0]
            now.moved_bytes += after[1] - before[1]
            now.dense_bytes += dense
            now.legs[-1][1] += 1
            self.taken += 1
            on_step()

    def take_step(self, indices: torch.Tensor) -> tuple[float, int, int]:
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

    def dense_bytes_per_step(self, world_size: int) -> int:
        """Return what a rank of so many sends in a dense step; what it hands over, in a world of one."""
        model_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters() if p.requires_grad)
        return moved_bytes(Op.MEAN, model_bytes, world_size) if world_size > 1 else model_bytes


def machine() -> dict[str, Any]:
    """Return what decides how fast this process computes.

    Example:
        >>> sorted(machine())
        ['cores', 'processor', 'system', 'threads', 'usable_cores']
    """
    return {
        "processor": platform.processor() or platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "usable_cores": usable_cores(),
        "threads": torch.get_num_threads(),
    }


def report(times: StepTimes, traffic: Traffic, driver: AnyDriver) -> dict[str, Any]:
    """Gather what every rank measured since it started; all ranks call it.

    Args:
        times: this rank's.
        traffic: this rank's ledger.
        driver: the way to the other ranks.

    Returns:
        "ranks": for each rank its steps and their bytes, means and quantiles in seconds, machine and ledger,
        in rank order.
    """
    ledger = [asdict(entry) for entry in traffic.entries()]
    took = {"means_s": times.means(), "quantiles_s": times.quantiles()}
    done = {"steps": times.steps, "moved_bytes": times.moved_bytes}
    own = {**done, **took, "machine": machine(), "ledger": ledger}
    received: Sequence[str] = everyone(driver, json.dumps(own))
    return {"ranks": [json.loads(text) for text in received]}
