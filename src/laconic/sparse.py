"""Sparse vectors as (places, values): what the sparsifying compressors share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["largest_places", "mean_of_sparse"]

_SAMPLE = 32768  # magnitudes from which a bound for the k-th largest is guessed


def mean_of_sparse(vectors: Sequence[tuple[Tensor, ...]], like: Tensor) -> Tensor:
    """Return the dense mean of sparse vectors, added in rank order.

    Args:
        vectors: per rank `(places, values)`, places unique within a rank.
        like: flat tensor whose length, dtype and device the result has.

    Example:
        >>> import torch
        >>> a = (torch.tensor([0]), torch.tensor([2.0]))
        >>> b = (torch.tensor([1]), torch.tensor([4.0]))
        >>> mean_of_sparse([a, b], torch.empty(3))
        tensor([1., 2., 0.])
    """
    total = torch.zeros_like(like)
    for places, values in vectors:
        total.index_add_(0, places, values.to(like.dtype))
    return total.div_(len(vectors))


def largest_places(x: Tensor, k: int) -> Tensor:
    """Return the places of the k elements of largest magnitude, in no order; exact.

    For small shares of large tensors a bound below the k-th largest magnitude is guessed from a regular
    sample: whatever reaches it is a candidate, and if at least k do, all of the k largest are among them. So
    only candidates are sorted. A wrong guess costs the time of the plain way.

    Args:
        x: flat tensor; NaN counts as largest or as nothing.
        k: 0 to the number of elements.

    Example:
        >>> import torch
        >>> largest_places(torch.tensor([0.1, -0.9, 0.3, 0.2]), 2).sort().values
        tensor([1, 2])
    """
    magnitude, n = x.abs(), x.numel()
    if n >= 2 * _SAMPLE and 0 < k <= n // 16:
        sample = magnitude[:: (n // _SAMPLE) | 1]
        reach = math.ceil(1.5 * k / n * sample.numel()) + 8  # 1.5 k candidates, and some for small k
        bound = torch.topk(sample, reach, sorted=False).values.min()
        candidates = (magnitude >= bound).nonzero().view(-1)
        if k <= candidates.numel() <= n // 4:
            chosen = torch.topk(magnitude.index_select(0, candidates), k, sorted=False).indices
            return candidates.index_select(0, chosen)
    return torch.topk(magnitude, k, sorted=False).indices
