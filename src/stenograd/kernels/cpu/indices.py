"""Elias-Fano codes of ascending places on the CPU; the format is that of `reference.indices`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stenograd.errors import ConfigError, WireError
from stenograd.kernels.cpu.jit import kernel, peek, view
from stenograd.kernels.cpu.lanes import load_word, lowest_bit
from stenograd.kernels.reference.indices import mark_count, places_bytes, planes_of

__all__ = ["pack_places", "unpack_places"]


def pack_places(places: Tensor, n: int) -> Tensor:
    """Write ascending places: low bits as they are, the rest in unary."""
    packed = torch.zeros(places_bytes(n, places.numel()), dtype=torch.uint8)
    if not _pack(view(places), n, sum(planes_of(n, places.numel())), view(packed)):
        raise ConfigError(f"places must be strictly ascending in [0, {n}): sort them")
    return packed


@kernel
def _pack(places: Any, n: int, low: int, packed: Any) -> bool:
    """Fill `packed`, which is all zeros, and return whether the places were in order."""
    previous = np.int64(-1)
    for i in range(places.size):
        if not previous < places[i] < n:
            return False
        previous = np.int64(places[i])
    start = 0
    for shift in range(0, low, 8):
        start += _pack_plane(places, shift, min(8, low - shift), packed[start:])
    marks = packed[start:]
    for i in range(places.size):
        bit = np.uint64((np.int64(places[i]) >> low) + i)
        marks[bit >> np.uint64(3)] |= np.uint8(1) << np.uint8(bit & np.uint64(7))
    return True


@kernel
def _pack_plane(places: Any, shift: int, bits: int, packed: Any) -> int:
    """Write `bits` bits of each place, lowest first; return how many bytes that took."""
    pending, held, at = 0, 0, 0
    for i in range(places.size):
        pending |= ((np.int64(places[i]) >> shift) & ((1 << bits) - 1)) << held
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


def unpack_places(packed: Tensor, n: int, k: int) -> Tensor:
    """Read back what `pack_places` wrote."""
    needed = places_bytes(n, k)
    if packed.numel() != needed:
        raise WireError(f"{k} of {n} places take {needed} bytes, got {packed.numel()}")
    places = torch.empty(k, dtype=torch.int32)
    found, good = _unpack(view(packed), n, sum(planes_of(n, k)), mark_count(n, k), view(places))
    if found != k:
        raise WireError(f"{k} places have {k} bits set, got {found}: the ranks disagree on k")
    if not good:
        raise WireError(f"the {k} places received do not ascend in [0, {n}): the payload is damaged")
    return places


@kernel
def _unpack(packed: Any, n: int, low: int, marks: int, places: Any) -> tuple[int, bool]:
    """Fill `places`; return how many bits are set in the unary part, and whether all places are in order."""
    k = places.size
    places[:] = 0
    start = 0
    for shift in range(0, low, 8):
        bits = min(8, low - shift)
        mask = np.uint64((1 << bits) - 1)
        plane = packed[start : start + (k * bits + 7) // 8]
        safe = min(k, max(0, 8 * (plane.size - 8) // bits + 1))  # of these, whole words can be read
        for i in range(safe):
            word = load_word(plane, (i * bits) >> 3) >> np.uint64((i * bits) & 7)
            places[i] |= np.int64(word & mask) << shift
        for i in range(safe, k):
            places[i] |= np.int64(peek(plane, i * bits) & mask) << shift
        start += plane.size
    unary, found, good, previous = packed[start:], 0, True, np.int64(-1)
    for first in range(0, marks, 32):
        word = np.uint32(peek(unary, first))
        if marks - first < 32:
            word &= np.uint32((1 << (marks - first)) - 1)
        while word:
            if found < k:
                place = ((first + lowest_bit(word) - found) << low) | np.int64(places[found])
                good &= previous < place < n
                previous = place
                places[found] = place
            found += 1
            word &= word - np.uint32(1)
    return found, good
