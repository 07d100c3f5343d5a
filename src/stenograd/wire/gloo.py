"""How collectives travel on gloo, and what one costs beyond its bytes: messages, headers, acknowledgements.

Every message of gloo has a header of 48 bytes. Before it, the sender tells that it has something to send and
the receiver that it is ready, 48 bytes each and a packet of its own, since gloo sets TCP_NODELAY. A packet on
Ethernet holds at most 1,500 bytes, 1,448 of them data after the headers of IP (20) and TCP (20, and 12 for
timestamps), and has 14 bytes of Ethernet in front: 66 bytes a packet.

Acknowledgements depend on timing: some ride on packets that travel anyway, and a receiver that is handed
several packets at once acknowledges them at once. Counted is one a message, and one for every 16 packets of
data, as measured (see docs/traffic.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from functools import lru_cache
from typing import NamedTuple

from stenograd.wire.requests import REDUCTIONS, Op

__all__ = [
    "ACK_EVERY",
    "DATA_BYTES",
    "MESSAGE_BYTES",
    "PACKET_BYTES",
    "Frames",
    "Route",
    "broadcast_frames",
    "frames",
    "route",
    "spreads",
    "swaps",
]

# That all ranks gather together, or two ranks add up; more is limited by the link. A ring shares that better,
# and adds piece by piece while the rest is on its way.
_MOST_DIRECT_BYTES = 1 << 17  # 16 kB took 2.2 ms in place of 4.7, on four ranks and two cores
_LEAST_SWAPPED_BYTES = 1 << 14  # to a rank; below, one call of gloo costs less than many messages


class Route(Enum):
    """The way that a collective's messages take."""

    RING = "ring"
    DIRECT = "direct"


def route(op: Op, nbytes: int, world_size: int, *, on_gloo: bool = True) -> Route:
    """Return how a collective travels.

    gloo's all-reduce is a ring whatever its size, and so is its all-gather, whose `N - 1` messages each wait
    for the one before. So a small all-gather goes to every rank directly, as an all-to-all of equal rows, and
    so does any between two ranks. Two ranks send each other what they have to add up if it is small: as many
    bytes as a ring's, in one message instead of several of which the second half waits for the first.

    Args:
        op: the collective, neither `COMMIT` nor `SEVERAL`.
        nbytes: that each rank hands over.
        world_size: number of ranks.
        on_gloo: False for tensors on other devices than the CPU, which NCCL sends as it likes.

    Example:
        >>> [route(Op.GATHER, 1000, n).value for n in (2, 3, 200)]
        ['direct', 'direct', 'ring']
        >>> [route(Op.MEAN, nbytes, 2).value for nbytes in (1000, 1 << 20)]
        ['direct', 'ring']
        >>> route(Op.MEAN, 1000, 8), route(Op.SCATTER, 1000, 8)
        (<Route.RING: 'ring'>, <Route.DIRECT: 'direct'>)
    """
    if op in REDUCTIONS:
        near = world_size == 2 and nbytes <= _MOST_DIRECT_BYTES
    elif op is Op.GATHER:
        near = world_size == 2 or world_size * nbytes <= _MOST_DIRECT_BYTES
    else:
        return Route.DIRECT
    return Route.DIRECT if near and on_gloo else Route.RING


def spreads(op: Op, nbytes: int, world_size: int, *, on_gloo: bool = True) -> bool:
    """Return whether every rank sends each other one all that it hands over; arguments as for `route`.

    Example:
        >>> spreads(Op.GATHER, 1000, 3), spreads(Op.MEAN, 1000, 3), spreads(Op.SCATTER, 1000, 2)
        (True, False, False)
    """
    whole = op is Op.GATHER or op in REDUCTIONS
    return whole and route(op, nbytes, world_size, on_gloo=on_gloo) is Route.DIRECT


def swaps(nbytes: int, world_size: int) -> bool:
    """Return whether a direct collective travels as messages of ours, rather than as gloo's all-to-all.

    gloo's all-to-all begins to send before it offers to receive, and the offer waits behind the data on the
    same connection: the two directions then take turns, which costs up to twice the time of a long message.

    Args:
        nbytes: to each rank.
        world_size: number of ranks.

    Example:
        >>> swaps(64, 2), swaps(64, 8), swaps(1 << 20, 8)
        (True, False, True)
    """
    return world_size == 2 or nbytes >= _LEAST_SWAPPED_BYTES


MESSAGE_BYTES = 48  # of gloo, before each message and in each of the two notices
PACKET_BYTES = 66  # Ethernet 14, IP 20, TCP 20, timestamps 12
DATA_BYTES = 1448  # in a packet, at an MTU of 1,500
ACK_EVERY = 16  # packets of data
_SEGMENT_BYTES = 1 << 20  # largest piece of gloo's ring all-reduce


class Frames(NamedTuple):
    """What one rank sends for a collective besides its bytes.

    Args:
        messages: that it sends.
        received: messages that it gets, each of which it says it is ready for.
        packets: with data or notices.
        acks: packets that only acknowledge.
    """

    messages: int = 0
    received: int = 0
    packets: int = 0
    acks: int = 0

    @property
    def header_bytes(self) -> int:
        """Bytes besides the payload.

        Example:
            >>> Frames(messages=1, received=1, packets=3, acks=1).header_bytes
            408
        """
        notices = 2 * self.messages + self.received
        return MESSAGE_BYTES * notices + PACKET_BYTES * (self.packets + self.acks)


# Asked for each collective of each step, and steps repeat.
@lru_cache(maxsize=1024)
def frames(
    op: Op,
    nbytes: int,
    world_size: int,
    *,
    rank: int = 0,
    itemsize: int = 1,
    peers: int = 0,
    sources: int | None = None,
) -> Frames:
    """Work out the frames of one rank for one collective of gloo.

    An all-reduce is a ring: the data are cut into at least two pieces a rank, of at most 1 MiB, and each
    rank passes on all but the pieces of one rank, twice. An all-gather is a ring of two pieces a rank. An
    all-to-all sends each rank one message, an exchange each of its peers.

    Args:
        op: the collective.
        nbytes: handed to it by each rank.
        world_size: number of ranks.
        rank: this one; few bytes make few messages, which not all ranks send.
        itemsize: bytes of an element, which are not cut.
        peers: number of ranks that an exchange sends to.
        sources: number of ranks that it receives from; None for as many.

    Example:
        >>> frames(Op.MEAN, 4, 3, rank=1, itemsize=4)  # one piece, got twice and passed on once
        Frames(messages=1, received=2, packets=4, acks=2)
        >>> frames(Op.GATHER, 20_000, 2).packets  # two pieces of 10,000 bytes, and four notices
        18
    """
    if world_size == 1 or nbytes == 0:
        return Frames()
    if op in REDUCTIONS:
        return _ring(nbytes, world_size, rank, itemsize)
    if op is Op.GATHER:
        halves = [nbytes // 2, nbytes - nbytes // 2]  # an empty one is a message, too
        return _frames(halves * (world_size - 1), 2 * (world_size - 1))
    if op is Op.EXCHANGE:
        return _frames([nbytes] * peers, peers if sources is None else sources)
    return _frames([nbytes // world_size] * (world_size - 1), world_size - 1)


def broadcast_frames(nbytes: int, children: int, root: bool) -> Frames:
    """Work out the frames of one rank for a broadcast along a tree.

    Example:
        >>> broadcast_frames(1000, 0, False)  # a leaf only says that it is ready
        Frames(messages=0, received=1, packets=1, acks=1)
    """
    return _frames([nbytes] * children, 0 if root else 1)


def _ring(nbytes: int, world_size: int, rank: int, itemsize: int) -> Frames:
    pieces = max(-(-nbytes // _SEGMENT_BYTES), 2 * world_size)
    each = -(-pieces // world_size)  # of a rank's share
    size = -(-nbytes // (each * world_size))
    size = -(-size // itemsize) * itemsize
    filled = -(-nbytes // size)  # pieces that are not empty

    def share(owner: int) -> int:
        """Return how many pieces of a rank's share are not empty."""
        return min(max(filled - (owner % world_size) * each, 0), each)

    sent = 2 * filled - share(rank) - share(rank - 1)
    received = 2 * filled - share(rank + 1) - share(rank)
    return _counted(sent, received, sent * _packets(size))


def _frames(sent: Sequence[int], received: int) -> Frames:
    return _counted(len(sent), received, sum(map(_packets, sent)))


def _counted(sent: int, received: int, data: int) -> Frames:
    # Over all ranks as much data is received as is sent, so `data` tells the acknowledgements of it.
    return Frames(sent, received, sent + received + data, received + data // ACK_EVERY)


def _packets(nbytes: int) -> int:
    return -(-(MESSAGE_BYTES + nbytes) // DATA_BYTES)
