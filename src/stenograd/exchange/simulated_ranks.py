"""Ranks that are threads of one process: whole trainings without a network, in step and reproducible."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from stenograd.devices import synchronize
from stenograd.errors import PeerLost, bad_value
from stenograd.exchange.simulate import answers
from stenograd.wire.drivers import Observer
from stenograd.wire.pipeline import Pipeline
from stenograd.wire.requests import REDUCTIONS, Op, Reply, Request, Rounds, gather_ragged
from stenograd.wire.traffic import ATTACH, PLAIN, Label, Tally, Traffic

__all__ = ["SimulatedDriver", "ranks"]

T = TypeVar("T")


def ranks(world_size: int, fn: Callable[..., T], *args: Any, timeout_s: float = 60.0) -> list[T]:
    """Call `fn(driver, *args)` on simulated ranks, each in a thread, and return the results in rank order.

    A driver is also what `stenograd.distribute(..., group=driver)` takes, so whole trainings run in one
    process. The ranks share PyTorch's global random generator; draw from generators of their own.

    Args:
        world_size: number of ranks, at least 1.
        fn: what each rank does.
        args: further arguments.
        timeout_s: seconds after which a silent rank is an error.

    Raises:
        Exception: what the lowest rank raised that failed by itself; all others then stop waiting.

    Example:
        >>> from stenograd.wire.requests import mean
        >>> ranks(2, lambda driver: driver.run(mean(torch.tensor([2.0 * driver.rank]))))
        [tensor([1.]), tensor([1.])]
    """
    if world_size < 1:
        raise bad_value("world_size", "must be at least 1", world_size, "give the number of ranks")
    hub = _Hub(world_size)

    def call(rank: int) -> T:
        try:
            # Else all ranks' backward passes would share autograd's one thread for a GPU, and the first that
            # waits in it for the others would keep them from coming.
            with torch.autograd.set_multithreading_enabled(False):
                return fn(SimulatedDriver(hub, rank, timeout_s=timeout_s), *args)
        except BaseException as error:  # whatever ended it, others may wait for this rank
            hub.fail(error)
            raise

    with ThreadPoolExecutor(world_size, thread_name_prefix="stenograd-rank") as threads:
        jobs = [threads.submit(call, rank) for rank in range(world_size)]
    failures = [error for job in jobs if (error := job.exception()) is not None]
    if failures:
        # a PeerLost is what came of another rank's error
        raise next((error for error in failures if not isinstance(error, PeerLost)), failures[0])
    return [job.result() for job in jobs]


class _Hub:
    """Where the ranks of a group meet: the n-th request of each is one collective."""

    def __init__(self, size: int, parent: _Hub | None = None) -> None:
        self.size = size
        self._parent = parent
        # One for all groups, so that a failure in one wakes those that wait in another.
        self._changed: threading.Condition = threading.Condition() if parent is None else parent._changed
        self._asked: dict[int, dict[int, Request]] = {}
        self._answers: dict[int, dict[int, Reply]] = {}
        self._parts: dict[tuple[int, tuple[int, ...]], _Hub] = {}
        self._failure: BaseException | None = None
        self._announced: dict[str, set[int]] = {}

    def announce(self, what: str, rank: int) -> None:
        """Let all ranks know that one does something from now on."""
        with self._changed:
            self._announced.setdefault(what, set()).add(rank)
            self._changed.notify_all()

    def announced(self, what: str) -> set[int]:
        """Return the ranks that have announced it so far."""
        return self._announced.get(what, set())

    def unannounced(self, what: str, timeout_s: float) -> list[int]:
        """Return those that have not within the time."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self.announced(what)) == self.size or self.failure is not None, timeout_s
            )
            return [rank for rank in range(self.size) if rank not in self.announced(what)]

    @property
    def failure(self) -> BaseException | None:
        """What made a rank fail, in this group or in the whole world."""
        return self._parent.failure if self._parent is not None else self._failure

    def fail(self, error: BaseException) -> None:
        """Let all ranks that wait give up."""
        if self._parent is not None:
            self._parent.fail(error)
            return
        with self._changed:
            self._failure = self._failure or error
            self._changed.notify_all()

    def ask(self, number: int, rank: int, request: Request) -> None:
        """Hand in a rank's n-th request; the last rank to do so works out all replies."""
        with self._changed:
            asked = self._asked.setdefault(number, {})
            asked[rank] = request
            if len(asked) < self.size:
                return
            del self._asked[number]
            found = answers([asked[r] for r in range(self.size)])
            # The replies were made on this thread's streams, and the other ranks read them elsewhere.
            synchronize(t for part in (request, *request.parts) for t in part.tensors)
            self._answers[number] = dict(enumerate(found))
            self._changed.notify_all()

    def reply(self, number: int, rank: int, timeout_s: float) -> Reply:
        """Wait for the replies to the n-th requests and take a rank's own."""

        def ready() -> bool:
            return number in self._answers or self.failure is not None

        with self._changed:
            # A failure wakes all; one whose reply is there takes it, and fails in its next request.
            if not self._changed.wait_for(ready, timeout_s) or number not in self._answers:
                late = [r for r in range(self.size) if r not in self._asked.get(number, {})]
                error = PeerLost(
                    f"simulated rank {rank}: rank(s) {', '.join(map(str, late))} did not come within "
                    f"{timeout_s:g} s, or failed ({self.failure!r}): look at what they did"
                )
                error.ranks = tuple(late)
                raise error
            own = self._answers[number].pop(rank)
            if not self._answers[number]:
                del self._answers[number]
            return own

    def part(self, number: int, members: Sequence[int]) -> _Hub:
        """Return where a part of the group meets, the same for the n-th split of each rank."""
        with self._changed:
            key = (number, tuple(members))
            return self._parts.setdefault(key, _Hub(len(members), self))


class _SimulatedPending:
    def __init__(self, driver: SimulatedDriver, number: int, label: Label, request: Request) -> None:
        self._driver, self._number = driver, number
        self.start = time.perf_counter()
        self.tally = driver.count(request, label)

    def wait(self) -> Reply:
        start = time.perf_counter()
        reply = self._driver.hub.reply(self._number, self._driver.rank, self._driver.timeout_s)
        self.tally.wait_s += time.perf_counter() - start
        return reply


class SimulatedDriver:
    """One simulated rank's way to the others; made by `ranks`, see `drivers.AnyDriver`."""

    def __init__(
        self, hub: _Hub, rank: int, *, timeout_s: float = 60.0, names: Sequence[int] | None = None
    ) -> None:
        self.hub, self.rank, self.world_size, self.timeout_s = hub, rank, hub.size, timeout_s
        self.traffic = Traffic(rank)
        self.tracer: Observer | None = None
        self._names = list(range(hub.size)) if names is None else list(names)
        self._asked = self._splits = 0

    def start(self, request: Request, label: Label = PLAIN) -> _SimulatedPending:
        """Issue a request without waiting for it; it is counted under the label."""
        pending = _SimulatedPending(self, self._asked, label, request)
        self._ask(request)
        return pending

    def _ask(self, request: Request) -> int:
        number = self._asked
        self._asked += 1
        synchronize(t for part in (request, *request.parts) for t in part.tensors)
        # Whoever asks last reads all ranks' tensors in its own thread, so these must have been written.
        self.hub.ask(number, self.rank, request)
        return number

    def run(self, rounds: Rounds[T], label: Label = PLAIN) -> T:
        """Drive one coroutine to its end."""
        pipeline: Pipeline[T] = Pipeline(self)
        pipeline.add(rounds, label)
        return pipeline.finish()[0]

    def count(self, request: Request, label: Label) -> Tally:
        """Count what a request sends, and return where its seconds are counted."""
        parts = request.parts or (request,)
        for part in parts:
            size, itemsize = part.nbytes, part.tensors[0].element_size() if part.tensors else 1
            ends = part.peers, part.senders
            if size and (part.op is not Op.EXCHANGE or any(ends)):
                op = _travels(part.op)
                self.traffic.count(op, size, self.world_size, *ends, label=label, itemsize=itemsize)
        return self.traffic.tally(label, _travels(parts[0].op).value)

    def spent(self, on: str, tally: Tally, start: float, label: Label, end: float | None = None) -> None:
        """Count seconds of computing, "encode" or "decode", since `start`."""
        seconds = (time.perf_counter() if end is None else end) - start
        if on == "encode":
            tally.encode_s += seconds
        else:
            tally.decode_s += seconds

    def broadcast(self, tensor: Tensor, source: int = 0, *, counted: bool = False) -> None:
        """Overwrite a tensor with that of rank `source`."""
        if self.world_size == 1 or not tensor.numel():
            return
        label, nbytes = PLAIN if counted else Label(ATTACH), tensor.numel() * tensor.element_size()
        place = (self.rank - source) % self.world_size
        self.traffic.count_broadcast(nbytes, place, self.world_size, label=label)
        number = self._ask(Request(Op.GATHER, (tensor.detach(),)))
        everyone = self.hub.reply(number, self.rank, self.timeout_s)
        if self.rank != source:
            tensor.copy_(everyone[source][0])

    def gather_bytes(self, message: bytes) -> list[bytes]:
        """Bring every rank's message of any length to every rank."""
        own = torch.frombuffer(bytearray(message + b"."), dtype=torch.uint8)[:-1]
        received = self.run(gather_ragged(own), Label(ATTACH))
        return [bytes(other.numpy()) for (other,) in received]

    def private(self) -> SimulatedDriver:
        """Return a driver over the same ranks whose collectives mix with nobody else's."""
        (own,) = self.split([range(self.world_size)])
        assert own is not None  # every rank is in the one part
        own.traffic = self.traffic
        return own

    def split(self, parts: Sequence[Sequence[int]], what: str = "part") -> list[SimulatedDriver | None]:
        """Make a driver for each of several parts of this group, None where this rank is not in it."""
        # On ranks that are in no part, too, so that the n-th split is the same one everywhere.
        self._splits += 1
        found: list[SimulatedDriver | None] = []
        for number, part in enumerate(parts):
            members = sorted(part)
            if self.rank not in members:
                found.append(None)
                continue
            hub = self.hub.part(self._splits * 1000 + number, members)
            names = [self._names[rank] for rank in members]
            place = members.index(self.rank)
            found.append(SimulatedDriver(hub, place, timeout_s=self.timeout_s, names=names))
        return found

    def name_of(self, rank: int) -> int:
        """Return the number in the whole world of a rank of this group."""
        return self._names[rank]

    def announce(self, what: str) -> None:
        """Tell the other ranks that this one does something from now on; waits for nobody."""
        self.hub.announce(what, self.rank)

    def announced(self, what: str) -> bool:
        """Return whether a rank has announced it."""
        return bool(self.hub.announced(what))

    def unannounced(self, what: str, grace_s: float) -> list[int]:
        """Return the ranks that have not announced it within the time."""
        return self.hub.unannounced(what, grace_s)

    def check_groupless(self) -> None:
        """Do nothing: a simulated world is complete."""

    def stay_in_memory(self) -> None:
        """Do nothing: simulated ranks share one memory."""

    def close(self) -> None:
        """Do nothing: there are no connections."""


def _travels(op: Op) -> Op:
    """Return what is counted: a sum, too, is an all-reduce."""
    return Op.MEAN if op in REDUCTIONS else op
