"""What the CPU kernels share: the compiler's settings, views of tensors, and streams of bits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from llvmlite import __version__ as llvmlite_version  # type: ignore[import-untyped]
from llvmlite.binding import get_host_cpu_name  # type: ignore[import-untyped]
from numba import carray, njit  # type: ignore[attr-defined]
from torch import Tensor

from stenograd.errors import WireError
from stenograd.kernels.cpu.lanes import as_pointer, load_word
from stenograd.kernels.host_cache import folder, once_per_host

__all__ = [
    "CHUNK",
    "addresses",
    "aligned",
    "array_at",
    "bits_of",
    "divide",
    "kernel",
    "largest_magnitude",
    "one_over",
    "peek",
    "put",
    "reordering",
    "view",
]

CHUNK = 1024  # elements handled at a time: two such pieces stay in the first-level cache between loops

F = TypeVar("F", bound=Callable[..., Any])


def kernel(function: F) -> F:
    """Compile on first use, without the interpreter's lock and without reordering any floating-point sum.

    The machine code is kept on disk, see `host_cache`; where nothing can be written, every process compiles
    for itself.

    Args:
        function: what to compile; `kernel(f).py_func` is f.

    Example:
        >>> @kernel
        ... def double(a):
        ...     return a + a
        >>> double(21)
        42
    """
    return _compiled(function)


def reordering(function: F) -> F:
    """Do as `kernel` does, but let sums be reordered: for what one rank computes for itself alone.

    Every run on the same kind of machine still gives the same bits.

    Example:
        >>> @reordering
        ... def double(a):
        ...     return a + a
        >>> double(21)
        42
    """
    # no more of fastmath: NaN and infinity must stay
    return _compiled(function, fastmath={"reassoc", "contract"})


def _compiled(function: F, **more: Any) -> F:
    # nogil, as exchanges run beside training; numpy's error model, as a division by zero gives infinity in
    # torch.
    settings: Any = {"nogil": True, "boundscheck": False, "error_model": "numpy", **more}
    compiler: Any = njit  # numba's own types differ from version to version
    config: Any = numba.config
    if config.DISABLE_JIT:
        raise ImportError("kernels cannot run as plain Python: leave out NUMBA_DISABLE_JIT")
    place = folder(config.CACHE_DIR, (numba.__version__, llvmlite_version, get_host_cpu_name()))
    if place is None:
        return cast(F, compiler(**settings)(function))
    before, config.CACHE_DIR = config.CACHE_DIR, str(place)  # numba reads it when a kernel is made
    try:
        dispatcher = compiler(cache=True, **settings)(function)
    except RuntimeError:  # numba finds no way to keep it, as for a function that is in no file
        return cast(F, compiler(**settings)(function))
    finally:
        config.CACHE_DIR = before
    once_per_host(dispatcher, place)
    return cast(F, dispatcher)


def aligned(tensor: Tensor) -> Tensor:
    """Return a tensor whose elements lie one after another at addresses that suit their type.

    Example:
        >>> import torch
        >>> aligned(torch.ones(2, 2).t()).is_contiguous()
        True
    """
    odd = tensor.data_ptr() % tensor.element_size()
    return tensor.clone() if odd else tensor.contiguous()


def addresses(payloads: Sequence[tuple[Tensor, Tensor]], nbytes: int, what: str) -> tuple[Any, list[Tensor]]:
    """Return where every rank's packed bytes and float32 scales lie, and the tensors to keep meanwhile.

    Args:
        payloads: per rank `(packed, scales)`.
        nbytes: how long each `packed` must be.
        what: which elements these are, for the message.

    Raises:
        WireError: one has another length.

    Example:
        >>> import torch
        >>> addresses([(torch.zeros(2, dtype=torch.uint8), torch.zeros(1))], 2, "16 signs")[0].shape
        (1, 2)
    """
    keep: list[Tensor] = []
    for packed, scales in payloads:
        if packed.numel() != nbytes:
            raise WireError(f"{what} take {nbytes} bytes, got {packed.numel()}")
        keep += [packed.contiguous(), aligned(scales.to(torch.float32))]
    return np.array([t.data_ptr() for t in keep], np.int64).reshape(-1, 2), keep


def one_over(count: int) -> Any:
    """Return `1 / count` where multiplying by it equals dividing by count, for powers of two, and else 0.

    Example:
        >>> float(one_over(4)), float(one_over(3))
        (0.25, 0.0)
    """
    return np.float32(0 if count & (count - 1) else 1 / count)


def view(tensor: Tensor) -> Any:
    """Return the numpy array that shares a tensor's memory.

    Example:
        >>> import torch
        >>> view(torch.ones(2))
        array([1., 1.], dtype=float32)
    """
    return tensor.detach().numpy()


@kernel
def array_at(address: Any, size: Any, dtype: Any) -> Any:
    """Return the array of some length that lies at an address: how a kernel takes one array a rank."""
    return carray(as_pointer(address), (size,), dtype)


@kernel
def bits_of(value: Any) -> Any:
    """Return the bits of a float32 without its sign, which order magnitudes as integers; NaN is largest."""
    return np.float32(value).view(np.uint32) & np.uint32(0x7FFFFFFF)


@kernel
def largest_magnitude(v: Any) -> Any:
    """Return the largest magnitude; NaN is larger than infinity."""
    largest = np.uint32(0)
    for i in range(v.size):
        bits = np.uint32(bits_of(v[i]))
        # numba's `max` would compare in 64 bits, which takes four times as long.
        largest = bits if bits > largest else largest
    return np.uint32(largest).view(np.float32)


@kernel
def divide(piece: Any, count: int, inverse: Any) -> None:
    """Divide by a count, or multiply by its inverse where that gives the same, in a tenth of the time."""
    if inverse:
        for i in range(piece.size):
            piece[i] *= inverse
    else:
        for i in range(piece.size):
            piece[i] /= np.float32(count)


@kernel
def peek(packed: Any, bit: int) -> Any:
    """Return the 57 bits or more that begin at some bit, lowest first; there are zeros behind the end."""
    byte = bit >> 3
    if byte + 8 <= packed.size:
        word = load_word(packed, byte)
    else:
        word = np.uint64(0)
        for j in range(packed.size - byte):
            word |= np.uint64(packed[byte + j]) << np.uint64(8 * j)
    return word >> np.uint64(bit & 7)


@kernel
def put(words: Any, pending: Any, held: Any, at: int, word: Any, width: int) -> tuple[Any, Any, int]:
    """Append 32 bits or fewer to a stream; return `(pending, held, at)` for the next call.

    Args:
        words: where full words of 32 bits go.
        pending: bits that fill no word yet; whoever writes last stores them at `words[at]`.
        held: how many those are, below 32.
        at: index of the next word.
        word: the bits to append; those from `width` on are 0.
        width: how many.
    """
    pending |= np.uint64(word) << held
    held += np.uint64(width)
    if held >= np.uint64(32):
        words[np.uint64(at)] = np.uint32(pending)
        pending >>= np.uint64(32)
        return pending, held - np.uint64(32), at + 1
    return pending, held, at
