"""Gloo's own thread beside the training, where both have one core."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["waiting_loops"]

_LOOP = "gloo_tcp_loop"  # what gloo calls the thread that moves a process group's messages
_TASKS = Path("/proc/self/task")


@contextlib.contextmanager
def waiting_loops() -> Iterator[None]:
    """Let the threads that gloo starts inside wait for a core, rather than interrupt whoever computes on it.

    Such a thread wakes when a message comes, and may interrupt the very thread that is sending on the same
    connection. That one holds the connection's lock, which gloo's thread then tries in vain, and asks the
    kernel for messages again and again, until it has used up its time slice: 3 to 5 ms of nothing. Ranks
    that send at the same time, as in training, meet this in most steps. Linux lets a thread of `SCHED_BATCH`
    interrupt nobody; it gets its share of the time as before, and a free core at once.

    Only groups of our own are made in here: the program's stay as they are. Where the system has no such
    policy or does not allow it, nothing changes.

    Example:
        >>> with waiting_loops():
        ...     pass  # make a process group
    """
    before = _loops()
    yield
    for thread in _loops() - before:
        with contextlib.suppress(OSError):  # not allowed, or gone
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _loops() -> set[int]:
    """Return the numbers of this process's threads that have gloo's name; none where that is not told."""
    found: set[int] = set()
    if not hasattr(os, "SCHED_BATCH"):
        return found
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                if (task / "comm").read_text().strip() == _LOOP:
                    found.add(int(task.name))
    return found
