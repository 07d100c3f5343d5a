"""One bit an element and one scale a block, on the CPU: a block stays in the first-level cache throughout."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stenograd.kernels.backend import length_of
from stenograd.kernels.bits import block_starts, packed_bytes
from stenograd.kernels.cpu.jit import addresses, array_at, divide, kernel, one_over, peek, put, view
from stenograd.kernels.cpu.lanes import (
    add_magnitudes_256,
    add_signs_32,
    in_pairs_32,
    load_word,
    not_negative_32,
    prefetch_32,
    sum_magnitudes_256,
    take_signs_32,
)
from stenograd.kernels.sign import block_count, check_scales

__all__ = ["mean_magnitude", "sign_decode_mean", "sign_encode_feedback"]

_NONE = np.empty(0, np.float32)


def sign_encode_feedback(
    x: Tensor | None, residual: Tensor | None, block: int, numels: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Send signs and mean magnitudes, and leave the error in residual."""
    n = sum(numels)
    scales = torch.empty(
        block_count(block, numels, length_of(x, residual)), dtype=torch.float32, device="cpu"
    )
    # One more than full words: the end of the stream is stored even if no bit is left for it.
    words = np.empty(n // 32 + 1, np.uint32)
    more, left = (_NONE if t is None else view(t) for t in (x, residual))
    _encode(more, left, view(block_starts(block, numels)), words, view(scales))
    return torch.from_numpy(words.view(np.uint8)[: packed_bytes(n, 1)]), scales


@kernel
def _encode(x: Any, residual: Any, starts: Any, words: Any, scales: Any) -> None:
    lanes = np.empty(32, np.float64)
    pending, held, at = np.uint64(0), np.uint64(0), 0  # see `put`
    for row in range(scales.size):
        start, stop = starts[row], starts[row + 1]
        v = residual[start:stop] if residual.size else x[start:stop]
        both = residual.size > 0 and x.size > 0
        scale = _sum_magnitude(v, x[start:stop], lanes) if both else mean_magnitude(v, lanes)
        for i in range(0, v.size, 32):
            prefetch_32(residual, stop + i)  # while this block is worked on, the next one is on its way
            prefetch_32(x, stop + i)
            width = min(v.size - i, 32)
            if width < 32:
                word = _not_negative(v[i:], scale, residual.size > 0)
            else:
                word = take_signs_32(v, i, scale) if residual.size else not_negative_32(v, i)
            pending, held, at = put(words, pending, held, at, word, width)
        scales[row] = scale
    words[at] = np.uint32(pending)


@kernel
def mean_magnitude(v: Any, lanes: Any) -> Any:
    """Return the mean magnitude of a block, added in the order of the reference's `lane_means`."""
    lanes[:] = 0
    whole = v.size - v.size % 256
    for start in range(0, whole, 256):
        add_magnitudes_256(v, start, lanes)
    return _with_rest(v, whole, lanes)


@kernel
def _sum_magnitude(v: Any, more: Any, lanes: Any) -> Any:
    """Add more to v, and do what `mean_magnitude` does."""
    lanes[:] = 0
    whole = v.size - v.size % 256
    for start in range(0, whole, 256):
        sum_magnitudes_256(v, more, start, lanes)
    for i in range(whole, v.size):
        v[i] += more[i]
    return _with_rest(v, whole, lanes)


@kernel
def _with_rest(v: Any, whole: int, lanes: Any) -> Any:
    """Return the mean magnitude where those before `whole` are in the lanes."""
    for i in range(whole, min(whole + 32, v.size)):
        eight = np.float32(0)
        for j in range(i, v.size, 32):
            eight += abs(v[j]) * np.float32(0.125)
        lanes[i - whole] += eight
    return np.float32(in_pairs_32(lanes) * 8 / v.size)


@kernel
def _not_negative(v: Any, scale: Any, take: bool) -> Any:
    """Do what `not_negative_32` or `take_signs_32` does, for fewer."""
    word = np.uint32(0)
    for i in range(v.size):
        word |= np.uint32(v[i] >= 0) << np.uint32(i)
        if take:
            v[i] -= scale if v[i] >= 0 else -scale
    return word


def sign_decode_mean(
    payloads: Sequence[tuple[Tensor, Tensor]], block: int, numels: Sequence[int], out: Tensor | None = None
) -> Tensor:
    """Add what the ranks sent in rank order and divide by their number."""
    n = sum(numels)
    check_scales(payloads, block_count(block, numels, n))
    total = torch.empty(n, dtype=torch.float32, device="cpu") if out is None else out
    where, _keep = addresses(payloads, packed_bytes(n, 1), f"{n} signs")
    _decode(where, view(block_starts(block, numels)), view(total), one_over(len(payloads)))
    return total


@kernel
def _decode(addresses: Any, starts: Any, out: Any, inverse: Any) -> None:
    ranks, blocks, nbytes = addresses.shape[0], starts.size - 1, (out.size + 7) // 8
    for row in range(blocks):
        start, total = starts[row], out[starts[row] : starts[row + 1]]
        total[:] = 0
        for rank in range(ranks):
            bits = array_at(addresses[rank, 0], nbytes, np.uint8)
            scale = array_at(addresses[rank, 1], blocks, np.float32)[row]
            _add_signs(bits, start, total, scale)
        divide(total, ranks, inverse)


@kernel
def _add_signs(bits: Any, start: int, total: Any, scale: Any) -> None:
    safe = min(8 * (bits.size - 8) - start, total.size - 32)  # 64 bits can be read from here, 32 are used
    # Floor division rounds a negative `safe` down to -32 or less, which leaves nothing whole.
    whole = max(0, safe // 32 * 32 + 32)
    for i in range(0, whole, 32):
        word = load_word(bits, (start + i) >> 3) >> np.uint64(start & 7)
        add_signs_32(total, i, np.uint32(word), scale)
    for i in range(whole, total.size):
        total[i] += scale if peek(bits, start + i) & np.uint64(1) else -scale
