"""Sparse vectors in few bits: places as an Elias-Fano code, float32 values in 30 bits."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import WireError
from laconic.kernels.reference import pack_bits, packed_bytes, unpack_bits

__all__ = ["pack_floats", "pack_places", "places_bytes", "unpack_floats", "unpack_places"]

_NEGLIGIBLE = 63  # the code of six bits for numbers below 2**-62 of the largest: they are written as zeros


def places_bytes(n: int, k: int) -> int:
    """Bytes that `pack_places` needs for k of n places: about `k (2 + log2(n / k)) / 8`.

    Example:
        >>> places_bytes(1_000_000, 10_000) * 8 / 10_000  # bits a place; an int32 has 32
        8.5624
    """
    return sum(packed_bytes(k, bits) for bits in _planes(n, k)) + packed_bytes(_marks(n, k), 1)


def pack_places(places: Tensor, n: int) -> Tensor:
    """Write ascending places: `l = floor(log2(n / k))` low bits of each as they are, the rest in unary.

    The unary part has one bit for each place and one for each of the `n / 2**l` values of the high bits:
    bit `(p_i >> l) + i` is set for the i-th place. So the size follows from n and k alone.

    Args:
        places: 1-D int64 tensor, strictly ascending, in [0, n).
        n: number of places there are.

    Example:
        >>> packed = pack_places(torch.tensor([3, 500, 999]), n=1000)
        >>> packed.numel(), unpack_places(packed, n=1000, k=3)
        (4, tensor([  3, 500, 999]))

    Reference: Elias, "Efficient Storage and Retrieval by Content and Address of Static Files", 1974.
    """
    k = places.numel()
    planes = _planes(n, k)
    marks = torch.zeros(_marks(n, k), dtype=torch.uint8, device=places.device)
    marks[(places >> sum(planes)) + torch.arange(k, device=places.device)] = 1
    low = [((places >> 8 * i) & ((1 << bits) - 1)).to(torch.uint8) for i, bits in enumerate(planes)]
    parts = [pack_bits(plane, bits) for plane, bits in zip(low, planes, strict=True)]
    return torch.cat([*parts, pack_bits(marks, 1)])


def unpack_places(packed: Tensor, n: int, k: int) -> Tensor:
    """Read back what `pack_places` wrote, as int64.

    Raises:
        WireError: packed has another length, or does not hold k places.
    """
    planes, marks = _planes(n, k), _marks(n, k)
    sizes = [*(packed_bytes(k, bits) for bits in planes), packed_bytes(marks, 1)]
    if packed.numel() != sum(sizes):
        raise WireError(f"{k} of {n} places take {sum(sizes)} bytes, got {packed.numel()}")
    *low, high = packed.split(sizes)
    set_bits = unpack_bits(high, 1, marks).nonzero().view(-1)
    if set_bits.numel() != k:
        raise WireError(f"{k} places have {k} bits set, got {set_bits.numel()}: the ranks disagree on k")
    places = (set_bits - torch.arange(k, device=packed.device)) << sum(planes)
    for i, (plane, bits) in enumerate(zip(low, planes, strict=True)):
        places |= unpack_bits(plane, bits, k).long() << 8 * i
    return places


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
    exponents = (words >> 23) & 0xFF
    largest = exponents.amax().view(1) if values.numel() else exponents
    distances = (largest - exponents).clamp_(max=_NEGLIGIBLE).to(torch.uint8)
    rest = (words & 0x7FFFFF) | ((words >> 8) & 0x800000)
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
    words = (words & 0x7FFFFF) | ((words & 0x800000) << 8) | ((largest.to(torch.int32) - codes) << 23)
    return words.masked_fill_(codes == _NEGLIGIBLE, 0).view(torch.float32)


def _planes(n: int, k: int) -> list[int]:
    """Bits of each low byte of a place: eight, and what is left of `floor(log2(n / k))`."""
    low = (n // k).bit_length() - 1 if k else 0
    return [8] * (low // 8) + [low % 8] * (low % 8 > 0)


def _marks(n: int, k: int) -> int:
    return k + ((n - 1) >> sum(_planes(n, k))) if k else 0
