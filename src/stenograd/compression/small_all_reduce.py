"""Averages of few numbers in two hops, where a ring takes two for each other rank."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stenograd.data.requests import Rounds, gather, means, scatter

__all__ = ["direct_means"]

_FEWEST_RANKS = 4  # with fewer, a ring has hardly more hops
_MOST_BYTES = 1 << 16  # of a rank; more takes longer on the link than in its hops


def direct_means(
    tensors: Sequence[Tensor], world_size: int, *, scaled: bool = False
) -> Rounds[tuple[Tensor, ...]]:
    """Average tensors of one dtype, as `wire.means` does and with as many bytes, but sooner.

    Every rank sends each other one its part of the numbers, adds up its own part of all ranks' numbers in
    rank order, and sends that to all. `2 (N - 1)` messages a rank as in a ring, of which none waits for
    another but the second half for the first. Many numbers, other devices than the CPU, and fewer than 4
    ranks take `wire.means`.

    Args:
        tensors: floating, of one dtype; not overwritten unless `wire.means` is taken.
        world_size: number of ranks.
        scaled: whether they are divided by the world size already, so that the sum is the mean.

    Example:
        >>> from stenograd.simulate import run
        >>> run([direct_means([torch.tensor([1.0 * rank, 2.0])], 4) for rank in range(4)])[3]
        (tensor([1.5000, 2.0000]),)
    """
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    if world_size < _FEWEST_RANKS or not 0 < nbytes <= _MOST_BYTES or tensors[0].device.type != "cpu":
        return (yield from means(tensors, scaled=scaled))
    flat = torch.cat([t.reshape(-1) for t in tensors])
    padded = torch.nn.functional.pad(flat, (0, -flat.numel() % world_size))
    rows = yield from scatter(padded.view(world_size, -1))
    parts = torch.stack([row for (row,) in rows])
    if not scaled:
        parts.mul_(1.0 / world_size)  # first, so that the sum cannot overflow
    mine = parts.sum(0)
    everyone = yield from gather(mine)
    average = torch.cat([part for (part,) in everyone])[: flat.numel()]
    pieces = average.split([t.numel() for t in tensors])
    return tuple(piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True))
