"""The dense mean of sparse vectors in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stenograd.checks import require
from stenograd.errors import ConfigError, WireError

__all__ = ["inside", "put", "scatter_mean"]


def put(x: Tensor, places: Tensor, values: Tensor) -> None:
    """Write values at places."""
    x.index_copy_(0, places.long(), values)


def scatter_mean(
    vectors: Sequence[tuple[Tensor, Tensor]],
    n: int,
    out: Tensor | None = None,
) -> Tensor:
    """Add sparse vectors one after another into zeros and divide by their number."""
    if not vectors:
        raise ConfigError("vectors must not be empty, got []: give one (places, values) per rank")
    total = torch.empty(n, dtype=torch.float32, device=vectors[0][1].device) if out is None else out
    total.zero_()
    for places, values in vectors:
        places = inside(places, n)
        if places.numel() != values.numel():
            raise WireError(f"{places.numel()} places came with {values.numel()} values")
        total.index_add_(0, places, values.to(total.dtype))
    return total.div_(len(vectors))


def inside(places: Tensor, n: int) -> Tensor:
    """Return places, of which those outside a vector of n elements are refused.

    Elsewhere than on the CPU they are looked at later, and moved to the ends until then.

    Raises:
        WireError: naming the least and the greatest.

    Example:
        >>> inside(torch.tensor([0, 4]), 4)
        Traceback (most recent call last):
        stenograd.errors.WireError: places lie in [0, 4), got 0 to 4: the message is damaged
    """
    rule = f"places lie in [0, {n})"
    if not places.numel():
        return places
    lowest, highest = places.aminmax()
    if places.is_cpu:
        if int(lowest) < 0 or int(highest) >= n:
            raise WireError(f"{rule}, got {int(lowest)} to {int(highest)}: the message is damaged")
        return places
    require((lowest >= 0) & (highest < n), f"{rule}: the message is damaged")
    return places.clamp(0, n - 1)
