"""Codecs: compressors that write one message per rank, and need no more than `encode` and `decode`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stenograd.compression.contract import Compressor, Payload, Site, Transport, average_of
from stenograd.compression.transports import AllGather

__all__ = ["Codec", "message_share", "one_message"]


@dataclass(frozen=True, kw_only=True)
class Codec(Compressor):
    """A compressor with one message per rank: write `encode` and `decode`, and the library does the rest.

    By default every rank gathers all messages and decodes them in rank order; override `transport` where
    codes can be averaged as they are (`AllReduce()`) or differ in length (`AllGather(ragged=True)`). For
    speed, override `encode_error` (add the residual, encode and keep the error in one pass), `combine`
    (decode and add up) and `finite` (then nobody has to look through x).
    """

    def transport(self, site: Site) -> Transport:
        """Gather all messages."""
        known = type(self).finite is not Codec.finite
        return AllGather(reports_finite=known, frees_residual=known)

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

    def message(
        self, x: Tensor, residual: Tensor | None, site: Site, want_error: bool
    ) -> tuple[Payload, Tensor | None]:
        """Encode x, with the residual and what that loses where the error is wanted; for transports."""
        return self.encode_error(x, residual, site) if want_error else (self.encode(x, site), None)

    def combine(self, payloads: Sequence[Payload], like: Tensor, site: Site) -> Tensor:
        """Return the mean of all ranks' decoded payloads, summed in rank order."""
        return average_of(self.decode(p, like, site) for p in payloads)

    def finite(self, payloads: Sequence[Payload]) -> Tensor:
        """Tell from all ranks' messages whether all that they hold was finite, by `data.finite.finite_of`.

        A codec that overrides it must write every NaN and infinity of x so that it shows here.
        """
        raise NotImplementedError(f"{type(self).__name__} does not tell what is finite")


def one_message(compressor: Compressor) -> bool:
    """Return whether each rank writes one message, of a length known before, that others read by itself."""
    transport = compressor.transport(Site(shapes=()))
    return isinstance(compressor, Codec) and not (isinstance(transport, AllGather) and transport.ragged)


def message_share(compressor: Compressor, device: torch.device | str = "cpu") -> float:
    """Return a message's bytes for each byte of a large float32 tensor; 0 where they are not known before.

    It is measured, by encoding a tensor on a device, so that no compressor need say it.
    """
    if not (isinstance(compressor, Codec) and one_message(compressor)):
        return 0.0
    x = torch.ones(2**16, dtype=torch.float32, device=device)
    site = Site(shapes=(x.shape,), step=2**40, device=x.device)  # where a ramp has long ended
    return sum(t.nbytes for t in compressor.encode(x, site)) / x.nbytes
