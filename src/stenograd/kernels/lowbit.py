"""Rounding to the nearest of a few levels per block: codes of 2 or 4 bits, and a scale."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from stenograd.kernels.backend import pick
from stenograd.kernels.bits import block_views, pack_bits, scale_blocks, unpack_bits
from stenograd.kernels.sign import block_count, check_scales

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
    """Send the code of the level nearest to `x / m`, `m = max|x|` of a block.

    Args:
        x: flat tensor (n,), floating; left alone.
        name: "e3m0", "int4" or "int2".
        block: elements per scale; blocks never span tensors.
        numels: lengths of the tensors that lie one after another in x.

    Returns:
        Codes, uint8 (ceil(n bits / 8),), lowest bit first; scales m, float32, one per block, NaN where the
        block has a NaN.

    Raises:
        ConfigError: block below 1, or lengths that do not add up to n.

    Example:
        >>> lowbit_encode(torch.tensor([4.0, -1.4, 0.0]), "e3m0", 8, [3])
        (tensor([215,   0], dtype=torch.uint8), tensor([4.]))
    """
    fast = pick(lowbit_encode, x)
    if fast is not None:
        return fast(x, name, block, numels)
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
    """Return what a message says, float32 (n,).

    Args:
        payload: codes and scales.
        name: as in encoding.
        block: as in encoding.
        numels: as in encoding.

    Raises:
        ConfigError: block below 1.
        WireError: codes or scales have another length.

    Example:
        >>> payload = lowbit_encode(torch.tensor([4.0, -1.4, 0.0]), "e3m0", 8, [3])
        >>> lowbit_decode(payload, "e3m0", 8, [3])
        tensor([ 4., -1.,  0.])
    """
    fast = pick(lowbit_decode, payload[1], numel=sum(numels))
    if fast is not None:
        return fast(payload, name, block, numels)
    codes, scales = payload
    check_scales([payload], block_count(block, numels, sum(numels)))
    indices = unpack_bits(codes, BITS[name], sum(numels)).to(torch.int32)
    values = levels(name, codes.device).index_select(0, indices)
    return scale_blocks(values, scales, block, numels)
