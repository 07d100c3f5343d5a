"""The hash that tells whether replicas are equal."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from stenograd.kernels.backend import pick

__all__ = ["GOLDEN", "hash_tensor", "hash_tensors", "hash_words"]

# 2**64 / golden ratio, and the multipliers of splitmix64 (Steele et al., "Fast Splittable Pseudorandom Number
# Generators", OOPSLA 2014), as signed numbers: torch's int64 wraps around like unsigned ones.
GOLDEN = 0x9E3779B97F4A7C15
_STEP = GOLDEN - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_TAIL = 0x5851F42D4C957F2D  # odd, so a bijection; keeps the tail's indices apart from the words'
_CHUNK = {"cpu": 1 << 14, "cuda": 1 << 22}  # words at a time: on the CPU all of it stays in the cache


def hash_tensor(tensor: Tensor) -> Tensor:
    """Hash a tensor's bits: `h = H(words) + c H(tail)`, `H(w) = sum_i mix(w_i + (i + 1) golden) mod 2**64`.

    Words are 8 bytes each; the tail is what is left, followed by zeros, and the number of bytes. mix is
    splitmix64's finaliser, a bijection. So two tensors that differ within one aligned word (a flipped
    bit, NaN's payload, the sign of zero) always have different hashes, and others have equal ones with a
    chance of about 2**-64. It is no defence against someone who looks for equal ones.

    Args:
        tensor: strided, of any dtype, shape, layout in memory and device; read in logical order.

    Returns:
        0-d int64 on the tensor's device.

    Example:
        >>> bool(hash_tensor(torch.tensor([0.0])) == hash_tensor(torch.tensor([-0.0])))
        False
    """
    raw = _bytes(tensor)
    whole = raw.numel() // 8 * 8
    ending = raw.new_zeros(8)
    ending[: raw.numel() - whole] = raw[whole:]
    tail = torch.stack([ending.view(torch.int64)[0], torch.tensor(raw.numel(), device=raw.device)])
    return hash_words(raw[:whole].view(torch.int64)) + _TAIL * hash_words(tail)


def hash_tensors(tensors: Iterable[Tensor]) -> int:
    """Hash several tensors, at least one, in their order: the hash of their hashes, from -2**63 to 2**63 - 1.

    Example:
        >>> hash_tensors([torch.ones(2), torch.zeros(2)]) == hash_tensors([torch.zeros(2), torch.ones(2)])
        False
    """
    return int(hash_tensor(torch.stack([hash_tensor(t).cpu() for t in tensors])))


def hash_words(words: Tensor) -> Tensor:
    """Return `sum_i mix(w_i + (i + 1) golden) mod 2**64` as a 0-d int64.

    Example:
        >>> one, other = hash_words(torch.tensor([1, 2])), hash_words(torch.tensor([2, 1]))
        >>> bool(one == other)
        False
    """
    fast = pick(hash_words, words)
    if fast is not None:
        return fast(words)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    chunk = _CHUNK.get(words.device.type, 1 << 22)
    # Made once: the keys of a later chunk are these plus one number.
    keys = torch.arange(1, min(chunk, words.numel()) + 1, device=words.device) * _STEP
    for start in range(0, words.numel(), chunk):
        part = words[start : start + chunk]
        z = part + keys[: part.numel()] + _wrapped(start * _STEP)
        z = (z ^ _shifted(z, 30)) * _FIRST
        z = (z ^ _shifted(z, 27)) * _SECOND
        total += (z ^ _shifted(z, 31)).sum()
    return total


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift right, filling with zeros; torch's own shift repeats the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _wrapped(number: int) -> int:
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.numel() and flat.stride(0) != 1:  # one element can have any stride
        flat = flat.clone()
    raw = flat.view(torch.uint8)
    # words lie at multiples of 8
    return raw.clone() if raw.data_ptr() % 8 or raw.storage_offset() % 8 else raw
