"""Kernels for CUDA tensors in Triton; STENOGRAD_KERNELS=triton turns them on.

They give plain torch's bits, on a GPU and in Triton's interpreter; a test compiles them without one. Few
programs ran with them, so plain torch is the default. What is missing (top-k, scatter, indices, casts) is
left to it, for which None is returned. Blocks whose codes do not begin at a byte are written one code a
byte, and then packed by torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from stenograd.devices import bring
from stenograd.errors import WireError
from stenograd.kernels.backend import present
from stenograd.kernels.bits import block_starts, pack_bits, packed_bytes
from stenograd.kernels.quantize import MOST, hash_keys, levels_of
from stenograd.kernels.sign import block_count, check_scales

__all__ = ["qsgd_decode_mean", "qsgd_encode_feedback", "sign_decode_mean", "sign_encode_feedback"]

_WIDEST = 8192  # elements of a block that one program holds in registers
_PIECE = 256  # elements that the mean magnitude adds up at once
_EXACT = {"enable_fp_fusion": False}  # a * b + c rounded twice, as everywhere else

try:
    triton: Any = import_module("triton")
    tl: Any = import_module("triton.language")
except ImportError:
    triton = tl = None
if triton and tuple(map(int, triton.__version__.split(".")[:2])) < (3, 6):  # what is older was not tried
    triton = tl = None


def _kernel(function: Callable[..., Any]) -> Any:
    """Compile for the GPU where Triton is installed."""
    return triton.jit(function) if triton else function


@lru_cache(maxsize=64)
def _starts(block: int, numels: tuple[int, ...], device: torch.device) -> tuple[Tensor, int]:
    """Return where each block starts, the end of the last included, and the lanes that hold the longest."""
    width = min(block, max(numels, default=1))
    return block_starts(block, numels).to(device), triton.next_power_of_2(max(width, 1))


def _packs(bits: int, block: int, numels: Sequence[int], width: int) -> bool:
    """Return whether every block's codes start at a byte, so that a program can write whole bytes."""
    per = 8 // bits
    ends_inside = block < max(numels, default=0)
    whole = 8 % bits == 0 and (not ends_inside or block % per == 0)
    return whole and width >= per and all(numel % per == 0 for numel in numels[:-1])


def _how(width: int) -> dict[str, Any]:
    """Return how to launch a program for a block: each thread holds up to 32 elements."""
    return {**_EXACT, "num_warps": min(max(width // 1024, 1), 8)}


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
    packs = _packs(1, block, numels, width)
    codes, scales = _room(first, 1, packs=packs), first.new_empty(blocks)
    # The mean magnitude reads whole pieces, however short the blocks are.
    flags = (max(width, _PIECE), len(given) == 2, residual is not None, packs)
    _sign[(blocks,)](first, left, starts, codes, scales, *flags, **_how(width))
    return codes if packs else pack_bits(codes, 1), scales


def _room(x: Tensor, bits: int, *, packs: bool) -> Tensor:
    return x.new_empty(packed_bytes(x.numel(), bits) if packs else x.numel(), dtype=torch.uint8)


@_kernel
def _sign(
    x: tl.tensor,
    left: tl.tensor,
    starts: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    width: tl.constexpr,
    add: tl.constexpr,
    keep: tl.constexpr,
    packs: tl.constexpr,
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
    if packs:
        bit = ((v >= 0) & (lane < length)).to(tl.int32) << (lane & 7)
        byte = tl.arange(0, width // 8)
        packed = tl.sum(tl.reshape(bit, [width // 8, 8]), 1).to(tl.uint8)
        tl.store(codes + start // 8 + byte, packed, byte * 8 < length)
    else:
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
    packs = _packs(bits, block, numels, width)
    codes, scales = _room(first, bits, packs=packs), first.new_empty(blocks)
    keys = bring(torch.tensor(hash_keys(seed), device="cpu"), first.device)
    numbers = float(levels), MOST
    flags = width, len(given) == 2, residual is not None, bits if packs else 0
    _quantize[(blocks,)](first, left, starts, keys, codes, scales, *numbers, *flags, **_how(width))
    return codes if packs else pack_bits(codes, bits), scales


@_kernel
def _quantize(
    x: tl.tensor,
    left: tl.tensor,
    starts: tl.tensor,
    keys: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    levels: tl.tensor,
    most: tl.tensor,
    width: tl.constexpr,
    add: tl.constexpr,
    keep: tl.constexpr,
    packed: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    start = tl.load(starts + row)
    lane = tl.arange(0, width)
    length = tl.load(starts + row + 1) - start
    inside = lane < length
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
    larger = (inverse.to(tl.int32, bitcast=True) + 1).to(tl.float32, bitcast=True)  # the next float
    inverse = tl.where(inverse == inverse, larger, inverse)  # after a GPU's NaN comes -0
    y = draw.to(tl.float32) * 1.52587890625e-05 + v * inverse + levels  # 2**-16
    y = tl.minimum(tl.where(y > 0, y, 0.0), 2 * levels).to(tl.int32)  # NaN, too, becomes 0
    tl.store(scales + row, scale)
    if packed:  # so many bits a code
        per: tl.constexpr = 8 // packed
        bits = tl.where(inside, y, 0) << ((lane & (per - 1)) * packed)
        byte = tl.arange(0, width // per)
        whole = tl.sum(tl.reshape(bits, [width // per, per]), 1).to(tl.uint8)
        tl.store(codes + start // per + byte, whole, byte * per < length)
    else:
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
    for codes, _ in payloads:
        if codes.numel() != packed_bytes(n, bits):
            raise WireError(
                f"{n} values of {bits} bits take {packed_bytes(n, bits)} bytes, got {codes.numel()}"
            )
    if blocks:
        sent = tuple(codes.contiguous() for codes, _ in payloads), tuple(s.contiguous() for _, s in payloads)
        # torch divides a CUDA tensor by a number by the reciprocal, in float32.
        by = 1 / torch.tensor(float(len(payloads)), device="cpu") if total.is_cuda else len(payloads)
        args = (total, starts, *sent, packed_bytes(n, bits), float(levels), float(by))
        _decode[(blocks,)](*args, len(payloads), total.is_cuda, bits, factor, width, **_how(width))
    return total


@_kernel
def _decode(
    total: tl.tensor,
    starts: tl.tensor,
    codes: tl.tensor,
    scales: tl.tensor,
    size: tl.tensor,
    levels: tl.tensor,
    by: tl.tensor,
    count: tl.constexpr,
    multiplies: tl.constexpr,
    bits: tl.constexpr,
    factor: tl.constexpr,
    width: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    start = tl.load(starts + row)
    lane = tl.arange(0, width)
    inside = lane < tl.load(starts + row + 1) - start
    bit = (start + lane) * bits
    added = tl.zeros([width], tl.float32)
    for i in tl.static_range(count):
        code = tl.load(codes[i] + (bit >> 3), inside, 0).to(tl.int32)
        if 8 % bits != 0:  # then a code may lie in two bytes
            code |= tl.load(codes[i] + (bit >> 3) + 1, inside & ((bit >> 3) + 1 < size), 0).to(tl.int32) << 8
        code = (code >> (bit & 7).to(tl.int32)) & ((1 << bits) - 1)
        value = (code * factor).to(tl.float32) - levels
        added += value * tl.div_rn(tl.load(scales[i] + row), levels)
    added = added * by if multiplies else tl.div_rn(added, by)
    tl.store(total + start + lane, added, inside)
