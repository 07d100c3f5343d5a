"""Top-k sparsification: the largest elements with their places."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic.compact import pack_floats, pack_places, unpack_floats, unpack_places
from laconic.compressor import Codec, Payload, Site
from laconic.errors import MethodError, bad_value
from laconic.sparse import largest_places, mean_of_sparse

__all__ = ["TopK"]


@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """Send the `k = ceil(ratio * n)` elements of largest magnitude: `sent = x` on `S = top_k(|x|)`, else 0.

    Selection is over the whole bucket. Biased, a contraction with `delta = k / n`: use error feedback.
    Wire: k int32 places and k values, `8 k` bytes for float32, one all-gather. Compact, a place takes about
    `2 + log2(n / k)` bits and a float32 value 30: 38.6 bits together at 1 %, for a sort of the k places.

    Args:
        ratio: share of the elements to send, in (0, 1].
        compact: write places as an Elias-Fano code and float32 values in 30 bits, exact for all but those
            below 2**-62 of the largest, which are left for later.

    Raises:
        MethodError: ratio outside its range.

    Example:
        >>> import torch
        >>> from laconic.simulate import exchange
        >>> exchange(TopK(ratio=0.25), [torch.tensor([0.1, 0.9, -0.3, 0.2])])[0].average
        tensor([0.0000, 0.9000, 0.0000, 0.0000])

    Reference: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017.
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"topk": {}}
    summary: ClassVar[str] = "the largest elements of each bucket, with their places"

    ratio: float = 0.01
    compact: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise bad_value("ratio", "must be in (0, 1]", self.ratio, "use 0.01 to send 1 %", MethodError)

    @classmethod
    def examples(cls) -> Iterator[TopK]:
        """Yield a sparse, a moderate and the complete selection."""
        for ratio in (0.01, 0.3, 1.0):
            yield cls(ratio=ratio)
            yield cls(ratio=ratio, compact=True)

    @property
    def biased(self) -> bool:
        """Small elements are dropped, always the same ones."""
        return True

    @property
    def delta(self) -> float:
        """The k largest hold at least k/n of the energy."""
        return self.ratio

    def encode(self, x: Tensor, site: Site) -> Payload:
        """Select and compact."""
        places = largest_places(x, self._count(x))
        if not self.compact:
            return places.to(torch.int32), x.index_select(0, places)
        places = places.sort().values
        values = x.index_select(0, places)
        wire = pack_floats(values) if x.dtype is torch.float32 else (values,)
        return pack_places(places, x.numel()), *wire

    def decode(self, payload: Payload, like: Tensor, site: Site) -> Tensor:
        """Scatter into zeros."""
        places, values = self._read(payload, like)
        return torch.zeros_like(like).index_put_((places.long(),), values)

    def error(self, x: Tensor, payload: Payload, site: Site) -> Tensor:
        """Return x less what was sent: zeros there, where not negligible; overwrites x."""
        if not self.compact:
            return x.index_fill_(0, payload[0].long(), 0)
        places, values = self._read(payload, x)
        return x.index_add_(0, places, values, alpha=-1)

    def combine(self, payloads: Sequence[Payload], like: Tensor, site: Site) -> Tensor:
        """Add all ranks' elements into one dense tensor."""
        return mean_of_sparse([self._read(p, like) for p in payloads], like)

    def _count(self, x: Tensor) -> int:
        return math.ceil(self.ratio * x.numel())

    def _read(self, payload: Payload, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return places and values."""
        if not self.compact:
            return payload[0], payload[1]
        n, k = like.numel(), self._count(like)
        values = unpack_floats(payload[1:], k) if like.dtype is torch.float32 else payload[1]
        return unpack_places(payload[0], n, k), values
