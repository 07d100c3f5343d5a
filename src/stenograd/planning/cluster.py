"""Machines and the links between them, and what one collective takes there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from stenograd.comm.routes import Route, route
from stenograd.data.requests import REDUCTIONS, Op
from stenograd.errors import bad_value, check_count
from stenograd.planning.link import Cost, Link, hops, messages, wire_bytes
from stenograd.planning.program import Collective

__all__ = ["Cluster", "Transfer", "cluster_of", "message_level", "ring_s"]

_MESSAGE_LEVEL_RANKS = 16  # beyond, a closed form: the message level takes time with the square of the ranks
# Between processes of one host, through the loopback device; chosen, not fitted.
_INSIDE_BPS, _INSIDE_HOP_S = 1e10, 1e-4
_DIRECT = "all-to-all"


class Transfer(NamedTuple):
    """What a collective takes that has the link to itself.

    Args:
        latency_s: in which the link does nothing, when all ranks are idle.
        busy_latency_s: the same while they compute.
        wire_s: in which the busiest link sends; collectives at the same time share it.
        cpu_s: of a rank's processor while it sends.
        latency_cpu_s: of a rank's processor before.
        inside: whether it stays within hosts, so does not share the links between them.
        crowding: how many times as long its bytes take while others send, besides the sharing.
        at_once_s: of sending, saved because a token bucket lets the first bytes pass at once, if the link was
            idle before.
    """

    latency_s: float
    busy_latency_s: float
    wire_s: float
    cpu_s: float
    latency_cpu_s: float
    inside: bool
    crowding: float = 1.0
    at_once_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Hosts with as many ranks each, in the order of the ranks.

    Attributes:
        hosts: number of hosts.
        ranks_per_host: on each of them.
        cores: that a rank has for itself.
        up_bps, down_bps: bits per second that each host sends and receives: one value for all, or one each.
        costs: by collective, with rates as shares of the slowest link: see `cluster_of`.
        inside_bps, inside_hop_s: between ranks of a host.
        extra_hop_s: latency on top of what the costs say, between hosts.
        sites: places that have as many hosts each, in their order.
        site_bps: bits per second that a site sends, and receives, all its hosts together.
        site_hop_s: latency between sites on top of that between hosts.
    """

    hosts: int
    ranks_per_host: int
    cores: float
    up_bps: tuple[float, ...]
    down_bps: tuple[float, ...]
    costs: Mapping[str, Cost]
    inside_bps: float = _INSIDE_BPS
    inside_hop_s: float = _INSIDE_HOP_S
    extra_hop_s: float = 0.0
    sites: int = 1
    site_bps: float = math.inf
    site_hop_s: float = 0.0

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.hosts * self.ranks_per_host

    def with_rate(self, bits_per_s: float) -> Cluster:
        """Return the same with another rate of every link."""
        return replace(self, up_bps=(bits_per_s,), down_bps=(bits_per_s,))

    def without_latency(self) -> Cluster:
        """Return the same with messages that arrive at once."""
        costs = {op: replace(c, hop_s=0.0, busy_hop_s=0.0) for op, c in self.costs.items()}
        return replace(self, costs=costs, inside_hop_s=0.0, extra_hop_s=0.0, site_hop_s=0.0)

    def without_limits(self) -> Cluster:
        """Return the same with links of infinite rate, which cost no processor time."""
        costs = {op: replace(c, cpu_s_per_byte=0.0, cpu_s=0.0, issue_s=0.0) for op, c in self.costs.items()}
        return replace(self.with_rate(math.inf), costs=costs, inside_bps=math.inf, site_bps=math.inf)

    def issue_s(self, about: Collective) -> float:
        """Return the processor time of the thread that asks for a collective, and waits for it."""
        if about.size == 1 or about.nbytes == 0:
            return 0.0
        op = Op.MEAN.value if about.op in {kind.value for kind in REDUCTIONS} else about.op
        return self.costs.get(op, self.costs[_DIRECT]).issue_s

    def transfer(self, about: Collective) -> Transfer:
        """Return what a collective takes."""
        op, nbytes, size = about.op, about.nbytes, about.size
        if size == 1 or nbytes == 0:
            return Transfer(0.0, 0.0, 0.0, 0.0, 0.0, True)
        inside = self.hosts == 1 or (size == self.ranks_per_host and size < self.world_size)
        if op == "broadcast":
            depth = math.ceil(math.log2(size))
            return self._direct(nbytes * depth, depth, depth, inside, 1, 1, self.costs[_DIRECT])
        kind, per_host = Op(op), 1 if size == self.hosts else self.ranks_per_host
        if kind is Op.EXCHANGE:
            peers = len(about.peers)
            sent = wire_bytes(kind, nbytes, size, peers=peers)
            # At a distance d, so many of the ranks that are side by side send to other places.
            shared, trunk = (
                sum(min(peer, size - peer, per) for peer in about.peers) / max(peers, 1) if per < size else 0
                for per in (per_host, size // self.sites)
            )
            # A message to one other travels as in a ring, not as from many senders to each receiver.
            cost = self.costs[Op.MEAN.value if peers == 1 else _DIRECT]
            return self._direct(sent, peers, 1, inside or not shared, shared or 1.0, trunk, cost)
        sent = wire_bytes(kind, nbytes, size, itemsize=about.itemsize)
        if route(kind, nbytes, size) is Route.RING:
            return self._ring(kind, sent, size, hops(kind, nbytes, size), inside)
        shared, trunk = (_leaving(per, size) for per in (per_host, size // self.sites))
        return self._direct(sent, size - 1, 1, inside, shared, trunk, self.costs[_DIRECT])

    def _direct(
        self, sent: float, count: int, depth: int, inside: bool, sharing: float, trunk: float, cost: Cost
    ) -> Transfer:
        """Return what ranks take that send to others directly.

        Args:
            sent: bytes of a rank.
            count: messages of a rank.
            depth: messages that wait for one another.
            inside: whether all stay within hosts.
            sharing: ranks' bytes that cross a host's link.
            trunk: ranks' bytes that cross a site's.
            cost: of such messages.
        """
        cpu = sent * cost.cpu_s_per_byte
        if inside:
            hop = depth * self.inside_hop_s
            return Transfer(hop, hop, 8 * sent / self.inside_bps, cpu, count * cost.cpu_s, True)
        more_s = self.extra_hop_s + (self.site_hop_s if trunk else 0.0)
        idle, busy = (depth * (a + more_s) for a in (cost.hop_s, cost.busy_hop_s))
        counted = 8 * cost.counted(sent) / cost.bytes_per_s
        wire_s = max(counted * sharing / min(*self.up_bps, *self.down_bps), counted * trunk / self.site_bps)
        at_once_s = sharing * self._at_once_s(cost, sent)
        return Transfer(idle, busy, wire_s, cpu, count * cost.cpu_s, False, cost.crowding, at_once_s)

    def _ring(self, op: Op, sent: int, size: int, steps: int, inside: bool) -> Transfer:
        cost = self.costs[Op.MEAN.value if op in REDUCTIONS else op.value]
        share, per_host = cost.bytes_per_s, 1 if size == self.hosts else self.ranks_per_host
        chunk, inside_chunk = 8 * cost.counted(sent) / steps, 8 * sent / steps
        crossing = [not inside and (at + 1) % per_host == 0 for at in range(size)]
        leaving = [across and (at + 1) % (size // self.sites) == 0 for at, across in enumerate(crossing)]
        leaving = leaving if self.sites > 1 else [False] * size
        ups, downs = (self._spread(rates) for rates in (self.up_bps, self.down_bps))
        seconds = np.empty(size)
        for at, across in enumerate(crossing):
            host = at // per_host % self.hosts
            rate = min(ups[host], downs[(host + 1) % self.hosts])
            rate = (min(rate, self.site_bps) if leaving[at] else rate) * share
            seconds[at] = chunk / rate if across else inside_chunk / self.inside_bps
        found = []
        for hop in (cost.hop_s, cost.busy_hop_s):
            latency = np.where(crossing, hop + self.extra_hop_s, self.inside_hop_s)
            latency = latency + np.where(leaving, self.site_hop_s, 0.0)
            level = message_level if size <= _MESSAGE_LEVEL_RANKS else ring_s
            found.append(max(level(steps, seconds, latency) - steps * float(seconds.max()), 0.0))
        cpu = sent * cost.cpu_s_per_byte
        messages_s = messages(op, size) * cost.cpu_s
        alone = (found[0], found[1], float(steps * seconds.max()), cpu, messages_s, inside)
        return Transfer(*alone) if inside else Transfer(*alone, cost.crowding, self._at_once_s(cost, sent))

    def _at_once_s(self, cost: Cost, sent: float) -> float:
        saved = max(sent - cost.counted(sent), 0.0)
        return 8 * saved / cost.bytes_per_s / min(*self.up_bps, *self.down_bps)

    def _spread(self, rates: Sequence[float]) -> Sequence[float]:
        return rates if len(rates) == self.hosts else [min(rates)] * self.hosts


def ring_s(steps: int, seconds: np.ndarray, latency: np.ndarray) -> float:
    """Return what a ring of dependent messages takes, by a closed form.

    Every rank passes on `steps` messages of two halves each, one after another, and none before it has come
    from the rank before. With edges that send a message in `w_e` seconds and deliver it `a_e` later, either
    the first halves wait for nothing but themselves: `sum_e (a_e + w_e / 2)` along the `steps` edges in a row
    where that is most, and the second half behind it. Or the slowest edge m sends without a pause,
    `steps w_m + a_m`, more what a message takes longer than `w_m` on edges before and after it. The longer of
    the two counts.

    Args:
        steps: messages that each rank passes on.
        seconds: w_e, for each edge.
        latency: a_e, for each edge.

    Example:
        >>> ring_s(2, np.array([1.0, 1.0]), np.array([0.1, 0.1]))
        2.1
    """
    slowest = int(seconds.argmax())
    rounds, rest = divmod(steps, len(seconds))
    edges = latency + seconds / 2
    sums = np.concatenate([[0.0], np.cumsum(np.concatenate([edges, edges]))])
    along = rounds * edges.sum() + (sums[rest : rest + len(edges)] - sums[: len(edges)]).max()
    gains = np.roll(edges - seconds[slowest], -slowest)  # from the slowest edge on
    after, before = (np.resize(g, steps - 1).cumsum() for g in (np.roll(gains, -1), gains[::-1]))
    around = max(0.0, float(after.max()), float(before.max())) if steps > 1 else 0.0
    port = steps * seconds[slowest] + latency[slowest] + around
    return float(max(port, along + seconds[slowest] / 2))


def message_level(steps: int, seconds: np.ndarray, latency: np.ndarray) -> float:
    """Return what `ring_s` returns, by following every half of every message.

    Example:
        >>> message_level(2, np.array([1.0, 1.0]), np.array([0.1, 0.1]))
        2.1
    """
    half = seconds / 2
    ready = [np.zeros(len(seconds)), np.zeros(len(seconds))]  # by half: when each rank can pass it on
    free = np.zeros(len(seconds))
    for _ in range(steps):
        arrived = []
        for at in (0, 1):
            free = np.maximum(ready[at], free) + half
            arrived.append(free + latency)
        ready = [np.roll(came, 1) for came in arrived]
    return float(max(came.max() for came in ready))


def cluster_of(
    link: Link, world_size: int, *, ranks_per_host: int | None = None, cores: float = 1.0
) -> Cluster:
    """Return a cluster whose links are like one that was measured or assumed.

    A collective's rate becomes a share of the slowest link, so that it can be scaled to other rates.

    Args:
        link: the link.
        world_size: number of ranks.
        ranks_per_host: on each host; None for as many as on the link's first host.
        cores: that a rank has for itself, above 0.

    Raises:
        ConfigError: ranks_per_host does not divide world_size, or a number is out of range.
    """
    check_count("world_size", world_size, "give the number of workers")
    if not cores > 0:
        raise bad_value("cores", "must be above 0", cores, "give the cores of a worker")
    per_host = min(link.hosts.count(0), world_size) if ranks_per_host is None else ranks_per_host
    check_count("ranks_per_host", per_host, "use 1")
    if world_size % per_host:
        raise bad_value("ranks_per_host", f"must divide the {world_size} workers", per_host, "use 1")
    hosts, slowest = world_size // per_host, link.bps / 8
    alone = len(set(link.hosts)) == 1  # then what was measured is the way inside a host
    # Ranks of a host that send to all at once have shared its link while that was measured.
    together = 1.0 if alone or not link.measured else _leaving(link.hosts.count(0), len(link.hosts))
    costs = {
        op: _shared(cost, slowest / (together if op == _DIRECT else 1.0)) for op, cost in link.costs.items()
    }
    rates = [rates if len(rates) == hosts else (min(rates),) for rates in (link.up_bps, link.down_bps)]
    return Cluster(
        hosts=hosts,
        ranks_per_host=per_host,
        cores=cores,
        up_bps=tuple(rates[0]),
        down_bps=tuple(rates[1]),
        costs=costs,
        inside_bps=link.bps if alone else _INSIDE_BPS,
        inside_hop_s=link.costs["all-reduce"].hop_s if alone else _INSIDE_HOP_S,
    )


def _leaving(side_by_side: int, size: int) -> float:
    """Return how many ranks' messages leave a host, where each of its ranks sends to all others.

    Example:
        >>> _leaving(1, 4), round(_leaving(2, 4), 3)
        (1.0, 1.333)
    """
    return side_by_side * (size - side_by_side) / max(size - 1, 1)


def _shared(cost: Cost, slowest: float) -> Cost:
    """Return a cost whose rate is a share of the slowest link's bytes per second.

    A share above 1 is a measurement that was disturbed: nothing passes its link's rate.
    """
    share = cost.bytes_per_s / slowest
    above = max(share, 1.0)
    counts = tuple((sent, counted / above) for sent, counted in cost.counts_as)
    return replace(cost, bytes_per_s=share / above, counts_as=counts)
