"""Codecs in plain PyTorch that write codes and scales, and read a message back as float32."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from stenograd.compression.codec import Codec
from stenograd.compression.contract import Payload, Site
from stenograd.data.finite import finite_of

__all__ = ["ScaledCodes"]


@dataclass(frozen=True, kw_only=True)
class ScaledCodes(Codec):
    """A codec whose payload is `(codes, scales)`: write `encode` and `read`.

    A scale must be NaN or infinite where something that it belongs to is.
    """

    @abstractmethod
    def read(self, payload: Payload, site: Site) -> Tensor:
        """Return what one message says, in float32."""

    def encode_error(self, x: Tensor, residual: Tensor | None, site: Site) -> tuple[Payload, Tensor]:
        """Add, encode and leave the rest in x."""
        x = x if residual is None else x.add_(residual)
        payload = self.encode(x, site)
        return payload, x.sub_(self.read(payload, site))

    def decode(self, payload: Payload, like: Tensor, site: Site) -> Tensor:
        """Read one message."""
        return self.combine([payload], like, site)

    def combine(self, payloads: Sequence[Payload], like: Tensor, site: Site) -> Tensor:
        """Average the messages in rank order, in float32 or wider."""
        wide = torch.promote_types(like.dtype, torch.float32)
        total = site.out(like).zero_() if like.dtype == wide else torch.zeros_like(like, dtype=wide)
        for payload in payloads:
            total += self.read(payload, site)
        return total.div_(len(payloads)).to(like.dtype)

    def finite(self, payloads: Sequence[Payload]) -> Tensor:
        """Look at the scales."""
        return finite_of(scales for _, scales in payloads)
