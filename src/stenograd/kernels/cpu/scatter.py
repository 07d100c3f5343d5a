"""The dense mean of sparse vectors on the CPU: one pass over the result, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stenograd.errors import WireError
from stenograd.kernels.cpu.jit import aligned, array_at, divide, kernel, one_over, view
from stenograd.kernels.cpu.lanes import stream_32, wait_for_streams

__all__ = ["put", "put_at", "scatter_mean"]

_REGION = 8192  # elements of the result that are finished at a time, in the first-level cache
_STREAMED = 1 << 20  # elements of a result that will not all be in the cache when it is used


def scatter_mean(vectors: Sequence[tuple[Tensor, Tensor]], n: int, out: Tensor | None = None) -> Tensor:
    """Add sparse vectors in rank order and divide by their number."""
    total = torch.empty(n, dtype=torch.float32, device="cpu") if out is None else out
    ascending = True
    for indices, values in vectors:
        lowest, highest, sorted_ = _extent(view(indices.contiguous()))
        if indices.numel() and not (lowest >= 0 and highest < n):
            raise WireError(f"indices lie in [0, {n}), got {lowest} to {highest}")
        if indices.numel() != values.numel():
            raise WireError(f"{indices.numel()} indices came with {values.numel()} values")
        ascending &= sorted_
    everyone = [(aligned(p.to(torch.int32)), aligned(v.to(torch.float32))) for p, v in vectors]
    # The kernel knows addresses only: `everyone` keeps alive what may be copies.
    addresses = np.array([[p.data_ptr(), v.data_ptr(), p.numel()] for p, v in everyone], np.int64)
    _mean(
        addresses,
        np.zeros(len(everyone), np.int64),
        view(total),
        _REGION if ascending else n,  # in any order, all of it is one region
        one_over(len(vectors)),
    )
    return total


def put(x: Tensor, indices: Tensor, values: Tensor) -> None:
    """Write values at indices."""
    put_at(view(indices), view(values), view(x))


@kernel
def put_at(indices: Any, values: Any, v: Any) -> None:
    """Write values at indices that lie in v."""
    for i in range(indices.size):
        v[np.uint64(indices[i])] = values[i]


@kernel
def _extent(indices: Any) -> tuple[int, int, bool]:
    """Return the least place, the greatest, and whether all are in order."""
    if indices.size == 0:
        return np.int64(0), np.int64(-1), True
    lowest = highest = indices[0]
    ordered = True
    for i in range(1, indices.size):
        lowest, highest = min(lowest, indices[i]), max(highest, indices[i])
        ordered &= indices[i] >= indices[i - 1]
    return np.int64(lowest), np.int64(highest), ordered


@kernel
def _mean(addresses: Any, done: Any, out: Any, region: int, inverse: Any) -> None:
    """Finish the result region by region; `done` counts what was used of each rank's sorted indices.

    The pieces of a large result are made aside, because an ordinary store reads the memory that it is about
    to overwrite, and pushes out of the cache what training needs next.
    """
    ranks = addresses.shape[0]
    aside = np.empty(region if out.size >= _STREAMED and region <= _REGION else 0, np.float32)
    for start in range(0, out.size, max(region, 1)):
        goal = out[start : start + region]
        piece = aside[: goal.size] if aside.size else goal
        piece[:] = 0
        for rank in range(ranks):
            indices = array_at(addresses[rank, 0], addresses[rank, 2], np.int32)
            values = array_at(addresses[rank, 1], addresses[rank, 2], np.float32)
            i, size, end = np.uint64(done[rank]), np.uint64(addresses[rank, 2]), start + region
            while i < size and indices[i] < end:  # unsigned indices need no test for counting from the end
                piece[np.uint64(indices[i] - start)] += values[i]
                i += np.uint64(1)
            done[rank] = i
        if aside.size and inverse:
            _stream(piece, goal, inverse)
        else:
            divide(piece, ranks, inverse)
            if aside.size:
                _stream(piece, goal, np.float32(1))
    wait_for_streams()


@kernel
def _stream(piece: Any, goal: Any, factor: Any) -> None:
    """Write a piece times a factor past the caches, but for what does not fill lines of 64 bytes."""
    before = -goal.ctypes.data % 64
    # from an odd address, no line begins at a float
    head = goal.size if before % 4 else min(goal.size, before // 4)
    whole = (goal.size - head) // 32 * 32
    for i in range(head):
        goal[i] = piece[i] * factor
    for i in range(head, head + whole, 32):
        stream_32(goal, i, piece, i, factor)
    for i in range(head + whole, goal.size):
        goal[i] = piece[i] * factor
