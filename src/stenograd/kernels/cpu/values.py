"""Numbers in fewer bits on the CPU, and whether they are finite, in one pass each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stenograd.errors import ConfigError
from stenograd.kernels.cpu.jit import CHUNK, bits_of, kernel, view
from stenograd.kernels.reference import values as reference_values
from stenograd.kernels.reference.values import VALUE_BLOCK, check_values

__all__ = ["cast_finite", "not_finite", "pack_values", "unpack_values"]

_INFINITE = np.uint32(0x7F800000)  # the bits of infinity; those of NaN are larger


def pack_values(values: Tensor, kind: str) -> tuple[Tensor, ...]:
    """Write float32 numbers as float32, bfloat16 or int8 with scales; see `dispatch`."""
    if kind != "int8":
        return reference_values.pack_values(values, kind)  # torch casts as fast as memory allows
    count = values.numel()
    codes, scales = torch.empty(count, dtype=torch.int8), torch.empty(-(-count // VALUE_BLOCK))
    _to_int8(view(values), view(codes), view(scales))
    return codes, scales


@kernel
def _to_int8(values: Any, codes: Any, scales: Any) -> None:
    for row in range(scales.size):
        v = values[row * VALUE_BLOCK : (row + 1) * VALUE_BLOCK]
        out = codes[row * VALUE_BLOCK : (row + 1) * VALUE_BLOCK]
        largest = np.uint32(0)
        for i in range(v.size):
            largest = max(largest, bits_of(v[i]))
        scale = np.uint32(largest).view(np.float32)
        unit = scale if scale != 0 else np.float32(1)
        for i in range(v.size):
            y = np.rint(v[i] / unit * np.float32(127))
            out[i] = np.int8(np.int32(y if y == y else np.float32(0)))
        scales[row] = scale


def unpack_values(packed: tuple[Tensor, ...], kind: str, count: int) -> Tensor:
    """Read back what `pack_values` wrote, as float32; see `dispatch`."""
    if kind != "int8":
        return reference_values.unpack_values(packed, kind, count)
    check_values(packed, kind, count)
    values = torch.empty(count)
    codes, scales = packed
    _from_int8(view(codes), view(scales), view(values))
    return values


@kernel
def _from_int8(codes: Any, scales: Any, values: Any) -> None:
    for row in range(scales.size):
        step = scales[row] / np.float32(127)
        code = codes[row * VALUE_BLOCK : (row + 1) * VALUE_BLOCK]
        out = values[row * VALUE_BLOCK : (row + 1) * VALUE_BLOCK]
        for i in range(code.size):
            out[i] = np.float32(code[i]) * step


def cast_finite(
    x: Tensor, dtype: torch.dtype, scale: float = 1.0, out: Tensor | None = None
) -> tuple[Tensor, bool]:
    """Scale, round to 16 bits, and say whether any result is infinite or NaN; see `dispatch`."""
    cast = {torch.float16: _to_half, torch.bfloat16: _to_bfloat}.get(dtype)
    if cast is None:
        raise ConfigError(f"dtype must be torch.float16 or torch.bfloat16, got {dtype}: choose one")
    y = torch.empty(x.numel(), dtype=dtype) if out is None else out
    return y, bool(cast(view(x), np.float32(scale), view(y.view(torch.uint16))))


@kernel
def _to_half(x: Any, scale: Any, out: Any) -> Any:
    """Round to nearest even: by adding to the bits, and below 2**-14 by adding 0.5, whose last bit is 2**-24.

    Whatever reaches 65,520 has no finite neighbour.
    """
    worst = np.uint32(0)
    for i in range(x.size):
        y = x[i] * scale
        bits = bits_of(y)
        worst = max(worst, bits)
        sign = (np.float32(y).view(np.uint32) >> np.uint32(16)) & np.uint32(0x8000)
        normal = (bits + np.uint32(0xC8000FFF) + ((bits >> np.uint32(13)) & np.uint32(1))) >> np.uint32(13)
        small = np.float32(abs(y) + np.float32(0.5)).view(np.uint32) - np.uint32(0x3F000000)
        half = small if bits < np.uint32(0x38800000) else normal & np.uint32(0xFFFF)
        half = np.uint32(0x7C00) if bits >= np.uint32(0x477FF000) else half
        half = np.uint32(0x7E00) if bits > _INFINITE else half
        out[i] = np.uint16(half | sign)
    return worst >= np.uint32(0x477FF000)


@kernel
def _to_bfloat(x: Any, scale: Any, out: Any) -> Any:
    """Round to nearest even; what reaches the middle behind the largest bfloat16 becomes infinite."""
    worst = np.uint32(0)
    for i in range(x.size):
        y = x[i] * scale
        bits = np.float32(y).view(np.uint32)
        magnitude = bits & np.uint32(0x7FFFFFFF)
        worst = max(worst, magnitude)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
        out[i] = np.uint16(np.uint32(0x7FC0) if magnitude > _INFINITE else rounded)
    return worst >= np.uint32(0x7F7F8000)


@kernel
def _not_finite(x: Any) -> bool:
    for start in range(0, x.size, CHUNK):
        piece = x[start : start + CHUNK]
        worst = np.uint32(0)
        for i in range(piece.size):
            worst = max(worst, bits_of(piece[i]))
        if worst >= _INFINITE:
            return True
    return False


def not_finite(x: Tensor) -> bool:
    """Return whether any element is infinite or NaN; see `dispatch`."""
    return bool(_not_finite(view(x)))
