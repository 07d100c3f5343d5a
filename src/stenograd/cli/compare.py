"""`stenograd compare`: several methods in turn, in one set of worker processes, from the same weights."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from stenograd.catalog.method import Method, method, methods
from stenograd.checkpoint.files import write_json
from stenograd.cli.folder import make_folder, versions
from stenograd.cli.loop import Trainer
from stenograd.cli.options import Options
from stenograd.cli.plot import plot
from stenograd.cli.ranks import in_ranks
from stenograd.cli.report import Display, counted, headline, megabytes, percent
from stenograd.cli.rows import Row
from stenograd.cli.setup import Setup, make_setup
from stenograd.cli.table import show
from stenograd.comm.driver import Driver
from stenograd.errors import ConfigError, LaunchError, PeerLost, StenogradError

__all__ = ["Result", "chosen_methods", "default_methods", "run", "split_methods"]

_WARM_UP = 3  # steps before a method's clock starts; rounds need one round
# With these keys each is within two points of dense training on digits, for seeds 0 to 2; methods without an
# entry are so with their defaults. randomblock is the exception: it ends 6 points below for seed 0. The
# random ones are without error feedback, which hands back about 1 / ratio steps at once and wants a lower
# learning rate than the task's.
_KEYS = {
    "dgc": "ratio=0.01,momentum=0",  # the tasks train with momentum in the optimizer
    "randomblock": "ratio=0.25,feedback=false",
    "randomk": "ratio=0.25,feedback=false",
    "threshold": "value=0.01",
}


@dataclass(kw_only=True)
class Result:
    """What one method cost and reached; `error` says why there is nothing else.

    Attributes:
        step_ms: median milliseconds of a training step on rank 0, evaluation excluded.
        wait_s: seconds in which rank 0 waited for the network, attaching excluded.
        seconds: training and evaluation of all epochs.
        moved_bytes_per_step: bytes that rank 0 sent.
        compression: how many times fewer those are than dense training's.
    """

    method: str
    error: str | None = None
    eval_accuracy: float | None = None
    eval_loss: float | None = None
    step_ms: float | None = None
    wait_s: float | None = None
    seconds: float | None = None
    payload_bytes_per_step: float | None = None
    moved_bytes_per_step: float | None = None
    compression: float | None = None
    fingerprint: str | None = None
    epochs: list[Row] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class _Ready:
    setup: Setup
    methods: list[Method]
    out: Path | None
    explain: Callable[[Sequence[Result]], str] | None


def run(
    options: Options,
    texts: Sequence[str] | None,
    out: Path | None,
    explain: Callable[[Sequence[Result]], str] | None = None,
) -> int:
    """Compare, and return the exit status: 1 if a method failed.

    Args:
        options: what to train and how.
        texts: the methods; None for every method that suits the task.
        out: folder for the results.
        explain: makes the text under the table, which rank 0 prints.
    """
    chosen = chosen_methods(texts) if texts else default_methods()
    return in_ranks(options, lambda world_size: _prepare(options, chosen, out, explain, world_size), _body)


def default_methods() -> list[str]:
    """Return every method of the registry that goes with the tasks' optimizers, with keys that suit them.

    Example:
        >>> "dense" in default_methods(), "threshold:value=0.01" in default_methods()
        (True, True)
    """
    chosen = [method(f"{name}:{_KEYS.get(name, '')}") for name in methods()]
    return [how.text for how in chosen if not how.own_momentum]


def split_methods(texts: Sequence[str]) -> list[str]:
    """Split lists of methods; a comma followed by KEY=VALUE continues a method.

    Example:
        >>> split_methods(["dense,topk:ratio=0.1,feedback=off,sign", "fp16"])
        ['dense', 'topk:ratio=0.1,feedback=off', 'sign', 'fp16']
    """
    found = [re.split(r",(?!\s*\w+\s*=)", part) for text in texts for part in text.split(";")]
    return [item.strip() for items in found for item in items if item.strip()]


def chosen_methods(texts: Sequence[str]) -> list[str]:
    """Return the canonical texts of the methods in lists of them, each once.

    Raises:
        ConfigError: there is none, or one is unknown.

    Example:
        >>> chosen_methods(["dense, topk:ratio=0.01", "dense"])
        ['dense', 'topk:ratio=0.01']
    """
    found = list(dict.fromkeys(method(text).text for text in split_methods(texts)))
    if not found:
        raise ConfigError("--methods must name at least one method, got none: write --methods dense,topk")
    return found


def _prepare(
    options: Options,
    texts: Sequence[str],
    out: Path | None,
    explain: Callable[[Sequence[Result]], str] | None,
    world_size: int,
) -> _Ready:
    if options.epochs == 0:
        raise ConfigError("--epochs must be at least 1 for a comparison, got 0: leave it out, or use train")
    setup = make_setup(options, world_size)
    if out is not None:
        make_folder(out)
    return _Ready(setup=setup, methods=[method(text) for text in texts], out=out, explain=explain)


def _body(ready: _Ready, driver: Driver) -> int:
    display = Display(driver.rank)
    results: list[Result] = []
    lost: StenogradError | None = None
    for how in ready.methods:
        try:
            results.append(_measure(ready.setup, how, driver, display))
        except (PeerLost, LaunchError) as error:
            lost = error  # nobody is left to train the other methods with
            break
        except StenogradError as error:
            results.append(Result(method=how.text, error=str(error)))
            display.line(f"{how.text}: {error}")
    if driver.rank == 0:
        _show(ready.setup, results)
        if ready.explain is not None:
            print(ready.explain(results), flush=True)
        if ready.out is not None:
            _write(ready.setup, results, ready.out, display)
    if lost is not None:
        raise lost
    return 1 if any(result.error is not None for result in results) else 0


def _warm_up(setup: Setup, how: Method, driver: Driver) -> None:
    """Train a copy for a moment: kernels that load then would be charged to whichever method comes first."""
    with torch.random.fork_rng(devices=[]):
        trainer = Trainer(setup, how, driver)
        try:
            trainer.warm_up(max(_WARM_UP, getattr(how.schedule, "every", 1)))
        finally:
            trainer.sync.close()


def _measure(setup: Setup, how: Method, driver: Driver, display: Display) -> Result:
    _warm_up(setup, how, driver)
    trainer = Trainer(setup, how, driver)
    try:
        display.line(headline(setup, how, sum(p.numel() for p in trainer.model.parameters())))
        # Attaching is not the method's cost: ranks wait there for the one that compiles its kernels.
        start, attached_s, rows = time.perf_counter(), trainer.sync.traffic.wait_s, list[Row]()
        with display.bar(how.text, setup.epochs * setup.steps) as tick:
            for epoch in range(1, setup.epochs + 1):
                rows.append(trainer.run_epoch(epoch, tick))
        seconds = time.perf_counter() - start
        fingerprint, wait_s = trainer.check_equal(), trainer.sync.traffic.wait_s - attached_s
    finally:
        trainer.sync.close()
    steps = sum(row.steps for row in rows)
    last, sent = rows[-1], sum(row.dense_bytes / row.compression for row in rows)
    after = counted(setup.epochs, "epoch")
    display.line(f"  eval accuracy {percent(last.eval_accuracy)} after {after}, {seconds:.1f} s")
    return Result(
        method=how.text,
        eval_accuracy=last.eval_accuracy,
        eval_loss=last.eval_loss,
        step_ms=1e3 * statistics.median(trainer.step_s),
        wait_s=wait_s,
        seconds=seconds,
        payload_bytes_per_step=sum(row.payload_bytes for row in rows) / steps,
        moved_bytes_per_step=sum(row.moved_bytes for row in rows) / steps,
        compression=sum(row.dense_bytes for row in rows) / sent,
        fingerprint=fingerprint,
        epochs=rows,
    )


def _show(setup: Setup, results: Sequence[Result]) -> None:
    workers, epochs = counted(setup.world_size, "worker"), counted(setup.epochs, "epoch")
    title = f"{setup.task.name}, {workers}, {epochs} of {counted(setup.steps, 'step')}"
    head = ("method", "eval accuracy", "eval loss", "ms/step", "sent/step", "compression", "waited", "total")
    show(head, [_cells(result) for result in results], f"{title}, seed {setup.options.seed}")


def _cells(result: Result) -> list[str]:
    numbers = (
        result.eval_accuracy,
        result.eval_loss,
        result.step_ms,
        result.moved_bytes_per_step,
        result.compression,
        result.wait_s,
        result.seconds,
    )
    if result.error is not None or None in numbers:
        return [result.method, f"failed: {result.error}"]
    accuracy, loss, step_ms, moved, compression, wait_s, seconds = (float(n or 0) for n in numbers)
    return [
        result.method,
        percent(accuracy),
        f"{loss:.4f}",
        f"{step_ms:.2f}",
        megabytes(moved),
        f"{compression:.1f}x",
        f"{wait_s:.2f} s",
        f"{seconds:.1f} s",
    ]


def _write(setup: Setup, results: Sequence[Result], out: Path, display: Display) -> None:
    about = {
        "task": setup.task.name,
        "world_size": setup.world_size,
        "seed": setup.options.seed,
        "epochs": setup.epochs,
        "steps_per_epoch": setup.steps,
        "recipe": asdict(setup.recipe),
        "versions": versions(),
    }
    write_json(out / "compare.json", {**about, "methods": [asdict(result) for result in results]})
    display.line(f"wrote {out / 'compare.json'}")
    curves = {result.method: result.epochs for result in results if result.epochs}
    display.line(plot(out / "compare.png", setup.task.name, curves))
