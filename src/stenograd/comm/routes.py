"""How a collective travels on gloo: the one rule that the driver, the ledger and predictions follow."""

from __future__ import annotations

from enum import Enum

from stenograd.data.requests import REDUCTIONS, Op

__all__ = ["Route", "route", "spreads", "swaps"]

# That all ranks gather together, or two ranks add up; more is limited by the link. A ring shares that better,
# and adds piece by piece while the rest is on its way.
_MOST_DIRECT_BYTES = 1 << 17
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
