"""What a training shows on the terminal: one line an epoch, and a progress bar where there is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from stenograd.catalog.method import Method
from stenograd.cli.rows import Row
from stenograd.cli.setup import Setup
from stenograd.cli.table import console, say
from stenograd.errors import bad_value

__all__ = ["Display", "counted", "headline", "megabytes", "percent", "row_line"]


def percent(share: float) -> str:
    """Format a share.

    Example:
        >>> percent(0.9806)
        '98.06 %'
    """
    return f"{100 * share:.2f} %"


def counted(count: int, what: str) -> str:
    """Write a number of things.

    Example:
        >>> counted(1, "host"), counted(2, "host")
        ('1 host', '2 hosts')
    """
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def megabytes(nbytes: float) -> str:
    """Format bytes as MB of a million bytes, with three digits or more.

    Example:
        >>> megabytes(1_234_567), megabytes(34_500), megabytes(250)
        ('1.23 MB', '0.0345 MB', '0.00025 MB')
    """
    mb = nbytes / 1e6
    return f"{mb:.2f} MB" if mb >= 1 or mb == 0 else f"{mb:.3g} MB"


def headline(setup: Setup, method: Method, parameters: int) -> str:
    """Say in one line what is trained."""
    workers = counted(setup.world_size, "worker")
    sizes = f"{setup.task.train_size:,} training and {setup.task.eval_size:,} evaluation samples"
    return f"{setup.task.name}: {sizes}, {parameters:,} parameters, {workers}, method {method.text}"


def row_line(row: Row, epochs: int) -> str:
    """Format one epoch."""
    skipped = f"  {counted(row.skipped, 'step')} skipped (not finite)" if row.skipped else ""
    return (
        f"epoch {row.epoch:>{len(str(epochs))}}/{epochs}"
        f"  train loss {row.train_loss:.4f} accuracy {percent(row.train_accuracy)}"
        f"  eval loss {row.eval_loss:.4f} accuracy {percent(row.eval_accuracy)}"
        f"  {row.seconds:.2f} s  sent {megabytes(row.moved_bytes)}"
        f"  compression {row.compression:.1f}x{skipped}"
    )


class Display:
    """Prints on rank 0, and nothing elsewhere.

    Args:
        rank: this process's rank, at least 0.
    """

    def __init__(self, rank: int) -> None:
        if rank < 0:
            raise bad_value("rank", "must be at least 0", rank, "number the ranks from 0")
        self.screen = console()
        self._speaks = rank == 0
        # Open MPI gives a rank's output a terminal of its own, whatever becomes of it; but not its errors.
        self._draws = self._speaks and self.screen.is_terminal and sys.stderr.isatty()
        self._progress: Progress | None = None

    def line(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._speaks:
            screen = self._progress.console if self._progress is not None else self.screen
            say(text, screen)
            screen.file.flush()

    @contextmanager
    def bar(self, what: str, steps: int) -> Iterator[Tick]:
        """Show a bar while the block runs; it yields what to call after each step."""
        if not self._draws:
            yield Tick(None)
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.screen, transient=True) as self._progress:
            try:
                self._progress.add_task(what, total=steps)
                yield Tick(self._progress)
            finally:
                self._progress = None


class Tick:
    """Moves a bar on by one; does nothing where there is none."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress

    def __call__(self) -> None:
        if self._progress is not None:
            self._progress.advance(self._progress.task_ids[0])
