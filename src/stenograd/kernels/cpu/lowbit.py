"""Rounding to the nearest of a few levels per block, on the CPU: a block stays in the cache meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stenograd.errors import WireError
from stenograd.kernels.bits import block_starts, packed_bytes
from stenograd.kernels.cpu.jit import aligned, bits_of, kernel, largest_magnitude, view
from stenograd.kernels.lowbit import BITS, levels, top_of
from stenograd.kernels.sign import block_count, check_scales

__all__ = ["lowbit_decode", "lowbit_encode"]

_HALF_LOWEST = np.uint32(0x3C000000)  # 2^-7, half of e3m0's smallest level
_ROUNDER = np.float32(3 << 22)  # added and taken away, it rounds to integers, ties to even


def lowbit_encode(x: Tensor, name: str, block: int, numels: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Pack the codes, lowest bit first, and the largest magnitude of each block."""
    scales = torch.empty(block_count(block, numels, x.numel()), dtype=torch.float32, device="cpu")
    bits, n = BITS[name], x.numel()
    codes = np.zeros(n + -n % 8, np.uint8)  # whole bytes, whatever the bits
    top = np.float32(0 if name == "e3m0" else top_of(name))
    _encode(view(x), view(block_starts(block, numels)), top, codes, view(scales))
    packed = np.empty(codes.size * bits // 8, np.uint8)
    _pack(codes, bits, packed)
    return torch.from_numpy(packed[: packed_bytes(n, bits)]), scales


def lowbit_decode(payload: tuple[Tensor, Tensor], name: str, block: int, numels: Sequence[int]) -> Tensor:
    """Look up the levels and multiply by the scales."""
    codes, scales = payload
    bits, n = BITS[name], sum(numels)
    check_scales([payload], block_count(block, numels, n))
    if codes.numel() != packed_bytes(n, bits):
        raise WireError(f"{n} values of {bits} bits take {packed_bytes(n, bits)} bytes, got {codes.numel()}")
    values = torch.empty(n, dtype=torch.float32, device="cpu")
    factors = view(aligned(scales.to(torch.float32)))
    starts = view(block_starts(block, numels))
    _decode(view(codes.contiguous()), bits, view(levels(name)), starts, factors, view(values))
    return values


@kernel
def _encode(x: Any, starts: Any, top: Any, codes: Any, scales: Any) -> None:
    for row in range(scales.size):
        start, stop = starts[row], starts[row + 1]
        v, out = x[start:stop], codes[start:stop]
        scale = largest_magnitude(v)
        unit = scale if scale != 0 else np.float32(1)
        if top == 0:
            _powers(v, unit, out)
        else:
            _integers(v, unit, top, out)
        scales[row] = scale


@kernel
def _powers(v: Any, unit: Any, out: Any) -> None:
    """Write the exponent of the power of two that is nearest, from 1 to 7, or 0; 8 more if it is negative."""
    for i in range(v.size):
        y = np.float32(v[i] / unit)
        magnitude = bits_of(y)
        exponent = (np.int32(magnitude + np.uint32(1 << 22)) >> 23) - 120  # 1.0 has 127
        exponent = min(max(exponent, 0), 7)
        # What lies between half and 3/4 of the smallest level has too low an exponent, but is nearer to it;
        # a NaN is no number, and compares so.
        near = (magnitude >= _HALF_LOWEST) & (magnitude <= np.uint32(0x7F800000))
        out[i] = np.uint8(max(exponent, np.int32(near)) + 8 * np.int32(y < 0))


@kernel
def _integers(v: Any, unit: Any, top: Any, out: Any) -> None:
    """Write the nearest of `-top .. top`, plus top; NaN becomes 0 before that."""
    for i in range(v.size):
        y = np.float32(np.float32(v[i] / unit) * top)
        y = y if y == y else np.float32(0)
        rounded = np.float32(np.float32(y + _ROUNDER) - _ROUNDER)
        out[i] = np.uint8(np.int32(min(max(rounded, -top), top) + top))


@kernel
def _pack(codes: Any, bits: int, packed: Any) -> None:
    if bits == 4:
        for i in range(packed.size):
            packed[i] = codes[2 * i] | (codes[2 * i + 1] << np.uint8(4))
    else:
        for i in range(packed.size):
            low = codes[4 * i] | (codes[4 * i + 1] << np.uint8(2))
            packed[i] = low | (codes[4 * i + 2] << np.uint8(4)) | (codes[4 * i + 3] << np.uint8(6))


@kernel
def _decode(packed: Any, bits: int, table: Any, starts: Any, scales: Any, values: Any) -> None:
    mask = (1 << bits) - 1
    for row in range(scales.size):
        start, stop = starts[row], starts[row + 1]
        scale, at = scales[row], start
        if bits == 4 and not start & 1:  # two at once, as far as they are pairs
            pairs = (stop - start) >> 1
            for i in range(pairs):
                both = packed[(start >> 1) + i]
                values[start + 2 * i] = table[both & 15] * scale
                values[start + 2 * i + 1] = table[both >> 4] * scale
            at = start + 2 * pairs
        for i in range(at, stop):
            code = (packed[(i * bits) >> 3] >> ((i * bits) & 7)) & mask
            values[i] = table[code] * scale
