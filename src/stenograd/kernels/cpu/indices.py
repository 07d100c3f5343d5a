"""Elias-Fano codes of ascending indices on the CPU; the format is that of `kernels.indices`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stenograd.errors import ConfigError, WireError
from stenograd.kernels.cpu.jit import kernel, peek, view
from stenograd.kernels.cpu.lanes import bit_count, load_word, lowest_bit, store_word
from stenograd.kernels.indices import indices_bytes, mark_count, planes_of

__all__ = ["pack_indices", "unpack_indices"]


def pack_indices(indices: Tensor, n: int) -> Tensor:
    """Write ascending indices: low bits as they are, the rest in unary."""
    packed = torch.zeros(indices_bytes(n, indices.numel()), dtype=torch.uint8, device="cpu")
    if not _pack(view(indices), n, sum(planes_of(n, indices.numel())), view(packed)):
        raise ConfigError(f"indices must be strictly ascending in [0, {n}): sort them")
    return packed


@kernel
def _pack(indices: Any, n: int, low: int, packed: Any) -> bool:
    """Fill `packed`, which is all zeros, and return whether the indices were in order."""
    if indices.size == 0:
        return True
    # Before anything is written: kernels do not check bounds.
    good = indices[0] >= 0 and indices[indices.size - 1] < n
    for i in range(1, indices.size):
        good &= indices[i - 1] < indices[i]
    if not good:
        return False
    start = 0
    for shift in range(0, low, 8):
        start += _pack_plane(indices, shift, min(8, low - shift), packed[start:])
    _mark(indices, low, packed[start:])
    return True


@kernel
def _pack_plane(indices: Any, shift: int, bits: int, packed: Any) -> int:
    """Write `bits` bits of each place, lowest first; return how many bytes that took.

    Eight indices fill `bits` bytes; behind them come zeros, where zeros are or more indices come.
    """
    mask = np.int64((1 << bits) - 1)
    # Groups whose eight bytes all lie in the plane.
    whole = min(indices.size // 8, (packed.size - 8) // bits + 1) if packed.size >= 8 else 0
    for group in range(whole):
        word = np.uint64(0)
        for j in range(8):
            place = np.int64(indices[np.uint64(8 * group + j)])
            word |= np.uint64((place >> shift) & mask) << np.uint64(j * bits)
        store_word(packed, group * bits, word)
    pending, held, at = np.int64(0), 0, whole * bits
    for i in range(8 * whole, indices.size):
        pending |= ((np.int64(indices[i]) >> shift) & mask) << held
        held += bits
        if held >= 8:
            packed[at] = pending & 255
            pending >>= 8
            held -= 8
            at += 1
    if held:
        packed[at] = pending
        at += 1
    return at


@kernel
def _mark(indices: Any, low: int, marks: Any) -> None:
    """Set the bit of each place's high bits, by words of which all but the last are complete."""
    word, at = np.uint64(0), np.uint64(0)
    for i in range(indices.size):
        bit = np.uint64((np.int64(indices[np.uint64(i)]) >> low) + i)
        # Words that are passed over keep the zeros that were there.
        if bit >> np.uint64(6) != at:
            store_word(marks, np.int64(at * np.uint64(8)), word)
            word, at = np.uint64(0), bit >> np.uint64(6)
        word |= np.uint64(1) << (bit & np.uint64(63))
    for i in range(np.int64(at) * 8, marks.size):
        marks[i] = word & np.uint64(255)
        word >>= np.uint64(8)


def unpack_indices(packed: Tensor, n: int, k: int) -> Tensor:
    """Read back what `pack_indices` wrote."""
    needed = indices_bytes(n, k)
    if packed.numel() != needed:
        raise WireError(f"{k} of {n} indices take {needed} bytes, got {packed.numel()}")
    indices = torch.empty(k, dtype=torch.int32, device="cpu")
    found, good = _unpack(view(packed), n, sum(planes_of(n, k)), mark_count(n, k), view(indices))
    if found != k:
        raise WireError(f"{k} indices have {k} bits set, got {found}: the ranks disagree on k")
    if not good:
        raise WireError(f"the {k} indices received do not ascend in [0, {n}): the payload is damaged")
    return indices


@kernel
def _unpack(packed: Any, n: int, low: int, marks: int, indices: Any) -> tuple[int, bool]:
    """Fill `indices`; return how many bits the unary part has set, and whether all indices are in order."""
    k = indices.size
    start = 0
    indices[:] = 0
    for shift in range(0, low, 8):
        bits = min(8, low - shift)
        plane = packed[start : start + (k * bits + 7) // 8]
        _unpack_plane(plane, shift, bits, indices)
        start += plane.size
    unary, found = packed[start:], np.int64(0)
    for first in range(0, marks, 64):
        found += bit_count(_marked(unary, first, marks))
    if found != k:  # more than k would be written behind the indices
        return found, False
    good, previous, at = True, np.int64(-1), np.uint64(0)
    for first in range(0, marks, 64):
        word = _marked(unary, first, marks)
        while word:
            place = ((first + lowest_bit(word) - np.int64(at)) << low) | np.int64(indices[at])
            good &= previous < place
            previous = place
            indices[at] = place
            at += np.uint64(1)
            word &= word - np.uint64(1)
    return found, good and previous < n


@kernel
def _unpack_plane(plane: Any, shift: int, bits: int, indices: Any) -> None:
    """Read what `_pack_plane` wrote into indices, where these bits are zeros."""
    mask = np.uint64((1 << bits) - 1)
    # Groups whose eight bytes all lie in the plane.
    whole = min(indices.size // 8, (plane.size - 8) // bits + 1) if plane.size >= 8 else 0
    for group in range(whole):
        word = load_word(plane, group * bits)
        for j in range(8):
            indices[np.uint64(8 * group + j)] |= np.int64((word >> np.uint64(j * bits)) & mask) << shift
    for i in range(8 * whole, indices.size):
        indices[i] |= np.int64(peek(plane, i * bits) & mask) << shift


@kernel
def _marked(unary: Any, first: int, marks: int) -> Any:
    """Return 64 bits of the unary part, without those behind its end."""
    word = np.uint64(peek(unary, first))
    return word if marks - first >= 64 else word & ((np.uint64(1) << np.uint64(marks - first)) - np.uint64(1))
