"""Measures a network through the very collectives that training uses; all ranks do it together."""

from __future__ import annotations

import json
import math
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate

import torch

from stenograd.comm.agreement import everyone
from stenograd.comm.driver import Driver
from stenograd.comm.traffic import ATTACH, Label, moved_bytes
from stenograd.data.requests import Op, Request, Rounds, gather
from stenograd.errors import bad_value
from stenograd.planning.link import OPS, Cost, Link, Sample, hops, wire_bytes
from stenograd.sync.handshake import compare

__all__ = ["measure_link"]

_WARM_UP, _PINGS = 5, 20
_SMALL_BYTES = 64
_FIRST_BYTES, _APART = 1024, 4
_MOST_BYTES = 1 << 26
_REPEATS, _REPEATS_BRIEF, _BRIEF_S = 3, 7, 0.02
_LEAST_S = 1e-6
_SILENCE_S = 0.3
_LABEL = Label(ATTACH)


def measure_link(driver: Driver, seconds: float = 10.0) -> Link:
    """Measure latency, rates and collectives between the ranks of a driver, all of which call it.

    Args:
        driver: the way to the other ranks, which does nothing else meanwhile.
        seconds: about how long it may take, from 2; sizes are left out where time is short.

    Raises:
        ConfigError: there is one rank only, or seconds is below 2.
    """
    if driver.world_size < 2:
        raise bad_value("workers", "must be at least 2 to measure a link", driver.world_size, "start more")
    if seconds < 2:
        raise bad_value("seconds", "must be at least 2", seconds, "leave it at 10")
    start = time.perf_counter()
    compare(driver, {"measures": "link"})
    names = list(dict.fromkeys(driver.traffic.hosts))
    hosts = tuple(names.index(name) for name in driver.traffic.hosts)
    _Timed(driver).mean_of(Op.MEAN, _SMALL_BYTES, 1, _WARM_UP)
    timed = _Timed(driver)
    small = [timed.sample(op, _SMALL_BYTES, repeats=_PINGS) for op in OPS.values()]
    with _computing():
        busy = [timed.sample(op, _SMALL_BYTES, repeats=_PINGS // 2, busy=True) for op in OPS.values()]
    up, down = _rates(timed, hosts, seconds * 0.3)
    bytes_per_s = min(*up, *down) / 8
    samples = [*small, *busy, *_by_size(timed, bytes_per_s, start + seconds, seconds / 30)]
    cold = _cold(timed)
    costs = {op: _fitted(op, samples, driver.world_size) for op in OPS}
    if len(set(hosts)) > 1:
        passed = _passed(samples, driver.world_size)
        up, down = (tuple(max(rate, passed) for rate in rates) for rates in (up, down))
    return Link(
        measured=True,
        hosts=hosts,
        up_bps=up,
        down_bps=down,
        costs=costs,
        samples=tuple(samples),
        cold_s=cold,
        seconds=time.perf_counter() - start,
        sent_bytes=timed.sent_bytes,
    )


class _Timed:
    """Runs collectives on all ranks at once and tells the slowest rank's time, equal on all ranks."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.sent_bytes = driver, 0

    def sample(
        self, op: Op, nbytes: int, at_once: int = 1, repeats: int = _REPEATS, *, busy: bool = False
    ) -> Sample:
        """Measure one size of a collective."""
        requests = [_request(op, nbytes, self.driver.world_size) for _ in range(at_once)]
        taken, cpu = self._repeated(lambda: requests, repeats)
        self.sent_bytes += repeats * at_once * wire_bytes(op, nbytes, self.driver.world_size)
        return Sample(op.value, nbytes, at_once, tuple(taken), tuple(cpu), busy)

    def mean_of(self, op: Op, nbytes: int, at_once: int, repeats: int) -> float:
        """Return the median seconds of a collective."""
        return statistics.median(self.sample(op, nbytes, at_once, repeats).seconds)

    def flow(self, senders: Sequence[int], receivers: Sequence[int], nbytes: int, repeats: int) -> float:
        """Return the seconds for `nbytes` from each sender to each receiver, one way.

        The fastest repetition counts: other programs on a host make some slower, and none faster.
        """
        me = self.driver.rank
        peers = tuple(r for r in sorted(receivers) if me in senders and r != me)
        sources = tuple(s for s in sorted(senders) if me in receivers and s != me)
        request = Request(Op.EXCHANGE, (torch.zeros(nbytes, dtype=torch.uint8),), peers, sources)
        taken, _ = self._repeated(lambda: [request], repeats)
        self.sent_bytes += repeats * len(peers) * nbytes
        return min(taken)

    def _repeated(self, make: Callable[[], list[Request]], repeats: int) -> tuple[list[float], list[float]]:
        times: list[float] = []
        cpu: list[float] = []
        for _ in range(repeats):
            requests = make()
            self._meet()
            start, cpu_start = time.perf_counter(), time.process_time()
            pending = [self.driver.start(request, _LABEL) for request in requests]
            for each in pending:
                each.wait()
            times.append(time.perf_counter() - start)
            cpu.append(time.process_time() - cpu_start)
        told = [json.loads(text) for text in everyone(self.driver, json.dumps([times, cpu]))]
        slowest = [max(values) for values in zip(*(theirs for theirs, _ in told), strict=True)]
        return slowest, [statistics.mean(values) for values in zip(*(c for _, c in told), strict=True)]

    def _meet(self) -> None:
        """Let all ranks begin at about the same time."""
        for _ in range(2):  # the first may find ranks that come late, the second leaves them close together
            self.driver.start(Request(Op.MEAN, (torch.zeros(1),)), _LABEL).wait()


def _request(op: Op, nbytes: int, world_size: int) -> Request:
    if op is Op.SCATTER:
        row = max(nbytes // world_size, 1)
        return Request(op, (torch.zeros(world_size, row, dtype=torch.uint8),))
    if op is Op.MEAN:
        return Request(op, (torch.zeros(max(nbytes // 4, 1)),))
    return Request(op, (torch.zeros(nbytes, dtype=torch.uint8),))


@contextmanager
def _computing() -> Iterator[None]:
    """Multiply matrices in another thread meanwhile, as a backward pass would."""
    stop = threading.Event()

    def work() -> None:
        a = torch.ones(256, 256)
        while not stop.is_set():
            torch.mm(a, a)  # releases Python's lock

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _rates(
    timed: _Timed, hosts: Sequence[int], seconds: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measure what each host sends to all others at once, and receives from them, in bits per second.

    With two hosts a flow shows only the slower of one's sending and the other's receiving rate.
    """
    first = [hosts.index(host) for host in range(max(hosts) + 1)]
    if len(first) == 1:  # one host: between its first two ranks
        first = [0, 1]
    budget_s = seconds / (2 * len(first))
    up: list[float] = []
    down: list[float] = []
    for rank in first:
        others = [other for other in first if other != rank]
        for found, senders, receivers in ((up, [rank], others), (down, others, [rank])):
            nbytes, began = 1 << 14, time.perf_counter()
            less, taken = 0.0, timed.flow(senders, receivers, nbytes, _REPEATS)
            while (taken < budget_s / 6 or not less) and nbytes < _MOST_BYTES:
                spent = timed.driver.run(_largest(time.perf_counter() - began), _LABEL)
                if less and spent + 3 * _APART * taken > 2 * budget_s:
                    break
                nbytes, less = nbytes * _APART, taken
                taken = timed.flow(senders, receivers, nbytes, _REPEATS)
            # The difference leaves out latency, and what a token bucket lets pass at once.
            sent = wire_bytes(Op.EXCHANGE, nbytes, 2)
            part = sent - wire_bytes(Op.EXCHANGE, nbytes // 4, 2)
            found.append(8 * len(others) * max(part / max(taken - less, taken / 4), sent / taken))
    if len(set(hosts)) == 1:
        return (min(up),), (min(down),)
    return tuple(up), tuple(down)


def _largest(value: float) -> Rounds[float]:
    told = yield from gather(torch.tensor([value], dtype=torch.float64))
    return max(float(theirs) for (theirs,) in told)


def _by_size(timed: _Timed, bytes_per_s: float, deadline: float, longest_s: float) -> list[Sample]:
    """Measure collectives from small sizes up to one that takes about so long, as far as there is time.

    The last but one is also measured with two under way at once, which gloo's two threads drive together.
    """
    samples: list[Sample] = []
    largest = min(bytes_per_s * longest_s, _MOST_BYTES)
    places = max(round(math.log(largest / _FIRST_BYTES, _APART)), 1)
    for place in range(places, -1, -1):
        sent = largest / _APART**place
        taken_s = len(OPS) * (_REPEATS + 2 if place else 2) * sent / bytes_per_s
        late_s = timed.driver.run(_largest(time.perf_counter() + taken_s - deadline), _LABEL)
        if late_s > 0 and place < 1:
            break
        brief = sent < bytes_per_s * _BRIEF_S
        for op in OPS.values():
            nbytes = _handed(op, sent, timed.driver.world_size)
            repeats = _REPEATS_BRIEF if brief else _REPEATS if place else 2
            samples.append(timed.sample(op, nbytes, repeats=repeats))
            if place == 1:
                samples.append(timed.sample(op, nbytes, at_once=2, repeats=1))
    return samples


def _passed(samples: Sequence[Sample], world_size: int) -> float:
    """Return the bits per second that every rank has sent and received in a ring, so that it can do.

    It guards against a host whose rate was found too low because packets were lost. A token bucket may have
    let pass at once what the next smaller size sends.
    """
    op = Op.MEAN
    large = [s for s in samples if s.op == op.value and s.at_once == 1 and not s.busy][-2:]
    less, most = (wire_bytes(op, s.nbytes, world_size) for s in (large[0], large[-1]))
    return 8 * (most - less) / min(large[-1].seconds)


def _handed(op: Op, sent: float, world_size: int) -> int:
    """Return about how many bytes a rank hands over where it then sends so many."""
    share = moved_bytes(op, 1 << 20, world_size) / (1 << 20)
    unit = 4 * world_size
    return max(round(sent / share / unit), 1) * unit


def _cold(timed: _Timed) -> dict[str, float]:
    """Measure exchanges right after silence, when TCP may have to find its window again."""
    found = {}
    for name, nbytes in (("small", _SMALL_BYTES), ("large", 1 << 18)):
        warm = timed.mean_of(Op.MEAN, nbytes, 1, _REPEATS)
        time.sleep(_SILENCE_S)
        found[f"{name} warm"], found[f"{name} cold"] = warm, timed.mean_of(Op.MEAN, nbytes, 1, 1)
    return found


def _fitted(op: str, samples: Sequence[Sample], world_size: int) -> Cost:
    """Take hops from the smallest messages, and a rate from the two largest sizes.

    Sizes between are kept as they were measured. A line through all would tell of small sizes, which a token
    bucket lets pass at once, rather than of a link.
    """
    own = [s for s in samples if s.op == op and s.at_once == 1]
    idle, busy = (
        next(statistics.median(s.seconds) for s in own if s.nbytes == _SMALL_BYTES and s.busy is b)
        / hops(OPS[op], _SMALL_BYTES, world_size)
        for b in (False, True)
    )
    still = sorted((s for s in own if not s.busy and s.nbytes > _SMALL_BYTES), key=lambda s: s.nbytes)
    sent = [float(wire_bytes(OPS[op], s.nbytes, world_size)) for s in still]
    left = [
        max(statistics.median(s.seconds) - idle * hops(OPS[op], s.nbytes, world_size), 0.0) for s in still
    ]
    left = list(accumulate(left, max))  # more bytes do not take less time
    rate = sent[-1] / max(left[-1], _LEAST_S)
    if len(sent) > 1 and left[-1] > left[-2]:
        # Between the two sizes the link did nothing but send; but noise may make the difference small.
        rate = min((sent[-1] - sent[-2]) / (left[-1] - left[-2]), 2 * rate)
    cpu = statistics.median(still[-1].cpu_s) / sent[-1]
    counts = tuple((b, seconds * rate) for b, seconds in zip(sent, left, strict=True))
    return Cost(idle, max(idle, busy), rate, cpu, counts)
