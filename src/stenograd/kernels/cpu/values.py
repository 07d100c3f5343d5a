"""Numbers in fewer bits on the CPU, in one pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stenograd.kernels.cpu.jit import kernel, largest_magnitude, view
from stenograd.kernels.values import VALUE_BLOCK

__all__ = ["pack_values", "unpack_values"]


def pack_values(values: Tensor, kind: str) -> tuple[Tensor, ...]:
    """Write float32 numbers as int8 with scales."""
    count = values.numel()
    codes = torch.empty(count, dtype=torch.int8, device="cpu")
    scales = torch.empty(-(-count // VALUE_BLOCK), dtype=torch.float32, device="cpu")
    _to_int8(view(values), view(codes), view(scales))
    return codes, scales


@kernel
def _to_int8(values: Any, codes: Any, scales: Any) -> None:
    for row in range(scales.size):
        v = values[row * VALUE_BLOCK : (row + 1) * VALUE_BLOCK]
        out = codes[row * VALUE_BLOCK : (row + 1) * VALUE_BLOCK]
        scale = largest_magnitude(v)
        unit = scale if scale != 0 else np.float32(1)
        for i in range(v.size):
            y = np.rint(v[i] / unit * np.float32(127))  # halves to even, as torch rounds
            # NaN has no integer that is the same on every machine.
            out[i] = np.int8(np.int32(y if y == y else np.float32(0)))
        scales[row] = scale


def unpack_values(packed: tuple[Tensor, ...], kind: str, count: int) -> Tensor:
    """Read back what `pack_values` wrote, as float32; it was checked before."""
    values = torch.empty(count, dtype=torch.float32, device="cpu")
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
