"""Selection of the largest elements.

Magnitudes are compared by their bits, so NaN is larger than infinity and is sent first.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from stenograd.errors import ConfigError
from stenograd.kernels.backend import matching, pick
from stenograd.kernels.indices import index_type

__all__ = ["magnitude_bits", "select", "select_feedback"]

_SAMPLE = 32768  # magnitudes from which a bound for the k-th largest is guessed
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def magnitude_bits(x: Tensor) -> Tensor:
    """Return the bits of floating numbers without their signs: integers in the order of `|x|`, NaN last.

    Example:
        >>> magnitude_bits(torch.tensor([-1.0, 0.5, float("nan")])).argsort()
        tensor([1, 0, 2])
    """
    integer = _INTEGERS[x.element_size()]
    return x.contiguous().view(integer) & torch.iinfo(integer).max


def select_feedback(x: Tensor, residual: Tensor, k: int, halves: bool = False) -> tuple[Tensor, Tensor]:
    """Take the k largest after correction: `v = x + r`, `S = top_k(|v|)`, `r' = v` outside S, else 0.

    A bound that slightly more than k elements reach is guessed from a regular sample. One pass adds, writes
    the residual and compacts what reaches the bound; only that is ranked, by counting. So the result is
    exact, and a wrong guess costs time only.

    Args:
        x: flat tensor (n,), any floating type; left alone.
        residual: flat tensor (n,), overwritten.
        k: 0 to n.
        halves: whether values will travel as bfloat16, so that on S `r' = v - bfloat16(v)`.

    Returns:
        Indices (k,), ascending, int32 (int64 above 2**31 elements), and values (k,) in residual's type. Of
        equal magnitudes those at lower indices are taken.

    Raises:
        ConfigError: k outside its range, or lengths that differ.
        TensorTypeError: a tensor is not flat and floating.

    Example:
        >>> residual = torch.tensor([0.0, 2.0, 0.0])
        >>> select_feedback(torch.tensor([1.0, 1.0, -4.0]), residual, k=2)
        (tensor([1, 2], dtype=torch.int32), tensor([ 3., -4.]))
        >>> residual
        tensor([1., 0., 0.])
    """
    x = matching(x, residual)
    _check_k(x, k)
    fast = pick(select_feedback, x, residual)
    if fast is not None:
        return fast(x, residual, k, halves)
    indices, values = select(residual.add_(x), k)
    left = values - values.bfloat16().to(values.dtype) if halves else torch.zeros_like(values)
    residual.index_copy_(0, indices.long(), left)
    return indices, values


def select(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k elements of largest magnitude and their indices, like `select_feedback` without residual.

    Plain torch sorts only the elements that reach a bound, guessed from a regular sample: if there are at
    least k of them, all of the k largest are among them.

    Args:
        x: flat tensor (n,), any floating type; left alone.
        k: 0 to n.

    Raises:
        ConfigError: k outside its range.
        TensorTypeError: x is not flat and floating.

    Example:
        >>> select(torch.tensor([0.1, -0.9, 0.3, 0.2]), k=2)
        (tensor([1, 2], dtype=torch.int32), tensor([-0.9000,  0.3000]))
    """
    x = matching(x, None)
    _check_k(x, k)
    fast = pick(select, x)
    if fast is not None:
        return fast(x, k)
    bits = magnitude_bits(x)
    if not x.is_cpu:  # below, the host would wait for sizes
        return _taken(x, _largest(bits, k))
    indices = (bits >= _bound(bits, k)).nonzero().view(-1)
    if indices.numel() < k:  # the guess was too high
        indices = torch.arange(x.numel(), device=x.device)
    bits = bits.index_select(0, indices)
    if k:
        last = bits.topk(k, sorted=False).values.amin()
        above, equal = bits > last, bits == last
        indices = indices[above | equal & (equal.cumsum(0) <= k - above.sum())]
    return _taken(x, indices[:k])


def _largest(bits: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest, ascending, without a size that only the device knows.

    `topk` may take any of those that equal the least: they are replaced by the first that do.
    """
    top = bits.topk(k, sorted=False)
    if not k:
        return top.indices
    last = top.values.amin()
    equal = top.values == last
    numbers = equal.cumsum(0, dtype=torch.int32)  # 1, 2, ... among the equal ones
    found = torch.searchsorted((bits == last).cumsum(0, dtype=torch.int32), numbers)
    return torch.where(equal, found, top.indices).sort().values


def _taken(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    return indices.to(index_type(x.numel())), x.index_select(0, indices)


def _bound(bits: Tensor, k: int) -> Tensor | int:
    """Guess a bound that a few more than k elements reach; 0 where a guess would not pay."""
    n = bits.numel()
    if not (n >= 2 * _SAMPLE and 0 < k <= n // 16):
        return 0
    # An odd stride goes through all columns of a matrix whose width is a power of two.
    sample = bits[:: (n // _SAMPLE) | 1]
    reach = math.ceil(1.5 * k / n * sample.numel()) + 8  # 1.5 k candidates, and some for small k
    return sample.topk(reach, sorted=False).values.amin()


def _check_k(x: Tensor, k: int) -> None:
    if not 0 <= k <= x.numel():
        raise ConfigError(f"k must be 0 to {x.numel()}, got {k}")
