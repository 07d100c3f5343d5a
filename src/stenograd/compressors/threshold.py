"""Threshold sparsification: every element that is large enough, with its place."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stenograd.compression.codec import Codec, gathered
from stenograd.compression.contract import Exchange, Facts, Feedback, Payload, Site, State
from stenograd.errors import MethodError, bad_value
from stenograd.kernels.indices import index_type
from stenograd.kernels.scatter import scatter_mean
from stenograd.wire.finite import finite_of
from stenograd.wire.requests import Rounds, gather_lengths, gather_padded

__all__ = ["Threshold"]


@dataclass(frozen=True)
class Threshold(Codec):
    """Send every element of magnitude `value` or more: `S = {i : |x_i| >= value}`, `sent = x` on S, else 0.

    Biased, and no contraction: an x whose elements are all small is not sent at all, so use error feedback.
    An exact zero is never sent. Wire: one int32 count, then as many int32 indices (int64 for n above 2**31)
    and values as the rank with the most has, `4 + 8 max_r |S_r|` bytes for float32, two all-gathers.

    Args:
        value: smallest magnitude that is sent, in units of the gradient; positive and finite.

    Raises:
        MethodError: value outside its range.

    Example:
        >>> import torch
        >>> from stenograd.simulate import exchange
        >>> exchange(Threshold(value=0.3), [torch.tensor([0.1, 0.9, -0.3, 0.2])])[0].average
        tensor([ 0.0000,  0.9000, -0.3000,  0.0000])

    Reference: Strom, "Scalable Distributed DNN Training Using Commodity GPU Cloud Computing", Interspeech
    2015 (which sends plus or minus the threshold; here the element itself is sent).
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"threshold": {}}
    summary: ClassVar[str] = "elements of a given magnitude or more, with their indices"

    value: float = 1e-3
    _: KW_ONLY

    def __post_init__(self) -> None:
        if not (self.value > 0 and math.isfinite(self.value)):
            advice = "give a typical gradient magnitude, such as 0.001"
            raise bad_value("value", "must be positive and finite", self.value, advice, MethodError)

    @classmethod
    def examples(cls) -> Iterator[Threshold]:
        """Yield one that sends nearly everything, one that sends some and one that sends hardly anything."""
        for value in (1e-3, 1.0, 5.0):
            yield cls(value=value)

    feedback = Feedback.ON  # small elements are dropped, always the same ones

    def facts(self, site: Site) -> Facts:
        """Lengths first."""
        return Facts(rounds=2, finite=True)

    def exchange(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Gather messages of different lengths."""
        if x.is_cpu:
            return gathered(self, x, residual, state, site, ragged=True)
        return self._counted(x, residual, state, site)

    def _counted(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Let the device count, so that the host reads the lengths of all buckets at once: the same bytes."""
        x = x if residual is None else x.add_(residual)
        count = _reaches(x, self.value).sum(dtype=torch.int32)
        own, lengths = yield from gather_lengths(count.view(1), x.numel())
        # The i-th place is where the count reaches i: `nonzero` would ask the device for its length again.
        reached = _reaches(x, self.value).cumsum(0, dtype=torch.int32)
        numbers = torch.arange(1, own + 1, dtype=torch.int32, device=x.device)
        payload = _taken(x, torch.searchsorted(reached, numbers))
        error = _left(x, payload) if site.error else None
        everyone = yield from gather_padded(payload, lengths)
        finite = self.finite(everyone)
        return Exchange(self.combine(everyone, x, site), state, error, finite)

    def encode(self, x: Tensor, site: Site) -> Payload:
        """Select and compact."""
        return _taken(x, torch.nonzero(_reaches(x, self.value)).view(-1))

    def decode(self, payload: Payload, like: Tensor, site: Site) -> Tensor:
        """Scatter into zeros."""
        return self.combine([payload], like, site)

    def encode_error(self, x: Tensor, residual: Tensor | None, site: Site) -> tuple[Payload, Tensor]:
        """Send, and leave x with zeros where it was sent."""
        x = x if residual is None else x.add_(residual)
        payload = self.encode(x, site)
        return payload, _left(x, payload)

    def finite(self, payloads: Sequence[Payload]) -> Tensor:
        """Look at what is sent: NaN and infinity are."""
        return finite_of(values for _, values in payloads)

    def combine(self, payloads: Sequence[Payload], like: Tensor, site: Site) -> Tensor:
        """Add all ranks' elements into one dense tensor."""
        vectors = [(indices, values) for indices, values in payloads]
        return scatter_mean(vectors, like.numel(), out=site.out(like))


def _reaches(x: Tensor, value: float) -> Tensor:
    return ~(x.abs() < value)  # NaN, too


def _taken(x: Tensor, indices: Tensor) -> Payload:
    return indices.to(index_type(x.numel())), x.index_select(0, indices)


def _left(x: Tensor, payload: Payload) -> Tensor:
    """Return x with zeros where it was sent."""
    return x.index_fill_(0, payload[0].long(), 0)
