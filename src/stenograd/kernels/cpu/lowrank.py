"""The two projections of a low-rank approximation on the CPU, each one pass over the matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stenograd.kernels.cpu.jit import kernel, reordering, view
from stenograd.kernels.lowrank import Factors, Place

__all__ = ["expand", "orthonormal", "project_columns", "project_rows"]

_NONE = np.empty(0, np.float32)


def project_rows(x: Tensor, addend: Tensor | None, place: Place, queries: Tensor) -> Tensor:
    """Add in place, then multiply the matrices by thin ones."""
    out = torch.empty(queries.shape[0], queries.shape[1], place[3])
    _rows(view(x), _NONE if addend is None else view(addend), place, view(queries.contiguous()), view(out))
    return out


def project_columns(x: Tensor, place: Place, factors: Tensor) -> Tensor:
    """Multiply thin matrices by the matrices."""
    out = torch.zeros(factors.shape[0], factors.shape[1], place[4])
    _columns(view(x), place, view(factors.contiguous()), view(out))
    return out


def expand(x: Tensor | None, average: Tensor, place: Place, mine: Factors, mean: Factors) -> None:
    """Take one product of thin matrices from x and write the other."""
    thin = [view(t.contiguous()) for t in (*mine, *mean)]
    _expand(_NONE if x is None else view(x), view(average), place, *thin)


def orthonormal(rows: Tensor, spare: Tensor, degenerate: float) -> Tensor:
    """Make rows orthonormal in order; see `linalg.orthogonalize`."""
    out = torch.empty_like(rows)
    _orthonormal(view(rows), view(spare), degenerate, view(out))
    return out


@reordering
def _rows(x: Any, addend: Any, place: Any, queries: Any, out: Any) -> None:
    start, stride, count, rows, columns = place
    for c in range(count):
        for i in range(rows):
            first = start + c * stride + i * columns
            row = x[first : first + columns]
            if addend.size:
                more = addend[first : first + columns]
                for j in range(columns):
                    row[j] += more[j]
            for k in range(queries.shape[1]):
                query, total = queries[c, k], np.float32(0)
                for j in range(columns):
                    total += row[j] * query[j]
                out[c, k, i] = total


@reordering
def _columns(x: Any, place: Any, factors: Any, out: Any) -> None:
    """Four rows at a time, so that what is added up is read and written less often."""
    start, stride, count, rows, columns = place
    for c in range(count):
        base = start + c * stride
        for i in range(0, rows, 4):
            here = min(4, rows - i)
            for k in range(factors.shape[1]):
                weight, total = factors[c, k], out[c, k]
                if here == 4:
                    at = base + i * columns
                    a, b = x[at : at + columns], x[at + columns : at + 2 * columns]
                    d, e = x[at + 2 * columns : at + 3 * columns], x[at + 3 * columns : at + 4 * columns]
                    wa, wb, wd, we = weight[i], weight[i + 1], weight[i + 2], weight[i + 3]
                    for j in range(columns):
                        total[j] += (wa * a[j] + wb * b[j]) + (wd * d[j] + we * e[j])
                else:
                    for more in range(here):
                        at = base + (i + more) * columns
                        row, w = x[at : at + columns], weight[i + more]
                        for j in range(columns):
                            total[j] += w * row[j]


@kernel
def _expand(x: Any, average: Any, place: Any, left: Any, right: Any, mean_left: Any, mean_right: Any) -> None:
    """Row by row; every element of the average is the same sum, in the same order, on every rank."""
    start, stride, count, rows, columns = place
    for c in range(count):
        for i in range(rows):
            first = start + c * stride + i * columns
            row = average[first : first + columns]
            row[:] = 0
            for k in range(left.shape[1]):
                weight, other = mean_left[c, k, i], mean_right[c, k]
                for j in range(columns):
                    row[j] += weight * other[j]
            if x.size:
                row = x[first : first + columns]
                for k in range(left.shape[1]):
                    weight, other = left[c, k, i], right[c, k]
                    for j in range(columns):
                        row[j] -= weight * other[j]


@kernel
def _orthonormal(rows: Any, spare: Any, degenerate: float, out: Any) -> None:
    for c in range(rows.shape[0]):
        for k in range(rows.shape[1]):
            row = out[c, k]
            row[:] = rows[c, k]
            before = np.sqrt(_dot(row, row))
            _take_out(out[c], k)
            after = np.sqrt(_dot(row, row))
            if not after > degenerate * before:
                row[:] = spare[k]
                _take_out(out[c], k)
                after = np.sqrt(_dot(row, row))
            for i in range(row.size):
                row[i] /= after


@kernel
def _take_out(rows: Any, k: int) -> None:
    """Take the earlier rows out of row k, twice: after that it is orthogonal to them to rounding."""
    for _ in range(2):
        for before in range(k):
            share = _dot(rows[k], rows[before])
            for i in range(rows.shape[1]):
                rows[k, i] -= share * rows[before, i]


@kernel
def _dot(a: Any, b: Any) -> Any:
    """Add in eight strands, in an order that depends on the length only."""
    whole = a.size - a.size % 8
    strands = np.zeros(8)
    for i in range(0, whole, 8):
        for j in range(8):
            strands[j] += a[i + j] * b[i + j]
    total = 0.0
    for j in range(8):
        total += strands[j]
    for i in range(whole, a.size):
        total += a[i] * b[i]
    return total
