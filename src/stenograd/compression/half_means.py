"""Averages of numbers that travel in 16 bits, of which every rank knows what it has lost."""

from __future__ import annotations

import torch
from torch import Tensor

from stenograd.compression.small_all_reduce import added_in_order
from stenograd.data.requests import Rounds, gather, scatter

__all__ = ["half_means", "half_rounds"]

_FEWEST_RANKS = 4  # with fewer, gathering moves no more than a reduce-scatter and a gather, in one hop


def half_rounds(world_size: int) -> int:
    """Return how many collectives `half_means` asks for."""
    return 1 if world_size < _FEWEST_RANKS else 2


def half_means(x: Tensor, rank: int, world_size: int) -> Rounds[tuple[Tensor, Tensor]]:
    """Average flat x over the ranks, written as bfloat16, and tell what of this rank's x is in the average.

    Up to three ranks gather the numbers of all. More divide the places among them: each averages its part of
    all ranks' numbers in float32, rounds it, sends it to all, and counts what it has rounded away, times the
    number of ranks, as not sent by itself. So `average = mean_r(sent_r)` up to float32's rounding, and `x -
    sent` is all that was lost. An all-reduce of bfloat16 rounds partial sums; nobody knows what that loses.

    Args:
        x: float32 (n,); left alone.
        rank: this rank.
        world_size: number of ranks.

    Returns:
        The average, equal on all ranks bit for bit, and sent; float32 (n,) each.

    Example:
        >>> from stenograd.simulate import run
        >>> x = torch.tensor([1.0, 1.001])
        >>> run([half_means(x, rank, 2) for rank in range(2)])[0]
        (tensor([1., 1.]), tensor([1., 1.]))
    """
    codes = x.to(torch.bfloat16)
    sent = codes.to(x.dtype)
    if world_size < _FEWEST_RANKS:
        everyone = yield from gather(codes)
        return added_in_order([theirs.to(x.dtype) for (theirs,) in everyone], 1 / world_size), sent
    padded = torch.nn.functional.pad(codes, (0, -codes.numel() % world_size))
    rows = yield from scatter(padded.view(world_size, -1))
    exact = added_in_order([row.to(x.dtype) for (row,) in rows], 1 / world_size)
    rounded = exact.to(torch.bfloat16)
    mine = sent[rank * exact.numel() :][: exact.numel()]  # the last ranks' parts may be shorter, or empty
    mine.sub_((exact - rounded)[: mine.numel()], alpha=world_size)
    everyone = yield from gather(rounded)
    return torch.cat([part for (part,) in everyone])[: x.numel()].to(x.dtype), sent
