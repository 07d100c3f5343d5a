"""TernGrad: each element as minus one, zero or one times the largest magnitude of its tensor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from stenograd.compression.blocks import WHOLE
from stenograd.compression.contract import Exchange, Payload, Site, State
from stenograd.compressors.qsgd import Rounding
from stenograd.errors import MethodError, bad_value
from stenograd.wire.finite import norm_of
from stenograd.wire.requests import Rounds

__all__ = ["TernGrad"]


@dataclass(frozen=True, kw_only=True)
class TernGrad(Rounding):
    """Send `m * sign(x) * b`, `m = max|x|` of the tensor, `b` 1 with the chance `|x| / m` and else 0.

    Unbiased, and every rank draws for itself. A few large elements make m large and nearly all others zero;
    `clip` first limits every element to so many times the tensor's root mean square. That part is biased,
    and what it cuts off is lost unless `feedback=true` sends it later.

    Wire: 2 bits per element and 32 bits per tensor: one all-gather up to three ranks, from four ranks on an
    all-to-all and an all-gather (`BlockCodec`), where each rank's part of a tensor has its own scale and the
    average is drawn once more, without clipping.

    Args:
        clip: largest magnitude in units of the tensor's root mean square, such as the paper's 2.5; 0 for no
            limit.
        seed: of the draws; any integer.

    Raises:
        MethodError: clip is negative or not finite.

    Example:
        >>> import torch
        >>> from stenograd.simulate import exchange
        >>> exchange(TernGrad(), [torch.tensor([2.0, -2.0, 0.0])])[0].average
        tensor([ 2., -2.,  0.])

    Reference: Wen et al., "TernGrad: Ternary Gradients to Reduce Communication in Distributed Deep Learning",
    NeurIPS 2017. There clipping takes the standard deviation, which for a tensor of equal elements is zero.
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"terngrad": {}}
    summary: ClassVar[str] = "sign or nothing, drawn at random, 2 bits per element and a scale per tensor"

    clip: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.clip >= 0 and math.isfinite(self.clip)):
            advice = "use 2.5, or leave it out for no limit"
            raise bad_value("clip", "must be at least 0 and finite", self.clip, advice, MethodError)

    @classmethod
    def examples(cls) -> Iterator[TernGrad]:
        """Yield it without and with clipping."""
        yield cls()
        yield cls(clip=2.5)

    def form(self) -> tuple[int, int]:
        """Two bits, and a scale for each tensor."""
        return 2, WHOLE

    def exchange(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Clip before anything travels where ranks own chunks: an owner does not encode its own."""
        if not self.clip or self.chunks(site) is None:
            return super().exchange(x, residual, state, site)
        return self._clipping(x, residual, state, site)

    def _clipping(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        x = x if residual is None else x.add_(residual)
        clipped = self._clipped(x, site)
        x.sub_(clipped)  # what clipping cuts off; below, what drawing loses is added
        done = yield from replace(self, clip=0.0).exchange(clipped, None, state, site)
        return done if done.error is None else done._replace(error=x.add_(done.error))

    def encode(self, x: Tensor, site: Site) -> Payload:
        """Clip, draw and pack `level + 1`, lowest bit first."""
        return super().encode(self._clipped(x, site), site)

    def encode_error(self, x: Tensor, residual: Tensor | None, site: Site) -> tuple[Payload, Tensor]:
        """Add, encode and leave the rest, and what was clipped, in x."""
        if not self.clip:
            return super().encode_error(x, residual, site)
        x = x if residual is None else x.add_(residual)
        clipped = self._clipped(x, site)
        x.sub_(clipped)  # what clipping cuts off; below, what drawing loses is added
        payload, lost = super().encode_error(clipped, None, site)
        return payload, x.add_(lost)

    def _clipped(self, x: Tensor, site: Site) -> Tensor:
        """Return x, or a copy with every tensor clipped; NaN makes all of its tensor NaN."""
        if not self.clip:
            return x
        x = x.clone()  # `encode_error` still needs x, for what is cut off
        for part in x.split(site.numels):
            if part.numel():
                bound = (norm_of(part) * (self.clip / math.sqrt(part.numel()))).to(x.dtype)
                part.clamp_(-bound, bound)
        return x
