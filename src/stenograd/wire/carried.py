"""What a model carries besides what it trains: how it travels, what of it is averaged, and by which rule."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from stenograd.errors import TensorTypeError
from stenograd.wire.finite import is_finite

__all__ = [
    "Carried",
    "averaged_buffers",
    "can_average",
    "form_of",
    "in_memory",
    "mean_of_finite",
    "refuse_unfit",
    "wide",
]

# by name: which there are depends on torch
_FLOAT8 = tuple(dtype for name, dtype in vars(torch).items() if name.startswith("float8_"))
_AVERAGED = (torch.float16, torch.bfloat16, torch.float32, torch.float64, *_FLOAT8)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which numbers of a real type are averaged: float32, or float64 for float64.

    Example:
        >>> wide(torch.bfloat16), wide(torch.float8_e5m2)
        (torch.float32, torch.float32)
    """
    return torch.float64 if dtype == torch.float64 else torch.float32


def can_average(t: Tensor) -> bool:
    """Return whether a mean of such tensors has a meaning, and torch can take it.

    Example:
        >>> [can_average(torch.ones(1, dtype=dtype)) for dtype in (torch.float16, torch.int64)]
        [True, False]
    """
    return t.dtype in _AVERAGED


def in_memory(t: Tensor) -> Tensor:
    """Return a tensor without the repetitions of `expand`, which share memory and cannot be written to.

    Example:
        >>> in_memory(torch.zeros(1, 3).expand(4, 3)).shape
        torch.Size([1, 3])
    """
    repeated = [stride == 0 and size > 1 for stride, size in zip(t.stride(), t.shape, strict=True)]
    return t[tuple(slice(1) if again else slice(None) for again in repeated)] if any(repeated) else t


def averaged_buffers(model: nn.Module) -> list[Tensor]:
    """Return what rounds average of a model's buffers, for `mean_of_finite`: floating numbers."""
    return [in_memory(b.detach()) for b in model.buffers() if can_average(b)]


class Carried:
    """What rounds average of a model's buffers: floating numbers, in the forms that all ranks have now.

    One of another form later, such as a cache that grows with a rank's inputs, is each rank's own from then
    on. NaN stands in for it, which counts for nothing in `mean_of_finite`, so messages stay equally long.

    Example:
        >>> norm = nn.BatchNorm1d(2)
        >>> carried = Carried(norm)
        >>> norm.running_var = torch.ones(3)
        >>> carried.now()
        [tensor([0., 0.]), tensor([nan, nan])]
    """

    def __init__(self, model: nn.Module) -> None:
        held = {id(b): (m, key, b) for m in model.modules() for key, b in m._buffers.items() if b is not None}
        self._held = [(m, key, _form(b)) for m, key, b in held.values() if can_average(b)]

    def now(self) -> list[Tensor]:
        """Return the buffers, as memory that can be written to."""
        found = []
        for module, key, form in self._held:
            buffer = module._buffers.get(key)
            if buffer is not None and _form(buffer) == form:
                found.append(in_memory(buffer.detach()))
            else:
                shape, dtype, device = form
                found.append(torch.full(shape, math.nan, dtype=torch.float32, device=device).to(dtype))
        return found


def _form(t: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return in_memory(t).shape, t.dtype, t.device


def form_of(t: Tensor) -> str:
    """Describe what must be equal on all ranks for a tensor to travel.

    Example:
        >>> form_of(torch.eye(2)), form_of(torch.zeros(1).expand(2)), form_of(torch.eye(2).to_sparse())
        ('(2, 2) torch.float32', '(2,) torch.float32, 1 in memory', '(2, 2) torch.float32, torch.sparse_coo')
    """
    if is_lazy(t):
        return "uninitialised"
    plain = f"{tuple(t.shape)} {t.dtype}" if not t.is_nested else f"nested {t.dtype}"
    if t.layout != torch.strided or t.is_nested:
        return f"{plain}, {t.layout}"
    held = in_memory(t).numel()
    plain = plain if held == t.numel() else f"{plain}, {held} in memory"
    return f"{plain}, without memory" if t.is_meta else plain


def refuse_unfit(tensors: Mapping[str, Tensor]) -> None:
    """Refuse tensors that cannot be sent as the bytes of one block of memory.

    Args:
        tensors: by what messages call them; of the same forms (`form_of`) on all ranks, so that all raise.

    Raises:
        TensorTypeError: names the first of them, and what to do.

    Example:
        >>> refuse_unfit({"buffer mask": torch.eye(2).to_sparse()})
        Traceback (most recent call last):
        stenograd.errors.TensorTypeError: buffer mask must be dense, got torch.sparse_coo: keep it outside ...
    """
    for name, t in tensors.items():
        if is_lazy(t):
            raise TensorTypeError(
                f"{name} must be initialised, got a lazy one: pass one batch through the model first"
            )
        if t.layout != torch.strided or t.is_nested or t.is_quantized:
            got = "a nested tensor" if t.is_nested else "a quantized one" if t.is_quantized else t.layout
            raise TensorTypeError(
                f"{name} must be dense, got {got}: keep it outside of the model's parameters and buffers, as "
                "a plain attribute, or register its dense parts as buffers"
            )
        if t.is_meta:
            raise TensorTypeError(
                f"{name} must have memory, got one on the meta device: call model.to_empty(device=...) and "
                "initialise the model first"
            )


def mean_of_finite(
    rows: Sequence[Tensor], weights: Sequence[float], mean: Tensor, otherwise: Tensor | None = None
) -> Tensor:
    """Mend a weighted mean of what ranks carry: what is equal stays, and only finite numbers count.

    Element by element, with x_r of rank r and weight w_r,

        m = x_0                                   if all x_r are equal: infinity in a mask is a value
        m = sum_F w_r x_r / sum_F w_r             if some are not finite; F are the ranks whose x_r is
        m = otherwise                             if none is finite

    and the given mean elsewhere, so ordinary numbers keep their bits. An equal number would lose bits in a
    mean of three, and the largest of its type, which stands for infinity in many masks, would overflow.

    Args:
        rows: x, one of each rank, of any floating types.
        weights: w, all above 0.
        mean: the weighted mean as usual, in the type of the result.
        otherwise: None for the first row.

    Example:
        >>> nan, inf = float("nan"), float("inf")
        >>> rows = [torch.tensor([nan, -inf, 1.0]), torch.tensor([2.0, -inf, 3.0])]
        >>> mean_of_finite(rows, [0.5, 0.5], sum(0.5 * row for row in rows))
        tensor([2., -inf, 2.])
    """
    given = [row.to(mean.dtype) for row in rows]
    # NaN equals nothing, not even itself, so where all ranks have it `otherwise` decides.
    same = torch.ones_like(mean, dtype=torch.bool)
    for row in given[1:]:
        same &= row == given[0]
    mean = torch.where(same, given[0], mean)
    if is_finite(mean):  # the usual case ends here
        return mean
    total, weight = torch.zeros_like(mean), torch.zeros_like(mean)
    # Together below 1, so that no sum of finite numbers overflows; by a power of two, which costs no bit.
    scale = math.ldexp(1.0, -math.frexp(sum(weights))[1])
    for row, share in zip(given, weights, strict=True):
        fit = row.isfinite()
        total.add_(torch.where(fit, row, 0.0), alpha=share * scale)
        weight.add_(fit, alpha=share * scale)
    fallback = given[0] if otherwise is None else otherwise.to(mean.dtype)
    mended = torch.where(weight > 0, total / weight, fallback)
    return torch.where(same | mean.isfinite(), mean, mended)
