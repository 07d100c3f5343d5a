"""The dense mean of sparse vectors on the CPU: one pass over the result, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stenograd.errors import WireError
from stenograd.kernels.cpu.jit import aligned, array_at, divide, kernel, one_over, view

__all__ = ["scatter_mean"]

_REGION = 8192  # elements of the result that are finished at a time, in the first-level cache


def scatter_mean(vectors: Sequence[tuple[Tensor, Tensor]], n: int, out: Tensor | None = None) -> Tensor:
    """Add sparse vectors in rank order and divide by their number."""
    total = torch.empty(n) if out is None else out
    ascending = True
    for places, values in vectors:
        lowest, highest, sorted_ = _extent(view(places.contiguous()))
        if places.numel() and not (lowest >= 0 and highest < n):
            raise WireError(f"places lie in [0, {n}), got {lowest} to {highest}")
        if places.numel() != values.numel():
            raise WireError(f"{places.numel()} places came with {values.numel()} values")
        ascending &= sorted_
    everyone = [(aligned(p.to(torch.int32)), aligned(v.to(torch.float32))) for p, v in vectors]
    addresses = np.array([[p.data_ptr(), v.data_ptr(), p.numel()] for p, v in everyone], np.int64)
    _mean(
        addresses,
        np.zeros(len(everyone), np.int64),
        view(total),
        _REGION if ascending else n,
        one_over(len(vectors)),
    )
    return total


@kernel
def _extent(places: Any) -> tuple[int, int, bool]:
    """Return the least place, the greatest, and whether all are in order."""
    if places.size == 0:
        return np.int64(0), np.int64(-1), True
    lowest = highest = places[0]
    ordered = True
    for i in range(1, places.size):
        lowest, highest = min(lowest, places[i]), max(highest, places[i])
        ordered &= places[i] >= places[i - 1]
    return np.int64(lowest), np.int64(highest), ordered


@kernel
def _mean(addresses: Any, done: Any, out: Any, region: int, inverse: Any) -> None:
    """Finish the result region by region; `done` counts what was used of each rank's sorted places."""
    ranks = addresses.shape[0]
    for start in range(0, out.size, max(region, 1)):
        piece = out[start : start + region]
        piece[:] = 0
        for rank in range(ranks):
            size = addresses[rank, 2]
            places = array_at(addresses[rank, 0], size, np.int32)
            values = array_at(addresses[rank, 1], size, np.float32)
            i = done[rank]
            while i < size and places[i] < start + region:
                out[np.uint64(places[i])] += values[i]
                i += 1
            done[rank] = i
        divide(piece, ranks, inverse)
