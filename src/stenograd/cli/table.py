"""Tables on the terminal, for commands and drills alike."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

__all__ = ["console", "show"]

_PLAIN_WIDTH = 160  # columns for tables that go to a file or a pipe
_NUMBERS = tuple("+-0123456789")


def console() -> Console:
    """Return the standard output, wide enough for tables where it is not a terminal."""
    screen = Console(highlight=False, markup=False)
    return screen if screen.is_terminal else Console(highlight=False, markup=False, width=_PLAIN_WIDTH)


def show(head: Sequence[str], rows: Sequence[Sequence[object]], title: str | None = None) -> None:
    """Print a table; a column of numbers, also with units behind them, is aligned to the right.

    Args:
        head: names of the columns.
        rows: cells, printed as `str` does; a short row leaves its last columns empty.
        title: stands above the table.
    """
    texts = [[str(cell) for cell in row] for row in rows]
    table = Table(title=title)
    for index, name in enumerate(head):
        cells = [row[index] for row in texts if row[index:] and row[index]]
        numbers = bool(cells) and all(cell.startswith(_NUMBERS) for cell in cells)
        table.add_column(name, justify="right" if numbers else "left", overflow="fold")
    for row in texts:
        table.add_row(*row)
    console().print(table)
