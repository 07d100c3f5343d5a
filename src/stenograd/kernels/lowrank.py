"""Kernels of low-rank approximation: matrices at equal distances in a flat tensor, and thin factors."""

from __future__ import annotations

import torch
from torch import Tensor

from stenograd.kernels.backend import pick, present

__all__ = ["Factors", "Place", "expand", "orthonormal", "project_columns", "project_rows", "take_out"]

# Where matrices lie in a flat tensor: the first one's start, the distance of their starts, how many they are,
# rows and columns; in elements.
Place = tuple[int, int, int, int, int]


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
    out: Tensor = pick("lowrank", "project_rows", x, *present(addend))(x, addend, place, queries)
    return out


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
    out: Tensor = pick("lowrank", "project_columns", x)(x, place, factors)
    return out


# The thin matrices of a product `P Q^T`, as `P^T` and `Q^T`: shapes (count, r, rows) and (count, r, columns).
Factors = tuple[Tensor, Tensor]


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
    pick("lowrank", "expand", average)(average, place, factors)


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
    pick("lowrank", "take_out", x)(x, place, factors)


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
    integers = rows.view(torch.int64)  # numba is used for float32 and for integers
    out: Tensor = pick("lowrank", "orthonormal", integers)(rows, spare, degenerate)
    return out
