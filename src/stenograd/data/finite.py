"""Is it finite? Every question of that kind is asked here."""

from __future__ import annotations

import math
from collections.abc import Iterable
from enum import IntEnum

import torch
from torch import Tensor

__all__ = ["Finite", "finite_of", "is_finite", "not_finite"]

# Far below float32's 3.4e38: whatever a codec makes of magnitudes up to this, its sum over millions of ranks
# stays finite.
_BOUND = 1e30


class Finite(IntEnum):
    """What the messages of all ranks tell about their numbers; travels as a 0-d uint8 tensor."""

    NO = 0  # some rank's x held NaN or infinity
    YES = 1  # every rank's x was finite; the average may have overflowed, so look at it
    BOUNDED = 2  # every rank's x was finite, and so is the average


def finite_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return the `Finite` of some floating tensors: BOUNDED if no magnitude exceeds 1e30.

    A tensor, not a number, because reading a number from a CUDA device makes the program wait.

    Args:
        tensors: of any shapes, on one device; such as the scales in all ranks' messages.

    Example:
        >>> [Finite(int(finite_of([torch.tensor([x, 1.0])]))).name for x in (2.0, 2e38, float("nan"))]
        ['BOUNDED', 'YES', 'NO']
    """
    largest_of = [t.abs().amax() for t in tensors if t.numel()]  # NaN is the largest
    if not largest_of:
        return torch.tensor(Finite.BOUNDED, dtype=torch.uint8)
    largest = torch.stack(largest_of).amax()
    return largest.isfinite().to(torch.uint8) + (largest <= _BOUND)


def is_finite(x: Tensor) -> bool:
    """Return whether all elements are; no temporary, and one pass unless something is large or infinite.

    Example:
        >>> is_finite(torch.tensor([3e38, 3e38])), is_finite(torch.tensor([1.0, float("nan")]))
        (True, False)
        >>> is_finite(torch.tensor([0.0, float("inf")]).to_sparse())
        False
    """
    if x.layout is torch.sparse_coo:
        x = x._values()  # also of a tensor whose places repeat
    if x.numel() == 0 or math.isfinite(x.sum()):  # adding is fastest, and NaN and infinity stay in a sum
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(x))).all())


def not_finite(x: Tensor) -> Tensor:
    """Return 1.0 if x holds NaN or infinity, else 0.0, as a 0-d tensor; one pass, no temporary.

    Example:
        >>> not_finite(torch.tensor([1.0, float("inf")]))
        tensor(1.)
    """
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    return (~torch.stack(torch.aminmax(x)).isfinite().all()).float()  # NaN is both ends
