"""The dense mean of sparse vectors in plain torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stenograd.errors import ConfigError, WireError

__all__ = ["put", "scatter_mean"]


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
        if places.numel() and not (int(places.amin()) >= 0 and int(places.amax()) < n):
            raise WireError(f"places lie in [0, {n}), got {int(places.amin())} to {int(places.amax())}")
        if places.numel() != values.numel():
            raise WireError(f"{places.numel()} places came with {values.numel()} values")
        total.index_add_(0, places, values.to(total.dtype))
    return total.div_(len(vectors))
