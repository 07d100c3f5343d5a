"""Messages between pairs of ranks, in both directions at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from stenograd.comm.groups import ranks_of
from stenograd.comm.pending import All

__all__ = ["messages", "swap"]


def messages(group: Any, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]]) -> All:
    """Begin messages between this rank and others, and return their work.

    Every receive is offered before anything is sent: on gloo an offer that comes later waits behind the data
    on the same connection, and the other rank waits for the offer.

    Args:
        group: the process group, None for the default one.
        sends: ranks of the whole world, with what each gets.
        receives: ranks of the whole world, with what each fills.
    """
    operations = [dist.P2POp(dist.irecv, tensor, rank, group) for rank, tensor in receives]
    operations += [dist.P2POp(dist.isend, tensor, rank, group) for rank, tensor in sends]
    return All(dist.batch_isend_irecv(operations))


def swap(group: Any, me: int, rows: Tensor, received: Tensor) -> All:
    """Begin an all-to-all: send row j to rank j and fill row j from there; return its work.

    Args:
        group: the process group, None for the default one.
        me: this rank's number in it.
        rows: (ranks, elements a row).
        received: the same.
    """
    received[me].copy_(rows[me])
    ranks, size = ranks_of(group), len(rows)
    after = [(me + step) % size for step in range(1, size)]  # so that not all send to one rank first
    receives = [(ranks[at], received[at]) for at in reversed(after)]
    return messages(group, [(ranks[at], rows[at]) for at in after], receives)
