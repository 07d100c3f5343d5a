"""Low-rank approximation: matrices at equal distances in a flat tensor, and thin factors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stenograd.kernels.backend import pick, present

__all__ = [
    "Factors",
    "Place",
    "expand",
    "orthonormal",
    "project_columns",
    "project_rows",
    "row_sums",
    "take_out",
]

# Where matrices lie in a flat tensor: the first one's start, the distance of their starts, how many they are,
# rows and columns; in elements.
Place = tuple[int, int, int, int, int]
# The thin matrices of a product `P Q^T`, as `P^T` and `Q^T`: shapes (count, r, rows) and (count, r, columns).
Factors = tuple[Tensor, Tensor]


def project_rows(x: Tensor, addend: Tensor | None, place: Place, queries: Tensor) -> Tensor:
    """Return `(M Q)^T` for each matrix M of x, in one pass that also adds: `M <- M + R`.

    Args:
        x: flat; its matrices are changed.
        addend: flat like x and not changed, or None.
        place: where the matrices are.
        queries: shape (count, r, columns), `Q^T` of each.

    Returns:
        Shape (count, r, rows).

    Example:
        >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0])
        >>> project_rows(x, torch.ones(4), (0, 4, 1, 2, 2), torch.ones(1, 1, 2)), x
        (tensor([[[5., 9.]]]), tensor([2., 3., 4., 5.]))
    """
    fast = pick(project_rows, x, *present(addend))
    if fast is not None:
        return fast(x, addend, place, queries)
    m = _matrices(x, place)
    if addend is not None:
        m.add_(_matrices(addend, place))
    return queries @ m.mT  # (count, r, rows): several times as fast as M Q


def project_columns(x: Tensor, place: Place, factors: Tensor) -> Tensor:
    """Return `P^T M` for each matrix M of x.

    Args:
        x: flat; left alone.
        place: where the matrices are.
        factors: shape (count, r, rows), `P^T` of each.

    Returns:
        Shape (count, r, columns).

    Example:
        >>> project_columns(torch.tensor([1.0, 2.0, 3.0, 4.0]), (0, 4, 1, 2, 2), torch.ones(1, 1, 2))
        tensor([[[4., 6.]]])
    """
    fast = pick(project_columns, x)
    if fast is not None:
        return fast(x, place, factors)
    return factors @ _matrices(x, place)


def expand(average: Tensor, place: Place, factors: Factors) -> None:
    """Write `P Q^T` where the matrices are.

    Args:
        average: flat, changed.
        place: where the matrices are.
        factors: of each matrix.

    Example:
        >>> average, thin = torch.zeros(4), torch.ones(1, 1, 2)
        >>> expand(average, (0, 4, 1, 2, 2), (thin, 2 * thin))
        >>> average
        tensor([2., 2., 2., 2.])
    """
    fast = pick(expand, average)
    if fast is not None:
        return fast(average, place, factors)
    out, (p, q) = _matrices(average, place), factors
    if not out.is_cpu:
        torch.bmm(p.mT, q, out=out)
        return None
    # Each rank does this for itself. Libraries add products in another order, and with or without rounding
    # between the two operations, on processors of another kind; single operations are the same on all.
    wide = torch.promote_types(out.dtype, torch.float32)
    total = p[:, 0, :, None].to(wide) * q[:, 0, None, :].to(wide)
    for j in range(1, p.shape[1]):
        total.add_(p[:, j, :, None].to(wide) * q[:, j, None, :].to(wide))
    out.copy_(total)
    return None


def take_out(x: Tensor, place: Place, factors: Factors) -> None:
    """Subtract `P Q^T` from each matrix: `M <- M - P Q^T`.

    Args:
        x: flat, changed.
        place: where the matrices are.
        factors: of each matrix.

    Example:
        >>> x, thin = torch.ones(4), torch.ones(1, 1, 2)
        >>> take_out(x, (0, 4, 1, 2, 2), (thin, thin))
        >>> x
        tensor([0., 0., 0., 0.])
    """
    fast = pick(take_out, x)
    if fast is not None:
        return fast(x, place, factors)
    _matrices(x, place).baddbmm_(factors[0].mT, factors[1], alpha=-1)
    return None


def orthonormal(rows: Tensor, spare: Tensor, degenerate: float) -> Tensor:
    """Make rows orthonormal, in order; one that depends on those before it gives way to a spare one.

    Args:
        rows: float64, shape (count, r, n).
        spare: float64, shape (r, n).
        degenerate: the share of a row's length that must be left for it to count.

    Example:
        >>> rows = torch.tensor([[[3.0, 4.0], [1.0, 1.0]]], dtype=torch.float64)
        >>> orthonormal(rows, torch.eye(2, dtype=torch.float64), 1e-12).round(decimals=3)
        tensor([[[ 0.6000,  0.8000],
                 [ 0.8000, -0.6000]]], dtype=torch.float64)
    """
    fast = pick(orthonormal, rows.view(torch.int64))  # numba is used for float32 and integers
    if fast is not None:
        return fast(rows, spare, degenerate)
    q = torch.empty_like(rows)
    for j in range(rows.shape[1]):
        # The spare row goes along, so that no branch has to ask a device which of the two counts.
        pair = torch.stack([rows[:, j], spare[j].expand_as(rows[:, j])], 1)  # (count, 2, n)
        before = _norm(pair)
        for _ in range(2 if j else 0):  # twice: once leaves what rounding brought back
            shares = row_sums(pair[:, :, None] * q[:, None, :j])  # (count, 2, j)
            pair = pair - (shares[..., None] * q[:, None, :j]).sum(2)
        after = _norm(pair)
        good = after[:, :1] > degenerate * before[:, :1]
        chosen = torch.where(good, pair[:, 0], pair[:, 1])
        q[:, j] = chosen / torch.where(good, after[:, :1], after[:, 1:])
    return q


def _matrices(flat: Tensor, place: Sequence[int]) -> Tensor:
    start, stride, count, rows, columns = place
    # `as_strided` counts from where the storage begins, not from where the tensor does.
    return flat.as_strided((count, rows, columns), (stride, columns, 1), flat.storage_offset() + start)


# Rows that one torch reduction adds on a GPU: longer ones may be split in ways that change bits.
_ROWS = 1024


def _norm(rows: Tensor) -> Tensor:
    return row_sums(rows * rows).sqrt()


def row_sums(rows: Tensor) -> Tensor:
    """Sum over the last dimension in an order that depends on neither threads nor the kind of processor.

    Example:
        >>> row_sums(torch.ones(2, 3000))
        tensor([3000., 3000.])
    """
    n = rows.shape[-1]
    if rows.device.type != "cpu":  # there every launch takes its time
        if n <= _ROWS:
            return rows.sum(-1)
        whole = n // _ROWS * _ROWS
        parts = rows[..., :whole].unflatten(-1, (-1, _ROWS)).sum(-1)
        return row_sums(parts) + rows[..., whole:].sum(-1)
    # Halves are added element by element: a library's reduction goes by the width of the processor's vectors.
    while n > 1:
        half = n // 2
        rows, rest = rows[..., :half] + rows[..., half : 2 * half], rows[..., 2 * half :]
        rows[..., : n % 2] += rest
        n = half
    return rows[..., 0] if n else rows.sum(-1)
