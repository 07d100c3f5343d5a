"""Measures a network through the very collectives that training uses; all ranks do it together."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from stenograd.comm.driver import Driver
from stenograd.comm.traffic import moved_bytes
from stenograd.data.requests import Op
from stenograd.errors import bad_value
from stenograd.planning.link import OPS, Cost, Link, Sample, hops, messages, wire_bytes
from stenograd.planning.timed import Computing, Timed
from stenograd.sync.handshake import compare

__all__ = ["measure_link"]

_WARM_UP, _PINGS, _PINGS_BRIEF = 5, 20, 3
_MOST_PINGED = 8  # hosts, beside the first
_SMALL_BYTES = 64
_FIRST_BYTES, _APART = 1024, 4
_MOST_BYTES = 1 << 26
_FEW, _NEARLY = 3, 0.9
_CLOSE = 0.95  # two measurements of a rate that differ by less are as good
_WAYS_OF_A_FLOW = 40  # how often its messages could go to and fro: TCP finds its window in some of them
_FLOWS = 3  # of the same kind
_FLOW_SHARE = 16  # of what may be in memory: a flow's messages are all there at once
_GROWTH = 64  # at most, from one flow to the next: what a token bucket let pass tells nothing of the rate
_REPEATS, _PAIRS, _COLD_BYTES = 7, 3, 1 << 18
_CROWDING = (0.5, 1.5)  # what is beyond was disturbed
_WINDOWS = 3  # beside computing: one that is interrupted from elsewhere shall not decide
_LATER = 2  # sizes among which what is left of the time is shared
_LIKE_NOTHING = 0.1  # of a collective that is all latency: what is sent faster tells nothing more
_LEAST_S = 1e-6
_A_CORE = 0.75  # of one, that a rank must have for computing
_SILENCE_S = 0.3


def measure_link(driver: Driver, seconds: float = 10.0) -> Link:
    """Measure latency, rates and collectives between the ranks of a driver, all of which call it.

    Args:
        driver: the way to the other ranks, which does nothing else meanwhile.
        seconds: about how long it may take, from 2; sizes are left out where time is short. Latencies of more
            than 5 ms take longer.

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
    Timed(driver).sample(Op.MEAN, _SMALL_BYTES, repeats=_WARM_UP, at_most_s=seconds / 50)
    timed = Timed(driver)
    latency_s = _latency_s(timed, hosts, seconds / 30)
    samples = _small(timed, seconds / 30)
    samples += _beside(timed, _SMALL_BYTES, _PINGS, seconds / 90)
    up, down = _rates(timed, hosts, seconds * 0.3, _WAYS_OF_A_FLOW * latency_s)
    bytes_per_s = min(*up, *down) / 8
    if any(sample.busy for sample in samples):
        samples += _beside(timed, bytes_per_s * seconds / 400, _REPEATS, seconds / 90)
    deadline = start + seconds - 2 * _SILENCE_S - seconds / 20
    shortest_s = min(statistics.median(s.seconds) for s in samples) * _LIKE_NOTHING
    samples += _by_size(timed, bytes_per_s, deadline, shortest_s, seconds / 30)
    cold = _cold(timed, samples)
    costs = {op: _fitted(op, samples, driver.world_size) for op in OPS}
    return Link(
        measured=True,
        hosts=hosts,
        up_bps=up,
        down_bps=down,
        latency_s=latency_s,
        costs=costs,
        samples=tuple(samples),
        cold_s=cold,
        seconds=time.perf_counter() - start,
        sent_bytes=timed.sent_bytes,
    )


def _small(timed: Timed, at_most_s: float) -> list[Sample]:
    """Measure the smallest size of each collective, which is all latency."""
    return [
        timed.sample(op, _SMALL_BYTES, repeats=_PINGS, least=2, at_most_s=at_most_s) for op in OPS.values()
    ]


def _beside(timed: Timed, sent: float, repeats: int, at_most_s: float) -> list[Sample]:
    """Measure collectives by which a rank sends so many bytes while every rank computes.

    Each is measured several times between measurements of what is computed alone, whose speed drifts.

    Nothing is measured where ranks have less than a core each. Computing that never pauses then keeps their
    messages waiting for many times as long as a training does, whose ranks wait for one another.
    """
    samples: list[Sample] = []
    with Computing() as computing:
        if -timed.largest(-computing.alone(at_most_s)) < _A_CORE:
            return samples
        for op in [*OPS.values()] * _WINDOWS:
            computing.alone(at_most_s / 2)
            nbytes = _handed(op, sent, timed.driver.world_size) if sent > _SMALL_BYTES else _SMALL_BYTES
            samples.append(
                timed.sample(op, nbytes, repeats=repeats, least=2, at_most_s=at_most_s, beside=computing)
            )
    return samples


def _latency_s(timed: Timed, hosts: Sequence[int], at_most_s: float) -> float:
    """Return the one-way latency from the first host to the one that is farthest, or between ranks of one."""
    first = [hosts.index(host) for host in range(max(hosts) + 1)]
    others = first[1 : _MOST_PINGED + 1] or [1]
    began = time.perf_counter()
    timed.one_way_s(first[0], others[0], _PINGS_BRIEF)
    spent_s = timed.largest(time.perf_counter() - began)
    pings = int(min(max(_PINGS_BRIEF * at_most_s / len(others) / spent_s, _PINGS_BRIEF), _PINGS))
    return max(timed.one_way_s(first[0], other, pings) for other in others)


def _rates(
    timed: Timed, hosts: Sequence[int], seconds: float, least_s: float
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Measure what each host sends to others at once, and receives from them, in bits per second.

    Few others first: with many senders to one receiver packets are lost, and that takes longer to even out.
    All the others where those few send, or take, no more than was found. At last every host sends to the
    next, which guards against rates that were found too low because packets were lost. With two hosts a flow
    shows only the slower of one's sending and the other's receiving rate.
    """
    first = [hosts.index(host) for host in range(max(hosts) + 1)]
    if len(first) == 1:  # one host: between its first two ranks
        first = [0, 1]
    count = len(first)
    flows = _Flows(timed, first, seconds / (2 * count), least_s)
    if count == 2:  # what one sends is what the other receives
        up = [flows.bits_per_s(at, [1 - at], sending=True) for at in (0, 1)]
        return (tuple(up), (up[1], up[0])) if len(set(hosts)) == 2 else ((min(up),), (min(up),))
    few = {at: [(at + step) % count for step in range(1, min(count, _FEW + 1))] for at in range(count)}
    up, down = (
        [flows.bits_per_s(at, others, sending=sending) for at, others in few.items()]
        for sending in (True, False)
    )
    for mine, theirs, sending in ((up, down, True), (down, up, False)):
        for at, others in few.items():
            if len(others) < count - 1 and mine[at] > _NEARLY * sum(theirs[other] for other in others):
                everybody = [other for other in range(count) if other != at]
                mine[at] = max(mine[at], flows.bits_per_s(at, everybody, sending=sending))
    for at, rate in enumerate(flows.passed_on()):
        for rates, host in ((up, at - 1), (down, at)):
            rates[host] = rate if rates[host] < _CLOSE * rate else rates[host]
    return tuple(up), tuple(down)


class _Flows:
    """Flows between hosts, each of a size that takes about as long as it may; the median of some counts.

    One flow may be slow, because packets were lost, or look fast, because a rank was held up at its beginning
    and then found at once what had come meanwhile.

    Args:
        timed: the ranks.
        first: the first rank of each host.
        seconds: about how long all flows of a host and a direction may take.
        least_s: what a single one must take in any case.
    """

    def __init__(self, timed: Timed, first: Sequence[int], seconds: float, least_s: float) -> None:
        self._timed, self._first = timed, first
        self._count = _FLOWS if seconds / _FLOWS > least_s else 1
        self._each_s = max(seconds / self._count, least_s)
        self._nbytes = _FIRST_BYTES  # of a message; the next flow begins with what suited the one before

    def bits_per_s(self, host: int, others: Sequence[int], *, sending: bool) -> float:
        """Return what a host sends to others at once, or receives from them."""
        one, many = [self._first[host]], [self._first[other] for other in others]
        ends = (one, many) if sending else (many, one)
        most = max(_MOST_BYTES // _FLOW_SHARE // len(many), _FIRST_BYTES)
        flow = self._timed.flow(*ends, self._nbytes)
        while flow.seconds < self._each_s / 3 and self._nbytes < most:
            times = min(max(0.8 * self._each_s / flow.seconds, 2), _GROWTH)
            self._nbytes = min(int(self._nbytes * times), most)
            flow = self._timed.flow(*ends, self._nbytes)
        rates = [flow.bytes_per_s]
        if flow.seconds > self._each_s:
            self._nbytes = max(int(self._nbytes * self._each_s / flow.seconds), _FIRST_BYTES)
        while len(rates) < self._count:
            rates.append(self._timed.flow(*ends, self._nbytes).bytes_per_s)
        return 8 * statistics.median(rates)

    def passed_on(self) -> list[float]:
        """Return what each host gets when all of them send to the next."""
        # As much for each as from the many senders of the other flows, to one receiver.
        nbytes = min(min(len(self._first) - 1, _FEW) * self._nbytes, _MOST_BYTES // _FLOW_SHARE)
        rates = [self._timed.passed_on(self._first, nbytes) for _ in range(self._count)]
        return [8 * statistics.median(own) for own in zip(*rates, strict=True)]


def _by_size(
    timed: Timed, bytes_per_s: float, deadline: float, shortest_s: float, longest_s: float
) -> list[Sample]:
    """Measure collectives of sizes that take so long to send, small ones first, as far as there is time.

    The last but one is also measured with two under way at once, which gloo's two threads drive together.
    """
    samples: list[Sample] = []
    largest = min(bytes_per_s * longest_s, _MOST_BYTES)
    smallest = max(_FIRST_BYTES, bytes_per_s * shortest_s)
    places = max(round(math.log(largest / smallest, _APART)), 1)
    took_s = 0.0  # all collectives of the size before, once each, and meeting for it
    for place in range(places, -1, -1):
        left_s = -timed.largest(time.perf_counter() - deadline)
        sent = largest / _APART**place
        expected_s = max(took_s, len(OPS) * sent / bytes_per_s)
        if samples and left_s < 2 * expected_s and place < 1:
            break
        brief = 2 * timed.largest(took_s) < left_s / (1 + min(place, _LATER))
        took_s = 0.0
        # What is left is shared by the sizes to come, each of which takes longer than the one before.
        each_s = max(left_s, 0.0) / len(OPS) / (1 + min(place, _LATER))
        for op in OPS.values():
            nbytes = _handed(op, sent, timed.driver.world_size)
            began = time.perf_counter()
            samples.append(timed.sample(op, nbytes, repeats=_REPEATS if brief else 1, at_most_s=each_s))
            if place == 1:
                samples.append(timed.sample(op, nbytes, at_once=2, repeats=_PAIRS, at_most_s=each_s))
            took_s += (time.perf_counter() - began) / (1 + len(samples[-1].seconds))
    return samples


def _handed(op: Op, sent: float, world_size: int) -> int:
    """Return about how many bytes a rank hands over where it then sends so many."""
    share = moved_bytes(op, 1 << 20, world_size) / (1 << 20)
    unit = 4 * world_size
    return max(round(sent / share / unit), 1) * unit


def _cold(timed: Timed, samples: Sequence[Sample]) -> dict[str, float]:
    """Measure exchanges right after silence, when TCP may have to find its window again."""
    own = [s for s in samples if s.op == Op.MEAN.value and s.at_once == 1 and not s.busy]
    large = max((s for s in own if s.nbytes <= _COLD_BYTES), key=lambda s: s.nbytes)
    found = {}
    for name, warm in (("small", own[0]), ("large", large)):
        found[f"{name} warm"] = statistics.median(warm.seconds)
        found[f"{name} cold"] = timed.after_silence_s(Op.MEAN, warm.nbytes, _SILENCE_S)
    return found


def _usual(seconds: Sequence[float]) -> float:
    """Return the mean without the slowest tenth, which interruptions make.

    Small messages take either the link's latency or that of waking a thread up, ten times as long; a median
    shows the one that is more frequent, and steps take the mean.
    """
    return statistics.mean(sorted(seconds)[: max(len(seconds) - len(seconds) // 10, 1)])


def _fitted(op: str, samples: Sequence[Sample], world_size: int) -> Cost:
    """Take hops from the smallest messages, and a rate from the two largest sizes.

    Sizes between are kept as they were measured. A line through all would tell of small sizes, which a token
    bucket lets pass at once, rather than of a link. What messages take from computing is what was lost beside
    it, or where nothing was measured so, the process's own processor time.
    """
    own = [s for s in samples if s.op == op and s.at_once == 1]
    small = hops(OPS[op], _SMALL_BYTES, world_size)
    idle = _usual([t for s in own if s.nbytes == _SMALL_BYTES and not s.busy for t in s.seconds]) / small
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
    counts = tuple((b, seconds * rate) for b, seconds in zip(sent, left, strict=True))
    cost = Cost(idle, idle, rate, statistics.median(still[-1].cpu_s) / sent[-1], counts)
    beside = [s for s in own if s.busy]
    least = [s for s in own if s.nbytes == _SMALL_BYTES and s.busy == bool(beside)]
    issue_s = statistics.median(s.own_s for s in least)
    if beside:
        took_s, lost_s_per_byte = _lost(beside, world_size)
        busy = _usual([t for s in least for t in s.seconds]) / small
        slowed = max(idle, busy, _busy_hop_s(cost, op, beside, world_size))
        cost = replace(cost, busy_hop_s=slowed, cpu_s_per_byte=max(cost.cpu_s_per_byte, lost_s_per_byte))
    else:
        took_s = statistics.median(t for s in least for t in s.cpu_s)
    each_s = max(took_s - issue_s, 0.0) / messages(OPS[op], world_size)
    return replace(cost, cpu_s=each_s, issue_s=issue_s, crowding=_crowding(cost, op, samples, world_size))


def _crowding(cost: Cost, op: str, samples: Sequence[Sample], world_size: int) -> float:
    """Return how many times as long the bytes of two collectives take as those of one after the other."""
    pairs = [s for s in samples if s.op == op and s.at_once == 2]
    if not pairs:
        return 1.0
    sent = wire_bytes(OPS[op], pairs[-1].nbytes, world_size)
    hop_s = cost.hop_s * hops(OPS[op], pairs[-1].nbytes, world_size)
    # What a token bucket lets pass at once it lets pass once for both.
    bytes_s = (cost.counted(sent) + sent) / cost.bytes_per_s
    found = (statistics.median(pairs[-1].seconds) - hop_s) / bytes_s
    return min(max(found, _CROWDING[0]), _CROWDING[1])


def _busy_hop_s(cost: Cost, op: str, beside: Sequence[Sample], world_size: int) -> float:
    """Return the latency while ranks compute as large messages show it, each piece of which may wait."""
    most = max(s.nbytes for s in beside)
    if most == _SMALL_BYTES:
        return 0.0
    seconds = statistics.median(statistics.median(s.seconds) for s in beside if s.nbytes == most)
    sending_s = cost.counted(wire_bytes(OPS[op], most, world_size)) / cost.bytes_per_s
    return (seconds - sending_s) / hops(OPS[op], most, world_size)


def _lost(busy: Sequence[Sample], world_size: int) -> tuple[float, float]:
    """Return the seconds of computing that a collective takes, and those that each byte sent takes.

    What the kernel does for a link is counted nowhere else: it interrupts whoever happens to run.
    """
    by_size = {s.nbytes: wire_bytes(OPS[s.op], s.nbytes, world_size) for s in busy}
    lost = {n: statistics.median(s.lost_s for s in busy if s.nbytes == n) for n in by_size}
    least, most = min(lost), max(lost)
    each_s = max(lost[least], 0.0)
    return each_s, max(lost[most] - each_s, 0.0) / max(by_size[most] - by_size[least], 1)
