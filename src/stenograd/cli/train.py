"""`stenograd train`: one model under one method, with checkpoints."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from stenograd.adapters import stops
from stenograd.catalog.method import Method, method
from stenograd.checkpoint.api import Loaded
from stenograd.cli.folder import RunFolder, make_folder, saved_options
from stenograd.cli.loop import Row, Trainer, report
from stenograd.cli.open import OpenJob
from stenograd.cli.open import work as open_work
from stenograd.cli.options import Options, TrainOptions
from stenograd.cli.setup import Setup, check_option, in_ranks, make_setup
from stenograd.cli.table import Display, counted, megabytes, percent
from stenograd.errors import ConfigError
from stenograd.launch.detect import OPEN_VARIABLE, detect
from stenograd.stopping import STOPPED, stop_on
from stenograd.wire.agreement import agree
from stenograd.wire.driver import Driver

__all__ = ["run"]

_REMEMBERED = ("method", "save_every", "save_steps", "keep")  # of a job, besides the shared options


class _Stopped(Exception):
    """All ranks were asked to stop, at this step."""


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """A job that was checked."""

    job: TrainOptions
    setup: Setup
    method: Method
    folder: RunFolder | None
    resume: bool


def run(job: TrainOptions) -> int:
    """Train, and return the exit status."""
    if job.resume:
        job = _remembered(job)
    quorum = getattr(method(job.method).schedule, "quorum", 0)
    if job.keep and not quorum:
        advice = "give diloco:every=30,quorum=0.75"
        raise ConfigError(f"--keep needs a method with a quorum, got {job.method}: {advice}")
    if (job.workers or 1) < 2 and detect(os.environ).launcher == "alone":
        job.refuse(["keep"], "without --workers of 2 or more, which it would start again")
    if quorum and (job.workers or 1) > 1 and _joins():
        job.refuse(["workers"], f"where {OPEN_VARIABLE} names the run, to which each command is one worker")
    if not quorum:
        return in_ranks(job, partial(_prepare, job), _body, _requests)
    return in_ranks(job, partial(_prepare_open, job), open_work, _requests, open_run=True, keep=job.keep)


def _requests() -> AbstractContextManager[object]:
    """Take the signals by which batch systems announce an end; only the main thread can.

    Until all ranks have met, signals end them at once: who noted one would wait for those that it has ended.
    """
    if threading.current_thread() is not threading.main_thread():
        return nullcontext()
    return stop_on(signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else []))


def _prepare(job: TrainOptions, world_size: int) -> _Ready:
    how = method(job.method)
    check_option("--save-every", job.save_every)
    check_option("--save-steps", job.save_steps)
    if job.out is None and (job.save_every is not None or job.save_steps is not None):
        name = "--save-every" if job.save_steps is None else "--save-steps"
        raise ConfigError(f"{name} needs --out: give the folder of the run")
    setup = make_setup(job, world_size)
    folder = RunFolder(job.out, setup.identity(how)) if job.out is not None else None
    resume = job.resume
    if folder is not None:
        # torchrun starts a run anew with the same arguments
        resume = resume or (_restarts() and folder.holds_run())
        folder.check(resume)
        make_folder(folder.path)
    return _Ready(job=job, setup=setup, method=how, folder=folder, resume=resume)


def _prepare_open(job: TrainOptions, world_size: int) -> OpenJob:
    if job.trace is not None:
        raise ConfigError("--trace needs the same workers in all rounds: leave it or the quorum out")
    job.refuse(["save_every", "save_steps"], "with a quorum, which saves after each epoch of all workers")
    # One that is started again finds what the others have written.
    resume = job.resume or OPEN_VARIABLE in os.environ
    ready = _prepare(replace(job, resume=resume), world_size)
    about = {"epochs": ready.setup.epochs, "steps_per_epoch": ready.setup.steps, "options": _told_again(job)}
    return OpenJob(
        job=job,
        setup=ready.setup,
        method=ready.method,
        folder=ready.folder,
        resume=job.resume,
        about=about,
    )


def _remembered(job: TrainOptions) -> TrainOptions:
    """Fill in what the command line leaves open with what the run in the folder was started with.

    Raises:
        ConfigError: there is no such run.
    """
    if job.out is None:
        raise ConfigError("--resume needs --out: give the folder of the run")
    before = {name: value for name, value in saved_options(job.out).items() if name not in job.given}
    world = detect(os.environ)
    started = world.launcher != "alone" and before.get("workers") != world.world_size
    if started or _joins():
        before.pop("workers", None)  # who starts them says how many there are
    if before.get("data") is not None:
        before["data"] = Path(before["data"])
    return replace(job, **before)


def _told_again(job: TrainOptions) -> dict[str, Any]:
    """Return what `_remembered` needs, JSON-able."""
    names = [*(f.name for f in fields(Options) if f.name != "given"), *_REMEMBERED]
    received = {name: getattr(job, name) for name in names}
    return received if job.data is None else received | {"data": str(job.data.resolve())}


def _joins() -> bool:
    """Whether this process is a worker of an open run, and no launcher has started it."""
    return OPEN_VARIABLE in os.environ and detect(os.environ).launcher == "alone"


def _restarts() -> bool:
    """Whether torchrun started this process again, or would."""
    return any(int(os.environ.get(f"TORCHELASTIC_{name}", "0")) for name in ("RESTART_COUNT", "MAX_RESTARTS"))


def _body(ready: _Ready, driver: Driver) -> int:
    trainer = Trainer(ready.setup, ready.method, driver)
    display = Display(driver.rank)
    try:
        display.line(trainer.headline)
        rows = _resumed(ready, trainer, display)  # before the trace, which is of training
        trace, stopped = ready.job.trace, False
        with trainer.sync.trace(str(trace)) if trace is not None else nullcontext():
            try:
                rows = _train(ready, trainer, rows, display)
            except _Stopped:  # on all ranks, so that they can write one trace
                stopped = True
        if not stopped:
            _finish(ready, trainer, rows, display)
        if trace is not None:
            display.line(f"wrote {trace}")
        if not stopped:
            return 0
        saved = "saved nothing: no --out" if ready.folder is None else "saved, to be continued by --resume"
        display.line(f"stopped after step {trainer.taken} because of a signal; {saved} (status {STOPPED})")
        return STOPPED
    finally:
        trainer.sync.close()


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
        about: dict[str, Any] = {"epochs": ready.setup.epochs, "steps_per_epoch": ready.setup.steps}
        about["options"] = _told_again(ready.job)
        _on_rank_0(trainer, lambda: folder.begin([asdict(row) for row in rows], about))
    return rows


def _on_rank_0(trainer: Trainer, write: Callable[[], None]) -> None:
    """Let rank 0 write, and every rank fail with its error if it cannot."""
    agree(trainer.driver, write if trainer.driver.rank == 0 else lambda: None)


def _whence(trainer: Trainer, saved: Loaded, epochs: int) -> str:
    """Say where a resumed run goes on."""
    before, now = saved.world_size, trainer.driver.world_size
    those, these = counted(before, "worker"), counted(now, "worker")
    place = f"after epoch {epochs}"
    if trainer.progress.epoch > epochs:
        place += f" and {counted(trainer.progress.steps, 'step')}"
    if before == now:
        return f"resumed {place} (step {trainer.taken})"
    return (
        f"resumed at step {trainer.taken} of {those} with {these}, {place}: "
        "residuals re-sharded, their sum kept; the samples left are shared out anew"
    )


def _train(ready: _Ready, trainer: Trainer, rows: list[Row], display: Display) -> list[Row]:
    epochs = ready.setup.epochs
    for epoch in range(len(rows) + 1, epochs + 1):
        with display.bar(f"epoch {epoch}/{epochs}", trainer.begin_epoch(epoch)) as tick:
            row = trainer.run_epoch(epoch, partial(_after_step, ready, trainer, rows, tick))
        rows = [*rows, row]
        display.line(row.line(epochs))
        stopping = trainer.by_time and trainer.sync.stopping
        if ready.folder is not None:
            _on_rank_0(trainer, partial(ready.folder.append, row))
            # the last always: --resume with more epochs starts from it
            if epoch % (ready.job.save_every or 1) == 0 or epoch == epochs or stopping:
                ready.folder.save(trainer, rows)
        if stopping:
            raise _Stopped
    return rows


def _after_step(ready: _Ready, trainer: Trainer, rows: list[Row], tick: Callable[[], None]) -> None:
    """Move the bar, and save where the step is one of those to save, or the last for now."""
    tick()
    every, folder = ready.job.save_steps, ready.folder
    saves = every is not None and trainer.taken % every == 0
    stopping = not trainer.by_time and stops(trainer.sync, trainer.taken)
    if folder is not None and (stopping or saves):
        folder.save(trainer, rows)
    # By time, ranks are at one step where all save, and at the end of an epoch.
    if stopping or (trainer.by_time and saves and trainer.sync.stopping):
        raise _Stopped


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
        f"after {counted(len(rows), 'epoch')}: eval accuracy {percent(score.accuracy)}, "
        f"loss {score.loss:.4f}, {result['seconds']:.1f} s, "
        f"{megabytes(result['moved_bytes'])} sent per worker, fingerprint {result['fingerprint']}"
    )
    if ready.folder is not None:
        files = "run.json, metrics.jsonl, steps.json, result.json and checkpoints"
        display.line(f"wrote {ready.folder.path} ({files})")
