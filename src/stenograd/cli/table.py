"""What commands print: numbers, lines and tables that never break inside a word, JSON, a progress bar."""

from __future__ import annotations

import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from stenograd.checkpoint.files import strict_json

__all__ = ["Display", "console", "counted", "megabytes", "note", "percent", "say", "show", "show_json"]

_PLAIN_WIDTH = 120  # columns where the output is a file or a pipe and COLUMNS is not set
_NUMBERS = tuple("+-0123456789")
_PROSE = 16  # columns that text has at least: sentences in narrower ones are hard to read
_GAP = 2  # columns between those of a table without a frame


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


def console() -> Console:
    """Return the standard output."""
    screen = Console(highlight=False, markup=False)
    if screen.is_terminal or "COLUMNS" in os.environ:
        return screen
    return Console(highlight=False, markup=False, width=_PLAIN_WIDTH)


def say(text: str, screen: Console | None = None) -> None:
    """Print a line; a terminal gets it wrapped between words, a file or a pipe as it is."""
    screen = console() if screen is None else screen
    if screen.is_terminal:
        text = _wrapped(text, screen.width, "")
    screen.print(text, soft_wrap=True)


def show_json(value: Any) -> None:
    """Print a value as JSON; what is not finite becomes null."""
    print(strict_json(value))


def note(text: str, quiet: bool) -> None:
    """Print a line, such as which file was written; on standard error where the output is JSON."""
    if quiet:
        print(text, file=sys.stderr, flush=True)
    else:
        say(text)


def show(head: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None) -> None:
    """Print a table; a column of numbers, also with units behind them, is aligned to the right.

    Where the lines are too short for a frame it goes, and where they are too short for the columns, each row
    becomes a block of lines, its first cell above the others.

    Args:
        head: names of the columns.
        rows: cells, printed as `str` does; a short row leaves its last columns empty.
        title: stands above the table.
    """
    screen = console()
    texts = [[str(cell) for cell in row] + [""] * (len(head) - len(row)) for row in rows]
    columns = [[row[index] for row in texts if row[index]] for index in range(len(head))]
    numbers = [bool(cells) and all(cell.startswith(_NUMBERS) for cell in cells) for cells in columns]
    if title is not None:
        say(title, screen)
    for box, taken in ((HEAVY_HEAD, 3 * len(head) + 1), (None, _GAP * (len(head) - 1))):
        widths = _widths(head, columns, numbers, screen.width - taken)
        if widths is None:
            continue
        padding = (0, 1) if box else (0, _GAP, 0, 0)
        table = Table(box=box, padding=padding, pad_edge=box is not None)
        for name, number, width in zip(head, numbers, widths, strict=True):
            table.add_column(name, justify="right" if number else "left", width=width)
        for row in texts:
            table.add_row(*row)
        screen.print(table)
        return
    for first, *others in texts:
        print(first)
        for name, cell in zip(head[1:], others, strict=True):
            if cell:
                print(_wrapped(f"{name}: {cell}" if name else cell, screen.width, "  "))


def _widths(
    head: Sequence[str], columns: Sequence[Sequence[str]], numbers: Sequence[bool], room: int
) -> list[int] | None:
    """Return the columns' widths, or None where words and numbers do not fit whole."""
    least, most = [], []
    for name, cells, number in zip(head, columns, numbers, strict=True):
        words = [*name.split(), *(cells if number else (word for cell in cells for word in cell.split()))]
        most.append(max(map(len, [name, *cells])))
        least.append(max([0 if number else min(most[-1], _PROSE), *map(len, words)]))
    spare = room - sum(least)
    if spare < 0:
        return None
    widths = list(least)
    for index in sorted(range(len(head)), key=lambda index: most[index] - least[index]):
        more = min(most[index] - least[index], spare)
        widths[index] += more
        spare -= more
    return widths


def _wrapped(text: str, width: int, indent: str) -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


class Display:
    """Prints on rank 0, and nothing elsewhere.

    Args:
        rank: this process's rank.
    """

    def __init__(self, rank: int) -> None:
        self.screen = console()
        self._speaks = rank == 0
        # Open MPI gives a rank's output a terminal of its own, whatever becomes of it; but not its errors.
        self._draws = self._speaks and self.screen.is_terminal and sys.stderr.isatty()

    def line(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._speaks:
            say(text, self.screen)
            self.screen.file.flush()

    @contextmanager
    def bar(self, what: str, steps: int) -> Iterator[Callable[[], None]]:
        """Show a bar while the block runs, if there is a terminal; it yields what to call after each step."""
        if not self._draws:
            yield lambda: None
            return
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with Progress(*columns, console=self.screen, transient=True) as progress:
            task = progress.add_task(what, total=steps)
            yield lambda: progress.advance(task)
