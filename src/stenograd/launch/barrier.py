"""Through a key-value store, wait until every rank of a launch has come, or say which ones have not."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

from stenograd.errors import LaunchError
from stenograd.launch.detect import World
from stenograd.launch.failure_detector import Presence

__all__ = ["Store", "gather_ranks", "introduce", "store_errors"]

_POLL_S = 0.01


class Store(Protocol):
    """What is used of torch.distributed's stores."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number that begins at 0, and return the sum."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""


def gather_ranks(store: Store, world: World, verb: str, limit_s: float, deadline: float) -> None:
    """Wait until every rank did what the verb says; rank 0, which may host the store, returns last."""

    def mark(prefix: str) -> None:
        if store.add(f"{prefix}/{world.rank}", 1) > 1:
            raise LaunchError(
                f"rank {world.rank} of {world.world_size} finds another rank {world.rank} at the meeting "
                f"point: give each job a MASTER_PORT of its own, and start each rank once"
            )

    def wait(keys: list[str], prefix: str) -> None:
        while not store.check(keys):
            if time.monotonic() > deadline:
                absent = [rank for rank in range(world.world_size) if not store.check([f"{prefix}/{rank}"])]
                raise _absentees(absent or [0], world.world_size, verb, limit_s)
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


def _absentees(absent: list[int], size: int, verb: str, limit_s: float) -> LaunchError:
    names = ", ".join(map(str, absent[:16])) + (", ..." if len(absent) > 16 else "")
    return LaunchError(
        f"{size - len(absent)} of {size} ranks {verb} within {limit_s:g} s, missing: {names}; "
        f"look for errors of those ranks, or wait longer with timeout_s"
    )


def introduce(presence: Presence | None, store: Store, world: World) -> None:
    """Give a rank's presence the cards that all ranks left in the store."""
    if presence is None:
        return
    with store_errors():
        cards = {rank: store.get(f"presence/{rank}").decode() for rank in range(world.world_size)}
    presence.meet({rank: card for rank, card in cards.items() if card})


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Turn the store's own error into a `LaunchError`."""
    try:
        yield
    except RuntimeError as error:
        raise LaunchError(f"rank 0 left while the ranks met: {str(error).splitlines()[0]}") from None
