"""The two projections of a low-rank approximation on the CPU, each one pass over the matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stenograd.kernels.cpu.jit import CHUNK, kernel, reordering, view
from stenograd.kernels.lowrank import Factors, Place

__all__ = ["expand", "orthonormal", "project_columns", "project_rows", "take_out"]

_NONE = np.empty(0, np.float32)


def project_rows(x: Tensor, addend: Tensor | None, place: Place, queries: Tensor) -> Tensor:
    """Add in place, then multiply the matrices by thin ones."""
    # (count, r, n)
    out = torch.empty(queries.shape[0], queries.shape[1], place[3], dtype=torch.float32, device="cpu")
    _rows(view(x), _NONE if addend is None else view(addend), place, view(queries.contiguous()), view(out))
    return out


def project_columns(x: Tensor, place: Place, factors: Tensor) -> Tensor:
    """Multiply thin matrices by the matrices."""
    # (count, r, m), zeros because products are added to it.
    out = torch.zeros(factors.shape[0], factors.shape[1], place[4], dtype=torch.float32, device="cpu")
    _columns(view(x), place, view(factors.contiguous()), view(out))
    return out


def expand(average: Tensor, place: Place, factors: Factors) -> None:
    """Write products of thin matrices."""
    left, right = factors
    _expand(view(average), place, view(left.contiguous()), view(right.contiguous()), True)


def take_out(x: Tensor, place: Place, factors: Factors) -> None:
    """Subtract products of thin matrices."""
    left, right = factors
    # Negated while thin, so that one kernel both adds and subtracts.
    _expand(view(x), place, view((-left).contiguous()), view(right.contiguous()), False)


def orthonormal(rows: Tensor, spare: Tensor, degenerate: float) -> Tensor:
    """Make rows orthonormal in order; see `kernels.lowrank.orthonormal`."""
    out = torch.empty_like(rows)
    _orthonormal(view(rows), view(spare), degenerate, view(out))
    return out


@reordering
def _rows(x: Any, addend: Any, place: Any, queries: Any, out: Any) -> None:
    start, stride, count, rows, columns = place
    step = _rows_at_once(columns)
    # Only `_by_four` adds while it multiplies; wide rows are left to `_four_by_four`, which does not.
    fused = columns <= CHUNK and queries.shape[1] >= 4
    for c in range(count):
        for i in range(0, rows, step):
            here, first = min(step, rows - i), start + c * stride + i * columns
            piece, more = x[first : first + here * columns], addend[first : first + here * columns]
            if more.size and not fused:
                for j in range(piece.size):
                    piece[j] += more[j]
                more = more[:0]
            for k in range(0, queries.shape[1], 4):
                _dots(piece, more, queries[c, k : k + 4], out[c, k : k + 4, i : i + here])
                more = more[:0]  # it is added once


@kernel
def _columns(x: Any, place: Any, factors: Any, out: Any) -> None:
    start, stride, count, rows, columns = place
    for c in range(count):
        first = start + c * stride
        m = x[first : first + rows * columns].reshape((rows, columns))
        for i in range(0, rows, 4):
            for k in range(0, factors.shape[1], 4):
                _add_products(out[c, k : k + 4], factors[c, k : k + 4, i : i + 4], m[i : i + 4], False)


@kernel
def _expand(out: Any, place: Any, left: Any, right: Any, fresh: bool) -> None:
    """Add products, or write them; every element is the same sum, in the same order, on every rank."""
    start, stride, count, rows, columns = place
    step = _rows_at_once(columns)
    for c in range(count):
        first = start + c * stride
        m = out[first : first + rows * columns].reshape((rows, columns))
        for i in range(0, rows, step):
            for k in range(0, left.shape[1], 4):
                weights, others = left[c, k : k + 4, i : i + step].T, right[c, k : k + 4]
                _add_products(m[i : i + step], weights, others, fresh and k == 0)


@kernel
def _rows_at_once(columns: int) -> int:
    """Return 4 where four thin rows fill the first-level cache, so that one reading must serve four rows.

    Shorter rows come from memory faster one after the other; several in one call, which takes its time.
    """
    return 4 if columns > CHUNK else 16


@reordering
def _dots(piece: Any, more: Any, queries: Any, out: Any) -> None:
    """Multiply rows by up to four queries, `out[k, i]` being row i by query k.

    Where there is more, it is added first: while four queries are read in the same pass.
    """
    count, columns = queries.shape
    rows = piece.reshape((out.shape[1], columns))
    if count < 4:
        for k in range(count):
            query = queries[k]
            for i in range(rows.shape[0]):
                row, total = rows[i], np.float32(0)
                for j in range(columns):
                    total += row[j] * query[j]
                out[k, i] = total
    elif rows.shape[0] == 4 and not more.size:
        _four_by_four(rows, queries, out)
    else:
        _by_four(rows, more, queries, out)


@reordering
def _by_four(rows: Any, more: Any, queries: Any, out: Any) -> None:
    a, b, c, d = queries[0], queries[1], queries[2], queries[3]
    for i in range(rows.shape[0]):
        row, added = rows[i], more[i * a.size : (i + 1) * a.size]
        ta, tb, tc, td = np.float32(0), np.float32(0), np.float32(0), np.float32(0)
        if added.size:
            for j in range(a.size):
                v = row[j] + added[j]
                row[j] = v
                ta, tb, tc, td = ta + v * a[j], tb + v * b[j], tc + v * c[j], td + v * d[j]
        else:
            for j in range(a.size):
                v = row[j]
                ta, tb, tc, td = ta + v * a[j], tb + v * b[j], tc + v * c[j], td + v * d[j]
        out[0, i], out[1, i], out[2, i], out[3, i] = ta, tb, tc, td


@reordering
def _four_by_four(rows: Any, queries: Any, out: Any) -> None:
    a, b, c, d = queries[0], queries[1], queries[2], queries[3]
    p, q, r, s = rows[0], rows[1], rows[2], rows[3]
    zero = np.float32(0)
    pa, pb, pc, pd, qa, qb, qc, qd = zero, zero, zero, zero, zero, zero, zero, zero
    ra, rb, rc, rd, sa, sb, sc, sd = zero, zero, zero, zero, zero, zero, zero, zero
    for j in range(a.size):
        aj, bj, cj, dj = a[j], b[j], c[j], d[j]
        v = p[j]
        pa, pb, pc, pd = pa + v * aj, pb + v * bj, pc + v * cj, pd + v * dj
        v = q[j]
        qa, qb, qc, qd = qa + v * aj, qb + v * bj, qc + v * cj, qd + v * dj
        v = r[j]
        ra, rb, rc, rd = ra + v * aj, rb + v * bj, rc + v * cj, rd + v * dj
        v = s[j]
        sa, sb, sc, sd = sa + v * aj, sb + v * bj, sc + v * cj, sd + v * dj
    out[0, 0], out[1, 0], out[2, 0], out[3, 0] = pa, pb, pc, pd
    out[0, 1], out[1, 1], out[2, 1], out[3, 1] = qa, qb, qc, qd
    out[0, 2], out[1, 2], out[2, 2], out[3, 2] = ra, rb, rc, rd
    out[0, 3], out[1, 3], out[2, 3], out[3, 3] = sa, sb, sc, sd


@kernel
def _add_products(rows: Any, weights: Any, others: Any, fresh: bool) -> None:
    """Add `weights @ others` to rows, from up to four others; `fresh`: write it instead."""
    if others.shape[0] < 4:
        for i in range(rows.shape[0]):
            row = rows[i]
            if fresh:
                row[:] = 0
            for k in range(others.shape[0]):
                weight, other = weights[i, k], others[k]
                for j in range(row.size):
                    row[j] += weight * other[j]
    elif rows.shape[0] == 4:
        _add_four_to_four(rows, weights, others, fresh)
    else:
        _add_four(rows, weights, others, fresh)


@kernel
def _add_four(rows: Any, weights: Any, others: Any, fresh: bool) -> None:
    a, b, c, d = others[0], others[1], others[2], others[3]
    for i in range(rows.shape[0]):
        row, wa, wb, wc, wd = rows[i], weights[i, 0], weights[i, 1], weights[i, 2], weights[i, 3]
        if fresh:
            for j in range(a.size):
                # Grouped as in `_add_four_to_four`: which of the two runs depends on the rows that are left,
                # and bits must not.
                row[j] = (wa * a[j] + wb * b[j]) + (wc * c[j] + wd * d[j])
        else:
            for j in range(a.size):
                row[j] += (wa * a[j] + wb * b[j]) + (wc * c[j] + wd * d[j])


@kernel
def _add_four_to_four(rows: Any, weights: Any, others: Any, fresh: bool) -> None:
    a, b, c, d = others[0], others[1], others[2], others[3]
    p, q, r, s = rows[0], rows[1], rows[2], rows[3]
    # As numbers of their own: in an array they could be in a row, for all that the compiler knows.
    pa, pb, pc, pd = weights[0, 0], weights[0, 1], weights[0, 2], weights[0, 3]
    qa, qb, qc, qd = weights[1, 0], weights[1, 1], weights[1, 2], weights[1, 3]
    ra, rb, rc, rd = weights[2, 0], weights[2, 1], weights[2, 2], weights[2, 3]
    sa, sb, sc, sd = weights[3, 0], weights[3, 1], weights[3, 2], weights[3, 3]
    for j in range(a.size):
        aj, bj, cj, dj = a[j], b[j], c[j], d[j]
        pj = (pa * aj + pb * bj) + (pc * cj + pd * dj)
        qj = (qa * aj + qb * bj) + (qc * cj + qd * dj)
        rj = (ra * aj + rb * bj) + (rc * cj + rd * dj)
        sj = (sa * aj + sb * bj) + (sc * cj + sd * dj)
        if fresh:
            p[j], q[j], r[j], s[j] = pj, qj, rj, sj
        else:
            p[j] += pj
            q[j] += qj
            r[j] += rj
            s[j] += sj


@kernel
def _orthonormal(rows: Any, spare: Any, degenerate: float, out: Any) -> None:
    for c in range(rows.shape[0]):
        for k in range(rows.shape[1]):
            row = out[c, k]
            row[:] = rows[c, k]
            before = np.sqrt(_dot(row, row))
            _take_out(out[c], k)
            after = np.sqrt(_dot(row, row))
            if not after > degenerate * before:  # NaN, too
                # Not tested again: a random row does not lie in the span of fewer than n others.
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
