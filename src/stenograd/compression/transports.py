"""The ways in which codes become an average: one all-reduce, or one all-gather that every rank decodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from stenograd.compression.contract import Exchange, Payload, Site, State, Transport
from stenograd.compression.small_all_reduce import mean_in_order, small_means
from stenograd.data.finite import Finite, finite_of, is_finite
from stenograd.data.requests import Op, Rounds, commit, gather, gather_ragged, mean, means

if TYPE_CHECKING:
    from stenograd.compression.codec import Codec

__all__ = ["AllGather", "AllReduce", "InOrder", "SmallAllReduce"]


@dataclass(frozen=True, kw_only=True)
class AllReduce(Transport):
    """Average the codes as they are, in one all-reduce.

    Args:
        op: `MEAN`, or `SUM` for x that is divided by the world size already.
    """

    linear: bool = True
    op: Op = Op.MEAN

    def summing(self) -> AllReduce:
        """Return the same for x that is divided by the world size already, which saves a pass over it."""
        return replace(self, op=Op.SUM)

    def run(
        self, codec: Codec, x: Tensor, residual: Tensor | None, state: State, site: Site, want_error: bool
    ) -> Rounds[Exchange]:
        """Encode, average, decode; see `Transport.run`."""
        payload, error = codec.message(x, residual, site, want_error)
        averaged = yield from self.reduced(payload, site)
        finite = yield from _overflow(x, averaged)
        site = replace(site, buffer=None if error is x else x)  # x is done with
        return Exchange(codec.decode(averaged, x, site), state, error, finite)

    def reduced(self, payload: Payload, site: Site) -> Rounds[Payload]:
        """Average, or add up, the codes of all ranks."""
        return (yield from means(payload, self.op))


@dataclass(frozen=True, kw_only=True)
class SmallAllReduce(AllReduce):
    """An all-reduce of few numbers in two hops, where a ring takes two for each other rank."""

    rounds: int = 2

    def reduced(self, payload: Payload, site: Site) -> Rounds[Payload]:
        """Average, or add up, the codes of all ranks; see `small_means`."""
        return (yield from small_means(payload, site.world_size, self.op))


@dataclass(frozen=True, kw_only=True)
class InOrder(AllReduce):
    """An all-reduce that adds up in rank order, as a loop in one process does; see `mean_in_order`."""

    rounds: int = 2

    def reduced(self, payload: Payload, site: Site) -> Rounds[Payload]:
        """Average, or add up, the codes of all ranks."""
        (x,) = payload
        return ((yield from mean_in_order(x, site.world_size, self.op)),)


def _overflow(x: Tensor, averaged: Sequence[Tensor]) -> Rounds[Tensor | None]:
    """Tell a sum that overflowed in float16 from one of bad numbers; None where nothing overflowed.

    Only float16 overflows where float32 does not. All ranks have the same sums, so all ask or none does.
    """
    narrow = [t for t in averaged if t.dtype is torch.float16]
    if x.dtype is torch.float16 or not narrow:
        return None
    if x.is_cpu:
        sound = all(map(is_finite, narrow))
    else:  # looking at once would make the host wait for each bucket
        codes = finite_of(narrow)
        sound = (yield from commit(codes)) or int(codes) == Finite.BOUNDED
    if sound:
        return None
    mine = torch.full((1,), not is_finite(x), dtype=torch.float32, device=x.device)
    bad = yield from mean(mine)
    return torch.tensor(Finite.NO if bad.item() > 0 else Finite.YES, dtype=torch.uint8, device=x.device)


@dataclass(frozen=True, kw_only=True)
class AllGather(Transport):
    """Bring every rank's message to every rank, and decode all of them in rank order.

    Args:
        ragged: messages differ in length from rank to rank; then their lengths are gathered first.
    """

    ragged: bool = False

    def __post_init__(self) -> None:
        if self.ragged:
            object.__setattr__(self, "rounds", 2)
        super().__post_init__()

    def run(
        self, codec: Codec, x: Tensor, residual: Tensor | None, state: State, site: Site, want_error: bool
    ) -> Rounds[Exchange]:
        """Encode, gather, decode; see `Transport.run`."""
        payload, error = codec.message(x, residual, site, want_error)
        everyone = yield from (gather_ragged(*payload, most=x.numel()) if self.ragged else gather(*payload))
        finite = codec.finite(everyone) if self.reports_finite else None
        if self.frees_residual and finite is not None and (yield from commit(finite)):
            # Where an error is kept it lies in x, and the old residual is free.
            site = replace(site, buffer=x if error is None else residual)
        return Exchange(codec.combine(everyone, x, site), state, error, finite)
