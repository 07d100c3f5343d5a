"""Rounding to the nearest of a few levels per block, in plain torch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from stenograd.kernels.reference.bits import block_views, pack_bits, unpack_bits
from stenograd.kernels.reference.sign import block_count, check_scales

__all__ = ["BITS", "SMALLEST", "levels", "lowbit_decode", "lowbit_encode", "top_of"]

BITS = {"e3m0": 4, "int4": 4, "int2": 2}  # per element
SMALLEST = 2.0**-6  # of the block's largest magnitude: the lowest of e3m0's seven powers of two
_HALF = 1 << 22  # half a float32's mantissa range: added to the bits, it carries 1.5 * 2^k up to 2^(k+1)


def top_of(name: str) -> int:
    """Return how many levels an integer format has on each side of zero.

    Example:
        >>> top_of("int4"), top_of("int2")
        (7, 1)
    """
    return (1 << (BITS[name] - 1)) - 1


@lru_cache(maxsize=32)
def levels(name: str, device: torch.device | str = "cpu") -> Tensor:
    """Return the level that each code stands for; code 8 of e3m0 is zero, as 0 is.

    Example:
        >>> levels("int2")
        tensor([-1.,  0.,  1.,  2.])
    """
    if name != "e3m0":
        top = top_of(name)
        return (torch.arange(1 << BITS[name], device=device, dtype=torch.float32) - top) / top
    half = [0.0, *(SMALLEST * 2.0**k for k in range(7))]
    return torch.tensor([*half, 0.0, *(-level for level in half[1:])], dtype=torch.float32, device=device)


def lowbit_encode(x: Tensor, name: str, block: int, numels: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Pack the codes, lowest bit first, and the largest magnitude of each block."""
    block_count(block, numels, x.numel())  # refuses lengths that do not fit
    codes = torch.empty(x.numel(), dtype=torch.uint8, device=x.device)
    scales = [torch.zeros(0, dtype=torch.float32, device=x.device)]
    for rows, out in zip(*(block_views(t, block, numels) for t in (x, codes)), strict=True):
        scale = rows.abs().amax(1, keepdim=True).to(torch.float32)
        scales.append(scale.view(-1))
        out.copy_(_codes((rows / torch.where(scale == 0, 1.0, scale)).to(torch.float32), name))
    return pack_bits(codes, BITS[name]), torch.cat(scales)


def _codes(y: Tensor, name: str) -> Tensor:
    """Return the code of each number in [-1, 1]; of NaN any, since its block's scale tells."""
    if name != "e3m0":
        top = top_of(name)
        # NaN has no integer that is the same on every machine.
        return y.mul_(top).round_().nan_to_num_(0.0).clamp_(-top, top).add_(top)
    magnitude = y.abs()
    exponent = ((magnitude.view(torch.int32) + _HALF) >> 23).sub_(120).clamp_(0, 7)  # 1.0 has 127
    # What lies between half and 3/4 of the smallest level has too low an exponent, but is nearer to it.
    torch.maximum(exponent, (magnitude >= SMALLEST / 2).to(torch.int32), out=exponent)
    return exponent.add_((y < 0).to(torch.int32), alpha=8)


def lowbit_decode(payload: tuple[Tensor, Tensor], name: str, block: int, numels: Sequence[int]) -> Tensor:
    """Look up the levels and multiply by the scales."""
    codes, scales = payload
    check_scales([payload], block_count(block, numels, sum(numels)))
    places = unpack_bits(codes, BITS[name], sum(numels)).to(torch.int32)
    values = levels(name, codes.device).index_select(0, places)
    start = 0
    for rows in block_views(values, block, numels):
        rows.mul_(scales[start : start + len(rows), None])
        start += len(rows)
    return values
