"""A 64-bit hash of words in plain torch, for any device."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["GOLDEN", "hash_words"]

# 2**64 / golden ratio, and the multipliers of splitmix64 (Steele et al., "Fast Splittable Pseudorandom Number
# Generators", OOPSLA 2014), as signed numbers: torch's int64 wraps around like unsigned ones.
GOLDEN = 0x9E3779B97F4A7C15
_STEP = GOLDEN - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)
_CHUNK = {"cpu": 1 << 14, "cuda": 1 << 22}  # words at a time: on the CPU all of it stays in the cache


def hash_words(words: Tensor) -> Tensor:
    """Return `sum_i mix(w_i + (i + 1) golden) mod 2**64` as a 0-d int64.

    Example:
        >>> one, other = hash_words(torch.tensor([1, 2])), hash_words(torch.tensor([2, 1]))
        >>> bool(one == other)
        False
    """
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    chunk = _CHUNK.get(words.device.type, 1 << 22)
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
