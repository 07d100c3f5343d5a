"""Kernels for CUDA tensors in Triton; STENOGRAD_KERNELS=triton turns them on.

They have run in Triton's interpreter only, where they give the bits of plain torch, and never on a GPU, so
plain torch is the default there. What is missing (top-k, scatter, indices, casts) stays with plain torch.
Codes are written one a byte and then packed by torch. None is returned for what is left to plain torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from stenograd.errors import WireError
from stenograd.kernels.backend import present
from stenograd.kernels.bits import pack_bits, packed_bytes
from stenograd.kernels.quantize import MOST, hash_keys, levels_of
from stenograd.kernels.sign import block_count, check_scales

__all__ = [
    "kernel",
    "qsgd_decode_mean",
    "qsgd_encode_feedback",
    "sign_decode_mean",
    "sign_encode_feedback",
]

_WIDEST = 8192  # elements of a block that one program holds in registers
_PIECE = 256  # elements that the mean magnitude adds up at once
_EXACT = {"enable_fp_fusion": False}  # a * b + c rounded twice, as everywhere else

try:
    triton: Any = import_module("triton")
    tl: Any = import_module("triton.language")
except ImportError:
    triton = tl = None


def kernel(function: Callable[..., Any]) -> Any:
    """Compile for the GPU where Triton is installed.

    Example:
        >>> kernel(lambda: None) is not None
        True
    """
    return triton.jit(function) if triton else function


@lru_cache(maxsize=64)
def _starts(block: int, numels: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """Return where each block starts, the end of the last included, and the lanes that hold the longest."""
    starts, begin = [0], 0
    for numel in numels:
        starts += [min(end, begin + numel) for end in range(begin + block, begin + numel + block, block)]
        begin += numel
    width = min(block, max(numels, default=1))
    return torch.tensor(starts, device=device), triton.next_power_of_2(max(width, 1))


def _suits(tensors: Sequence[Tensor], width: int) -> bool:
    return width <= _WIDEST and all(t.dtype is torch.float32 and t.is_contiguous() for t in tensors)


def sign_encode_feedback(
    x: Tensor | None, residual: Tensor | None, block: int, numels: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """Send signs and mean magnitudes, and leave the error in residual."""
    given = present(x, residual)
    first, left = given[0], given[-1]
    blocks = block_count(block, numels, first.numel())
    starts, width = _starts(block, tuple(numels), first.device)
    if not (blocks and _suits(given, width)):
        return None
    codes, scales = torch.empty_like(first, dtype=torch.uint8), first.new_empty(blocks)
    # The mean magnitude reads whole pieces, however short the blocks are.
    flags = (max(width, _PIECE), len(given) == 2, residual is not None)
    _sign[(blocks,)](first, left, starts, codes, scales, *flags, **_EXACT)
    return pack_bits(codes, 1), scales


@kernel
def _sign(
    x: Any,
    left: Any,
    starts: Any,
    codes: Any,
    scales: Any,
    width: tl.constexpr,
    add: tl.constexpr,
    keep: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    start = tl.load(starts + row)
    length = tl.load(starts + row + 1) - start
    # In the order of `lane_means`: eighths in float32, their sums in float64, then pairs.
    at = tl.arange(0, 32)
    lanes = tl.zeros([32], tl.float64)
    for piece in range(0, width, 256):
        part = tl.zeros([32], tl.float32)
        for eighth in tl.static_range(8):
            where = piece + 32 * eighth + at
            v = tl.load(x + start + where, where < length, 0.0)
            if add:
                v += tl.load(left + start + where, where < length, 0.0)
            part += tl.abs(v) * 0.125
        lanes += part.to(tl.float64)
    lanes = tl.sum(tl.reshape(lanes, [2, 16]), 0)  # of two, in which order does not matter
    lanes = tl.sum(tl.reshape(lanes, [2, 8]), 0)
    lanes = tl.sum(tl.reshape(lanes, [2, 4]), 0)
    lanes = tl.sum(tl.reshape(lanes, [2, 2]), 0)
    scale = (tl.sum(lanes, 0) * 8 / length.to(tl.float64)).to(tl.float32)
    tl.store(scales + row, scale)
    lane = tl.arange(0, width)
    v = tl.load(x + start + lane, lane < length, 0.0)
    if add:
        v += tl.load(left + start + lane, lane < length, 0.0)
    tl.store(codes + start + lane, (v >= 0).to(tl.uint8), lane < length)
    if keep:
        tl.store(left + start + lane, v - tl.where(v >= 0, scale, -scale), lane < length)


def qsgd_encode_feedback(
    x: Tensor | None, residual: Tensor | None, bits: int, block: int, numels: Sequence[int], seed: int
) -> tuple[Tensor, Tensor] | None:
    """Round at random, and leave the error in residual."""
    given = present(x, residual)
    first, left = given[0], given[-1]
    levels = levels_of(bits)
    blocks = block_count(block, numels, first.numel())
    starts, width = _starts(block, tuple(numels), first.device)
    if not (blocks and _suits(given, width)):
        return None
    codes, scales = torch.empty_like(first, dtype=torch.uint8), first.new_empty(blocks)
    keys = torch.tensor(hash_keys(seed), device=first.device)
    numbers = float(levels), MOST
    args = (first, left, starts, keys, codes, scales, *numbers, width, len(given) == 2, residual is not None)
    _quantize[(blocks,)](*args, **_EXACT)
    return pack_bits(codes, bits), scales


@kernel
def _quantize(
    x: Any,
    left: Any,
    starts: Any,
    keys: Any,
    codes: Any,
    scales: Any,
    levels: Any,
    most: Any,
    width: tl.constexpr,
    add: tl.constexpr,
    keep: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    start = tl.load(starts + row)
    lane = tl.arange(0, width)
    inside = lane < tl.load(starts + row + 1) - start
    v = tl.load(x + start + lane, inside, 0.0)
    if add:
        v += tl.load(left + start + lane, inside, 0.0)
    # The largest magnitude by its bits: as an integer NaN is above all, so the scale tells of it.
    scale = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF).to(tl.float32, bitcast=True)
    h = ((start + lane) >> 1).to(tl.uint32) ^ tl.load(keys).to(tl.uint32)
    h ^= h >> 16
    h = (h * 0x7FEB352D) ^ tl.load(keys + 1).to(tl.uint32)
    h ^= h >> 15
    h = h * 0x846CA68B
    h ^= h >> 16
    draw = (h >> (((start + lane) & 1) * 16).to(tl.uint32)) & 0xFFFF  # two draws of 16 bits a hash
    inverse = tl.div_rn(levels, tl.where(scale == 0, 1.0, scale))
    inverse = tl.where(inverse > most, most, inverse)
    inverse = (inverse.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)  # the next larger float
    y = draw.to(tl.float32) * 1.52587890625e-05 + v * inverse + levels  # 2**-16
    y = tl.minimum(tl.where(y > 0, y, 0.0), 2 * levels).to(tl.int32)  # NaN, too, becomes 0
    tl.store(scales + row, scale)
    tl.store(codes + start + lane, y.to(tl.uint8), inside)
    if keep:
        sent = (y.to(tl.float32) - levels) * tl.div_rn(scale, levels)
        tl.store(left + start + lane, v - sent, inside)


def sign_decode_mean(
    payloads: Sequence[tuple[Tensor, Tensor]], block: int, numels: Sequence[int], out: Tensor | None = None
) -> Tensor | None:
    """Add what the ranks sent in rank order and divide by their number."""
    return _decoded(payloads, 1, 2, 1, block, numels, out)


def qsgd_decode_mean(
    payloads: Sequence[tuple[Tensor, Tensor]],
    bits: int,
    block: int,
    numels: Sequence[int],
    out: Tensor | None = None,
) -> Tensor | None:
    """Add what the ranks sent in rank order and divide by their number."""
    return _decoded(payloads, bits, 1, levels_of(bits), block, numels, out)


def _decoded(
    payloads: Sequence[tuple[Tensor, Tensor]],
    bits: int,
    factor: int,
    levels: int,
    block: int,
    numels: Sequence[int],
    out: Tensor | None,
) -> Tensor | None:
    """Return the mean of `(factor * code - levels) * scale / levels`."""
    n = sum(numels)
    blocks = block_count(block, numels, n)
    check_scales(payloads, blocks)
    total = torch.empty(n, dtype=torch.float32, device=payloads[0][1].device) if out is None else out
    starts, width = _starts(block, tuple(numels), total.device)
    if not _suits([total], width):
        return None
    total.zero_()
    for codes, scales in payloads:
        if codes.numel() != packed_bytes(n, bits):
            raise WireError(
                f"{n} values of {bits} bits take {packed_bytes(n, bits)} bytes, got {codes.numel()}"
            )
        if blocks:
            args = (total, starts, codes.contiguous(), codes.numel(), scales.contiguous(), float(levels))
            _add_decoded[(blocks,)](*args, bits, factor, width, **_EXACT)
    return total.div_(len(payloads))


@kernel
def _add_decoded(
    total: Any,
    starts: Any,
    codes: Any,
    size: Any,
    scales: Any,
    levels: Any,
    bits: tl.constexpr,
    factor: tl.constexpr,
    width: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    start = tl.load(starts + row)
    lane = tl.arange(0, width)
    inside = lane < tl.load(starts + row + 1) - start
    bit = (start + lane) * bits
    low = tl.load(codes + (bit >> 3), inside, 0).to(tl.int32)
    # A code of 3, 5, 6 or 7 bits may lie in two bytes.
    high = tl.load(codes + (bit >> 3) + 1, inside & ((bit >> 3) + 1 < size), 0).to(tl.int32)
    code = ((low | (high << 8)) >> (bit & 7).to(tl.int32)) & ((1 << bits) - 1)
    value = (code * factor).to(tl.float32) - levels
    value *= tl.div_rn(tl.load(scales + row), levels)
    tl.store(total + start + lane, tl.load(total + start + lane, inside, 0.0) + value, inside)
