"""The one formula: a step is its computing, and what of the bytes at the link's rate is not hidden by it."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from stenograd.errors import StenogradError, bad_value, check_count
from stenograd.planning.link import Link
from stenograd.planning.program import BROADCAST, Collective, Program, hops, messages, wire_bytes
from stenograd.wire.requests import Op

__all__ = ["Network", "Transfer", "network_of", "step_s"]

# Between processes of one host, through the loopback device; chosen, not fitted.
_INSIDE_BPS, _INSIDE_HOP_S = 1e10, 1e-4
# What a collective takes from computing: the thread that asks for it and waits, and where there is no other
# core, each message and each byte. On emulated hosts messages took 0.3 to 1.2 ms and bytes 1 to 7 ns; these
# are the low ends, since a real network card does a part of it.
_ISSUE_S, _MESSAGE_S, _BYTE_S = 2e-4, 3e-4, 1.2e-9
_ENOUGH_CORES = 2.0  # for what trains and what sends
_NEEDS = {"wait": "issue", "begin": "post", "join": "done"}


class Transfer(NamedTuple):
    """What a collective takes.

    Args:
        sending_s: in which the busiest link sends; nothing else is sent meanwhile.
        latency_s: in which it does nothing but wait, besides.
        cpu_s: of a rank's processor.
    """

    sending_s: float
    latency_s: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class Network:
    """Hosts with as many ranks each, in the order of the ranks, and the link between them.

    Args:
        hosts: number of hosts.
        ranks_per_host: on each of them.
        bps: bits per second that a host sends while it receives as many.
        hop_s: seconds of a message without its bytes.
        cores: that a rank has for itself.
    """

    hosts: int
    ranks_per_host: int = 1
    bps: float
    hop_s: float
    cores: float = 1.0

    def transfer(self, about: Collective) -> Transfer:
        """Return what a collective takes.

        Of messages in a row, as on a ring, the first half of one travels while the second is being sent. With
        a latency a and w seconds for sending one, n of them take the longer of `n w + a` and
        `n (a + w / 2) + w / 2`.

        Example:
            >>> lan = Network(hosts=2, bps=1e8, hop_s=1e-3)
            >>> round(lan.transfer(Collective("all-to-all", 2_000_000, size=2)).sending_s, 3)
            0.084
        """
        op, nbytes, size, per_host = about.op, about.nbytes, about.size, self.ranks_per_host
        if size == 1 or nbytes == 0:
            return Transfer(0.0, 0.0, 0.0)
        inside = size == per_host and self.hosts > 1
        side_by_side = 1 if size == self.hosts or self.hosts == 1 else per_host
        if op == BROADCAST:
            count = in_a_row = math.ceil(math.log2(size))
            sent, sharing = float(nbytes * count), 1.0
        elif (kind := Op(op)) is Op.EXCHANGE:
            count, in_a_row = len(about.peers), 1
            sent = wire_bytes(kind, nbytes, size, peers=count)
            # Rank 0 was recorded, so a peer's number is its distance; so many of a host's ranks send outside.
            sharing = sum(min(p, size - p, side_by_side) for p in about.peers) / max(count, 1) or 1.0
        else:
            count, in_a_row = messages(kind, size), hops(kind, nbytes, size)
            sent = wire_bytes(kind, nbytes, size, itemsize=about.itemsize)
            sharing = 1.0 if in_a_row > 1 else _leaving(side_by_side, size)
        rate, a = (_INSIDE_BPS, _INSIDE_HOP_S) if inside else (self.bps / max(sharing, 1.0), self.hop_s)
        sending_s = 8 * sent / rate
        w = sending_s / in_a_row
        latency_s = max(a, in_a_row * (a - w / 2) + w / 2)  # the longer of the two, less the n w of sending
        return Transfer(sending_s, latency_s, count * _MESSAGE_S + sent * _BYTE_S)


def network_of(
    link: Link, world_size: int, *, ranks_per_host: int | None = None, cores: float = 1.0
) -> Network:
    """Return a network whose links are like one that was measured or assumed.

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
    hosts = world_size // per_host
    return Network(hosts=hosts, ranks_per_host=per_host, bps=link.bps, hop_s=link.hop_s, cores=cores)


def _leaving(side_by_side: int, size: int) -> float:
    """Return how many ranks' messages leave a host, where each of its ranks sends to all others.

    Example:
        >>> _leaving(1, 4), round(_leaving(2, 4), 3)
        (1.0, 1.333)
    """
    return side_by_side * (size - side_by_side) / max(size - 1, 1)


def step_s(program: Program, network: Network, floor_s: float, *, slower: float = 1.0) -> float:
    """Return the seconds of a training step: the median over the recorded periods but the first.

    One rank stands for all: it computes `slower` times as long as recorded, as the slowest of them does, and
    a collective ends everywhere when it ends here. Its threads go on by themselves until one needs what
    another, or the link, has not done yet; where a rank has less than two cores, they compute one after the
    other. The link sends one thing at a time, in the order of asking.

    Args:
        program: for as many ranks as the network has.
        network: where it runs.
        floor_s: seconds of a step that only computes.
        slower: of computing, above 0.

    Raises:
        StenogradError: the program waits for something that never comes, so it was not recorded whole.
    """
    lanes, shared = program.lanes, network.cores < _ENOUGH_CORES
    known = {(e.kind, e.number) for lane in lanes for e in lane}
    at, clock = [0] * len(lanes), [0.0] * len(lanes)
    done: dict[tuple[str, int], float] = {}
    link_free = core_free = 0.0
    ends = [0.0]
    begins = True  # the next event of the training's thread is the first of a step
    while at[0] < len(lanes[0]):
        able = []
        for number, lane in enumerate(lanes):
            if at[number] < len(lane):
                event = lane[at[number]]
                need = (_NEEDS.get(event.kind, ""), event.number)
                if need in done or need not in known:  # what came before the recording is there
                    able.append(number)
        if not able:
            raise StenogradError(
                f"{program.method}: its recording waits for what never comes: please report this"
            )
        # whichever is behind: what it does may hold up the others
        number = min(able, key=lambda number: clock[number])
        event = lanes[number][at[number]]
        at[number] += 1
        computing = slower * event.compute_s
        # `ends` begins with a 0, so this is the first event of the last step in a stretch.
        if number == 0 and begins and len(ends) % program.apart == 0:
            computing += slower * floor_s * program.idle
        begins = (number == 0 and event.kind == "step") or (begins and number != 0)
        transfer = None if event.collective is None else network.transfer(event.collective)
        if transfer is not None and transfer.sending_s:
            computing += _ISSUE_S + (transfer.cpu_s if shared else 0.0)
        now = (max(clock[number], core_free) if shared else clock[number]) + computing
        core_free = now if computing else core_free
        if transfer is not None:
            link_free = max(now, link_free) + transfer.sending_s
            done[event.kind, event.number] = link_free + transfer.latency_s
        elif event.kind in _NEEDS:
            now = max(now, done.get((_NEEDS[event.kind], event.number), 0.0))
        elif event.kind == "step":
            ends.append(now)
        else:
            done[event.kind, event.number] = now
        clock[number] = now
    marks = ends[:: program.period]
    lasted = [after - before for before, after in pairwise(marks)]
    return statistics.median(lasted[1:] or lasted) / program.steps
