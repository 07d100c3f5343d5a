"""Orthonormal columns with the same bits on every rank."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from stenograd.errors import ConfigError
from stenograd.kernels.lowrank import orthonormal

__all__ = ["orthogonalize"]

# A column is degenerate if this share of it, or less, is left once the earlier columns are taken out. Far
# above float64's rounding (2e-16), far below any direction that float32 input can hold on purpose (6e-8).
_DEGENERATE = 1e-12


def orthogonalize(p: Tensor) -> Tensor:
    """Replace the columns by orthonormal ones that span the same space: `Q^T Q = I`, `Q Q^T P = P`.

    Gram-Schmidt in float64, each column projected twice. Where a column is zero or depends on the earlier
    ones, a pseudo-random column (always the same) takes its place, so Q has full rank for every input. Only
    elementwise operations and short reductions are used: LAPACK and BLAS sum in an order that depends on
    the number of threads, and ranks that disagree in the last bit drift apart.

    Args:
        p: shape (..., n, r) with r <= n, floating.

    Raises:
        ConfigError: r > n, or fewer than two dimensions.

    Example:
        >>> orthogonalize(torch.tensor([[3.0, 1.0], [4.0, 1.0]]))
        tensor([[ 0.6000,  0.8000],
                [ 0.8000, -0.6000]])

    Reference: Giraud et al., "Rounding error analysis of the classical Gram-Schmidt process", 2005 ("twice
    is enough").
    """
    if p.ndim < 2 or p.shape[-1] > p.shape[-2]:
        rule = "must have shape (..., n, r) with r <= n"
        raise ConfigError(f"p {rule}, got {tuple(p.shape)}: lower the rank or transpose")
    *batch, n, r = p.shape
    columns = _scaled(p.reshape(math.prod(batch), n, r).mT.double().contiguous())  # (b, r, n)
    spare = _pseudo_random(r, n, p.device)
    q = orthonormal(columns, spare, _DEGENERATE)
    return q.mT.reshape(*batch, n, r).to(p.dtype)


def _scaled(columns: Tensor) -> Tensor:
    """Divide every column by its largest magnitude, so that no square overflows or vanishes."""
    if not columns.numel():
        return columns
    largest = columns.abs().amax(-1, keepdim=True)
    return columns / torch.where(largest > 0, largest, 1.0)


@lru_cache(maxsize=64)
def _pseudo_random(r: int, n: int, device: torch.device) -> Tensor:
    """Return r rows of n uniform numbers from a generator of its own."""
    generator = torch.Generator(device="cpu").manual_seed(0x6C61636F)
    # drawn there: equal for all devices
    rows = torch.rand(r, n, generator=generator, dtype=torch.float64, device="cpu") * 2 - 1
    return rows.to(device)
