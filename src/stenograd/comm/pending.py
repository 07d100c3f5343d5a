"""Collectives under way: what is waited for, and what comes of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from stenograd.comm.traffic import Label
from stenograd.data.requests import Op, Reply

if TYPE_CHECKING:
    from stenograd.comm.driver import Driver

__all__ = ["All", "Pending", "Several"]


class Pending:
    """A collective under way.

    Attributes:
        tally: where its seconds are counted.
        start: when it was asked for, by `time.perf_counter`.
    """

    def __init__(
        self, driver: Driver, work: Any, finish: Callable[[], Reply], what: str, label: Label, op: Op
    ) -> None:
        self._driver, self._work, self._finish, self._what = driver, work, finish, what
        self._label, self.tally = label, driver.traffic.tally(label, op.value)
        self.start = time.perf_counter()

    def wait(self) -> Reply:
        """Wait for the result.

        Raises:
            PeerLost: it did not come within the driver's timeout, or the connection broke.
        """
        if self._work is not None:
            start = time.perf_counter()
            self._driver.await_work(self._work, self._what, self.start)
            end = time.perf_counter()
            self.tally.wait_s += end - start
            if self._driver.tracer is not None:
                about = {"what": self._what, "waited_s": end - start, **self._label._asdict()}
                self._driver.tracer.add("collective", self.start, end, **about)
        return self._finish()


class Several(Pending):
    """Collectives under way at once; attributes as those of `Pending`."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        self._parts, self.tally, self.start = parts, parts[0].tally, parts[0].start

    def wait(self) -> list[Reply]:
        """Wait for all."""
        return [part.wait() for part in self._parts]


class All:
    """Several torch.distributed work objects as one, under one deadline."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait for all, each for what is left of the timeout."""
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        for work in self._works:
            if deadline is None:
                work.wait()
            else:  # below a millisecond gloo would wait for ever
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
