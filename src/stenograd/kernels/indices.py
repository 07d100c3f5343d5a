"""Ascending indices in about `2 + log2(n / k)` bits each (Elias-Fano)."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from stenograd.checks import require
from stenograd.errors import ConfigError, WireError
from stenograd.kernels.backend import pick
from stenograd.kernels.bits import pack_bits, packed_bytes, unpack_bits

__all__ = ["index_type", "indices_bytes", "mark_count", "pack_indices", "planes_of", "unpack_indices"]


def index_type(n: int) -> torch.dtype:
    """Return the integer type in which indices of n elements are kept: int32 where it suffices.

    Example:
        >>> index_type(1000)
        torch.int32
    """
    return torch.int32 if n <= 1 << 31 else torch.int64


@lru_cache(maxsize=1024)
def indices_bytes(n: int, k: int) -> int:
    """Bytes that `pack_indices` needs for k of n indices: about `k (2 + log2(n / k)) / 8`.

    Raises:
        ConfigError: k outside [0, n].

    Example:
        >>> indices_bytes(1_000_000, 10_000) * 8 / 10_000  # bits a place; an int32 has 32
        8.5624
    """
    return sum(packed_bytes(k, bits) for bits in planes_of(n, k)) + packed_bytes(mark_count(n, k), 1)


def pack_indices(indices: Tensor, n: int) -> Tensor:
    """Write ascending indices: `l = floor(log2(n / k))` low bits of each as they are, the rest in unary.

    The unary part has one bit for each place and one for each of the `n / 2**l` values of the high bits: bit
    `(p_i >> l) + i` is set for the i-th place. So the size, `indices_bytes(n, k)`, depends on n and k alone.

    Args:
        indices: int32 or int64 tensor (k,), strictly ascending, in [0, n).
        n: number of indices there are.

    Raises:
        ConfigError: indices are not in order or outside the range.

    Example:
        >>> packed = pack_indices(torch.tensor([3, 500, 999]), n=1000)
        >>> packed.numel(), unpack_indices(packed, n=1000, k=3)
        (4, tensor([  3, 500, 999], dtype=torch.int32))

    Reference: Elias, "Efficient Storage and Retrieval by Content and Address of Static Files", 1974.
    """
    indices = indices.contiguous()
    fast = pick(pack_indices, indices)
    if fast is not None:
        return fast(indices, n)
    indices, k = indices.long(), indices.numel()
    planes = planes_of(n, k)
    # On other devices reading them would make the host wait, and all that come here were sorted before.
    looked_at = k and indices.is_cpu
    if looked_at and not (int(indices[0]) >= 0 and int(indices[-1]) < n and bool((indices.diff() > 0).all())):
        raise ConfigError(f"indices must be strictly ascending in [0, {n}): sort them")
    marks = torch.zeros(mark_count(n, k), dtype=torch.uint8, device=indices.device)
    marks.index_fill_(0, (indices >> sum(planes)) + torch.arange(k, device=indices.device), 1)
    low = [((indices >> 8 * i) & ((1 << bits) - 1)).to(torch.uint8) for i, bits in enumerate(planes)]
    parts = [pack_bits(plane, bits) for plane, bits in zip(low, planes, strict=True)]
    return torch.cat([*parts, pack_bits(marks, 1)])


def unpack_indices(packed: Tensor, n: int, k: int) -> Tensor:
    """Read back what `pack_indices` wrote, as int32 (int64 above 2**31 indices).

    Args:
        packed: uint8 tensor of `indices_bytes(n, k)` bytes.
        n: number of indices there are.
        k: number of indices written.

    Raises:
        ConfigError: k outside [0, n].
        WireError: packed has another length, or does not hold k ascending indices below n.

    Example:
        >>> unpack_indices(pack_indices(torch.arange(2), n=2), n=2, k=2)
        tensor([0, 1], dtype=torch.int32)
    """
    packed = packed.contiguous()
    fast = pick(unpack_indices, packed) if index_type(n) is torch.int32 else None
    if fast is not None:
        return fast(packed, n, k)
    planes, marks = planes_of(n, k), mark_count(n, k)
    if packed.numel() != indices_bytes(n, k):
        raise WireError(f"{k} of {n} indices take {indices_bytes(n, k)} bytes, got {packed.numel()}")
    *low, high = packed.split([*(packed_bytes(k, bits) for bits in planes), packed_bytes(marks, 1)])
    set_bits = _set_bits(unpack_bits(high, 1, marks), k)
    indices = (set_bits - torch.arange(k, device=packed.device)) << sum(planes)
    for i, (plane, bits) in enumerate(zip(low, planes, strict=True)):
        indices |= unpack_bits(plane, bits, k).long() << 8 * i
    if k:
        # None can be below 0: the i-th bit that is set has at least i bits before it.
        ascend = (indices[-1] < n) & (indices.diff() > 0).all()
        require(ascend, f"the {k} indices received do not ascend in [0, {n}): the payload is damaged")
    if not indices.is_cpu:
        indices.clamp_(max=n - 1)  # until somebody reads that they are damaged
    return indices.to(index_type(n))


def _set_bits(marks: Tensor, k: int) -> Tensor:
    """Return the indices of k ones.

    Raises:
        WireError: there are not so many.
    """
    rule = f"{k} indices have {k} bits set"
    if marks.is_cpu:
        found = marks.nonzero().view(-1)
        if found.numel() != k:
            raise WireError(f"{rule}, got {found.numel()}: the ranks disagree on k")
        return found
    reached = marks.cumsum(0, dtype=torch.int32)
    if k:
        require(reached[-1] == k, f"{rule}: the ranks disagree on k")
    return torch.searchsorted(reached, torch.arange(1, k + 1, dtype=torch.int32, device=marks.device))


@lru_cache(maxsize=1024)
def planes_of(n: int, k: int) -> tuple[int, ...]:
    """Return the bits of each low byte of a place: eight, and what is left of `floor(log2(n / k))`.

    Raises:
        ConfigError: k outside [0, n].

    Example:
        >>> planes_of(1 << 20, 100)
        (8, 5)
    """
    if not 0 <= k <= n:
        raise ConfigError(f"k must be 0 to {n}, got {k}")
    low = (n // k).bit_length() - 1 if k else 0
    return (8,) * (low // 8) + (low % 8,) * (low % 8 > 0)


@lru_cache(maxsize=1024)
def mark_count(n: int, k: int) -> int:
    """Return the bits of the unary part: one a place, and one for each value of the high bits but 0.

    Example:
        >>> mark_count(1024, 128)
        255
    """
    return k + ((n - 1) >> sum(planes_of(n, k))) if k else 0
