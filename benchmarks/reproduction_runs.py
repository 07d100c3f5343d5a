"""The trainings that `reproductions.py` judges: what `stenograd train` does, in ranks of one pool.

A run of a pool's ranks uses the command line's own `Trainer`, so its figures are those of the command that
`Run.command` tells; what the command line cannot do (samples split by class, plain SGD on a text, a rank that
dies) is added here.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from stenograd import method, tasks
from stenograd.cli.loop import Trainer
from stenograd.cli.options import Options, Shards, Task
from stenograd.cli.setup import Setup, make_setup
from stenograd.testing.pool import RankPool, RanksFailed
from stenograd.wire.driver import Driver

__all__ = ["Run", "measure"]

_TIMEOUT_S = 120.0
_LOSS_TIMEOUT_S = 20.0  # where a rank dies: those that are not its neighbours notice only after that
_NOTICED = 4  # mixings after which every survivor has had the lost rank as a neighbour, up to 16 ranks
_STILL = 24  # mixings at learning rate 0 after a loss, in which the mean of the ranks should stay


@dataclass(frozen=True, kw_only=True)
class Run:
    """One training.

    Attributes:
        task: digits, mnist or text.
        ranks: number of them.
        method: its text.
        seed: of weights and of the samples' order.
        epochs: after which the learning rate's schedule ends; 0 for the task's own number.
        steps: of an epoch; 0 for the task's own number.
        stop: epochs that are trained; 0 for all.
        lr, momentum: the optimizer's; None for the task's own.
        sgd: SGD, where the task has AdamW.
        by_class: every rank has the samples of other classes.
        dies: step before which the last rank but one dies; 0 for none.
    """

    task: str = "digits"
    ranks: int = 2
    method: str = "dense"
    seed: int = 0
    epochs: int = 0
    steps: int = 0
    stop: int = 0
    lr: float | None = None
    momentum: float | None = None
    sgd: bool = False
    by_class: bool = False
    dies: int = 0

    @property
    def key(self) -> str:
        """Return what tells this run from all others, as long as defaults stay.

        Example:
            >>> Run(ranks=4, method="topk", seed=1).key
            'digits ranks=4 topk seed=1'
        """
        told = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("task", "method")}
        usual = {f.name: f.default for f in fields(self)} | {"ranks": None, "seed": None}
        items = [f"{name}={value}" for name, value in told.items() if value != usual[name]]
        return " ".join([self.task, items[0], self.method, *items[1:]])

    @property
    def command(self) -> str:
        """Return the command that does the same, or nothing where the command line cannot.

        Example:
            >>> Run(task="mnist", method="local:every=8", epochs=2).command
            'stenograd train --task mnist --data PATH --workers 2 --method local:every=8 --epochs 2 --seed 0'
        """
        own_steps = {"digits": 0, "mnist": 0, "text": 200}[self.task]
        if self.sgd or self.by_class or self.dies or self.stop or self.steps not in (0, own_steps):
            return ""
        data = "" if self.task == "digits" else " --data PATH"
        said = f"stenograd train --task {self.task}{data} --workers {self.ranks} --method {self.method}"
        for name in ("epochs", "lr", "momentum", "seed"):
            value = getattr(self, name)
            if value is not None and (value or name != "epochs"):
                said += f" --{name} {value}"
        return said


class _ByClass(tasks.Digits):
    """The digits with their training samples sorted by class: a stretch of them holds few classes."""

    def __init__(self) -> None:
        super().__init__()
        self._order = torch.arange(self.train_size)
        _, labels = self.train_batch(self._order)
        self._order = labels.argsort(stable=True)

    def train_batch(
        self, indices: Tensor, *, generator: torch.Generator | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the samples at these places of the sorted order."""
        return super().train_batch(self._order[indices])


def measure(pool: RankPool, run: Run, data: Mapping[str, Path]) -> dict[str, Any]:
    """Train, and return figures, or why there are none.

    Args:
        pool: of at least so many ranks.
        run: what to train.
        data: by task, its file or folder.
    """
    path = data.get(run.task)
    if run.dies:
        return _without_one(pool, run, path)
    try:
        return dict(pool.run(run.ranks, _train, run, path, timeout_s=7200)[0])
    except RanksFailed as failed:
        first = next(iter(failed.errors.values()))
        return {"failed": first.strip().splitlines()[-1]}


def _train(rank: int, run: Run, data: Path | None) -> dict[str, Any]:
    """Be one rank of an ordinary training; all return what rank 0 knows of it."""
    trainer = _enter(run, data)
    rows = []
    try:
        for epoch in range(1, (run.stop or trainer.setup.epochs) + 1):
            rows.append(trainer.run_epoch(epoch))
    finally:
        trainer.sync.close()
    last, steps = rows[-1], sum(row.steps for row in rows)
    curve, taken = [], 0
    for row in rows:
        taken += row.steps
        curve.append([taken, round(row.eval_loss, 5), round(row.eval_accuracy, 5)])
    return {
        "loss": last.eval_loss,
        "accuracy": last.eval_accuracy,
        "steps": steps,
        "payload_bytes": sum(row.payload_bytes for row in rows),
        "moved_bytes": sum(row.moved_bytes for row in rows),
        "skipped": sum(row.skipped for row in rows),
        "seconds": round(sum(row.seconds for row in rows), 1),
        "curve": curve,
    }


def _enter(run: Run, data: Path | None) -> Trainer:
    """Return this rank's training, which has not begun."""
    shards = Shards.CONTIGUOUS if run.by_class else Shards.SHUFFLED
    options = Options(
        task=Task(run.task),
        data=data,
        seed=run.seed,
        epochs=run.epochs or None,
        lr=run.lr,
        momentum=None if run.sgd else run.momentum,
        shards=shards,
        timeout_s=_LOSS_TIMEOUT_S if run.dies else _TIMEOUT_S,
    )
    return Trainer(_changed(make_setup(options, dist.get_world_size()), run), method(run.method), Driver())


def _changed(setup: Setup, run: Run) -> Setup:
    """Apply what the command line has no option for."""
    recipe = setup.recipe
    if run.sgd:
        floor = None if recipe.min_lr is None else recipe.lr / 10
        recipe = replace(recipe, optimizer="sgd", momentum=run.momentum or 0.0, min_lr=floor)
    if run.steps:
        recipe = replace(recipe, steps_per_epoch=run.steps)
    task = _ByClass() if run.by_class else setup.task
    return replace(setup, recipe=recipe, task=task, steps=run.steps or setup.steps)


def _without_one(pool: RankPool, run: Run, data: Path | None) -> dict[str, Any]:
    """Train, lose a rank, and put together what the survivors wrote."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            pool.run(run.ranks, _survive, run, data, Path(folder), timeout_s=600)
        except RanksFailed as failed:
            victim = run.ranks - 2
            if list(failed.errors) != [victim]:
                return {"failed": str(failed.errors)[-300:]}
        told = [json.loads(file.read_text()) for file in sorted(Path(folder).iterdir())]
    spread = math.sqrt(sum(one["distance"] ** 2 for one in told) / len(told))
    return {
        "accuracy": told[0]["accuracy"],
        "loss": told[0]["loss"],
        "survivors": len(told),
        "drift": told[0]["drift"] / spread,
        "shares": [one["share"] for one in told],
    }


def _survive(rank: int, run: Run, data: Path | None, folder: Path) -> None:
    """Be one rank of a training by gossip in which one dies.

    After the loss the learning rate is 0 for some mixings: what the mean of the ranks does then is no
    training, but what the mixing does to it.
    """
    warnings.simplefilter("ignore")  # the one that tells of the loss
    trainer = _enter(run, data)
    sync, setup, taken, told = trainer.sync, trainer.setup, 0, {}
    group = trainer.optimizer.param_groups[0]
    lr, start = group["lr"], torch.zeros(0)
    for epoch in range(1, setup.epochs + 1):
        trainer.begin_epoch(epoch)
        for indices in trainer.progress.batches(setup, rank):
            if taken == run.dies and rank == run.ranks - 2:
                os._exit(9)
            if taken == run.dies + _NOTICED:  # before that, some ranks would ask the lost one for a mean
                group["lr"] = 0.0
                with sync.consensus():
                    start = _flat(trainer)
                told["distance"] = float((_flat(trainer) - start).norm())
            if taken == run.dies + _NOTICED + _STILL:
                group["lr"] = lr
                with sync.consensus():
                    told["drift"] = float((_flat(trainer) - start).norm())
                told["share"] = getattr(sync, "share", 1.0)
            _step(trainer, indices)
            taken += 1
    with sync.consensus():
        told["loss"], told["accuracy"] = _evaluate(trainer)
    (folder / f"{rank}").write_text(json.dumps(told))
    sync.close()


def _step(trainer: Trainer, indices: Tensor) -> None:
    task = trainer.setup.task
    trainer.optimizer.zero_grad()
    loss, _, _ = task.loss(trainer.model, *task.train_batch(indices))
    loss.backward()
    trainer.optimizer.step()


def _flat(trainer: Trainer) -> Tensor:
    """Return the parameters as one tensor of float64."""
    return torch.cat([p.detach().double().reshape(-1) for p in trainer.model.parameters()])


@torch.no_grad()
def _evaluate(trainer: Trainer) -> tuple[float, float]:
    """Return loss and accuracy on all evaluation samples: the ranks that would share them may be lost."""
    task = trainer.setup.task
    loss, correct, count = task.loss(trainer.model, *task.eval_batch(torch.arange(task.eval_size)))
    return loss.item(), correct / count
