"""The network between ranks: as text, as a file, and measured by a ping, by one flow, and by all at once."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from stenograd.checkpoint.files import read_json
from stenograd.errors import ConfigError, DataError, bad_value
from stenograd.planning.program import hops, wire_bytes
from stenograd.sync.handshake import compare
from stenograd.wire.agreement import everyone
from stenograd.wire.driver import Driver, Pending
from stenograd.wire.gloo import DATA_BYTES, MESSAGE_BYTES, PACKET_BYTES
from stenograd.wire.requests import Op, Request
from stenograd.wire.traffic import ATTACH, Label

__all__ = [
    "Link",
    "assumed",
    "check_seconds",
    "from_json",
    "load_link",
    "measure_link",
    "number_text",
    "parse_link",
    "parse_rate",
    "parse_seconds",
    "rate_text",
    "time_text",
]

_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d+)?)"


def parse_rate(text: str) -> float:
    """Return bits per second from a number and kbit, mbit or gbit, as `tc` writes them.

    Raises:
        ConfigError: it is not written like that, or it is 0.

    Example:
        >>> parse_rate("100mbit"), parse_rate("2.5gbit")
        (100000000.0, 2500000000.0)
        >>> parse_rate("1gbps")
        Traceback (most recent call last):
        stenograd.errors.ConfigError: rate must be a number and kbit, mbit or gbit, got '1gbps': write 1gbit
    """
    match = re.fullmatch(_NUMBER + "(kbit|mbit|gbit)", text.strip())
    if match is None or float(match[1]) == 0:
        guess = re.fullmatch(_NUMBER + r"\s*([kmg]?)\w*(?:/s)?", text.strip(), re.IGNORECASE)
        unit = (guess[2].lower() or "m") if guess else ""
        advice = f"write {guess[1]}{unit}bit" if guess and float(guess[1]) else "write 1gbit"
        raise bad_value("rate", "must be a number and kbit, mbit or gbit", text, advice)
    return float(match[1]) * _RATE_UNITS[match[2]]


def parse_seconds(text: str) -> float:
    """Return seconds from a number and us, ms or s.

    Example:
        >>> parse_seconds("0.2ms")
        0.0002
    """
    match = re.fullmatch(_NUMBER + "(us|ms|s)", text.strip())
    if match is None:
        raise bad_value("latency", "must be a number and us, ms or s", text, "write 0.2ms")
    return float(match[1]) * _TIME_UNITS[match[2]]


def parse_link(text: str) -> tuple[float, float]:
    """Return a link's rate and latency from `RATE[/DOWN][,LATENCY]`.

    Returns:
        Bits per second that a host can send while it receives as many, so the lower of two rates; and the
        seconds that a message takes one way, half a ping, 0 where they are not said.

    Example:
        >>> parse_link("100mbit/20mbit,5ms")
        (20000000.0, 0.005)
    """
    rate, *rest = text.split(",")
    if len(rest) > 1:
        raise ConfigError(f"a link must be RATE or RATE,LATENCY, got {text!r}: write 1gbit,0.2ms")
    up, *down = rate.split("/")
    if len(down) > 1:
        raise ConfigError(f"a link must have one or two rates, got {text!r}: write 100mbit/20mbit")
    if down and re.fullmatch(_NUMBER + "(us|ms|s)", down[0].strip()):
        raise ConfigError(f"a link's latency stands after a comma, got {text!r}: write {up},{down[0]}")
    return min(map(parse_rate, (up, *down))), parse_seconds(rest[0]) if rest else 0.0


def rate_text(bits_per_s: float) -> str:
    """Write a rate for people.

    Example:
        >>> rate_text(94.13e6), rate_text(1.9e9), rate_text(640e3)
        ('94.1 Mbit/s', '1.9 Gbit/s', '640 kbit/s')
    """
    for unit, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits_per_s >= unit:
            return f"{number_text(bits_per_s / unit)} {name}"
    return f"{number_text(bits_per_s)} bit/s"


def time_text(seconds: float) -> str:
    """Write a duration for people, with three digits.

    Example:
        >>> time_text(0.000213), time_text(0.0415), time_text(2.5), time_text(1234)
        ('0.213 ms', '41.5 ms', '2.5 s', '1,234 s')
    """
    return f"{number_text(seconds)} s" if seconds >= 1 else f"{number_text(1e3 * seconds)} ms"


def number_text(value: float) -> str:
    """Write a number for people, with three digits, or all of those before the point.

    Example:
        >>> number_text(0.04151), number_text(2.5), number_text(999.6), number_text(123456.7)
        ('0.0415', '2.5', '1,000', '123,457')
    """
    return f"{value:.3g}" if abs(value) < 999.5 else f"{value:,.0f}"


_FORMAT = 5  # of as_json(); a reader refuses others
# How often a message's latency counts: gloo sends no data before the receiver has offered room for it, and in
# a collective the offer leaves when the data could. Links of 5 and 20 ms show it.
_WAYS = 2
_HOP_S = 1.5e-4  # of a small message on a link of which only the rate is known; chosen, not fitted


@dataclass(frozen=True, kw_only=True)
class Link:
    """The network between some ranks.

    Attributes:
        measured: False where it was described by somebody.
        hosts: for each rank, the number of its host.
        alone_bps: bits per second, packet headers included, that each host sends to the next one while
            nothing else is sent.
        together_bps: the same while all of them send at once.
        hop_s: seconds of a small message in a collective, with what gloo asks before it.
        latency_s: of a small message one way, half a ping, from the first host to the one farthest from it.
        seconds: that measuring took.
        sent_bytes: that each rank sent for it.
    """

    measured: bool
    hosts: tuple[int, ...]
    alone_bps: tuple[float, ...]
    together_bps: tuple[float, ...]
    hop_s: float
    latency_s: float = 0.0
    seconds: float = 0.0
    sent_bytes: int = 0

    @property
    def bps(self) -> float:
        """The rate of the slowest host while all send, as they do in a training."""
        return min(self.together_bps)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON-able values, for `load_link`."""
        return {"format": _FORMAT, **asdict(self)}


def assumed(text: str, hosts: Sequence[int]) -> Link:
    """Return a link that somebody describes.

    Args:
        text: `RATE[/DOWN][,LATENCY]`, see `parse_link`.
        hosts: for each rank, the number of its host.

    Example:
        >>> link = assumed("1gbit,0.2ms", [0, 1])
        >>> link.measured, link.bps, round(link.hop_s, 6)
        (False, 1000000000.0, 0.00055)
    """
    bps, latency_s = parse_link(text)
    rates = (bps,) * (max(hosts) + 1)
    return Link(
        measured=False,
        hosts=tuple(hosts),
        alone_bps=rates,
        together_bps=rates,
        hop_s=_HOP_S + _WAYS * latency_s,
        latency_s=latency_s,
    )


def load_link(path: Path) -> Link:
    """Read what `stenograd link --out` wrote.

    Raises:
        DataError: there is no such file, or it is of another kind.
    """
    return read_json(
        path, from_json, DataError, "cannot be read as a link", "give a file of stenograd link --out"
    )


def from_json(received: Mapping[str, Any]) -> Link:
    """Undo `Link.as_json`.

    Raises:
        DataError: it is of another version.
    """
    values = dict(received)
    if values.pop("format") != _FORMAT:
        raise DataError(f"the link's format must be {_FORMAT}, got {received['format']}: measure it again")
    values |= {key: tuple(values[key]) for key in ("hosts", "alone_bps", "together_bps")}
    return Link(**values)


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
    # This refuses ranks that do something else, and fills in `traffic.hosts`, which is read next.
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
        # On one host two pairs were measured, and one rate is kept.
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
        # It is infinite on all ranks but `one`, which alone has timed anything.
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
        while True:
            # `_flow` returns the same on all ranks, so that all leave this loop together. The median tells
            # whether they were long enough: one flow that had to wait for a core looks long at any size.
            tries, lasted = zip(*(self._flow(pairs) for _ in range(count)), strict=True)
            lasted_s = statistics.median(lasted)
            if lasted_s >= each_s / 3 or self._nbytes == _MOST_BYTES:
                break
            times = min(max(0.8 * each_s / lasted_s, 2), _GROWTH)
            self._nbytes = min(int(self._nbytes * times), _MOST_BYTES)
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
        received = [json.loads(text) for text in everyone(self.driver, json.dumps(came))]
        # A message shares its packets with the notices of others.
        bits = 8 * (size + 2 * MESSAGE_BYTES) * (1 + PACKET_BYTES / DATA_BYTES)
        lasted = [_lasted_s(received[r]) for _, r in pairs]
        rates = [(_PARTS - _BEGINNING) * bits / max(seconds, 1e-6) for seconds in lasted]
        return rates, max(max(other[-1] for other in received if other), 1e-6)

    def _message(self, nbytes: int, peers: tuple[int, ...], sources: tuple[int, ...]) -> Pending:
        zeros = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        return self.driver.start(Request(Op.EXCHANGE, (zeros,), peers, sources), _LABEL)

    def _meet(self) -> None:
        """Let all ranks begin at about the same time."""
        # Not by a gather, which between two ranks is a message and could be taken for one that is measured.
        request = Request(Op.MEAN, (torch.zeros(_SMALL_BYTES // 4, dtype=torch.float32, device="cpu"),))
        self.driver.start(request, _LABEL).wait()


def _lasted_s(came: Sequence[float]) -> float:
    """Return how long the messages of a flow took that came after its beginning.

    A rank that was kept from looking, as where there are fewer cores than ranks, finds them all at once: if
    the beginning was more than half of the flow, they get their share of all of it.
    """
    whole_s, beginning_s = came[-1], came[_BEGINNING - 1]
    return whole_s * (1 - _BEGINNING / _PARTS) if beginning_s > whole_s / 2 else whole_s - beginning_s
