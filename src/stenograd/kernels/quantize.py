"""Rounding at random to 2 to 8 bits; the random numbers come from a hash of the place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from stenograd.errors import ConfigError
from stenograd.kernels.backend import check_out, corrected, landed, length_of, matching, pick, present
from stenograd.kernels.bits import block_views, pack_bits, scale_blocks, unpack_bits
from stenograd.kernels.sign import block_count, check_scales

__all__ = [
    "MOST",
    "hash_keys",
    "levels_of",
    "qsgd_decode_mean",
    "qsgd_encode_feedback",
    "short_uniforms",
    "uniforms",
]

MOST = 3.4e38  # levels a unit, just below float32's largest number
_WORD = 0xFFFFFFFF
_CHUNK = {"cpu": 1 << 15}  # hashes at a time: on the CPU they stay in the cache


def qsgd_encode_feedback(
    x: Tensor | None, residual: Tensor | None, bits: int, block: int, numels: Sequence[int], seed: int
) -> tuple[Tensor, Tensor]:
    """Send integers: `code = floor(s v / m + u) + s`, `v = x + r`, `m = max|v|` of a block.

    There are `s = 2^(bits-1) - 1` levels on each side of zero. u is a hash of seed and place, uniform in
    [0, 1), so the rounding is unbiased and needs no generator; `r' = v - m / s (code - s)`. A block with an
    infinite or NaN element has such a scale.

    Args:
        x: flat tensor (n,); left alone. None where all that is to send is in residual.
        residual: flat tensor (n,), overwritten; None for none.
        bits: bits an element, 2 to 8.
        block: elements a scale; blocks never span tensors.
        numels: lengths of the tensors that lie one after another in x.
        seed: any integer; another one for each rank and step.

    Returns:
        Codes, uint8 (ceil(n bits / 8),), lowest bit first; scales m, float32, one a block.

    Raises:
        ConfigError: bits or block outside its range, lengths that do not fit, or neither x nor residual.
        TensorTypeError: a tensor is not flat and floating.

    Example:
        >>> qsgd_encode_feedback(torch.tensor([1.0, -1.0, 0.0]), None, bits=2, block=4, numels=[3], seed=0)
        (tensor([18], dtype=torch.uint8), tensor([1.]))
    """
    x = matching(x, residual) if x is not None else None
    fast = pick(qsgd_encode_feedback, *present(x, residual))
    if fast is not None and (sent := fast(x, residual, bits, block, numels, seed)) is not None:
        return sent
    levels = levels_of(bits)
    block_count(block, numels, length_of(x, residual))  # refuses lengths that do not fit
    v = corrected(x, residual)
    u = short_uniforms(seed, v.numel(), v.device)
    scales = [torch.zeros(0, dtype=torch.float32, device=v.device)]
    for rows, y in zip(block_views(v, block, numels), block_views(u, block, numels), strict=True):
        scale = rows.abs().amax(1, keepdim=True).to(torch.float32)
        # Not `levels / tensor`, which torch rounds twice: by the reciprocal.
        inverse = torch.full_like(scale, levels) / torch.where(scale == 0, 1.0, scale)
        inverse = torch.where(inverse > MOST, MOST, inverse)  # scales below 4e-37 reach fewer levels
        # Rounded up: the largest magnitude, and no other, must come out at the last level or above.
        y += rows.to(torch.float32) * torch.nextafter(inverse, torch.full_like(inverse, math.inf))
        y += levels
        y.copy_(torch.where(y > 0, y, 0.0)).clamp_(max=2 * levels).floor_()  # NaN becomes 0
        scales.append(scale.view(-1))
        if residual is not None:
            rows -= ((y - levels) * _level(scale, levels)).to(rows.dtype)  # r' = v - m / s (code - s)
    # Each y is a view of u, in which the codes have taken the draws' place.
    return pack_bits(u.to(torch.uint8), bits), torch.cat(scales)


def qsgd_decode_mean(
    payloads: Sequence[tuple[Tensor, Tensor]],
    bits: int,
    block: int,
    numels: Sequence[int],
    out: Tensor | None = None,
) -> Tensor:
    """Return the mean over ranks of what `qsgd_encode_feedback` sent, added in rank order.

    Args:
        payloads: per rank `(codes, scales)`.
        bits: as in encoding.
        block: as in encoding.
        numels: as in encoding; they add up to n.
        out: where to write it, (n,); new float32 memory otherwise.

    Raises:
        ConfigError: there are no payloads, bits or block outside its range, or out has another length.
        WireError: a payload has another length.

    Example:
        >>> payload = torch.tensor([18], dtype=torch.uint8), torch.tensor([1.0])
        >>> qsgd_decode_mean([payload], bits=2, block=4, numels=[3])
        tensor([ 1., -1.,  0.])
    """
    n = sum(numels)
    kind, wide = check_out(payloads, n, out)
    fast = pick(qsgd_decode_mean, kind, numel=n)
    if fast is not None and (mean := fast(payloads, bits, block, numels, wide)) is not None:
        return landed(mean, out)
    levels = levels_of(bits)
    check_scales(payloads, block_count(block, numels, n))
    total = torch.zeros(n, dtype=torch.float32, device=kind.device) if wide is None else wide.zero_()
    for codes, scales in payloads:
        y = unpack_bits(codes, bits, n).to(total.dtype).sub_(levels)
        total += scale_blocks(y, _level(scales, levels), block, numels)
    return landed(total.div_(len(payloads)), out)


def _level(scale: Tensor, levels: int) -> Tensor:
    # Not by the number itself, for whose reciprocal a GPU multiplies: that would be rounded twice.
    return scale / torch.full_like(scale, levels)


def levels_of(bits: int) -> int:
    """Return the number of levels on each side of zero, `2^(bits-1) - 1`.

    Raises:
        ConfigError: bits outside 2 to 8.

    Example:
        >>> levels_of(4)
        7
    """
    if not 2 <= bits <= 8:
        raise ConfigError(f"bits must be 2 to 8, got {bits}: use 4")
    return (1 << (bits - 1)) - 1


def hash_keys(seed: int) -> tuple[int, int]:
    """Return two 32-bit keys that neighbouring seeds share no pattern in (SplitMix64's finish).

    Example:
        >>> hash_keys(0) != hash_keys(1)
        True
    """
    # One more than the seed: a zero would stay zero through all that follows.
    z = (seed + 1) * 0x9E3779B97F4A7C15 % (1 << 64)
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % (1 << 64)
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % (1 << 64)
    z ^= z >> 31
    return z & _WORD, z >> 32


def uniforms(seed: int, n: int, device: torch.device | None = None) -> Tensor:
    """Return n float32 numbers in [0, 1), multiples of 2**-24: the i-th is a hash of seed and i.

    The hash is lowbias32 with a key before and within: two multiplications, so it costs less than reading
    the gradient, needs no state, and is the same everywhere.

    Args:
        seed: any integer.
        n: how many.
        device: where.

    Example:
        >>> abs(float(uniforms(3, 10_000).mean()) - 0.5) < 0.01
        True

    Reference: Wellons, "Prospecting for Hash Functions", 2018.
    """
    out = torch.empty(n, dtype=torch.float32, device=device)
    for part, h in _hashes(seed, out):
        part.copy_(h >> 8).mul_(2.0**-24)  # 24 bits, which float32 holds exactly
    return out


def short_uniforms(seed: int, n: int, device: torch.device | None = None) -> Tensor:
    """Return n float32 numbers in [0, 1), multiples of 2**-16: two from each hash, the lower half first.

    For rounding to a few levels, which they bias by 2**-17 of a level on average, at half as many hashes.

    Args:
        seed: any integer.
        n: how many.
        device: where.

    Example:
        >>> abs(float(short_uniforms(3, 10_000).mean()) - 0.5) < 0.01
        True
    """
    pairs = torch.empty((n + 1) // 2, 2, dtype=torch.float32, device=device)
    for part, h in _hashes(seed, pairs):
        part[:, 0].copy_(h & 0xFFFF)
        part[:, 1].copy_(h.bitwise_right_shift_(16))
        part.mul_(2.0**-16)
    return pairs.view(-1)[:n]


def _hashes(seed: int, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield parts of a tensor, each with the hashes of its indices: int64 is twice the size of the result."""
    first, second = hash_keys(seed)
    chunk = _CHUNK.get(out.device.type, 1 << 22)
    for start in range(0, len(out), chunk):
        part = out[start : start + chunk]
        # int64, masked: torch has no arithmetic of uint32
        h = torch.arange(start, start + len(part), device=out.device)
        h ^= first
        h ^= h >> 16
        h *= 0x7FEB352D  # lowbias32's multipliers
        h &= _WORD
        h ^= second
        h ^= h >> 15
        h *= 0x846CA68B
        h &= _WORD
        h ^= h >> 16
        yield part, h
