"""Collectives under way: messages between pairs of ranks, what is waited for, and what comes of it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch import Tensor

from stenograd.wire.groups import ranks_of
from stenograd.wire.requests import Op, Reply
from stenograd.wire.traffic import Label

if TYPE_CHECKING:
    from stenograd.wire.driver import Driver

__all__ = ["Arrival", "Pending", "Queued", "Several", "messages", "swap", "trade"]


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
        # It is None where nothing travels: one rank, an empty message, or an exchange without peers.
        if self._work is not None:
            start = time.perf_counter()
            self._driver.await_work(self._work, self._what, self.start)
            end = time.perf_counter()
            self.tally.wait_s += end - start
            if self._driver.tracer is not None:
                about = {"what": self._what, "waited_s": end - start, **self._label._asdict()}
                if isinstance(self._work, Arrival):
                    # Its thread starts before this object exists, so a quick result is there before `start`.
                    about["arrived_s"] = max(self._work.at - self.start, 0.0)
                self._driver.tracer.add("collective", self.start, end, **about)
        return self._finish()


class Several(Pending):
    """Collectives under way at once; attributes as those of `Pending`."""

    def __init__(self, parts: Sequence[Pending]) -> None:
        # The pipeline counts seconds of coding by one tally, so the first part stands for all.
        self._parts, self.tally = parts, parts[0].tally
        self.start = parts[-1].start  # packing the later ones is coding, too

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


class Queued:
    """A torch.distributed work object that a stream of the device waits for, and not the host.

    With a timeout, NCCL's would make the host wait, too. What watches instead is the group's own timeout.
    """

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, timeout: timedelta | None = None) -> None:
        """Let the current stream of this thread wait until it is done."""
        self._work.wait()


class Arrival:
    """A torch.distributed work object that notes when it was done, which gloo's own do not all tell.

    A thread of its own waits for it, so this is for traces. Where another thread holds Python's lock, the
    note comes up to some milliseconds late.

    Attributes:
        at: when it was done, by `time.perf_counter`; NaN until then.
    """

    def __init__(self, work: Any) -> None:
        self._work, self.at = work, math.nan
        self._error: RuntimeError | None = None
        self._thread = threading.Thread(target=self._follow, name="stenograd arrival", daemon=True)
        self._thread.start()

    def wait(self, timeout: timedelta | None = None) -> None:
        """Wait until it is done.

        Raises:
            RuntimeError: it failed, or the timeout is over.
        """
        self._thread.join(None if timeout is None else timeout.total_seconds())
        if self._thread.is_alive():
            raise RuntimeError("the wait for it timed out")
        if self._error is not None:
            raise self._error

    def _follow(self) -> None:
        try:
            # The group's own timeout ends this, not the driver's, which `wait` above keeps to.
            self._work.wait()
        except RuntimeError as error:  # for whoever waits
            self._error = error
        self.at = time.perf_counter()


_COLLECTIVE = 1  # tag of what all ranks ask for, which so does not meet an offer made to a neighbour before


def messages(
    group: Any, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], *, tag: int = 0
) -> All:
    """Begin messages between this rank and others, and return their work.

    Every receive is offered before anything is sent: on gloo an offer that comes later waits behind the data
    on the same connection, and the other rank waits for the offer.

    Args:
        group: the process group, None for the default one.
        sends: ranks of the whole world, with what each gets.
        receives: ranks of the whole world, with what each fills.
        tag: messages between two ranks arrive in their order among those of one tag; CUDA tensors have none.
    """
    begun: list[tuple[Any, int, Tensor]] = [(dist.irecv, rank, tensor) for rank, tensor in receives]
    begun += [(dist.isend, rank, tensor) for rank, tensor in sends]
    if all(tensor.device.type == "cpu" for *_, tensor in begun):  # a batch takes twice the time to begin
        return All([begin(tensor, rank, group, tag) for begin, rank, tensor in begun])
    operations = [dist.P2POp(begin, tensor, rank, group) for begin, rank, tensor in begun]
    return All(dist.batch_isend_irecv(operations))


def trade(group: Any, me: int, own: Tensor, received: Tensor) -> All:
    """Begin to send a tensor to the other of two ranks and to receive its; return the work.

    Args:
        group: the process group of the two, None for the default one.
        me: this rank's number in it.
        own: what the other gets.
        received: what is filled from there.
    """
    other = ranks_of(group)[1 - me]
    return messages(group, [(other, own)], [(other, received)], tag=_COLLECTIVE)


def swap(group: Any, me: int, rows: Tensor, received: Tensor) -> All:
    """Begin an all-to-all: send row j to rank j and fill row j from there; return its work.

    Args:
        group: the process group, None for the default one.
        me: this rank's number in it.
        rows: (ranks, elements a row).
        received: the same.
    """
    # torch refuses messages from a rank to itself.
    received[me].copy_(rows[me])
    ranks, size = ranks_of(group), len(rows)
    after = [(me + step) % size for step in range(1, size)]  # so that not all send to one rank first
    # the rank before sends to this one first
    receives = [(ranks[at], received[at]) for at in reversed(after)]
    return messages(group, [(ranks[at], rows[at]) for at in after], receives, tag=_COLLECTIVE)
