"""Checks of neighbours, and one form for the several in which users give them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any, TypeAlias

from stenograd.errors import ConfigError, bad_value

__all__ = [
    "Neighbours",
    "check_columns",
    "check_peers",
    "check_rank",
    "check_symmetric",
    "check_targets",
    "relation",
]

# By rank: a sequence in rank order, a mapping, or a graph of networkx with nodes 0..size-1.
Neighbours: TypeAlias = Sequence[Iterable[int]] | Mapping[int, Iterable[int]] | Any


def relation(neighbours: Neighbours) -> tuple[tuple[int, ...], ...]:
    """Return each rank's neighbours, ascending, in rank order.

    Raises:
        ConfigError: ranks are not 0..size-1, a rank is its own neighbour or twice another's, or the relation
            is not symmetric.

    Example:
        >>> relation({1: [0], 0: [2, 1], 2: [0]})
        ((1, 2), (0,), (0,))
    """
    if isinstance(neighbours, Sequence):
        rows = {rank: list(row) for rank, row in enumerate(neighbours)}
    else:
        rows = {rank: list(neighbours[rank]) for rank in neighbours}
    if not rows or set(rows) != set(range(len(rows))):
        raise bad_value("neighbours", "must be given for ranks 0..size-1", [*rows], "number ranks from 0")
    for rank, row in rows.items():
        check_peers(rank, row, len(rows))
    for rank, row in rows.items():  # when all rows are known to name ranks
        check_symmetric(rank, row, rows)
    return tuple(tuple(sorted(map(int, rows[rank]))) for rank in range(len(rows)))


def check_peers(rank: int, peers: Sequence[int], size: int) -> None:
    """Refuse a rank's neighbours unless they are other ranks of 0..size-1, each named once."""
    integers = all(isinstance(peer, Integral) for peer in peers)
    if not integers or len(set(peers)) != len(peers) or not set(peers) <= set(range(size)) - {rank}:
        rule = f"must be other ranks of 0..{size - 1}, each once"
        raise bad_value(f"neighbours of rank {rank}", rule, [*peers], "leave out the rank itself")


def check_symmetric(
    rank: int, row: Iterable[int], rows: Sequence[Any] | Mapping[int, Any], when: str = ""
) -> None:
    """Refuse a rank's neighbours if one of them does not have the rank among its own."""
    for other in row:
        if rank not in rows[other] and other != rank:
            raise ConfigError(
                f"neighbours{when} must be symmetric, got rank {other} among those of rank {rank}, not "
                f"reversed: add {rank} to the neighbours of rank {other}, or ranks wait for each other until "
                "the timeout"
            )


def check_targets(rank: int, targets: Sequence[int], rows: Sequence[Mapping[int, float]], step: int) -> None:
    """Refuse the ranks that a rank sends to unless exactly these receive from it, in ascending order."""
    expecting = [other for other, row in enumerate(rows) if rank in row and other != rank]
    if list(targets) != expecting:
        what = f"targets of rank {rank} at step {step}"
        advice = "ranks would wait for each other until the timeout"
        raise bad_value(what, f"must be the ranks whose weights name it, {expecting}", [*targets], advice)


def check_columns(rows: Sequence[Mapping[int, float]], step: int, rounding: float) -> None:
    """Refuse a mixing matrix that would lose or double a part of what some rank has."""
    for rank in range(len(rows)):
        column = {other: row[rank] for other, row in enumerate(rows) if rank in row}
        if abs(math.fsum(column.values()) - 1) > rounding:
            advice = f"divide what rank {rank} has among them, or the mean over the ranks is lost"
            what = f"weights that ranks give to rank {rank} at step {step}"
            raise bad_value(what, "must sum to 1", column, advice)


def check_rank(rank: int, size: int) -> None:
    """Refuse a rank outside 0..size-1."""
    if not 0 <= rank < size:
        raise bad_value("rank", f"must be in 0..{size - 1}", rank, "number the ranks from 0")
