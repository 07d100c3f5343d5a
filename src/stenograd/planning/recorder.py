"""A driver that sends nothing: the real engine runs on it, and everything it would send is noted."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from stenograd.comm.driver import Driver
from stenograd.comm.trace_events import Tracer
from stenograd.data.requests import Op
from stenograd.planning.program import Collective, Event

__all__ = ["Recorder", "RehearsalDriver"]

T = TypeVar("T")


class _Joining(Future[T]):
    """The result of a job, which notes when a thread waits for it."""

    def __init__(self, recorder: Recorder, number: int, inner: Future[T]) -> None:
        super().__init__()
        self._recorder, self._number, self._inner = recorder, number, inner

    def result(self, timeout: float | None = None) -> T:
        value = self._inner.result(timeout)
        self._recorder.note("join", self._number)
        return value

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._inner.exception(timeout)

    def add_done_callback(self, fn: Callable[[Future[T]], object]) -> None:
        self._inner.add_done_callback(lambda _: fn(self._inner))


class Recorder(Tracer):
    """Notes what each thread does, with the processor time in between; stands in for a `Tracer`.

    Processor time leaves out what a thread waits, and what other programs take. Numbers of collectives and
    jobs go on for as long as it records; `periods` makes them count from each period.

    Attributes:
        on: whether to note; what happens meanwhile costs nothing.
    """

    def __init__(self) -> None:
        super().__init__(max_events=1)
        self.on = False
        self._lock = threading.Lock()
        self._place: dict[int, int] = {threading.get_ident(): 0}
        self._lanes: list[list[Event]] = [[]]
        self._since: list[float] = [0.0]  # by lane: when the last event ended
        self._coding: list[float | None] = [None]  # by lane: when a method began to compute after it
        self._numbers: dict[str, int] = {}

    def begin(self) -> None:
        """Note from now on."""
        self.skip()
        self.on = True

    def number(self, what: str) -> int:
        """Return the next number of a "collective", "job" or "group"."""
        with self._lock:
            self._numbers[what] = self._numbers.get(what, -1) + 1
            return self._numbers[what]

    def note(self, kind: str, number: int = 0, collective: Collective | None = None) -> None:
        """Note an event of this thread."""
        if not self.on:
            return
        now, at = time.thread_time(), self._lane()
        since, coding = self._since[at], self._coding[at]
        middle = now if coding is None else max(coding, since)
        event = Event(kind, number, max(middle - since, 0.0), max(now - middle, 0.0), collective)
        self._lanes[at].append(event)
        self.skip()

    def skip(self) -> None:
        """Leave out what this thread did since its last event."""
        at = self._lane()
        self._coding[at], self._since[at] = None, time.thread_time()

    def coding_begins(self) -> None:
        """Take what this thread computes until its next event for coding."""
        self._coding[self._lane()] = time.thread_time()

    def add(self, kind: str, start: float, end: float, /, **about: Any) -> None:
        """Note that decoding has just ended; other events of traces are noted elsewhere."""
        if kind == "decode":
            self.note("decoded")

    def ready(self, bucket: int, parameter: Tensor) -> None:
        """Do nothing: a trial measures when gradients are ready."""

    def full(self, bucket: int) -> None:
        """Do nothing: what follows from it is noted."""

    def hand_over(self, thread: Executor, job: Callable[..., T], *args: Any) -> Future[T]:
        """Let a thread do a job; it begins no earlier than it was posted, and others may wait for it."""
        if not self.on:
            return thread.submit(job, *args)
        number = self.number("job")
        self.note("post", number)

        def noted() -> T:
            self.skip()
            self.note("begin", number)
            try:
                return job(*args)
            finally:
                self.note("done", number)

        return _Joining(self, number, thread.submit(noted))

    def periods(self) -> list[tuple[tuple[Event, ...], ...]]:
        """Cut what was noted at the events "period", and return each period's lanes.

        A job belongs to the period in which it was posted, whenever its thread came to it. A number below 0
        means a collective or a job of an earlier period.
        """
        cuts, where, number = [], {}, 0
        for event in self._lanes[0]:
            cuts.append(number)
            if event.kind == "post":
                where[event.number] = number
            number += event.kind == "period"
        for lane in self._lanes[1:]:
            at = 0
            for event in lane:
                at = where.get(event.number, at) if event.kind == "begin" else at
                if event.kind == "post":
                    where[event.number] = at
        found: list[list[list[Event]]] = [[[] for _ in self._lanes] for _ in range(number)]
        for index, lane in enumerate(self._lanes):
            at = number  # of jobs from before the first period nothing is known
            for place, event in enumerate(lane):
                if index == 0:
                    at = cuts[place]
                elif event.kind == "begin":
                    at = where.get(event.number, number)
                if at < number and event.kind != "period":
                    found[at][index].append(event)
        return _counted_anew(found)

    def _lane(self) -> int:
        me = threading.get_ident()
        with self._lock:
            if me not in self._place:
                self._place[me] = len(self._lanes)
                self._lanes.append([])
                self._since.append(time.thread_time())
                self._coding.append(None)
            return self._place[me]


def _counted_anew(periods: Sequence[Sequence[Sequence[Event]]]) -> list[tuple[tuple[Event, ...], ...]]:
    """Number the collectives and the jobs of each period from 0, in the order of lanes and of time."""
    place: dict[tuple[str, int], tuple[int, int]] = {}
    counts = []
    for at, lanes in enumerate(periods):
        count = {"issue": 0, "post": 0}
        for event in (event for lane in lanes for event in lane if event.kind in count):
            place[event.kind, event.number] = at, count[event.kind]
            count[event.kind] += 1
        counts.append(count)

    def renumbered(event: Event, at: int) -> Event:
        source = {"issue": "issue", "wait": "issue", "step": ""}.get(event.kind, "post")
        if event.kind == "decoded" or not source:
            return event
        of, number = place.get((source, event.number), (at - 1, 0))
        return replace(event, number=number - (at - of) * counts[at][source])

    return [
        tuple(tuple(renumbered(e, at) for e in lane) for lane in lanes) for at, lanes in enumerate(periods)
    ]


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
        self._recorder, self._group = recorder, recorder.number("group")
        self.tracer = recorder

    def _issue(self, call: Callable[[], Any], what: str) -> Any:
        return call()

    def await_work(self, work: Any, what: str, start: float) -> None:
        """Note that this collective is waited for."""
        self._recorder.note("wait", work)

    def _noted(self, op: str, handed: Tensor, size: int, **ends: Sequence[int]) -> int:
        number = self._recorder.number("collective")
        nbytes, itemsize = handed.numel() * handed.element_size(), handed.element_size()
        named = {key: tuple(ranks) for key, ranks in ends.items()}
        self._recorder.note("issue", number, Collective(op, nbytes, itemsize, self._group, size, **named))
        return number

    def _transmit(self, op: Op, handed: Tensor, received: Tensor) -> int:
        number = self._noted(op.value, handed, self.world_size)
        if op is Op.GATHER:
            received.view(self.world_size, -1).copy_(handed.view(1, -1).expand(self.world_size, -1))
        elif op is Op.SCATTER:
            received.copy_(handed[self.rank : self.rank + 1].expand_as(received))
        elif op is Op.MEAN and received is handed:
            handed.mul_(self.world_size)  # it was divided before
        elif op is Op.MEAN:
            received.copy_(handed)
        self._recorder.skip()
        return number

    def _transmit_to(self, peers: Sequence[int], sources: Sequence[int], mine: Tensor, theirs: Tensor) -> int:
        number = self._noted(Op.EXCHANGE.value, mine, self.world_size, peers=peers, sources=sources)
        theirs.copy_(mine.view(1, -1).expand_as(theirs))
        self._recorder.skip()
        return number

    def _transmit_from(self, source: int, tensor: Tensor) -> int:
        return self._noted("broadcast", tensor, self.world_size, sources=(source,))

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

    def words_device(self) -> torch.device:
        """Return where a message that is no part of training must live."""
        return torch.device("cpu")

    def check_groupless(self) -> None:
        """Do nothing: a rehearsal is complete."""
