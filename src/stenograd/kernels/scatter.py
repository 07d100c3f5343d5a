"""The dense mean of sparse vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stenograd.checks import require
from stenograd.errors import WireError
from stenograd.kernels.backend import check_out, landed, pick

__all__ = ["inside", "put", "scatter_mean"]


def put(x: Tensor, indices: Tensor, values: Tensor) -> None:
    """Write `x[indices] = values` in place.

    Args:
        x: flat tensor (n,), overwritten.
        indices: int32 or int64 tensor (k,), in [0, n), which is not checked, unique.
        values: (k,), of x's type.

    Example:
        >>> x = torch.zeros(3)
        >>> put(x, torch.tensor([0, 2]), torch.tensor([1.0, 3.0]))
        >>> x
        tensor([1., 0., 3.])
    """
    fast = pick(put, x, indices, values)
    if fast is not None:
        return fast(x, indices, values)
    x.index_copy_(0, indices.long(), values)
    return None


def scatter_mean(vectors: Sequence[tuple[Tensor, Tensor]], n: int, out: Tensor | None = None) -> Tensor:
    """Return the dense mean of sparse vectors: added in rank order into zeros, then divided by their number.

    Ascending indices are fastest: then the result is finished piece by piece in the first-level cache.

    Args:
        vectors: per rank `(indices, values)`, indices int32 or int64, unique within a rank, in any order.
        n: length of the result.
        out: where to write it, (n,); new float32 memory otherwise, which costs several times more.

    Raises:
        ConfigError: there are no vectors, or out has another length.
        WireError: a place outside [0, n), or other than one value a place.

    Example:
        >>> a, b = (torch.tensor([0]), torch.tensor([2.0])), (torch.tensor([1]), torch.tensor([4.0]))
        >>> scatter_mean([a, b], n=3)
        tensor([1., 2., 0.])
    """
    kind, wide = check_out(vectors, n, out)
    fast = pick(scatter_mean, kind, numel=n)
    if fast is not None:
        return landed(fast(vectors, n, wide), out)
    total = torch.zeros(n, dtype=torch.float32, device=kind.device) if wide is None else wide.zero_()
    for indices, values in vectors:
        indices = inside(indices, n)
        if indices.numel() != values.numel():
            raise WireError(f"{indices.numel()} indices came with {values.numel()} values")
        total.index_add_(0, indices, values.to(total.dtype))
    return landed(total.div_(len(vectors)), out)


def inside(indices: Tensor, n: int) -> Tensor:
    """Return indices, of which those outside a vector of n elements are refused.

    Elsewhere than on the CPU they are looked at later, and moved to the ends until then.

    Raises:
        WireError: naming the least and the greatest.

    Example:
        >>> inside(torch.tensor([0, 4]), 4)
        Traceback (most recent call last):
        stenograd.errors.WireError: indices lie in [0, 4), got 0 to 4: the message is damaged
    """
    rule = f"indices lie in [0, {n})"
    if not indices.numel():
        return indices
    lowest, highest = indices.aminmax()
    if indices.is_cpu:
        if int(lowest) < 0 or int(highest) >= n:
            raise WireError(f"{rule}, got {int(lowest)} to {int(highest)}: the message is damaged")
        return indices
    require((lowest >= 0) & (highest < n), f"{rule}: the message is damaged")
    return indices.clamp(0, n - 1)
