"""Is it finite? Every question of that kind is asked here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "Finite",
    "are_finite",
    "bound_of",
    "finite_of",
    "is_finite",
    "look_at",
    "norm_of",
    "not_bounded",
    "read",
    "values_of",
]

# Share of a type's largest number that codecs may be given. Whatever they make of it (a transform of a block,
# an average times the number of ranks, a momentum) stays in the range of float32, or of float64 for float64.
_SHARE = 1e-8


class Finite(IntEnum):
    """What the messages of all ranks tell about their numbers; travels as a 0-d uint8 tensor."""

    NO = 0  # some rank's x held NaN or infinity
    YES = 1  # every rank's x was finite, but so large that what was made of it may have overflowed
    BOUNDED = 2  # x, the average and the new states are finite on every rank, in float32 or wider


def finite_of(tensors: Iterable[Tensor]) -> Tensor:
    """Return the `Finite` of some floating tensors: BOUNDED up to `bound_of` their type.

    A tensor, not a number, because reading a number from a CUDA device makes the program wait.

    Args:
        tensors: of any shapes, on one device; such as the scales in all ranks' messages.

    Example:
        >>> [Finite(int(finite_of([torch.tensor([x, 1.0])]))).name for x in (2.0, 2e38, float("nan"))]
        ['BOUNDED', 'YES', 'NO']
    """
    largest_of = [t.abs().amax() for t in tensors if t.numel()]  # NaN is the largest
    if not largest_of:
        return torch.tensor(Finite.BOUNDED, dtype=torch.uint8, device="cpu")
    largest = torch.stack(largest_of).amax()
    # 0, 1 or 2 as in `Finite`; NaN is below no bound
    return largest.isfinite().to(torch.uint8) + (largest <= bound_of(largest.dtype))


def bound_of(dtype: torch.dtype) -> float:
    """Return the largest magnitude that sums and states can be made of without a look at them.

    float16 has no such bound of its own: whatever is made of it is made in float32, and only an average that
    is written as float16 again can overflow.

    Example:
        >>> [float(f"{bound_of(t):.2g}") for t in (torch.float16, torch.bfloat16, torch.float32)]
        [66000.0, 3.4e+30, 3.4e+30]
    """
    return torch.finfo(dtype).max * (1.0 if dtype is torch.float16 else _SHARE)


def is_finite(x: Tensor) -> bool:
    """Return whether all elements are; no temporary, and one pass unless something is large or infinite.

    Example:
        >>> is_finite(torch.tensor([3e38, 3e38])), is_finite(torch.tensor([1.0, float("nan")]))
        (True, False)
        >>> is_finite(torch.tensor([0.0, float("inf")]).to_sparse())
        False
    """
    x = values_of(x)
    if x.numel() == 0 or math.isfinite(x.sum()):  # adding is fastest, and NaN and infinity stay in a sum
        return True
    return bool(torch.isfinite(torch.stack(torch.aminmax(x))).all())  # a sum of finite numbers may overflow


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all elements of all tensors are; on other devices than the CPU the host waits once.

    Example:
        >>> are_finite([torch.ones(2), torch.tensor(3e38)]), are_finite([torch.tensor([1.0, float("inf")])])
        (True, False)
    """
    return bool(look_at(tensors))


def look_at(tensors: Iterable[Tensor]) -> bool | Tensor:
    """Return whether all elements of all tensors are finite, without waiting for a device.

    Returns:
        A bool where it is known on the host, as it always is of tensors on the CPU; otherwise a 0-d bool
        tensor, on the device of the first tensor that is not there.

    Example:
        >>> look_at([torch.ones(2), torch.tensor(3e38)]), look_at([torch.tensor([1.0, float("inf")])])
        (True, False)
    """
    apart: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for x in tensors:
        if x.is_cpu:
            if not is_finite(x):
                return False
        elif (dense := values_of(x)).numel():
            apart.setdefault((x.device, x.dtype), []).append(dense)
    # One launch for many tensors: their largest magnitudes are finite if all elements are.
    found = [torch.stack(torch._foreach_norm(some, math.inf)).isfinite().all() for some in apart.values()]
    if len(found) < 2:
        return found[0] if found else True
    return torch.stack([one.to(found[0].device, non_blocking=True) for one in found]).all()


def values_of(x: Tensor) -> Tensor:
    """Return a tensor itself, and of a sparse one, whose places may repeat, the values in it."""
    return x._values() if x.layout is torch.sparse_coo else x


def norm_of(x: Tensor) -> Tensor:
    """Return the L2 norm, 0-d, in float32 or wider; infinite only if an element is.

    Squares of 1e20 are beyond float32, and clipping by an infinite norm would make a gradient zero.

    Example:
        >>> norm_of(torch.tensor([3e20, 4e20])), norm_of(torch.tensor([4e4, 3e4], dtype=torch.float16))
        (tensor(5.0000e+20, dtype=torch.float64), tensor(50000.))
    """
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
    if not x.is_cpu or not norm.isfinite():  # reading a number of another device makes the program wait
        norm = torch.linalg.vector_norm(x, dtype=torch.float64)
    return norm


def not_bounded(x: Tensor, bound: float | None = None) -> Tensor:
    """Return 1.0, 0-d, if x holds NaN, infinity or more than a bound (None: `bound_of` its type), else 0.0.

    One pass, no temporary.

    Example:
        >>> not_bounded(torch.tensor([1.0, float("inf")])), not_bounded(torch.tensor([1e30, -1.0]))
        (tensor(1.), tensor(0.))
    """
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    ends = torch.stack(torch.aminmax(x))  # NaN is both
    # Not `>`, with which NaN would count as bounded.
    return (~(ends.abs() <= (bound_of(x.dtype) if bound is None else bound)).all()).float()


def read(tensors: Sequence[Tensor], dtype: torch.dtype = torch.float32) -> list[list[Any]]:
    """Return the numbers in some small tensors; the host waits once for each device.

    Args:
        tensors: of any shapes.
        dtype: as which they are read.

    Example:
        >>> read([torch.tensor(2, dtype=torch.uint8), torch.tensor([0.5, 1.0])])
        [[2.0], [0.5, 1.0]]
    """
    # One list for all will do: each entry is replaced below, and none is changed.
    found: list[list[Any]] = [[]] * len(tensors)
    for device in dict.fromkeys(t.device for t in tensors):
        indices = [i for i, t in enumerate(tensors) if t.device == device]
        rows = [tensors[i].reshape(-1).to(dtype) for i in indices]
        numbers = iter(torch.cat(rows).tolist())
        for i, row in zip(indices, rows, strict=True):
            found[i] = [next(numbers) for _ in range(row.numel())]
    return found
