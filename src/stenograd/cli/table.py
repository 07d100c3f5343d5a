"""What commands print: numbers, lines, tables that never break inside a word, JSON, and how far they are."""

from __future__ import annotations

import math
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from stenograd.checkpoint.files import strict_json

__all__ = [
    "Display",
    "console",
    "counted",
    "fewer",
    "megabytes",
    "note",
    "percent",
    "say",
    "show",
    "show_json",
    "working",
]

_PLAIN_WIDTH = 120  # columns where the output is a file or a pipe and COLUMNS is not set
_NUMBERS = tuple("+-0123456789")
_PROSE = 16  # columns that text has at least: sentences in narrower ones are hard to read
_GAP = 2  # columns between those of a table without a frame
_LINE_EVERY_S = 10.0  # how far something is, where no terminal shows it; tests read it in less
_PER_SECOND = 2  # times that a terminal's line is drawn anew: steps are being timed meanwhile


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


def fewer(ratio: float) -> str:
    """Format how many times less was sent; a dash where nothing was.

    Example:
        >>> fewer(28.71), fewer(float("inf"))
        ('28.7x', '-')
    """
    return f"{ratio:.1f}x" if math.isfinite(ratio) else "-"


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
    """Print lines; a terminal gets them wrapped between words, a file or a pipe as they are."""
    screen = console() if screen is None else screen
    if screen.is_terminal:
        text = "\n".join(_wrapped(line, screen.width, "") for line in text.split("\n"))
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


def show(
    head: Sequence[str],
    rows: Sequence[Sequence[object]],
    title: str | None = None,
    spare: Sequence[str] = (),
) -> None:
    """Print a table; a column of numbers, also with units behind them, is aligned to the right.

    Where the lines are too short for a frame it goes, and after it the columns that can be spared. Where they
    are too short for the others, each row becomes a block of lines, its first cell above the others.

    Args:
        head: names of the columns.
        rows: cells, printed as `str` does; a short row leaves its last columns empty.
        title: stands above the table.
        spare: names of columns that may be left out, in this order.
    """
    screen = console()
    texts = [[str(cell) for cell in row] + [""] * (len(head) - len(row)) for row in rows]
    if title is not None:
        say(title, screen)
    for count in range(len(spare) + 1):
        kept = [index for index, name in enumerate(head) if name not in spare[:count]]
        if _shown([head[index] for index in kept], [[row[index] for index in kept] for row in texts], screen):
            if count:
                say(f"left out for want of room: {', '.join(spare[:count])}", screen)
            return
    for first, *others in texts:
        print(first)
        for name, cell in zip(head[1:], others, strict=True):
            if cell:
                print(_wrapped(f"{name}: {cell}" if name else cell, screen.width, "  "))


def _shown(head: Sequence[str], texts: Sequence[Sequence[str]], screen: Console) -> bool:
    """Print a table, in a frame if there is room, and return whether there is room for its columns."""
    columns = [[row[index] for row in texts if row[index]] for index in range(len(head))]
    numbers = [bool(cells) and all(cell.startswith(_NUMBERS) for cell in cells) for cells in columns]
    # A frame takes a line and two spaces for each column, and one line more.
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
        return True
    return False


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
    # Columns that lack least come first, so that most of them get all that they need.
    for index in sorted(range(len(head)), key=lambda index: most[index] - least[index]):
        more = min(most[index] - least[index], spare)
        widths[index] += more
        spare -= more
    return widths


def _wrapped(text: str, width: int, indent: str) -> str:
    return textwrap.fill(
        text,
        max(width, 1),  # of a terminal that says 0, too
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


@contextmanager
def working(what: str, steps: int | None = None) -> Iterator[Callable[[], None]]:
    """Say on standard error, while the block runs, what takes so long and how far it is.

    A terminal shows one line, which goes when the block ends. Elsewhere a line is printed every 10 seconds.

    Args:
        what: is done.
        steps: of which it consists; None where nobody counts them.

    Yields:
        What to call after each step.
    """
    screen = Console(stderr=True, highlight=False, markup=False)
    if not screen.is_terminal:
        with _in_lines(what, steps) as tick:
            yield tick
        return
    counts: list[ProgressColumn] = [BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    columns = counts if steps is not None else [TimeElapsedColumn()]
    with Progress(
        TextColumn("{task.description}"),
        *columns,
        console=screen,
        transient=True,
        refresh_per_second=_PER_SECOND,
        redirect_stdout=sys.stdout.isatty(),  # else a file's lines would go to the terminal
    ) as progress:
        task = progress.add_task(what, total=steps)
        yield lambda: progress.advance(task)


@contextmanager
def _in_lines(what: str, steps: int | None) -> Iterator[Callable[[], None]]:
    done, start, ended = 0, time.monotonic(), threading.Event()

    def tick() -> None:
        nonlocal done
        done += 1

    def tell() -> None:
        while not ended.wait(_LINE_EVERY_S):
            far = "" if steps is None else f" {done} of {steps},"
            print(
                f"stenograd: {what}:{far} {time.monotonic() - start:.0f} s ...", file=sys.stderr, flush=True
            )

    teller = threading.Thread(target=tell, daemon=True, name="stenograd-progress")
    teller.start()
    try:
        yield tick
    finally:
        ended.set()
        teller.join()


class Display:
    """Prints on rank 0, and nothing elsewhere.

    Args:
        rank: this process's rank.
        quiet: whether standard output is for JSON; then lines go to standard error.
    """

    def __init__(self, rank: int, quiet: bool = False) -> None:
        self.screen = Console(stderr=True, highlight=False, markup=False) if quiet else console()
        self._speaks = rank == 0

    def line(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if self._speaks:
            say(text, self.screen)
            self.screen.file.flush()

    def bar(self, what: str, steps: int | None = None) -> AbstractContextManager[Callable[[], None]]:
        """Show how far something is while a block runs, as `working` does."""
        return working(what, steps) if self._speaks else nullcontext(lambda: None)
