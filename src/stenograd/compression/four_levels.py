"""Numbers in two bits: four bins per tensor, each read back as the mean of what fell into it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from stenograd.errors import WireError
from stenograd.kernels.reference.bits import pack_bits, unpack_bits

__all__ = ["pack_binned", "unpack_binned"]

_LEVELS = 4
_WIDTH = 1.5  # standard deviations per bin, so that four bins cover six


def pack_binned(values: Tensor, places: Tensor, numels: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Write each number as the number of its bin, and for every tensor the means of its four bins.

    With the mean and standard deviation `mu, sigma` of a tensor's numbers, the bins meet at `mu - 1.5 sigma`,
    `mu` and `mu + 1.5 sigma`; the outer two are open. The means are taken in float64, in order.

    Args:
        values: float32 (k,). NaN and infinity make the mean of their bin so.
        places: where they lie in a flat tensor, ascending, (k,).
        numels: lengths of the tensors that lie one after another there.

    Returns:
        Codes, uint8 (ceil(2 k / 8),), lowest bit first, and means, float32 (4 t,), 0 for an empty bin, where
        t counts the tensors that are not empty.

    Example:
        >>> values = torch.tensor([1.0, 1.2, -1.0, -1.2])
        >>> payload = pack_binned(values, torch.arange(4), [4])
        >>> payload[0].numel(), unpack_binned(payload, torch.arange(4), [4])
        (1, tensor([ 1.1000,  1.1000, -1.1000, -1.1000]))

    Reference: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025. There the range
    is cut so that two of the four levels are negative and one is for large positive numbers; here both sides
    are alike.
    """
    tensor, tensors = _owners(places, numels)
    exact = values.to(torch.float64)
    off = exact - _means(exact, tensor, tensors)[tensor]
    bound = _WIDTH * _means(off.square(), tensor, tensors).sqrt()[tensor]
    # 0 to 3, by the three places where bins meet
    codes = (off > -bound).to(torch.int64).add_(off >= 0).add_(off >= bound)
    means = _means(exact, tensor * _LEVELS + codes, tensors * _LEVELS)
    return pack_bits(codes.to(torch.uint8), 2), means.to(torch.float32)


def unpack_binned(packed: tuple[Tensor, Tensor], places: Tensor, numels: Sequence[int]) -> Tensor:
    """Read back what `pack_binned` wrote, as float32.

    Args:
        packed: what it returned.
        places: as in packing.
        numels: as in packing.

    Raises:
        WireError: the codes or means are not as many as belong to these places.
    """
    codes, means = packed
    tensor, tensors = _owners(places, numels)
    if means.numel() != _LEVELS * tensors or means.dtype is not torch.float32:
        wanted = f"{tensors} tensors have {_LEVELS * tensors} float32 means"
        raise WireError(f"{wanted}, got {means.numel()} {means.dtype}: the message is damaged")
    return means[tensor * _LEVELS + unpack_bits(codes, 2, places.numel())]


def _owners(places: Tensor, numels: Sequence[int]) -> tuple[Tensor, int]:
    """Return for each place the tensor that it is in, counting only tensors that are not empty."""
    ends = _ends(tuple(numels), places.device)
    return torch.searchsorted(ends, places.to(torch.int64), right=True), ends.numel()


# Kept, because making it on a device copies it there, in each step and for each message.
@lru_cache(maxsize=256)
def _ends(numels: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([n for n in numels if n], dtype=torch.int64, device=device).cumsum(0)


def _means(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return the mean of the values of each group, 0 where there are none."""
    total = torch.zeros(groups, dtype=values.dtype, device=values.device).index_add_(0, group, values)
    count = torch.zeros_like(total).index_add_(0, group, torch.ones_like(values))
    return total / count.clamp_(min=1)
