"""Times collectives and messages on all ranks at once, as closely as ranks without a common clock can."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch

from stenograd.comm.agreement import everyone
from stenograd.comm.driver import Driver, Pending
from stenograd.comm.gloo_framing import DATA_BYTES, MESSAGE_BYTES, PACKET_BYTES
from stenograd.comm.traffic import ATTACH, Label
from stenograd.data.requests import Op, Request, Rounds, gather
from stenograd.planning.link import Sample, wire_bytes

__all__ = ["Computing", "Flow", "Timed", "per_second"]

_LABEL = Label(ATTACH)
# After each collective, so that a token bucket fills again, as it does while a training computes.
_PAUSE_S = 0.002
_SIDE = 256  # of the matrices that are multiplied
_PARTS = 16  # messages of a flow
_PLAUSIBLE = 2.0  # how often the mean a rate may be: TCP begins slowly, but not for more than half of a flow
_BEGINNING = 4  # of them: what a token bucket lets pass at once, and TCP finding its window


class Flow(NamedTuple):
    """What messages one way took.

    Args:
        bytes_per_s: that all receivers together got after the beginning, packet headers included.
        seconds: from the arrival of the first message to that of the last.
    """

    bytes_per_s: float
    seconds: float


class Computing:
    """Multiplies matrices in another thread while a `with` block lasts, as a backward pass would.

    Attributes:
        unit_s: seconds that a product takes when nothing else is done.
    """

    def __init__(self) -> None:
        self._stop, self._count, self._cpu_s = threading.Event(), 0, 0.0
        self._thread = threading.Thread(target=self._work, daemon=True)
        self.unit_s = 0.0

    def __enter__(self) -> Computing:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def alone(self, seconds: float) -> float:
        """Measure `unit_s` for so long, and return the part of a core that this thread had."""
        count, cpu_s, start = self._count, self._cpu_s, time.perf_counter()
        time.sleep(seconds)
        took_s = time.perf_counter() - start
        self.unit_s = took_s / max(self._count - count, 1)
        return (self._cpu_s - cpu_s) / took_s

    def done_s(self) -> float:
        """Return the seconds that all products so far would have taken alone."""
        return self._count * self.unit_s

    def _work(self) -> None:
        a, out = torch.ones(_SIDE, _SIDE), torch.empty(_SIDE, _SIDE)
        while not self._stop.is_set():
            torch.mm(a, a, out=out)  # releases Python's lock
            self._count += 1
            self._cpu_s = time.thread_time()


class Timed:
    """Runs the same on all ranks and tells what it took, equal on all of them.

    Args:
        driver: the way to the other ranks, which does nothing else meanwhile.

    Attributes:
        sent_bytes: that this rank has sent for it.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver, self.sent_bytes = driver, 0

    def sample(
        self,
        op: Op,
        nbytes: int,
        *,
        at_once: int = 1,
        repeats: int,
        least: int = 1,
        at_most_s: float,
        beside: Computing | None = None,
    ) -> Sample:
        """Measure one size of a collective.

        Ranks do not begin together: after a meeting they are up to a message's way apart. So repetitions
        follow one another, each is timed from the end of the one before, and the first does not count: who
        began late also ends late, and the difference stays.

        Args:
            op: the collective.
            nbytes: handed to it by a rank.
            at_once: how many are under way at the same time.
            repeats: how often, where there is time.
            least: how often in any case.
            at_most_s: about how long all repetitions may take.
            beside: what every rank computes meanwhile.
        """
        requests = [_request_of(op, nbytes, self.driver.world_size) for _ in range(at_once)]
        began = time.perf_counter()
        self._meet()
        taken, cpu, own = [], [], []
        done_s = lost_s = 0.0
        count = at = 1
        while at <= count:
            start, cpu_start, own_start = time.perf_counter(), time.process_time(), time.thread_time()
            for pending in [self.driver.start(request, _LABEL) for request in requests]:
                pending.wait()
            taken.append(time.perf_counter() - start)
            cpu.append(time.process_time() - cpu_start)
            own.append(time.thread_time() - own_start)
            if at == 1 and repeats == least:
                count += least
            elif at == 1:
                spent_s = self.largest(time.perf_counter() - began)
                count += int(max(least, min(repeats, at_most_s / spent_s)))
            else:
                time.sleep(_PAUSE_S)
            if at == 1 and beside is not None:
                began, done_s = time.perf_counter(), beside.done_s()
            at += 1
        if beside is not None:
            lost_s = (time.perf_counter() - began - beside.done_s() + done_s) / (count - 1)
        self.sent_bytes += count * at_once * wire_bytes(op, nbytes, self.driver.world_size)
        lost_s, own_s, *found = self.mean([lost_s, statistics.median(own[1:]), *taken[1:], *cpu[1:]])
        seconds, cpu_s = tuple(found[: count - 1]), tuple(found[count - 1 :])
        return Sample(op.value, nbytes, at_once, seconds, cpu_s, beside is not None, lost_s, own_s)

    def after_silence_s(self, op: Op, nbytes: int, silence_s: float) -> float:
        """Return the seconds of one collective before which nothing was sent for a while."""
        request = _request_of(op, nbytes, self.driver.world_size)
        self._meet()
        time.sleep(silence_s)
        start = time.perf_counter()
        self.driver.start(request, _LABEL).wait()
        taken = time.perf_counter() - start
        self.sent_bytes += wire_bytes(op, nbytes, self.driver.world_size)
        return self.mean([taken])[0]

    def one_way_s(self, one: int, other: int, repeats: int) -> float:
        """Return half of what a small message takes from one rank to another and back, the fastest of some.

        All receives are offered before. Gloo sends nothing before it is offered room for it, so an offer that
        is made only when the message is wanted adds a way.
        """
        me, least_s = self.driver.rank, float("inf")
        offers: list[Pending] = []
        if me in (one, other):
            peer = other if me == one else one
            offers = [self._message(8, (), (peer,)) for _ in range(repeats)]
        self._meet()
        for offer in offers:
            start = time.perf_counter()
            if me == other:
                offer.wait()
            sent = self._message(8, (peer,), ())
            if me == one:
                offer.wait()
                least_s = min(least_s, time.perf_counter() - start)
            sent.wait()
        return -self.largest(-least_s) / 2

    def flow(self, senders: Sequence[int], receivers: Sequence[int], nbytes: int) -> Flow:
        """Send messages of `nbytes` from each sender to each receiver, one way and without a pause."""
        told = self._stream([(s, r) for s in senders for r in sorted(receivers)], nbytes)
        streams = [stream for theirs in told for stream in theirs]
        seconds = max(stream[-1] for stream in streams) - min(stream[0] for stream in streams)
        return Flow(_in_a_row(nbytes) * per_second(streams, _BEGINNING), max(seconds, 1e-6))

    def passed_on(self, ranks: Sequence[int], nbytes: int) -> list[float]:
        """Let each of some ranks send to the next, all at once; return what each gets in bytes per second."""
        told = self._stream([(ranks[at - 1], rank) for at, rank in enumerate(ranks)], nbytes)
        return [_in_a_row(nbytes) * per_second(told[rank], _BEGINNING) for rank in ranks]

    def _stream(self, pairs: Sequence[tuple[int, int]], nbytes: int) -> list[list[list[float]]]:
        """Send messages from one to the other of each pair; return when each rank's came, by its senders."""
        me = self.driver.rank
        peers = tuple(r for s, r in pairs if s == me)
        sources = [s for s, r in pairs if r == me]
        offers = [[self._message(nbytes, (), (source,)) for _ in range(_PARTS)] for source in sources]
        self._meet()
        start = time.perf_counter()
        sent = [self._message(nbytes, peers, ()) for _ in range(_PARTS if peers else 0)]
        with ThreadPoolExecutor(max(len(offers), 1)) as threads:
            came = list(threads.map(lambda own: [_came_s(each, start) for each in own], offers))
        for each in sent:
            each.wait()
        self.sent_bytes += len(sent) * len(peers) * wire_bytes(Op.EXCHANGE, nbytes, 2)
        return [json.loads(text) for text in everyone(self.driver, json.dumps(came))]

    def mean(self, values: Sequence[float]) -> list[float]:
        """Return the mean of all ranks' values, each by itself; all ranks have as many."""
        told = self.driver.run(gather(torch.tensor(values, dtype=torch.float64)), _LABEL)
        return [float(v) for v in torch.stack([theirs for (theirs,) in told]).mean(0)]

    def largest(self, value: float) -> float:
        """Return the largest of all ranks' values."""
        return self.driver.run(_largest(value), _LABEL)

    def _message(self, nbytes: int, peers: tuple[int, ...], sources: tuple[int, ...]) -> Pending:
        request = Request(Op.EXCHANGE, (torch.zeros(nbytes, dtype=torch.uint8),), peers, sources)
        return self.driver.start(request, _LABEL)

    def _meet(self) -> None:
        """Let all ranks begin at about the same time."""
        # Not by a gather, which between two ranks is a message and could be taken for one that is measured.
        self.driver.start(Request(Op.MEAN, (torch.zeros(1),)), _LABEL).wait()


def _in_a_row(nbytes: int) -> float:
    """Return what a message and the notice of it take among others, with which it shares packets."""
    return (nbytes + 2 * MESSAGE_BYTES) * (1 + PACKET_BYTES / DATA_BYTES)


def _came_s(pending: Pending, start: float) -> float:
    pending.wait()
    return time.perf_counter() - start


def per_second(streams: Sequence[Sequence[float]], beginning: int) -> float:
    """Return how many messages came per second, of all streams together, while all of them went on.

    A rank that is held up notices late what has come, which moves some times but not most. So it is the
    median of the slopes between any two messages that are at least a third of all apart (Theil and Sen). One
    that was held up nearly all the time finds most messages there at once: then the mean is what can be said.

    Args:
        streams: for each pair of a sender and a receiver, when its messages came.
        beginning: how many of each do not count.

    Example:
        >>> per_second([[1, 2, 3, 4, 5, 6], [1, 2, 3, 4.9, 5, 6]], 1)
        2.0
    """
    first, last = max(s[beginning - 1] for s in streams), min(s[-1] for s in streams)
    times = sorted(t for s in streams for t in s[beginning:] if first <= t <= last)
    whole_s = max(s[-1] for s in streams) - min(s[0] for s in streams)
    mean = sum(len(s) - 1 for s in streams) / max(whole_s, 1e-9)
    if len(times) < 2 * len(streams) + 2:  # they hardly went on together
        return mean
    apart = max(len(times) // 3, 1)
    pairs = ((i, j) for i in range(len(times)) for j in range(i + apart, len(times)))
    usual = statistics.median((j - i) / max(times[j] - times[i], 1e-9) for i, j in pairs)
    return usual if usual < _PLAUSIBLE * mean else mean


def _request_of(op: Op, nbytes: int, world_size: int) -> Request:
    """Return a collective's request of about so many bytes."""
    if op is Op.SCATTER:
        row = max(nbytes // world_size, 1)
        return Request(op, (torch.zeros(world_size, row, dtype=torch.uint8),))
    if op is Op.MEAN:
        return Request(op, (torch.zeros(max(nbytes // 4, 1)),))
    return Request(op, (torch.zeros(nbytes, dtype=torch.uint8),))


def _largest(value: float) -> Rounds[float]:
    told = yield from gather(torch.tensor([value], dtype=torch.float64))
    return max(float(theirs) for (theirs,) in told)
