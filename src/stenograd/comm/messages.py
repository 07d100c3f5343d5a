"""Messages between pairs of ranks, in both directions at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from stenograd.comm.groups import ranks_of
from stenograd.comm.pending import All

__all__ = ["messages", "swap", "trade"]

_COLLECTIVE = 1  # tag of what all ranks ask for, which so does not meet an offer made to a neighbour before


def messages(
    group: Any, sends: Sequence[tuple[int, Tensor]], receives: Sequence[tuple[int, Tensor]], *, tag: int = 0
) -> All:
    """Begin messages between this rank and others, and return their work.

    Every receive is offered before anything is sent: on gloo an offer that comes later waits behind the data
    on the same connection, and the other rank waits for the offer.

    Args:
        group: the process group, None for the default one.
        sends: ranks of the whole world, with what each gets.
        receives: ranks of the whole world, with what each fills.
        tag: messages between two ranks arrive in their order among those of one tag; CUDA tensors have none.
    """
    begun: list[tuple[Any, int, Tensor]] = [(dist.irecv, rank, tensor) for rank, tensor in receives]
    begun += [(dist.isend, rank, tensor) for rank, tensor in sends]
    if all(tensor.device.type == "cpu" for *_, tensor in begun):  # a batch takes twice the time to begin
        return All([begin(tensor, rank, group, tag) for begin, rank, tensor in begun])
    operations = [dist.P2POp(begin, tensor, rank, group) for begin, rank, tensor in begun]
    return All(dist.batch_isend_irecv(operations))


def trade(group: Any, me: int, mine: Tensor, theirs: Tensor) -> All:
    """Begin to send a tensor to the other of two ranks and to receive its; return the work.

    Args:
        group: the process group of the two, None for the default one.
        me: this rank's number in it.
        mine: what the other gets.
        theirs: what is filled from there.
    """
    other = ranks_of(group)[1 - me]
    return messages(group, [(other, mine)], [(other, theirs)], tag=_COLLECTIVE)


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
    return messages(group, [(ranks[at], rows[at]) for at in after], receives, tag=_COLLECTIVE)
