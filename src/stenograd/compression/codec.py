"""Codecs: compressors that write one message per rank, and need no more than `encode` and `decode`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stenograd.compression.contract import Compressor, Exchange, Facts, Payload, Site, State, average_of
from stenograd.wire.finite import Finite, finite_of, is_finite
from stenograd.wire.requests import Rounds, commit, gather, gather_ragged, mean, means

__all__ = ["Additive", "Codec", "gathered", "message_share", "one_message", "written"]


@dataclass(frozen=True, kw_only=True)
class Codec(Compressor):
    """A compressor with one message per rank: write `encode` and `decode`, and the library does the rest.

    Every rank gathers all messages and decodes them in rank order. For speed, override `encode_error` (add
    the residual, encode and keep the error in one pass), `combine` (decode and add up) and `finite` (then
    nobody has to look through x). Codes that can be averaged as they are have the base `Additive`, codes in
    blocks with scales the base `BlockCodec`.
    """

    @abstractmethod
    def encode(self, x: Tensor, site: Site) -> Payload:
        """Write flat x as tensors for the wire, in memory of their own unless the codec is lossless."""

    @abstractmethod
    def decode(self, payload: Payload, like: Tensor, site: Site) -> Tensor:
        """Read a payload back as a flat tensor like `like` (length, dtype, device)."""

    def encode_error(self, x: Tensor, residual: Tensor | None, site: Site) -> tuple[Payload, Tensor]:
        """Encode `x + residual` and return what that loses; x may be overwritten, the residual not."""
        if residual is not None:
            x.add_(residual)
        payload = self.encode(x, site)
        return payload, x - self.decode(payload, x, site)

    def combine(self, payloads: Sequence[Payload], like: Tensor, site: Site) -> Tensor:
        """Return the mean of all ranks' decoded payloads, summed in rank order."""
        return average_of(self.decode(p, like, site) for p in payloads)

    def finite(self, payloads: Sequence[Payload]) -> Tensor:
        """Tell from all ranks' messages whether all that they hold was finite, by `wire.finite.finite_of`.

        A codec that overrides it must write every NaN and infinity of x so that it shows here.
        """
        raise NotImplementedError(f"{type(self).__name__} does not tell what is finite")

    def facts(self, site: Site) -> Facts:
        """One all-gather, from which `finite` tells where the codec has it."""
        known = type(self).finite is not Codec.finite
        return Facts(finite=known, frees_residual=known)

    def exchange(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Encode, gather, decode."""
        return gathered(self, x, residual, state, site)


@dataclass(frozen=True, kw_only=True)
class Additive(Codec):
    """A codec whose codes are averaged as they are, in one all-reduce.

    If they add up as numbers do, so that x may be cut anywhere, it is `linear`; if not, override `facts`.
    """

    def facts(self, site: Site) -> Facts:
        """One all-reduce, in which NaN shows."""
        return Facts(linear=True)

    def reduce(self, payload: Payload, site: Site) -> Rounds[Payload]:
        """Average the codes of all ranks."""
        return means(payload)

    def exchange(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Encode, average, decode."""
        payload, error = written(self, x, residual, site)
        averaged = yield from self.reduce(payload, site)
        finite = yield from _overflow(x, averaged)
        site = replace(site, buffer=None if error is x else x)  # x is done with
        return Exchange(self.decode(averaged, x, site), state, error, finite)


def written(codec: Codec, x: Tensor, residual: Tensor | None, site: Site) -> tuple[Payload, Tensor | None]:
    """Encode x; where `site.error` asks for it, with the residual and what that loses."""
    return codec.encode_error(x, residual, site) if site.error else (codec.encode(x, site), None)


def gathered(
    codec: Codec, x: Tensor, residual: Tensor | None, state: State, site: Site, *, ragged: bool = False
) -> Rounds[Exchange]:
    """Bring every rank's message to every rank, and decode all of them in rank order.

    Args:
        codec: what writes them.
        x: as in `Compressor.exchange`, and so are residual, state and site.
        residual: see there.
        state: see there.
        site: see there.
        ragged: whether messages differ in length from rank to rank; then their lengths are gathered first.
    """
    payload, error = written(codec, x, residual, site)
    everyone = yield from (gather_ragged(*payload, most=x.numel()) if ragged else gather(*payload))
    finite = codec.finite(everyone) if type(codec).finite is not Codec.finite else None
    if finite is not None and site.frees_residual and (yield from commit(finite)):
        # Where an error is kept it lies in x, and the old residual is free.
        site = replace(site, buffer=x if error is None else residual)
    return Exchange(codec.combine(everyone, x, site), state, error, finite)


def one_message(compressor: Compressor) -> bool:
    """Return whether each rank writes one message, of a length known before, that others read by itself."""
    return isinstance(compressor, Codec) and compressor.facts(Site(shapes=())).rounds == 1


def message_share(compressor: Compressor, device: torch.device | str = "cpu") -> float:
    """Return a message's bytes for each byte of a large float32 tensor; 0 where they are not known before.

    It is measured, by encoding a tensor on a device, so that no compressor need say it.
    """
    if not (isinstance(compressor, Codec) and one_message(compressor)):
        return 0.0
    x = torch.ones(2**16, dtype=torch.float32, device=device)
    site = Site(shapes=(x.shape,), step=2**40, device=x.device)  # where a ramp has long ended
    return sum(t.nbytes for t in compressor.encode(x, site)) / x.nbytes


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
        # False may be another bucket's fault, for COMMIT answers for the whole step.
        sound = (yield from commit(codes)) or int(codes) == Finite.BOUNDED
    if sound:
        return None
    own = torch.full((1,), not is_finite(x), dtype=torch.float32, device=x.device)
    bad = yield from mean(own)
    return torch.tensor(Finite.NO if bad.item() > 0 else Finite.YES, dtype=torch.uint8, device=x.device)
