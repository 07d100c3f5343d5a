"""`stenograd train`: one model under one method, with checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from stenograd.catalog.method import Method, method
from stenograd.checkpoint.api import Loaded
from stenograd.cli.folder import RunFolder, make_folder
from stenograd.cli.loop import Trainer
from stenograd.cli.options import Options
from stenograd.cli.ranks import in_ranks
from stenograd.cli.report import Display, headline, megabytes, percent, row_line
from stenograd.cli.rows import Row
from stenograd.cli.setup import Setup, check_option, make_setup
from stenograd.cli.step_times import report
from stenograd.comm.agreement import agree
from stenograd.comm.driver import Driver
from stenograd.errors import ConfigError

__all__ = ["Job", "run"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What `stenograd train` was asked for.

    Attributes:
        options: those that are shared with other commands.
        method: text of the method.
        out: folder for results and checkpoints; None keeps nothing.
        resume: whether to continue from the checkpoint in `out`. Under `torchrun --max-restarts` that is so
            by itself where `out` holds a run.
        save_every: epochs per checkpoint, at least 1; the last epoch is always saved.
        save_steps: steps per checkpoint besides, at least 1; None for none in mid-epoch.
        trace: file for what happened when on all ranks; None for none.
    """

    options: Options
    method: str
    out: Path | None
    resume: bool
    save_every: int
    save_steps: int | None = None
    trace: Path | None = None


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """A job that was checked."""

    job: Job
    setup: Setup
    method: Method
    folder: RunFolder | None
    resume: bool


def run(job: Job) -> int:
    """Train, and return the exit status."""
    return in_ranks(job.options, lambda world_size: _prepare(job, world_size), _body)


def _prepare(job: Job, world_size: int) -> _Ready:
    how = method(job.method)
    check_option("--save-every", job.save_every)
    check_option("--save-steps", job.save_steps)
    for name, given in (("--resume", job.resume), ("--save-steps", job.save_steps is not None)):
        if given and job.out is None:
            raise ConfigError(f"{name} needs --out: give the folder of the run")
    setup = make_setup(job.options, world_size)
    folder = RunFolder(job.out, setup.identity(how)) if job.out is not None else None
    resume = job.resume
    if folder is not None:
        resume = resume or (_restarts() and folder.holds_run())
        folder.check(resume)
        make_folder(folder.path)
    return _Ready(job=job, setup=setup, method=how, folder=folder, resume=resume)


def _restarts() -> bool:
    """Whether torchrun started this process again, or would."""
    return any(int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))


def _body(ready: _Ready, driver: Driver) -> int:
    trainer = Trainer(ready.setup, ready.method, driver)
    display = Display(driver.rank)
    try:
        parameters = sum(p.numel() for p in trainer.model.parameters())
        display.line(headline(ready.setup, ready.method, parameters))
        rows = _resumed(ready, trainer, display)
        trace = ready.job.trace
        with trainer.sync.trace(str(trace)) if trace is not None else nullcontext():
            rows = _train(ready, trainer, rows, display)
        _finish(ready, trainer, rows, display)
    finally:
        trainer.sync.close()
    return 0


def _resumed(ready: _Ready, trainer: Trainer, display: Display) -> list[Row]:
    """Take the checkpoint's state and return its epochs; begin the run's files."""
    rows: list[Row] = []
    saved = ready.folder.load(trainer) if ready.folder is not None and ready.resume else None
    if saved is not None:
        rows = [Row(**row) for row in saved.extra["rows"]]
        for line in saved.refused:
            display.line(f"a newer checkpoint is damaged and was left: {line}")
        display.line(_whence(trainer, saved, len(rows)))
    elif ready.resume:
        display.line(f"no checkpoint in {ready.job.out} yet: starting from the beginning")
    if (folder := ready.folder) is not None:
        about = {"epochs": ready.setup.epochs, "steps_per_epoch": ready.setup.steps}
        _on_rank_0(trainer, lambda: folder.begin([asdict(row) for row in rows], about))
    return rows


def _on_rank_0(trainer: Trainer, write: Callable[[], None]) -> None:
    """Let rank 0 write, and every rank fail with its error if it cannot."""
    agree(trainer.driver, write if trainer.driver.rank == 0 else lambda: None)


def _whence(trainer: Trainer, saved: Loaded, epochs: int) -> str:
    """Say where a resumed run goes on."""
    before, now = saved.world_size, trainer.driver.world_size
    place = f"after epoch {epochs}"
    if trainer.progress.epoch > epochs:
        place += f" and {trainer.progress.steps} steps"
    if before == now:
        return f"resumed {place} (step {trainer.taken})"
    return (
        f"resumed at step {trainer.taken} of {_workers(before)} with {_workers(now)}, {place}: "
        "residuals re-sharded, their sum kept; the samples left are shared out anew"
    )


def _workers(count: int) -> str:
    return "1 worker" if count == 1 else f"{count} workers"


def _train(ready: _Ready, trainer: Trainer, rows: list[Row], display: Display) -> list[Row]:
    epochs = ready.setup.epochs
    for epoch in range(len(rows) + 1, epochs + 1):
        with display.bar(f"epoch {epoch}/{epochs}", trainer.begin_epoch(epoch)) as tick:
            row = trainer.run_epoch(epoch, _Step(ready, trainer, rows, tick))
        rows = [*rows, row]
        display.line(row_line(row, epochs))
        if ready.folder is None:
            continue
        _on_rank_0(trainer, partial(ready.folder.append, row))
        if epoch % ready.job.save_every == 0 or epoch == epochs:
            ready.folder.save(trainer, rows)
    return rows


class _Step:
    """What happens after every step: the bar moves, and some steps are saved."""

    def __init__(self, ready: _Ready, trainer: Trainer, rows: list[Row], tick: Callable[[], None]) -> None:
        self._ready, self._trainer, self._rows, self._tick = ready, trainer, rows, tick

    def __call__(self) -> None:
        self._tick()
        every, folder = self._ready.job.save_steps, self._ready.folder
        if folder is not None and every is not None and self._trainer.taken % every == 0:
            folder.save(self._trainer, self._rows)


def _finish(ready: _Ready, trainer: Trainer, rows: list[Row], display: Display) -> None:
    """Print the last line and write result.json."""
    with trainer.sync.consensus():
        score = trainer.evaluate()
    result = {
        **ready.setup.identity(ready.method),
        "epochs": len(rows),
        "eval_loss": score.loss,
        "eval_accuracy": score.accuracy,
        "seconds": sum(row.seconds for row in rows),
        "payload_bytes": sum(row.payload_bytes for row in rows),
        "moved_bytes": sum(row.moved_bytes for row in rows),
        "skipped": sum(row.skipped for row in rows),
        "fingerprint": trainer.check_equal(),
    }
    steps = report(trainer.times, trainer.sync.traffic, trainer.driver)
    if ready.folder is not None:
        _on_rank_0(trainer, partial(ready.folder.finish, result, steps))
    display.line(
        f"after {len(rows)} epochs: eval accuracy {percent(score.accuracy)}, loss {score.loss:.4f}, "
        f"{result['seconds']:.1f} s, {megabytes(result['moved_bytes'])} sent per worker, "
        f"fingerprint {result['fingerprint']}"
    )
