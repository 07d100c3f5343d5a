"""`laconic train`: one model under one method, with checkpoints."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from laconic.cli.folder import RunFolder, make_folder
from laconic.cli.loop import Trainer
from laconic.cli.options import Options
from laconic.cli.plan import Plan, check_at_least_1, make_plan
from laconic.cli.ranks import in_ranks
from laconic.cli.report import Display, headline, megabytes, percent, row_line
from laconic.cli.rows import Row
from laconic.drive import Driver
from laconic.errors import ConfigError
from laconic.parsing import Method, method
from laconic.totals import agree

__all__ = ["Job", "run"]


@dataclass(frozen=True, kw_only=True)
class Job:
    """What `laconic train` was asked for.

    Attributes:
        options: those that are shared with other commands.
        method: text of the method.
        out: folder for results and checkpoints; None keeps nothing.
        resume: whether to continue from the checkpoint in `out`.
        save_every: epochs per checkpoint, at least 1; the last epoch is always saved.
    """

    options: Options
    method: str
    out: Path | None
    resume: bool
    save_every: int


@dataclass(frozen=True, kw_only=True)
class _Ready:
    """A job that was checked."""

    job: Job
    plan: Plan
    method: Method
    folder: RunFolder | None


def run(job: Job) -> int:
    """Train, and return the exit status."""
    return in_ranks(job.options, lambda world_size: _prepare(job, world_size), _body)


def _prepare(job: Job, world_size: int) -> _Ready:
    how = method(job.method)
    check_at_least_1("--save-every", job.save_every)
    if job.resume and job.out is None:
        raise ConfigError("--resume needs --out: give the folder of the run to continue")
    plan = make_plan(job.options, world_size)
    folder = RunFolder(job.out, plan.identity(how)) if job.out is not None else None
    if folder is not None:
        folder.check(job.resume)
        make_folder(folder.path)
    return _Ready(job=job, plan=plan, method=how, folder=folder)


def _body(ready: _Ready, driver: Driver) -> int:
    saved = ready.folder.load(driver) if ready.folder is not None and ready.job.resume else None
    trainer = Trainer(ready.plan, ready.method, driver)
    display = Display(driver.rank)
    try:
        parameters = sum(p.numel() for p in trainer.model.parameters())
        display.line(headline(ready.plan, ready.method, parameters))
        rows = _resumed(ready, trainer, saved, display)
        rows = _train(ready, trainer, rows, display)
        _finish(ready, trainer, rows, display)
    finally:
        trainer.sync.close()
    return 0


def _resumed(ready: _Ready, trainer: Trainer, saved: dict[str, Any] | None, display: Display) -> list[Row]:
    """Take the checkpoint's state and return its epochs; begin the run's files."""
    rows: list[Row] = []
    if saved is not None:
        agree(trainer.driver, lambda: trainer.restore(saved["trainer"]))
        rows = [Row(**row) for row in saved["rows"]]
        display.line(f"resumed after epoch {rows[-1].epoch}")
    elif ready.job.resume:
        display.line(f"no checkpoint in {ready.job.out} yet: starting from the beginning")
    if ready.folder is not None and trainer.driver.rank == 0:
        about = {"epochs": ready.plan.epochs, "steps_per_epoch": ready.plan.steps}
        ready.folder.begin([asdict(row) for row in rows], about)
    return rows


def _train(ready: _Ready, trainer: Trainer, rows: list[Row], display: Display) -> list[Row]:
    epochs = ready.plan.epochs
    for epoch in range(len(rows) + 1, epochs + 1):
        with display.bar(f"epoch {epoch}/{epochs}", ready.plan.steps) as tick:
            row = trainer.run_epoch(epoch, tick)
        rows = [*rows, row]
        display.line(row_line(row, epochs))
        if ready.folder is None:
            continue
        if trainer.driver.rank == 0:
            ready.folder.append(row)
        if epoch % ready.job.save_every == 0 or epoch == epochs:
            ready.folder.save(trainer, rows)
    return rows


def _finish(ready: _Ready, trainer: Trainer, rows: list[Row], display: Display) -> None:
    """Print the last line and write result.json."""
    score = trainer.evaluate()
    result = {
        **ready.plan.identity(ready.method),
        "epochs": len(rows),
        "eval_loss": score.loss,
        "eval_accuracy": score.accuracy,
        "seconds": sum(row.seconds for row in rows),
        "payload_bytes": sum(row.payload_bytes for row in rows),
        "moved_bytes": sum(row.moved_bytes for row in rows),
        "skipped": sum(row.skipped for row in rows),
        "fingerprint": trainer.check_equal(),
    }
    if ready.folder is not None and trainer.driver.rank == 0:
        ready.folder.finish(result)
    display.line(
        f"after {len(rows)} epochs: eval accuracy {percent(score.accuracy)}, loss {score.loss:.4f}, "
        f"{result['seconds']:.1f} s, {megabytes(result['moved_bytes'])} sent per worker, "
        f"fingerprint {result['fingerprint']}"
    )
