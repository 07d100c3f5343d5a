"""Rounding at random to 2 to 8 bits, on the CPU: a block stays in the first-level cache throughout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stenograd.kernels.backend import length_of
from stenograd.kernels.bits import block_starts, packed_bytes
from stenograd.kernels.cpu.jit import (
    CHUNK,
    addresses,
    array_at,
    bits_of,
    divide,
    kernel,
    largest_magnitude,
    one_over,
    peek,
    view,
)
from stenograd.kernels.cpu.lanes import prefetch_32, round_32, store_word
from stenograd.kernels.quantize import MOST, hash_keys, levels_of
from stenograd.kernels.sign import block_count, check_scales

__all__ = ["qsgd_decode_mean", "qsgd_encode_feedback"]

_NONE = np.empty(0, np.float32)
_U32 = np.uint32
_ALL = np.uint64(0xFFFFFFFFFFFFFFFF)
_MOST = np.float32(MOST)


def qsgd_encode_feedback(
    x: Tensor | None, residual: Tensor | None, bits: int, block: int, numels: Sequence[int], seed: int
) -> tuple[Tensor, Tensor]:
    """Round at random, and leave the error in residual."""
    n, levels = sum(numels), levels_of(bits)
    scales = torch.empty(
        block_count(block, numels, length_of(x, residual)), dtype=torch.float32, device="cpu"
    )
    packed = np.empty(packed_bytes(n, bits) + 8, np.uint8)  # `store_word` writes up to eight zeros too many
    more, left = (_NONE if t is None else view(t) for t in (x, residual))
    keys, codes = np.array(hash_keys(seed), np.uint32), _codes(block, numels)
    starts = view(block_starts(block, numels))
    _encode(more, left, bits, np.float32(levels), starts, keys, codes, packed, view(scales))
    return torch.from_numpy(packed[: packed_bytes(n, bits)]), scales


@kernel
def _encode(
    x: Any,
    residual: Any,
    bits: int,
    levels: Any,
    starts: Any,
    keys: Any,
    words_of_codes: Any,
    packed: Any,
    scales: Any,
) -> None:
    # Two draws a word, and one word more where a piece begins in the middle of one.
    codes, draws = words_of_codes.view(np.uint8), np.empty(CHUNK // 2 + 1, np.uint32)
    for row in range(scales.size):
        start, stop = starts[row], starts[row + 1]
        v = residual[start:stop] if residual.size else x[start:stop]
        both = residual.size > 0 and x.size > 0
        scale = _largest_sum(v, x[start:stop]) if both else largest_magnitude(v)
        _fetch(x, stop)
        inverse, step = _inverse(scale, levels), scale / levels if residual.size else np.float32(0)
        _fetch(residual, stop)
        for i in range(0, v.size, CHUNK):
            piece = v[i : i + CHUNK]
            _draw(start + i, piece.size, keys, draws)
            halves = draws.view(np.uint16)[(start + i) & 1 :]
            _round(piece, halves, codes[i : i + CHUNK], inverse, levels, step)
        _pack(words_of_codes, v.size, bits, packed, start * bits)
        scales[row] = scale


@kernel
def _fetch(v: Any, start: int) -> None:
    """Have the cache fetch the elements of the next block while this one is worked on."""
    for i in range(start, start + CHUNK // 2, 32):
        prefetch_32(v, i)


@kernel
def _largest_sum(v: Any, more: Any) -> Any:
    """Add more to v, and do what `largest_magnitude` does."""
    largest = np.uint32(0)
    for i in range(v.size):
        total = v[i] + more[i]
        v[i] = total
        bits = _U32(bits_of(total))
        largest = bits if bits > largest else largest
    return np.uint32(largest).view(np.float32)


@kernel
def _inverse(scale: Any, levels: Any) -> Any:
    """Return levels a unit, rounded up so that the largest magnitude still is the last level."""
    inverse = levels / (scale if scale != 0 else np.float32(1))
    inverse = _MOST if inverse > _MOST else inverse
    return np.uint32(np.float32(inverse).view(np.uint32) + np.uint32(1)).view(np.float32)


@kernel
def _draw(first: int, count: int, keys: Any, draws: Any) -> None:
    """Write the hashes of the pairs of indices that begin with some place's."""
    before, within, at = keys[0], keys[1], first >> 1
    for i in range(((first + count + 1) >> 1) - at):
        h = _U32(_U32(at + i) ^ before)  # numba widens every result, and 64-bit lanes take 1.3 times as long
        h = _U32(h ^ _U32(h >> _U32(16)))
        h = _U32(_U32(h * _U32(0x7FEB352D)) ^ within)
        h = _U32(h ^ _U32(h >> _U32(15)))
        h = _U32(h * _U32(0x846CA68B))
        draws[i] = _U32(h ^ _U32(h >> _U32(16)))


@kernel
def _round(v: Any, halves: Any, codes: Any, inverse: Any, levels: Any, step: Any) -> None:
    """Write `floor(s v / m + u) + s` for each, NaN as 0; take what is sent from v if step is not 0."""
    whole = v.size - v.size % 32
    for i in range(0, whole, 32):
        round_32(v, i, halves, i, codes, inverse, levels, step)
    for i in range(whole, v.size):
        y = np.float32(np.int32(halves[i])) * np.float32(2.0**-16) + v[i] * inverse + levels
        y = y if y > 0 else np.float32(0)
        codes[i] = np.uint8(np.int32(min(y, levels + levels)))
        if step != 0:
            v[i] -= (np.float32(codes[i]) - levels) * step


@kernel
def _pack(words_of_codes: Any, size: int, bits: int, packed: Any, bit: int) -> None:
    """Write a block's codes from some bit on, eight at a time; what is above them becomes 0."""
    for j in range((size + 7) >> 3):
        words_of_codes[j] = _joined(words_of_codes[j], np.uint64(bits))
    # A block may begin in the middle of a byte, whose lower bits are the codes of the block before.
    shift, width = np.uint64(bit & 7), np.uint64(8 * bits)
    pending = np.uint64(packed[bit >> 3]) & ~(_ALL << shift)  # with 8 bits there is never a shift
    whole, at = size >> 3, bit >> 3
    for j in range(whole):
        word = words_of_codes[j] << shift | pending
        store_word(packed, at, word)
        pending = word >> width if shift else np.uint64(0)  # by 64 bits it would be undefined
        at += bits
    # Behind the block's last code lies whatever was there before.
    if size & 7:
        word = words_of_codes[whole] & _ones(bits * (size & 7))
        store_word(packed, at, word << shift | pending)


@kernel
def _ones(width: int) -> Any:
    return _ALL >> (np.uint64(64) - np.uint64(width))


@kernel
def _joined(word: Any, bits: Any) -> Any:
    """Join eight codes, one a byte, into the lowest `8 bits` bits."""
    gap = np.uint64(8) - bits
    word = (word & np.uint64(0x00FF00FF00FF00FF)) | (word & np.uint64(0xFF00FF00FF00FF00)) >> gap
    word = (word & np.uint64(0x0000FFFF0000FFFF)) | (word & np.uint64(0xFFFF0000FFFF0000)) >> gap + gap
    return (word & np.uint64(0xFFFFFFFF)) | (word >> np.uint64(32)) << np.uint64(4) * bits


@kernel
def _parted(word: Any, bits: Any) -> Any:
    """Undo `_joined`; what lies above the codes is left out."""
    gap = np.uint64(8) - bits
    half = _ones(4 * bits)
    word = (word & half) | ((word >> np.uint64(4) * bits) & half) << np.uint64(32)
    low = _ones(2 * bits) * np.uint64(0x0000000100000001)
    word = (word & low) | (word & (low << bits + bits)) << gap + gap
    low = _ones(bits) * np.uint64(0x0001000100010001)
    return (word & low) | (word & (low << bits)) << gap


def qsgd_decode_mean(
    payloads: Sequence[tuple[Tensor, Tensor]],
    bits: int,
    block: int,
    numels: Sequence[int],
    out: Tensor | None = None,
) -> Tensor:
    """Add what the ranks sent in rank order and divide by their number."""
    n, levels = sum(numels), levels_of(bits)
    check_scales(payloads, block_count(block, numels, n))
    total = torch.empty(n, dtype=torch.float32, device="cpu") if out is None else out
    where, _keep = addresses(payloads, packed_bytes(n, bits), f"{n} values of {bits} bits")
    starts, codes = view(block_starts(block, numels)), _codes(block, numels)
    _decode(where, bits, np.float32(levels), starts, codes, view(total), one_over(len(payloads)))
    return total


@kernel
def _decode(
    addresses: Any, bits: int, levels: Any, starts: Any, words_of_codes: Any, out: Any, inverse: Any
) -> None:
    ranks, blocks, nbytes = addresses.shape[0], starts.size - 1, (out.size * bits + 7) // 8
    codes = words_of_codes.view(np.uint8)
    for row in range(blocks):
        start, total = starts[row], out[starts[row] : starts[row + 1]]
        total[:] = 0
        for rank in range(ranks):
            packed = array_at(addresses[rank, 0], nbytes, np.uint8)
            step = array_at(addresses[rank, 1], blocks, np.float32)[row] / levels
            for i in range(0, total.size, 8):
                words_of_codes[i >> 3] = peek(packed, (start + i) * bits)
            for j in range((total.size + 7) >> 3):
                words_of_codes[j] = _parted(words_of_codes[j], np.uint64(bits))
            for i in range(total.size):
                total[i] += (np.float32(codes[i]) - levels) * step
        divide(total, ranks, inverse)


def _codes(block: int, numels: Sequence[int]) -> Any:
    """Return room for one block's codes, one a byte."""
    return np.empty((min(block, max(numels, default=0)) + 7) // 8, np.uint64)
