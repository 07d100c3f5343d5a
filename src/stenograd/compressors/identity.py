"""Dense averaging: every element in its own precision."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from stenograd.compression.codec import Additive
from stenograd.compression.contract import Feedback, Payload, Site

__all__ = ["Identity"]


@dataclass(frozen=True, kw_only=True)
class Identity(Additive):
    """Send x as it is: `average = sum_r x_r / N`, divided before summing.

    Wire: 32 bits an element for float32, one all-reduce. Lossless: `error = 0`.

    Example:
        >>> import torch
        >>> from stenograd.simulate import exchange
        >>> exchange(Identity(), [torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0])])[1].average
        tensor([2., 3.])
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"dense": {}}
    summary: ClassVar[str] = "every element, full precision (plain all-reduce)"

    feedback = Feedback.EXACT

    def encode(self, x: Tensor, site: Site) -> Payload:
        """Hand over x itself, so that it is averaged in place."""
        return (x,)

    def decode(self, payload: Payload, like: Tensor, site: Site) -> Tensor:
        """Take the numbers as they are."""
        return payload[0]
