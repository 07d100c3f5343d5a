"""The two projections of a low-rank approximation in plain torch: what the CPU's version must agree with."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stenograd.kernels.lowrank import Factors, Place

__all__ = ["expand", "orthonormal", "project_columns", "project_rows", "row_sums", "take_out"]


def project_rows(x: Tensor, addend: Tensor | None, place: Place, queries: Tensor) -> Tensor:
    """Add in place, then multiply the matrices by thin ones."""
    m = _matrices(x, place)
    if addend is not None:
        m.add_(_matrices(addend, place))
    return queries @ m.mT  # (count, r, rows): several times as fast as M Q


def project_columns(x: Tensor, place: Place, factors: Tensor) -> Tensor:
    """Multiply thin matrices by the matrices."""
    return factors @ _matrices(x, place)


def expand(average: Tensor, place: Place, factors: Factors) -> None:
    """Write products of thin matrices."""
    torch.bmm(factors[0].mT, factors[1], out=_matrices(average, place))


def take_out(x: Tensor, place: Place, factors: Factors) -> None:
    """Subtract products of thin matrices."""
    _matrices(x, place).baddbmm_(factors[0].mT, factors[1], alpha=-1)


def orthonormal(rows: Tensor, spare: Tensor, degenerate: float) -> Tensor:
    """Make rows orthonormal in order; see `linalg.orthogonalize`."""
    q = torch.empty_like(rows)
    for j in range(rows.shape[1]):
        # The spare row goes along, so that no branch has to ask a device which of the two counts.
        pair = torch.stack([rows[:, j], spare[j].expand_as(rows[:, j])], 1)  # (count, 2, n)
        before = _norm(pair)
        for _ in range(2 if j else 0):
            shares = row_sums(pair[:, :, None] * q[:, None, :j])  # (count, 2, j)
            pair = pair - (shares[..., None] * q[:, None, :j]).sum(2)
        after = _norm(pair)
        good = after[:, :1] > degenerate * before[:, :1]
        chosen = torch.where(good, pair[:, 0], pair[:, 1])
        q[:, j] = chosen / torch.where(good, after[:, :1], after[:, 1:])
    return q


def _matrices(flat: Tensor, place: Sequence[int]) -> Tensor:
    start, stride, count, rows, columns = place
    return flat.as_strided((count, rows, columns), (stride, columns, 1), flat.storage_offset() + start)


# Rows that one torch reduction adds: longer ones may be split by the number of threads, which changes bits.
_ROWS = 1024


def _norm(rows: Tensor) -> Tensor:
    return row_sums(rows * rows).sqrt()


def row_sums(rows: Tensor) -> Tensor:
    """Sum over the last dimension in an order that does not depend on the number of threads.

    Example:
        >>> row_sums(torch.ones(2, 3000))
        tensor([3000., 3000.])
    """
    n = rows.shape[-1]
    if n <= _ROWS:
        return rows.sum(-1)
    whole = n // _ROWS * _ROWS
    parts = rows[..., :whole].unflatten(-1, (-1, _ROWS)).sum(-1)
    return row_sums(parts) + rows[..., whole:].sum(-1)
