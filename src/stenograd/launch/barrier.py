"""A barrier through a key-value store: wait until every rank of a launch has come, or say which have not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

from stenograd.errors import LaunchError, first_line
from stenograd.launch.detect import World
from stenograd.launch.failure_detector import Presence

__all__ = [
    "Store",
    "gather_ranks",
    "introduce",
    "missing_ranks",
    "store_errors",
    "tell_all",
    "unmarked_ranks",
]

_POLL_S = 0.01  # a launch is late by this at most; stores have no wait that says which key is missing
_ROLL_CALL_POLL_S = 0.1  # coarser: the store's host may be struggling, and survivors have 2 s
_NAMED_RANKS = 16  # an error about a thousand missing ranks still fits a terminal


class Store(Protocol):
    """The methods that we use of torch.distributed's stores."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number that begins at 0, and return the sum."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""


def gather_ranks(store: Store, world: World, verb: str, limit_s: float, deadline: float) -> None:
    """Wait until every rank has done what the verb says ("came", "connected").

    Rank 0 may host the store, so it must not leave while others still read from it: it returns only when all
    have seen that everyone is there.

    Raises:
        LaunchError: ranks are missing at the deadline, or this rank's number is taken.
    """

    def mark(prefix: str) -> None:
        if store.add(f"{prefix}/{world.rank}", 1) > 1:
            raise LaunchError(
                f"another process is already rank {world.rank} of {world.world_size} at this rendezvous: "
                f"give each job a MASTER_PORT of its own, and start each rank once"
            )

    def wait(keys: list[str], prefix: str) -> None:
        while not store.check(keys):
            if time.monotonic() > deadline:
                absent = [rank for rank in range(world.world_size) if not store.check([f"{prefix}/{rank}"])]
                raise missing_ranks(absent or [0], world.world_size, verb, limit_s)
            time.sleep(_POLL_S)

    with store_errors():
        mark(verb)
        if world.rank == 0:
            wait([f"{verb}/{rank}" for rank in range(world.world_size)], verb)
            mark(f"{verb}/seen")
            wait([f"{verb}/seen/{rank}" for rank in range(world.world_size)], f"{verb}/seen")
        else:
            wait([f"{verb}/seen/0"], verb)
            mark(f"{verb}/seen")


def tell_all(store: Store, world: World, what: str, text: str, limit_s: float) -> list[str]:
    """Give every rank a text of each rank, in rank order; all ranks call it with the same `what`, once.

    Rank 0 may host the store: let `gather_ranks` follow before it leaves.

    Raises:
        LaunchError: ranks did not tell theirs in time; it names them.
    """
    keys = [f"{what}/{rank}" for rank in range(world.world_size)]
    deadline = time.monotonic() + limit_s
    with store_errors():
        store.set(keys[world.rank], text)
        while not store.check(keys):
            if time.monotonic() > deadline:
                absent = [rank for rank, key in enumerate(keys) if not store.check([key])]
                raise missing_ranks(absent or [0], world.world_size, f"told {what!r}", limit_s)
            time.sleep(_POLL_S)
        return [store.get(key).decode() for key in keys]


def missing_ranks(absent: list[int], size: int, verb: str, limit_s: float) -> LaunchError:
    """Build the error that names the ranks that did not come in time."""
    names = ", ".join(map(str, absent[:_NAMED_RANKS])) + (", ..." if len(absent) > _NAMED_RANKS else "")
    return LaunchError(
        f"{size - len(absent)} of {size} ranks {verb} within {limit_s:g} s, missing: {names}; "
        f"look for errors of those ranks, or wait longer with timeout_s"
    )


def introduce(detector: Presence | None, store: Store, world: World) -> None:
    """Give a rank's failure detector the addresses that all ranks left in the store."""
    if detector is None:
        return
    with store_errors():
        cards = {rank: store.get(f"detector/{rank}").decode() for rank in range(world.world_size)}
    detector.meet({rank: card for rank, card in cards.items() if card})


def unmarked_ranks(store: Store, rank: int, size: int, grace_s: float) -> list[int]:
    """Leave this rank's mark in the store, and return the ranks that leave none within the grace period."""
    deadline = time.monotonic() + grace_s
    store.set(str(rank), "here")
    missing = [other for other in range(size) if other != rank]
    while True:
        missing = [other for other in missing if not store.check([str(other)])]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(_ROLL_CALL_POLL_S)


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Turn the store's own error into a `LaunchError`."""
    try:
        yield
    except RuntimeError as error:
        raise LaunchError(f"rank 0 left during the rendezvous: {first_line(error)}") from None
