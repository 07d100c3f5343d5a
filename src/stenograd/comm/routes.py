"""How a collective travels on gloo: the one rule that the driver, the ledger and predictions follow."""

from __future__ import annotations

from enum import Enum

from stenograd.data.requests import REDUCTIONS, Op

__all__ = ["Route", "route"]

# That all ranks gather together; more is limited by the link, and a ring shares that better.
_MOST_DIRECT_BYTES = 1 << 17
_FEWEST_DIRECT_RANKS = 3  # two ranks are a ring of one hop anyway


class Route(Enum):
    """The way that a collective's messages take."""

    RING = "ring"
    DIRECT = "direct"


def route(op: Op, nbytes: int, world_size: int, *, on_gloo: bool = True) -> Route:
    """Return how a collective travels.

    gloo's all-reduce is a ring whatever its size, and so is its all-gather, whose `N - 1` messages each wait
    for the one before. So a small all-gather goes to every rank directly, as an all-to-all of equal rows.

    Args:
        op: the collective, neither `COMMIT` nor `SEVERAL`.
        nbytes: that each rank hands over.
        world_size: number of ranks.
        on_gloo: False for tensors on other devices than the CPU, which NCCL gathers as it likes.

    Example:
        >>> [route(Op.GATHER, 1000, n).value for n in (2, 3, 200)]
        ['ring', 'direct', 'ring']
        >>> route(Op.MEAN, 1000, 8), route(Op.SCATTER, 1000, 8)
        (<Route.RING: 'ring'>, <Route.DIRECT: 'direct'>)
    """
    if op in REDUCTIONS:
        return Route.RING
    if op is Op.GATHER:
        small = world_size >= _FEWEST_DIRECT_RANKS and world_size * nbytes <= _MOST_DIRECT_BYTES
        return Route.DIRECT if small and on_gloo else Route.RING
    return Route.DIRECT
