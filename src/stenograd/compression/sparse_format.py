"""Sparse vectors as (places, values): what the sparsifying compressors share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stenograd.compression.float30 import pack_floats, unpack_floats
from stenograd.compression.four_levels import pack_binned, unpack_binned
from stenograd.kernels.dispatch import pack_places, pack_values, unpack_places, unpack_values
from stenograd.kernels.reference.scatter import inside

__all__ = ["VALUES", "Message", "mean_over_senders"]

# How float32 values may travel.
VALUES = ("float32", "float30", "bfloat16", "int8", "int2")


def mean_over_senders(vectors: Sequence[tuple[Tensor, Tensor]], out: Tensor) -> Tensor:
    """Return for each place the mean of the values that were sent for it, 0 where none was.

    Args:
        vectors: per rank `(places, values)`, places unique within a rank.
        out: flat tensor to write it to, which is returned.

    Example:
        >>> a = (torch.tensor([0, 1]), torch.tensor([2.0, 6.0]))
        >>> b = (torch.tensor([1]), torch.tensor([4.0]))
        >>> mean_over_senders([a, b], torch.empty(3))
        tensor([2., 5., 0.])
    """
    # float16 counts ranks exactly up to 2,048 only, and bfloat16 up to 256
    wide = torch.promote_types(out.dtype, torch.float32)
    total = out.zero_() if out.dtype == wide else torch.zeros_like(out, dtype=wide)
    senders = torch.zeros_like(total)
    for places, values in vectors:
        places = inside(places, out.numel())
        total.index_add_(0, places, values.to(wide))
        senders.index_add_(0, places, torch.ones_like(values, dtype=wide))
    total.div_(senders.clamp_(min=1))
    return total if total is out else out.copy_(total)


@dataclass(frozen=True, slots=True)
class Message:
    """How k of n elements are written: places, then values.

    Args:
        numel: n.
        count: k.
        compact: whether places travel as an Elias-Fano code, in ascending order, not as int32.
        values: one of `VALUES` for float32 values; None to send them as they are.
        numels: lengths of the tensors among which the n places are divided; only "int2" needs them.

    Example:
        >>> message = Message(1000, 2, compact=True, values="bfloat16")
        >>> payload = message.write(torch.tensor([3, 999]), torch.tensor([1.0, -2.0]))
        >>> [t.numel() * t.element_size() for t in payload]
        [3, 4]
        >>> message.read(payload)[1]
        tensor([ 1., -2.])
    """

    numel: int
    count: int
    compact: bool
    values: str | None
    numels: tuple[int, ...] = ()

    @property
    def is_lossy(self) -> bool:
        """Whether values read back may differ."""
        return self.values not in (None, "float32")

    def write(self, places: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Write places, which ascend, and their values."""
        where = pack_places(places, self.numel) if self.compact else places.to(torch.int32)
        if self.values is None:
            return where, values
        if self.values == "int2":
            return where, *pack_binned(values, places, self.numels)
        return where, *(pack_floats(values) if self.values == "float30" else pack_values(values, self.values))

    def read(self, payload: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Read back places and values.

        Raises:
            WireError: the payload has another form.
        """
        where = payload[0]
        places = unpack_places(where, self.numel, self.count) if self.compact else where
        return places, self.read_values(payload, places)

    def read_values(self, payload: tuple[Tensor, ...], places: Tensor) -> Tensor:
        """Read back the values of places that are known.

        Raises:
            WireError: the payload has another form.
        """
        rest = payload[1:]
        if self.values is None:
            return rest[0]
        if self.values == "int2":
            return unpack_binned((rest[0], rest[1]), inside(places, self.numel), self.numels)
        if self.values == "float30":
            return unpack_floats((rest[0], rest[1], rest[2]), self.count)
        return unpack_values(rest, self.values, self.count)
