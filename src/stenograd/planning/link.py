"""The network between ranks: what is known of it, measured or assumed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from stenograd.comm.gloo_framing import frames
from stenograd.comm.routes import Route, route, spreads
from stenograd.comm.traffic import moved_bytes
from stenograd.data.requests import REDUCTIONS, Op
from stenograd.errors import DataError, first_line
from stenograd.planning.units import parse_link

__all__ = ["OPS", "WAYS", "Cost", "Link", "Sample", "assumed", "hops", "load_link", "messages", "wire_bytes"]

_FORMAT = 4
OPS = {"all-reduce": Op.MEAN, "all-gather": Op.GATHER, "all-to-all": Op.SCATTER}

# How often a hop's latency counts: gloo sends no data before the receiver has offered room for it, and in a
# collective the offer leaves when the data could. Links of 5 and 20 ms show it.
WAYS = 2
# Only for links that nobody measured: bytes per second by the rate that was given. Chosen, not fitted; on a
# link of 1,500-byte packets, headers alone leave 0.94 of the rate.
_GOODPUT = {"all-reduce": 0.94, "all-gather": 0.94, "all-to-all": 0.94}
_HOP_S = 1.5e-4  # of a small message, without a link's own latency; chosen, not fitted
_CPU_S_PER_BYTE = 1.2e-9  # of a rank that sends and receives, kernel time included; chosen, not fitted
_CPU_S, _ISSUE_S = 3e-4, 2e-4  # of a rank for each message, and for each collective; chosen, not fitted


@dataclass(frozen=True, slots=True)
class Sample:
    """One measured size of one collective, by the slowest rank.

    Args:
        op: "all-reduce", "all-gather" or "all-to-all".
        nbytes: handed to each of them by a rank.
        at_once: how many were under way at the same time.
        seconds: until all had ended, one value per repetition.
        cpu_s: processor time of one rank's process meanwhile, per repetition.
        busy: whether every rank was computing meanwhile.
        lost_s: seconds of that computing which each of them took.
        own_s: of these, processor seconds of the thread that asks for them and waits.
    """

    op: str
    nbytes: int
    at_once: int
    seconds: tuple[float, ...]
    cpu_s: tuple[float, ...]
    busy: bool = False
    lost_s: float = 0.0
    own_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Cost:
    """What one kind of collective costs, fitted to samples.

    Args:
        hop_s: seconds for each of its dependent messages, when ranks are idle.
        busy_hop_s: the same when every rank computes meanwhile.
        bytes_per_s: that a rank sends while it goes on, packet headers included.
        cpu_s_per_byte: processor time of a rank for each byte that it sends, and for receiving as many.
        counts_as: for measured sizes, ascending, the bytes that a rank sends, and as how many they count at
            `bytes_per_s`: a token bucket lets few bytes pass at once, and a queue that is full takes longer.
        cpu_s: processor time of a rank for each message that it sends, whatever its size: threads wake up
            and push what computes out of its caches.
        issue_s: processor time of the thread that asks for a collective, and waits for it.
        crowding: how many times as long the bytes of two take that are under way at once, as one after the
            other; below 1 where one alone does not fill the link.
    """

    hop_s: float
    busy_hop_s: float
    bytes_per_s: float
    cpu_s_per_byte: float
    counts_as: tuple[tuple[float, float], ...] = ()
    cpu_s: float = 0.0
    issue_s: float = 0.0
    crowding: float = 1.0

    def counted(self, sent: float) -> float:
        """Return as how many bytes those that a rank sends count at `bytes_per_s`.

        Example:
            >>> cost = Cost(1e-4, 1e-4, 1e6, 0.0, ((100, 40.0), (200, 150.0)))
            >>> cost.counted(50), cost.counted(150), cost.counted(1000)
            (20.0, 95.0, 950.0)
        """
        before = (0.0, 0.0)
        for point in self.counts_as:
            if sent <= point[0]:
                return before[1] + (point[1] - before[1]) * (sent - before[0]) / (point[0] - before[0])
            before = point
        return before[1] + sent - before[0]


@dataclass(frozen=True, kw_only=True)
class Link:
    """The network between some ranks.

    Attributes:
        measured: False where it was described by somebody.
        hosts: for each rank, the number of its host.
        up_bps, down_bps: bits per second, headers included, that a host sends and receives.
        costs: by collective.
        latency_s: of a small message one way, half a ping, from the first host to the one farthest from it.
        samples: what the costs were fitted to.
        cold_s: seconds that a small and a large exchange took after silence, and in a row.
        seconds: that measuring took.
        sent_bytes: that each rank sent for it.
    """

    measured: bool
    hosts: tuple[int, ...]
    up_bps: tuple[float, ...]
    down_bps: tuple[float, ...]
    costs: Mapping[str, Cost]
    latency_s: float = 0.0
    samples: Sequence[Sample] = ()
    cold_s: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    sent_bytes: int = 0

    @property
    def bps(self) -> float:
        """The rate of the slowest host and direction."""
        return min(*self.up_bps, *self.down_bps)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON-able values, for `load_link`."""
        return {"format": _FORMAT, **asdict(self)}


def hops(op: Op, nbytes: int, world_size: int) -> int:
    """Return how many messages of a collective wait for one another.

    Example:
        >>> hops(Op.MEAN, 1 << 20, 8), hops(Op.GATHER, 1 << 20, 8), hops(Op.GATHER, 100, 8)
        (14, 7, 1)
    """
    if world_size == 1:
        return 0
    return messages(op, world_size) if route(op, nbytes, world_size) is Route.RING else 1


def messages(op: Op, world_size: int) -> int:
    """Return how many messages a rank sends for a collective that reaches all ranks.

    Example:
        >>> messages(Op.MEAN, 8), messages(Op.SCATTER, 8)
        (14, 7)
    """
    return (2 if op in REDUCTIONS else 1) * (world_size - 1)


def wire_bytes(op: Op, nbytes: int, world_size: int, *, itemsize: int = 4, peers: int = 1) -> int:
    """Return what a rank sends for a collective, with the headers that gloo and TCP add.

    Example:
        >>> wire_bytes(Op.MEAN, 1_000_000, 2) / 1_000_000
        1.049878
    """
    if nbytes == 0:
        return 0
    if spreads(op, nbytes, world_size):
        op, nbytes = Op.SCATTER, world_size * nbytes
    framing = frames(op, nbytes, world_size, itemsize=itemsize, peers=peers)
    return moved_bytes(op, nbytes, world_size, peers) + framing.header_bytes


def assumed(text: str, hosts: Sequence[int]) -> Link:
    """Return a link that somebody describes, with what gloo usually makes of one.

    Args:
        text: `RATE[/DOWN][,LATENCY]`, see `units.parse_link`.
        hosts: for each rank, the number of its host.

    Example:
        >>> link = assumed("1gbit,0.2ms", [0, 1])
        >>> link.measured, link.bps, round(link.costs["all-reduce"].hop_s, 6)
        (False, 1000000000.0, 0.00055)
    """
    said = parse_link(text)
    slowest = min(said.up_bps, said.down_bps) / 8
    more_s = WAYS * said.latency_s
    spent: dict[str, Any] = {"cpu_s_per_byte": _CPU_S_PER_BYTE, "cpu_s": _CPU_S, "issue_s": _ISSUE_S}
    costs = {
        op: Cost(_HOP_S + more_s, 2 * _HOP_S + more_s, share * slowest, **spent)
        for op, share in _GOODPUT.items()
    }
    count = max(hosts) + 1
    rates: dict[str, Any] = {"up_bps": (said.up_bps,) * count, "down_bps": (said.down_bps,) * count}
    return Link(measured=False, hosts=tuple(hosts), costs=costs, latency_s=said.latency_s, **rates)


def load_link(path: Path) -> Link:
    """Read what `stenograd link --out` wrote.

    Raises:
        DataError: there is no such file, or it is of another kind.
    """
    try:
        return from_json(json.loads(path.read_text()))
    except (OSError, ValueError, KeyError, TypeError) as cause:
        raise DataError(
            f"{path}: cannot be read as a link ({first_line(cause)}): give a file of stenograd link --out"
        ) from cause


def from_json(told: Mapping[str, Any]) -> Link:
    """Undo `Link.as_json`."""
    values = dict(told)
    if values.pop("format") != _FORMAT:
        raise DataError(f"the link's format must be {_FORMAT}, got {told['format']}: measure it again")
    values["costs"] = {op: _cost_from(cost) for op, cost in values["costs"].items()}
    values["samples"] = tuple(
        Sample(**{**s, "seconds": tuple(s["seconds"]), "cpu_s": tuple(s["cpu_s"])}) for s in values["samples"]
    )
    for key in ("hosts", "up_bps", "down_bps"):
        values[key] = tuple(values[key])
    return Link(**values)


def _cost_from(told: Mapping[str, Any]) -> Cost:
    return Cost(**{**told, "counts_as": tuple((sent, counts) for sent, counts in told["counts_as"])})
