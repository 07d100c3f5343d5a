"""Selection on the CPU: one pass adds the residual and compacts candidates, and only those are ranked.

A magnitude is compared by its bits, as an integer, so that NaN has its place in the order: above infinity.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stenograd.kernels.cpu.jit import CHUNK, bits_of, kernel, view
from stenograd.kernels.cpu.lanes import at_least_32, bit_count, lowest_bit, sum_at_least_32
from stenograd.kernels.cpu.scatter import put_at

__all__ = ["select", "select_feedback"]

_SAMPLE = 16384  # magnitudes from which a bound is guessed; a third as many cost 0.1 ms less of 5
_NEIGHBOURS = 4  # that are looked at together: the memory is read by lines, and four guess as well as one
_NONE = np.empty(0, np.float32)


def select_feedback(x: Tensor, residual: Tensor, k: int, halves: bool) -> tuple[Tensor, Tensor]:
    """Take the k largest of `x + residual` and leave the rest in residual."""
    return _largest(view(x), view(residual), k, clear=True, halves=halves)


def select(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest and their indices, ascending."""
    return _largest(_NONE, view(x), k, clear=False, halves=False)


def _largest(addend: Any, v: Any, k: int, *, clear: bool, halves: bool) -> tuple[Tensor, Tensor]:
    """Add `addend` to v unless it is empty, and return the k largest.

    With `clear` they are taken out of v, where nothing of them is left, or with `halves` what bfloat16 loses.
    """
    n = v.size
    indices, values = _room(k)
    last = None
    # Else a guess does not pay: the sample is half of all, or candidates are a sixteenth or more.
    if n >= 2 * _SAMPLE and 0 < k <= n // 16:
        sample = _sampled(addend, v, n // (_SAMPLE // _NEIGHBOURS) | 1)
        expected = k / n * sample.size
        reach = math.ceil(expected + 3.5 * math.sqrt(expected)) + 4  # k or more, but for 1 in 4,000
        bound = max(np.uint32(_kth(sample, reach, np.uint32(0))[0]), np.uint32(1))  # 0 would take all zeros
        room = 3 * k + n // 256  # more means a wrong guess, which costs time only
        some, other = _room(room + CHUNK)
        count = _sweep(addend, v, bound, clear, halves, room, some, other)
        some, other = some[:count], other[:count]
        if k <= count < room:
            kept = _choose(some, other, *_kth(other, k, bound), v, clear)
            indices[:], values[:] = some[:kept], other[:kept]
            return torch.from_numpy(indices), torch.from_numpy(values)
        # What was taken out goes back before all are ranked.
        if clear:
            put_at(some, other, v)
        if count < k and bound == 1:  # all but a few are zeros
            last = np.uint32(0), k - count
    elif addend.size:
        _add(addend, v)
    bound, ties = last or _kth(v, k, np.uint32(0))
    _take(v, bound, ties, clear, halves, indices, values)
    return torch.from_numpy(indices), torch.from_numpy(values)


def _room(size: int) -> tuple[Any, Any]:
    return np.empty(size, np.int32), np.empty(size, np.float32)


@kernel
def _sampled(addend: Any, v: Any, stride: int) -> Any:
    """Return the sum at every stride-th place, and at the next ones; v is longer than a stride."""
    indices = (v.size - _NEIGHBOURS) // stride + 1
    out = np.empty(_NEIGHBOURS * indices, np.float32)
    for j in range(indices):
        for beside in range(_NEIGHBOURS):
            i = np.uint64(j * stride + beside)
            out[j * _NEIGHBOURS + beside] = v[i] + addend[i] if addend.size else v[i]
    return out


@kernel
def _add(addend: Any, v: Any) -> None:
    for i in range(addend.size):
        v[i] += addend[i]


@kernel
def _sweep(
    addend: Any, v: Any, bound: Any, clear: bool, halves: bool, room: int, indices: Any, values: Any
) -> Any:
    """Add, and write down what is at least the bound until the room is full; return how many that were.

    What is written down is taken out of v if `clear`. There is place for `CHUNK` more than `room`.
    """
    hits = np.empty(CHUNK // 64, np.uint64)
    count = np.int64(0)
    for start in range(0, v.size, CHUNK):
        if count >= room:
            # The guess was wrong. All is ranked anew, so the rest needs its sum as well.
            _add(addend[start:], v[start:])
            break
        before, stop = count, min(start + CHUNK, v.size)
        _mark(addend, v, start, stop, bound, hits.view(np.uint32))
        count = _written(hits, start, indices, count)
        for i in range(before, count):
            at = np.uint64(indices[np.uint64(i)])  # an unsigned index needs no test for counting from the end
            values[np.uint64(i)] = v[at]
            if clear:
                v[at] = _left(v[at], halves)
    return count


@kernel
def _left(value: Any, halves: bool) -> Any:
    """Return what is left of a value that is sent: nothing, or what rounding to nearest even loses."""
    if not halves:
        return np.float32(0)
    bits = np.float32(value).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
    return value - np.uint32(rounded).view(np.float32)


@kernel
def _mark(addend: Any, v: Any, start: int, stop: int, bound: Any, hits: Any) -> None:
    """Add, and set one bit for each of `CHUNK` elements or fewer that is at least the bound."""
    whole = (stop - start) // 32
    if addend.size:
        for i in range(whole):
            hits[i] = sum_at_least_32(v, addend, start + 32 * i, bound)
        for i in range(start + 32 * whole, stop):
            v[i] += addend[i]
    else:
        for i in range(whole):
            hits[i] = at_least_32(v, start + 32 * i, bound)
    for i in range(whole, hits.size):
        hits[i] = _at_least(v[start + 32 * i : stop], bound) if start + 32 * i < stop else np.uint32(0)


@kernel
def _written(hits: Any, first: int, indices: Any, count: Any) -> Any:
    """Write down where bits are set, and return the new count.

    Four are written for every 64 bits, whether set or not: what is beyond the count is written over. So there
    is nothing to mispredict where elements are few, as they are.
    """
    for i in range(hits.size):
        word = hits[i]
        start, end = np.uint64(count), count + bit_count(word)
        base = first + 64 * i
        for j in range(4):
            indices[start + np.uint64(j)] = base + lowest_bit(word)
            word &= word - np.uint64(1)
        at = start + np.uint64(4)
        while word:
            indices[at] = base + lowest_bit(word)
            word &= word - np.uint64(1)
            at += np.uint64(1)
        count = end
    return count


@kernel
def _take(v: Any, bound: Any, ties: int, clear: bool, halves: bool, indices: Any, values: Any) -> None:
    """Write down what is above the bound and the first `ties` at it, which are as many as there is room."""
    count = 0
    whole = v.size - v.size % 32
    for i in range(0, v.size, 32):
        least = bound + np.uint32(ties == 0)
        word = at_least_32(v, i, least) if i < whole else _at_least(v[whole:], least)
        while word:
            at = np.uint64(i + lowest_bit(word))
            word &= word - np.uint32(1)
            equal = bits_of(v[at]) == bound
            if not equal or ties:
                ties -= equal
                indices[count], values[count] = at, v[at]
                count += 1
                if clear:
                    v[at] = _left(v[at], halves)


@kernel
def _at_least(v: Any, bound: Any) -> Any:
    """Do what `at_least_32` does, for fewer."""
    word = np.uint32(0)
    for i in range(v.size):
        word |= np.uint32(bits_of(v[i]) >= bound) << np.uint32(i)
    return word


@kernel
def _kth(v: Any, k: int, base: Any) -> tuple[Any, int]:
    """Return the k-th largest magnitude's bits, and how many of its equals are among the k largest.

    All bits are at least `base`. Counting by the 11 highest bits of what is above it, of which few elements
    are left for the next 11, settles all 31 in three rounds at most.
    """
    span = np.uint32(0)
    for i in range(v.size):
        span |= bits_of(v[i]) - base
    undecided = np.uint32(0)
    while span >> undecided:
        undecided += np.uint32(1)
    while undecided:
        shift = undecided - min(undecided, np.uint32(11))
        counts = np.zeros(1 << (undecided - shift), np.int64)
        for i in range(v.size):
            above = bits_of(v[i]) - base  # wraps around below base
            if above >> undecided == 0:
                counts[above >> shift] += 1
        digit = counts.size - 1
        while counts[digit] < k:
            k -= counts[digit]
            digit -= 1
        base += np.uint32(digit) << shift
        undecided = shift
    return base, k


@kernel
def _choose(some: Any, other: Any, bound: Any, ties: int, v: Any, clear: bool) -> Any:
    """Move those above the bound and the first `ties` at it to the front, put others back; return a count.

    Everything is written before it is known whether it counts: a fifth does not, in an order that no
    branch predictor knows.
    """
    others, theirs_too = np.empty(some.size + 1, np.int32), np.empty(some.size + 1, np.float32)
    count = rest = np.uint64(0)
    for i in range(some.size):
        place, value = some[i], other[i]
        bits = bits_of(value)
        tie = (bits == bound) & (ties > 0)
        keep = np.uint64((bits > bound) | tie)
        ties -= np.int64(tie)
        others[rest], theirs_too[rest] = place, value
        some[count], other[count] = place, value
        count += keep
        rest += np.uint64(1) - keep
    if clear:
        for j in range(rest):
            v[np.uint64(others[j])] = theirs_too[j]
    return np.int64(count)
