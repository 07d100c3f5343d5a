"""Half precision: every element in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stenograd.compression.contract import Codec, Exchange, Payload, Site, State
from stenograd.data.flat_parameters import is_finite
from stenograd.data.requests import Rounds, means
from stenograd.errors import MethodError, bad_value

__all__ = ["Cast"]

_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class Cast(Codec):
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
    linear: ClassVar[bool] = True

    dtype: str = "float16"

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

    @property
    def propagates(self) -> bool:
        """A NaN on one rank is a NaN in the sum, and an overflow an infinity."""
        return True

    @property
    def bulky(self) -> bool:
        """Every element travels."""
        return True

    @property
    def takes_scaled(self) -> bool:
        """Divided before or after rounding, the sum is the mean."""
        return True

    def encode(self, x: Tensor, site: Site) -> Payload:
        """Round to nearest."""
        wire = _TYPES[self.dtype]
        return (x.clone() if x.element_size() <= wire.itemsize else x.to(wire),)

    def exchange(
        self, x: Tensor, residual: Tensor | None, state: State, site: Site, want_error: bool
    ) -> Rounds[Exchange]:
        """Round, average, widen into x's memory; see `Codec.exchange`."""
        error: Tensor | None = None
        if want_error:
            payload, error = self.encode_error(x, residual, site)
        else:
            payload = self.encode(x, site)
        (mean,) = yield from means(payload, scaled=site.scaled)
        if mean.dtype == x.dtype:
            return Exchange(mean, state, error)
        # only float16 overflows where float32 does not; all ranks have the same mean, so all ask or none
        overflow = mean.dtype is torch.float16 and not is_finite(mean) and not (yield from _any_bad(x))
        return Exchange(x.copy_(mean), state, error, overflow=overflow)

    def decode(self, payload: Payload, like: Tensor, site: Site) -> Tensor:
        """Widen again."""
        return payload[0].to(like.dtype)


def _any_bad(x: Tensor) -> Rounds[bool]:
    """Return whether any rank's x is not finite."""
    (share,) = yield from means((torch.full((1,), float(not is_finite(x)), device=x.device),))
    return bool(share.item() > 0)
