"""Parameters as flat tensors, cut into chunks to send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby

import torch
from torch import Tensor

from stenograd.exchange.buckets import Bucket, assign
from stenograd.wire.carried import wide

__all__ = ["Stream", "by_kind", "holds"]

_FLOAT16_ROUNDS_UP = 65520.0  # to infinity: half a step above the largest number


class Stream:
    """Parameters of one kind as one flat tensor, in logical order.

    Args:
        parameters: by name, of one kind (see `by_kind`), at least one.

    Example:
        >>> w, b = torch.ones(2, 2), torch.zeros(3)
        >>> stream = Stream({"w": w, "b": b})
        >>> stream.read(stream.empty())
        tensor([1., 1., 1., 1., 0., 0., 0.])
        >>> [part for part, _ in stream.cuts(3, whole=False)]
        [slice(0, 1, None), slice(1, 4, None), slice(4, 7, None)]
    """

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        first = next(iter(parameters.values()))
        self.names, self.parameters = list(parameters), list(parameters.values())
        self.numels = [p.numel() for p in self.parameters]
        self.dtype, self.device = wide(first.dtype), first.device

    def empty(self) -> Tensor:
        """Allocate a flat tensor for all parameters."""
        return torch.empty(sum(self.numels), dtype=self.dtype, device=self.device)

    def read(self, out: Tensor) -> Tensor:
        """Copy the parameters to a flat tensor, and return it."""
        for p, piece in self._pieces(out):
            piece.copy_(p)
        return out

    def write(self, values: Tensor) -> None:
        """Copy a flat tensor to the parameters, rounded once where they are narrower."""
        for p, piece in self._pieces(values):
            p.copy_(piece)

    def approach(self, target: Tensor, share: float) -> None:
        """Move every parameter by `share` of its way to the target."""
        for p, piece in self._pieces(target):
            p.copy_(p.to(self.dtype).lerp(piece, share))  # rounded once, at the end

    @property
    def is_narrow(self) -> bool:
        """Whether some parameter ends far below its flat tensor, as float16 does at 65,504."""
        return any(p.dtype is torch.float16 for p in self.parameters)

    def holds(self, values: Tensor) -> bool:
        """Return whether float16 parameters stay finite when they take these values; others are not read.

        Example:
            >>> stream = Stream({"w": torch.zeros(2, dtype=torch.float16)})
            >>> [stream.holds(torch.tensor([1.0, x])) for x in (65519.0, 65520.0, float("nan"))]
            [True, False, False]
        """
        return all(holds(p.dtype, piece) for p, piece in self._pieces(values))

    def cuts(self, chunk: int, whole: bool, dense_below: int = 0) -> Iterator[tuple[slice, Bucket]]:
        """Cut into chunks, the remainder first; or, for whole parameters, between them.

        Parameters with fewer than `dense_below` elements travel densely; they must be a stream of their own.
        """
        dense = max(self.numels) < dense_below
        if whole:
            # Never filled: `assign` looks at shapes, types and devices alone.
            shaped = {
                name: torch.empty(p.shape, dtype=self.dtype, device=self.device)
                for name, p in zip(self.names, self.parameters, strict=True)
            }
            assigned = assign(shaped, chunk * self.dtype.itemsize, dense_below=dense_below)
            place = {name: i for i, bucket in enumerate(assigned) for name in bucket.names}
            # One that a large tensor has left open goes on behind it; what is one slice ends before it.
            runs = [[*run] for _, run in groupby(self.names, key=place.__getitem__)]
            buckets = [
                Bucket(tuple(run), tuple(shaped[n].shape for n in run), self.dtype, self.device, dense)
                for run in runs
            ]
        else:
            total = sum(self.numels)
            sizes = [total % chunk] * (total % chunk > 0) + [chunk] * (total // chunk)
            buckets = [
                Bucket((f"chunk {i} of {self.dtype}",), (torch.Size([size]),), self.dtype, self.device, dense)
                for i, size in enumerate(sizes)
            ]
        start = 0
        for bucket in buckets:
            stop = start + sum(bucket.numels)
            yield slice(start, stop), bucket
            start = stop

    def _pieces(self, flat: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        for p, piece in zip(self.parameters, flat.split(self.numels), strict=True):
            yield p.detach(), piece.view(p.shape)


def holds(dtype: torch.dtype, values: Tensor) -> bool:
    """Return whether values in float32 stay finite in a parameter's type; read for float16 only.

    Only float16 ends far below float32, whose own end no mean of parameters comes near.
    """
    if dtype is not torch.float16 or not values.numel():
        return True
    return bool((torch.stack(torch.aminmax(values)).abs() < _FLOAT16_ROUNDS_UP).all())


def by_kind(parameters: Mapping[str, Tensor], dense_below: int = 0) -> list[dict[str, Tensor]]:
    """Group parameters that can lie in one flat tensor, each group in the order given.

    Those with fewer than `dense_below` elements, which travel densely, are groups of their own.
    """
    groups: dict[tuple[torch.dtype, torch.device, bool], dict[str, Tensor]] = {}
    for name, p in parameters.items():
        kind = (wide(p.dtype), p.device, p.numel() < dense_below)
        groups.setdefault(kind, {})[name] = p
    return list(groups.values())
