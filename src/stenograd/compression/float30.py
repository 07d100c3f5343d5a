"""Float32 values in 30 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from stenograd.errors import WireError
from stenograd.kernels.reference.bits import pack_bits, unpack_bits

__all__ = ["pack_floats", "unpack_floats"]

_NEGLIGIBLE = 63  # the code of six bits for numbers below 2**-62 of the largest: they are written as zeros


def pack_floats(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Write float32 numbers in 30 bits: sign and mantissa as they are, the exponent below the largest's.

    Exact for every number of at least `2**-62` of the largest magnitude; smaller ones become zeros.

    Args:
        values: 1-D float32 tensor.

    Returns:
        Three uint8 tensors: the largest exponent (1), the six-bit distances from it, three bytes a number.

    Example:
        >>> unpack_floats(pack_floats(torch.tensor([1.1, -3e-7, 1e-30])), 3)
        tensor([ 1.1000e+00, -3.0000e-07,  0.0000e+00])
    """
    words = values.view(torch.int32)
    exponents = (words >> 23) & 0xFF  # eight bits behind the sign
    largest = exponents.amax().view(1) if values.numel() else exponents
    distances = (largest - exponents).clamp_(max=_NEGLIGIBLE).to(torch.uint8)
    rest = (words & 0x7FFFFF) | ((words >> 8) & 0x800000)  # 23 bits of mantissa, and the sign behind them
    return (
        largest.to(torch.uint8),
        pack_bits(distances, 6),
        rest.view(torch.uint8).view(-1, 4)[:, :3].flatten(),
    )


def unpack_floats(packed: tuple[Tensor, ...], count: int) -> Tensor:
    """Read back what `pack_floats` wrote.

    Raises:
        WireError: packed has another length.
    """
    largest, distances, rest = packed
    if rest.numel() != 3 * count:
        raise WireError(f"{count} numbers take {3 * count} bytes, got {rest.numel()}")
    if largest.numel() != min(count, 1):
        raise WireError(f"{count} numbers have {min(count, 1)} largest exponents, got {largest.numel()}")
    codes = unpack_bits(distances, 6, count).to(torch.int32)
    words = torch.nn.functional.pad(rest.view(-1, 3), (0, 1)).view(-1).view(torch.int32)
    # The sign goes back to the highest bit, the exponent is what the distance leaves of the largest.
    words = (words & 0x7FFFFF) | ((words & 0x800000) << 8) | ((largest.to(torch.int32) - codes) << 23)
    return words.masked_fill_(codes == _NEGLIGIBLE, 0).view(torch.float32)
