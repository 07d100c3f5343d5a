"""A driver that sends nothing: the real engine runs on it, and everything it would send is noted."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

from torch import Tensor

from stenograd.comm.driver import Driver
from stenograd.data.requests import Op
from stenograd.planning.program import BROADCAST, Collective, Event

__all__ = ["Recorder", "RehearsalDriver"]

T = TypeVar("T")


class _Joined(Future[T]):
    """The result of a job that has ended, which notes when a thread asks for it."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        super().__init__()
        self._recorder, self._number = recorder, number

    def result(self, timeout: float | None = None) -> T:
        self._recorder.note("join", self._number)
        return super().result(timeout)


class Recorder:
    """Notes what each thread does, with the processor time in between; an `Observer` of drivers.

    Processor time leaves out what a thread waits, and what other programs take. Nothing is ever waited for
    here, so a job for another thread is done at once, in the thread that hands it over, and only noted as
    the other's: what is recorded then depends on no chance.

    Attributes:
        on: whether to note; what happens meanwhile costs nothing.
        lanes: events of each thread, the training's own first.
    """

    def __init__(self) -> None:
        self.on = False
        self.lanes: list[list[Event]] = [[]]
        self._lane, self._of_thread = 0, dict[int, int]()
        self._since: dict[int, float] = {}  # by real thread: when its last event ended
        self._numbers: dict[str, int] = {}

    def begin(self) -> None:
        """Note from now on."""
        self.skip()
        self.on = True

    def number(self, what: str) -> int:
        """Return the next number of a "collective" or a "job"."""
        self._numbers[what] = self._numbers.get(what, -1) + 1
        return self._numbers[what]

    def note(self, kind: str, number: int = 0, collective: Collective | None = None) -> None:
        """Note an event of the thread that is at work."""
        if not self.on:
            return
        now = time.thread_time()
        # Another thread than before, such as autograd's for a GPU, has a clock of its own.
        compute_s = now - self._since.get(threading.get_ident(), now)
        self.lanes[self._lane].append(Event(kind, number, max(compute_s, 0.0), collective))
        self.skip()  # noting is no time of the program's

    def skip(self) -> None:
        """Leave out what this thread did since its last event."""
        self._since[threading.get_ident()] = time.thread_time()

    def add(self, kind: str, start: float, end: float, /, **about: Any) -> None:
        """Note that decoding has just ended; other events of traces are noted elsewhere."""
        if kind == "decode":
            self.note("decoded")

    def ready(self, bucket: int, parameter: Tensor) -> None:
        """Do nothing: a trial measures when gradients are ready."""

    def full(self, bucket: int) -> None:
        """Do nothing: what follows from it is noted."""

    def hand_over(self, thread: Executor, job: Callable[..., T], *args: Any) -> Future[T]:
        """Do a job as if another thread did it; it begins no earlier than it was posted."""
        number, before = self.number("job"), self._lane
        future = _Joined[T](self, number)
        self.note("post", number)
        if id(thread) not in self._of_thread:
            self._of_thread[id(thread)] = len(self.lanes)
            self.lanes.append([])
        self._lane = self._of_thread[id(thread)]
        self.note("begin", number)
        try:
            future.set_result(job(*args))
        except BaseException as error:  # as an executor does: whoever asks for the result gets it
            future.set_exception(error)
        self.note("done", number)
        self._lane = before
        return future


def _left(group: object) -> None:
    """Leave a group that does not exist."""


class RehearsalDriver(Driver):
    """Rank `rank` of `world_size` ranks that do not exist.

    What it is asked to send comes back as if every rank had the same: a gather brings this rank's message N
    times, an all-to-all its row for itself N times, an average the tensors themselves. So whatever decodes
    messages gets valid ones. Bytes are counted as for real ranks, by the same code.

    Args:
        world_size: number of ranks that are pretended.
        recorder: notes what would be sent.
        rank: this rank's number.

    Example:
        >>> import torch
        >>> from stenograd.data.requests import gather
        >>> driver = RehearsalDriver(3, Recorder())
        >>> len(driver.run(gather(torch.ones(2)))), driver.traffic.moved_bytes
        (3, 16)
    """

    def __init__(self, world_size: int, recorder: Recorder, rank: int = 0) -> None:
        super().__init__(None)
        self.rank, self.world_size = rank, world_size
        self.traffic = type(self.traffic)(rank)
        self._groupless = False
        self._recorder = self.tracer = recorder

    def _issue(self, call: Callable[[], Any], what: str, handed: Tensor) -> Any:
        return call()

    def await_work(self, work: Any, what: str, start: float) -> None:
        """Note that this collective is waited for."""
        self._recorder.note("wait", work)

    def _noted(self, op: str, handed: Tensor, peers: Sequence[int] = ()) -> int:
        number, itemsize = self._recorder.number("collective"), handed.element_size()
        about = Collective(op, handed.numel() * itemsize, itemsize, self.world_size, tuple(peers))
        self._recorder.note("issue", number, about)
        return number

    def _transmit(self, op: Op, handed: Tensor, received: Tensor) -> int:
        number = self._noted(op.value, handed)
        if op is Op.GATHER:
            received.view(self.world_size, -1).copy_(handed.view(1, -1).expand(self.world_size, -1))
        elif op is Op.SCATTER:
            received.copy_(handed[self.rank : self.rank + 1].expand_as(received))
        elif op is Op.MEAN and received is handed:
            handed.mul_(self.world_size)  # it was divided before
        elif op is Op.MEAN:
            received.copy_(handed)
        self._recorder.skip()  # what stands for the network takes no time
        return number

    def _transmit_to(self, peers: Sequence[int], sources: Sequence[int], mine: Tensor, theirs: Tensor) -> int:
        number = self._noted(Op.EXCHANGE.value, mine, peers)
        theirs.copy_(mine.view(1, -1).expand_as(theirs))
        self._recorder.skip()
        return number

    def _transmit_from(self, source: int, tensor: Tensor) -> int:
        return self._noted(BROADCAST, tensor)

    def split(self, parts: Sequence[Sequence[int]], what: str = "part") -> list[Driver | None]:
        """Make a driver for each of several parts of this group, None where this rank is not in it."""
        found: list[Driver | None] = []
        for part in parts:
            members = list(part)
            if self.rank not in members:
                found.append(None)
                continue
            driver = RehearsalDriver(len(members), self._recorder, members.index(self.rank))
            driver._leave = weakref.finalize(driver, _left, ())  # a group of its own already
            driver._leave.atexit = False
            found.append(driver)
        return found

    def check_groupless(self) -> None:
        """Do nothing: a rehearsal is complete."""
