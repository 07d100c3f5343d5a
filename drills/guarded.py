"""Memory at whose ends a stray access is noticed: a page behind it that nobody may touch, and sentinels."""

from __future__ import annotations

import ctypes
import mmap

import numpy as np
import torch
from torch import Tensor

__all__ = ["GuardedInput", "GuardedOutput"]

_PAGE = mmap.PAGESIZE
_SENTINEL = 0x5A


class GuardedInput:
    """A place for a tensor right before a page without any rights: reading behind its end is a crash.

    Args:
        most_bytes: the largest tensor that will be put there.
    """

    def __init__(self, most_bytes: int) -> None:
        self._length = -(-max(most_bytes, 1) // _PAGE) * _PAGE
        self._map = mmap.mmap(-1, self._length + _PAGE)
        self._all = np.frombuffer(self._map, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(self._all.ctypes.data + self._length), ctypes.c_size_t(_PAGE), 0):
            raise OSError(ctypes.get_errno(), "mprotect failed")

    def put(self, tensor: Tensor) -> Tensor:
        """Return a copy of the tensor that ends where the page begins."""
        nbytes = tensor.numel() * tensor.element_size()
        if nbytes > self._length:
            raise ValueError(f"{nbytes} bytes do not fit in {self._length}")
        if nbytes == 0:
            return tensor
        place = torch.from_numpy(self._all[self._length - nbytes : self._length])
        copy = place.view(tensor.dtype).view(tensor.shape)
        return copy.copy_(tensor)


class GuardedOutput:
    """Memory for a float32 result between two zones of sentinels.

    Args:
        most: elements of the largest result.
        zone: elements of each zone.
    """

    def __init__(self, most: int, zone: int = 1024) -> None:
        self._bytes = torch.full((4 * (most + 2 * zone),), _SENTINEL, dtype=torch.uint8)
        self._zone = zone

    def room(self, count: int) -> Tensor:
        """Return `count` elements, with all around them reset."""
        self._bytes.fill_(_SENTINEL)
        return self._bytes.view(torch.float32)[self._zone : self._zone + count]

    def is_intact(self, count: int) -> bool:
        """Return whether nothing was written around the last `room(count)`."""
        before, after = self._bytes[: 4 * self._zone], self._bytes[4 * (self._zone + count) :]
        return bool((before == _SENTINEL).all()) and bool((after == _SENTINEL).all())
