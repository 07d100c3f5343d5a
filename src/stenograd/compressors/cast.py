"""Half precision: every element in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stenograd.compression.codec import Additive
from stenograd.compression.contract import Payload, Site
from stenograd.errors import MethodError, bad_value

__all__ = ["Cast"]

_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Cast(Additive):
    """Send x rounded to 16 bits: `average = sum_r cast(x_r) / N`, divided before summing, summed in 16 bits.

    float16 keeps 11 significant bits up to 65,504 (dividing first keeps the sum in range whenever the mean
    is); bfloat16 keeps 8 bits over float32's whole range. Numbers of 16 bits or fewer travel as they are.

    Args:
        dtype: "float16" or "bfloat16".

    Raises:
        MethodError: any other dtype.

    Example:
        >>> import torch
        >>> from stenograd.simulate import exchange
        >>> exchange(Cast(dtype="float16"), [torch.tensor([40000.0])] * 4)[0].average  # the sum would be inf
        tensor([40000.])
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "fp16": {"dtype": "float16"},
        "bf16": {"dtype": "bfloat16"},
    }
    summary: ClassVar[str] = "every element in 16 bits"

    dtype: str = "float16"
    _: KW_ONLY

    def __post_init__(self) -> None:
        if self.dtype not in _TYPES:
            raise bad_value(
                "dtype", f"must be one of {sorted(_TYPES)}", self.dtype, "choose one", MethodError
            )

    @classmethod
    def examples(cls) -> Iterator[Cast]:
        """Yield both types."""
        for dtype in _TYPES:
            yield cls(dtype=dtype)

    def encode(self, x: Tensor, site: Site) -> Payload:
        """Round to nearest."""
        wire = _TYPES[self.dtype]
        # a copy, because the driver may average in place
        return (x.clone() if x.element_size() <= wire.itemsize else x.to(wire),)

    def decode(self, payload: Payload, like: Tensor, site: Site) -> Tensor:
        """Widen again."""
        (narrow,) = payload
        return narrow if narrow.dtype == like.dtype else site.out(like).copy_(narrow)
