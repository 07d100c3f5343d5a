"""Averages by scatter and gather: in two hops, in rank order, or in 16 bits with what that loses."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stenograd.wire.carried import mean_of_finite
from stenograd.wire.requests import Rounds, gather, means, scatter

__all__ = ["added_in_order", "half_means", "half_rounds", "mean_in_order", "small_means", "small_rounds"]

_FEWEST_RANKS = 4  # with fewer, a ring has hardly more hops
_FEWEST_HALVED = 4  # with fewer, gathering moves no more than a reduce-scatter and a gather, in one hop
_MOST_BYTES = 1 << 16  # of a rank; more takes longer on the link than in its hops


def small_rounds(nbytes: int, world_size: int, device: torch.device) -> int:
    """Return how many collectives `small_means` asks for to average so many bytes of a rank."""
    small = world_size >= _FEWEST_RANKS and 0 < nbytes <= _MOST_BYTES and device.type == "cpu"
    return 2 if small else 1


def small_means(tensors: Sequence[Tensor], world_size: int) -> Rounds[tuple[Tensor, ...]]:
    """Average tensors of one dtype, as `requests.means` does and with as many bytes, but sooner.

    Every rank sends each other one its part of the numbers, adds up its own part of all ranks' numbers in
    rank order, and sends that to all. `2 (N - 1)` messages a rank as in a ring, of which none waits for
    another but the second half for the first. Many numbers, other devices than the CPU, and fewer than 4
    ranks take `requests.means`.

    Args:
        tensors: floating, of one dtype; not overwritten unless `requests.means` is taken.
        world_size: number of ranks.

    Example:
        >>> from stenograd.simulate import run
        >>> run([small_means([torch.tensor([1.0 * rank, 2.0])], 4) for rank in range(4)])[3]
        (tensor([1.5000, 2.0000]),)
    """
    nbytes = sum(t.numel() * t.element_size() for t in tensors)
    if small_rounds(nbytes, world_size, tensors[0].device) == 1:
        return (yield from means(tensors))
    flat = torch.cat([t.reshape(-1) for t in tensors])
    average = yield from mean_in_order(flat, world_size)
    pieces = average.split([t.numel() for t in tensors])
    return tuple(piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True))


def added_in_order(rows: Sequence[Tensor], share: float) -> Tensor:
    """Add up `share` of each row, which is multiplied first, so that a mean cannot overflow.

    Example:
        >>> added_in_order([torch.tensor([1.0]), torch.tensor([3.0])], share=0.5)
        tensor([2.])
    """
    total = rows[0] * share
    for row in rows[1:]:
        total.add_(row * share)
    return total


def mean_in_order(x: Tensor, world_size: int, *, weights: Sequence[float] | None = None) -> Rounds[Tensor]:
    """Average a flat tensor by numbers that are added up in rank order: `sum_r (x_r / N)`, r ascending.

    So the result is that of a loop in one process, bit for bit; the order in which an all-reduce adds depends
    on the place in the tensor. It moves as many bytes, and needs twice as much memory besides.

    Args:
        x: floating.
        world_size: N.
        weights: of all ranks, with mean 1, for `sum_r (w_r x_r / N)` by the rule of `carried.mean_of_finite`.

    Example:
        >>> from stenograd.simulate import run
        >>> run([mean_in_order(torch.tensor([1.0 * rank, 2.0, 3.0]), 2) for rank in range(2)])[1]
        tensor([0.5000, 2.0000, 3.0000])
    """
    if world_size == 1:
        return x
    padded = torch.nn.functional.pad(x, (0, -x.numel() % world_size))
    rows = yield from scatter(padded.view(world_size, -1))
    share = 1.0 / world_size
    found = [row for (row,) in rows]
    if weights is None:
        own = added_in_order(found, share)
    else:
        weighted = [row if w == 1 else row * w for row, w in zip(found, weights, strict=True)]
        # Rows without their weights: equal ones must stay equal to be kept as they are.
        own = mean_of_finite(found, weights, added_in_order(weighted, share))
    everyone = yield from gather(own)
    return torch.cat([part for (part,) in everyone])[: x.numel()]


def half_rounds(world_size: int) -> int:
    """Return how many collectives `half_means` asks for."""
    return 1 if world_size < _FEWEST_HALVED else 2


def half_means(x: Tensor, rank: int, world_size: int) -> Rounds[tuple[Tensor, Tensor]]:
    """Average flat x over the ranks, written as bfloat16, and tell what of this rank's x is in the average.

    Up to three ranks gather the numbers of all. More divide the indices among them: each averages its part of
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
    if world_size < _FEWEST_HALVED:
        everyone = yield from gather(codes)
        return added_in_order([other.to(x.dtype) for (other,) in everyone], 1 / world_size), sent
    padded = torch.nn.functional.pad(codes, (0, -codes.numel() % world_size))
    rows = yield from scatter(padded.view(world_size, -1))
    exact = added_in_order([row.to(x.dtype) for (row,) in rows], 1 / world_size)
    rounded = exact.to(torch.bfloat16)
    own = sent[rank * exact.numel() :][: exact.numel()]  # the last ranks' parts may be shorter, or empty
    own.sub_((exact - rounded)[: own.numel()], alpha=world_size)
    everyone = yield from gather(rounded)
    return torch.cat([part for (part,) in everyone])[: x.numel()].to(x.dtype), sent
