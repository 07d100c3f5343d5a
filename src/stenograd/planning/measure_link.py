"""Measures a network between ranks: by a ping, by one flow at a time, and by all flows at once."""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Sequence

import torch

from stenograd.comm.agreement import everyone
from stenograd.comm.driver import Driver, Pending
from stenograd.comm.gloo import DATA_BYTES, MESSAGE_BYTES, PACKET_BYTES
from stenograd.comm.traffic import ATTACH, Label
from stenograd.data.requests import Op, Request
from stenograd.errors import bad_value
from stenograd.planning.formula import hops, wire_bytes
from stenograd.planning.link import Link
from stenograd.sync.handshake import compare

__all__ = ["check_seconds", "measure_link"]

_LABEL = Label(ATTACH)
_WARM_UP, _PINGS = 5, 20
_MOST_PINGED = 8  # hosts, beside the first
_SMALL_BYTES = 64
_PARTS = 16  # messages of a flow
_BEGINNING = 4  # of them: what a token bucket lets pass at once, and TCP finding its window
_WAYS_OF_A_FLOW = 40  # how often its messages could go to and fro: TCP finds its window in some of them
_FIRST_BYTES, _MOST_BYTES = 1024, 1 << 22  # of a message: all of a flow's are in memory at once
_GROWTH = 64  # at most, from one flow to the next: what a token bucket let pass tells nothing of the rate
_FLOWS = 3  # whose median counts: one may be slow, because packets were lost


def measure_link(driver: Driver, seconds: float = 10.0) -> Link:
    """Measure latency and rates between the ranks of a driver, all of which call it.

    Args:
        driver: the way to the other ranks, which does nothing else meanwhile.
        seconds: about how long it may take, from 2. Latencies of more than 5 ms take longer.

    Raises:
        ConfigError: there is one rank only, or seconds is below 2.
    """
    if driver.world_size < 2:
        raise bad_value("workers", "must be at least 2 to measure a link", driver.world_size, "start more")
    check_seconds(seconds)
    began = time.perf_counter()
    compare(driver, {"measures": "link"})
    names = list(dict.fromkeys(driver.traffic.hosts))
    hosts = tuple(names.index(name) for name in driver.traffic.hosts)
    first = [hosts.index(host) for host in range(max(hosts) + 1)]
    ends = first if len(first) > 1 else [0, 1]  # on one host: between its first two ranks
    timed = _Timed(driver)
    hop_s = timed.hop_s()
    latency_s = max(timed.one_way_s(ends[0], other) for other in ends[1 : _MOST_PINGED + 1])
    pairs = [(rank, ends[(at + 1) % len(ends)]) for at, rank in enumerate(ends)]
    least_s = _WAYS_OF_A_FLOW * latency_s
    alone = [timed.rates([pair], seconds / 3 / len(pairs), least_s)[0] for pair in pairs]
    together = timed.rates(pairs, seconds / 3, least_s)
    return Link(
        measured=True,
        hosts=hosts,
        alone_bps=tuple(alone[: len(first)]),
        together_bps=tuple(together[: len(first)]),
        hop_s=hop_s,
        latency_s=latency_s,
        seconds=time.perf_counter() - began,
        sent_bytes=timed.sent_bytes,
    )


def check_seconds(seconds: float) -> None:
    """Refuse a time in which nothing can be measured.

    Raises:
        ConfigError: it is below 2, or not finite.
    """
    if not 2 <= seconds < math.inf:
        raise bad_value("seconds", "must be at least 2 and finite", seconds, "leave it at 10")


class _Timed:
    """Runs the same on all ranks and tells what it took, equal on all of them.

    Args:
        driver: the way to the other ranks.

    Attributes:
        sent_bytes: that this rank has sent for it.
    """

    def __init__(self, driver: Driver) -> None:
        self.driver, self.sent_bytes = driver, 0
        self._nbytes = _FIRST_BYTES  # of a message; the next flow begins with what suited the one before

    def hop_s(self) -> float:
        """Return what a small message takes in an all-reduce, by the slowest rank."""
        taken = []
        for _ in range(_WARM_UP + _PINGS):
            start = time.perf_counter()
            self._meet()
            taken.append(time.perf_counter() - start)
        size = self.driver.world_size
        each: list[list[float]] = [
            json.loads(text) for text in everyone(self.driver, json.dumps(taken[_WARM_UP:]))
        ]
        slowest: list[float] = [max(one) for one in zip(*each, strict=True)]
        return statistics.median(slowest) / hops(Op.MEAN, _SMALL_BYTES, size)

    def one_way_s(self, one: int, other: int) -> float:
        """Return half of what a small message takes from one rank to another and back, the fastest of some.

        All receives are offered before. Gloo sends nothing before it is offered room for it, so an offer that
        is made only when the message is wanted adds a way.
        """
        me, least_s = self.driver.rank, math.inf
        peer = other if me == one else one
        offers = [self._message(8, (), (peer,)) for _ in range(_PINGS)] if me in (one, other) else []
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
        return min(float(text) for text in everyone(self.driver, repr(least_s))) / 2

    def rates(self, pairs: Sequence[tuple[int, int]], seconds: float, least_s: float) -> list[float]:
        """Return the bits per second of flows that all go on at once, the median of some tries each.

        Args:
            pairs: who sends to whom; each rank sends once at most, and receives once.
            seconds: about how long all tries together may take.
            least_s: what a single one must take in any case.
        """
        count = _FLOWS if seconds / _FLOWS > least_s else 1
        each_s = max(seconds / (count + 1), least_s)  # one more to find the size
        found, lasted_s = self._flow(pairs)
        while lasted_s < each_s / 3 and self._nbytes < _MOST_BYTES:
            times = min(max(0.8 * each_s / lasted_s, 2), _GROWTH)
            self._nbytes = min(int(self._nbytes * times), _MOST_BYTES)
            found, lasted_s = self._flow(pairs)
        tries = [found, *(self._flow(pairs)[0] for _ in range(count - 1))]
        self._nbytes = max(int(self._nbytes * min(each_s / lasted_s, 1.0)), _FIRST_BYTES)
        return [statistics.median(one) for one in zip(*tries, strict=True)]

    def _flow(self, pairs: Sequence[tuple[int, int]]) -> tuple[list[float], float]:
        """Send messages one way without a pause; return each pair's rate, and the seconds of the longest."""
        me, size, came = self.driver.rank, self._nbytes, list[float]()
        offers = [self._message(size, (), (s,)) for s, r in pairs if r == me for _ in range(_PARTS)]
        self._meet()
        start = time.perf_counter()
        sent = [self._message(size, (r,), ()) for s, r in pairs if s == me for _ in range(_PARTS)]
        for offer in offers:
            offer.wait()
            came.append(time.perf_counter() - start)
        for message in sent:
            message.wait()
        self.sent_bytes += len(sent) * wire_bytes(Op.EXCHANGE, size, 2)
        told = [json.loads(text) for text in everyone(self.driver, json.dumps(came))]
        # A message shares its packets with the notices of others.
        bits = 8 * (size + 2 * MESSAGE_BYTES) * (1 + PACKET_BYTES / DATA_BYTES)
        lasted = [told[r][-1] - told[r][_BEGINNING - 1] for _, r in pairs]
        rates = [(_PARTS - _BEGINNING) * bits / max(seconds, 1e-6) for seconds in lasted]
        return rates, max(max(theirs[-1] for theirs in told if theirs), 1e-6)

    def _message(self, nbytes: int, peers: tuple[int, ...], sources: tuple[int, ...]) -> Pending:
        zeros = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        return self.driver.start(Request(Op.EXCHANGE, (zeros,), peers, sources), _LABEL)

    def _meet(self) -> None:
        """Let all ranks begin at about the same time."""
        # Not by a gather, which between two ranks is a message and could be taken for one that is measured.
        request = Request(Op.MEAN, (torch.zeros(_SMALL_BYTES // 4, device="cpu"),))
        self.driver.start(request, _LABEL).wait()
