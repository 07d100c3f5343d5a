"""The table that `stenograd compare` ends with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from stenograd.cli.plan import Plan
from stenograd.cli.report import megabytes, percent

if TYPE_CHECKING:
    from stenograd.cli.compare import Result

__all__ = ["show_results"]


def show_results(screen: Console, plan: Plan, results: Sequence[Result]) -> None:
    """Print one row a method."""
    workers = "1 worker" if plan.world_size == 1 else f"{plan.world_size} workers"
    seed = plan.options.seed
    title = f"{plan.task.name}, {workers}, {plan.epochs} epochs of {plan.steps} steps, seed {seed}"
    table = Table(title=title)
    table.add_column("method", overflow="fold")
    for name in ("eval accuracy", "eval loss", "ms/step", "sent/step", "compression", "waited", "total"):
        table.add_column(name, justify="right", overflow="fold")
    for result in results:
        table.add_row(*_cells(result))
    screen.print(table)


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
