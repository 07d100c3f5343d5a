"""Top-k sparsification: the largest elements with their indices."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from stenograd.compression.codec import Codec
from stenograd.compression.contract import Average, Exchange, Facts, Feedback, Payload, Site, State
from stenograd.compression.sparse import (
    VALUES,
    Message,
    Regions,
    check_ramp,
    chunk_count,
    mean_over_senders,
    ramped,
    regions_for,
    select_chunks,
    sparse_all_reduce,
)
from stenograd.errors import MethodError, bad_value, check_count
from stenograd.kernels.scatter import put, scatter_mean
from stenograd.kernels.select import select, select_feedback
from stenograd.wire.finite import finite_of
from stenograd.wire.requests import Rounds

__all__ = ["TopK"]

_REDUCE = ("auto", "gather", "regions")
_DIVIDE = ("ranks", "senders")


@dataclass(frozen=True)
class TopK(Codec):
    """Send the `k = ceil(ratio * n)` elements of largest magnitude: `sent = x` on `S = top_k(|x|)`, else 0.

    Selection is over the whole bucket, or with `chunk` over runs of so many elements of a tensor, of each of
    which `round(ratio * chunk)` are sent, at least 1: then every layer gets its share, and what is sent of it
    does not depend on buckets. Biased, a contraction with `delta = k / n` (2/3 of that with chunks, whose
    share is rounded): use error feedback.
    Wire: k indices of about `2 + log2(n / k)` bits and k values, one all-gather, which moves N-1 times that:
    at 1 %, 8.6 bits and 16. `values` makes it 40.6 bits together (float32), 24.6 (bfloat16), 16.7 (int8) or
    10.6 (int2, and 16 bytes per tensor); error feedback sends later what the rounding loses.
    Indices as int32 take 32 bits instead of 8.6.

    From five ranks on, a sparse all-reduce (`stenograd.compression.sparse`) moves at most `18
    k` bytes whatever N is (24 k with float32), if k is at least N: each rank adds up one region of the
    indices, and only about the k largest of the *average* come back. So the average has at most k
    non-zeros, not up to `N k`. What was selected and is not in the average stays in the error, so `delta`
    is then no bound for a single rank's. Chunks and `divide=senders` need every rank's message, and a
    ramp has no k to choose by, so they always gather.

    Args:
        ratio: share of the elements to send, in (0, 1].
        compact: whether indices travel as an Elias-Fano code, not as int32.
        values: how float32 values travel: "float32"; "bfloat16"; "int8" with a scale for each 256; or "int2",
            the means of four bins per tensor. The sparse all-reduce has bfloat16 for the last three.
            "float30", which took 30 bits in earlier versions, means the same as "float32".
        reduce: "gather" for one all-gather; "regions" for the sparse all-reduce; "auto" for what
            moves clearly less.
        chunk: elements per chunk, 1 to 2^31 - 1; 0 to select over the whole bucket. A tensor's last chunk may
            be shorter.
        divide: "ranks" for the mean over all ranks, where one that did not send an element counts as zero;
            "senders" for the mean over those that sent it, which makes a rarely chosen element's step up to N
            times as large.
        ratio_from: the share at the first step, from which it falls to `ratio` by the same factor per step.
        ramp_steps: number of steps until then; 0 for no ramp.

    Raises:
        MethodError: ratio, chunk or the ramp outside its range, another word for values, reduce or divide, or
            regions together with chunks, senders or a ramp.

    Example:
        >>> import torch
        >>> from stenograd.simulate import exchange
        >>> exchange(TopK(ratio=0.25), [torch.tensor([0.25, 2.0, -1.0, 0.5])])[0].average
        tensor([0., 2., 0., 0.])

    Reference: Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017;
    Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning", PPoPP 2022 (regions); Sarfi
    et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025 (chunks, int2, senders).
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"topk": {}}
    summary: ClassVar[str] = "the largest elements of each bucket, with their indices"

    ratio: float = 0.01
    _: KW_ONLY
    compact: bool = True
    values: str = "bfloat16"
    reduce: str = "auto"
    chunk: int = 0
    divide: str = "ranks"
    ratio_from: float = 0.25
    ramp_steps: int = 0

    def __post_init__(self) -> None:
        check_ramp(self.ratio, self.ratio_from, self.ramp_steps)
        if self._values not in VALUES:
            wanted = f"must be one of {', '.join(VALUES)}"
            raise bad_value("values", wanted, self.values, "float32 is exact", MethodError)
        if self.reduce not in _REDUCE:
            wanted = f"must be one of {', '.join(_REDUCE)}"
            raise bad_value("reduce", wanted, self.reduce, "leave it out for auto", MethodError)
        if self.divide not in _DIVIDE:
            wanted = f"must be one of {', '.join(_DIVIDE)}"
            raise bad_value("divide", wanted, self.divide, "ranks is the usual mean", MethodError)
        if self.chunk != 0:
            check_count("chunk", self.chunk, "use 4096, or leave it out for the whole bucket", MethodError)
        if self.reduce == "regions" and not self._regional:
            wanted = "must be auto or gather with chunk, divide=senders or ramp_steps, which always gather"
            raise bad_value("reduce", wanted, self.reduce, "leave it out", MethodError)

    @classmethod
    def examples(cls) -> Iterator[TopK]:
        """Yield a sparse, a moderate and the complete selection."""
        for ratio in (0.01, 0.3, 1.0):
            yield cls(ratio=ratio)
            yield cls(ratio=ratio, compact=False)
        for values in ("float32", "int8", "int2"):
            yield cls(ratio=0.1, values=values)
        yield cls(ratio=0.1, reduce="regions")
        yield cls(ratio=0.1, reduce="regions", compact=False, values="float32")
        yield cls(ratio=0.1, chunk=16)
        yield cls(ratio=0.3, chunk=7, compact=False)
        yield cls(ratio=0.1, ramp_steps=4)
        yield cls(ratio=0.1, chunk=64, values="int2", divide="senders")

    feedback = Feedback.ON  # small elements are dropped, always the same ones

    def facts(self, site: Site) -> Facts:
        """Gather all messages, or share the work by regions where that moves less."""
        if self._regions(site) is not None:
            return Facts(rounds=2)
        facts = super().facts(site)
        return replace(facts, average=Average.SENDERS) if self.divide == "senders" else facts

    def exchange(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Gather all messages, or add up regions."""
        regions = self._regions(site)
        if regions is None:
            return super().exchange(x, residual, state, site)
        halves = x.dtype is torch.float32 and self._values != "float32"
        return sparse_all_reduce(regions, x, residual, state, site, compact=self.compact, halves=halves)

    def encode(self, x: Tensor, site: Site) -> Payload:
        """Select and write."""
        return self._message(x, site).write(*self._select(x, site))

    def encode_error(self, x: Tensor, residual: Tensor | None, site: Site) -> tuple[Payload, Tensor]:
        """Add, select and leave the rest in x, in one pass unless there are chunks; then write."""
        message, halves = self._message(x, site), False
        if residual is None or self.chunk:
            x = x if residual is None else x.add_(residual)
            indices, values = self._select(x, site)
            x.index_fill_(0, indices.long(), 0)
        else:  # the sum is the same either way round, and x's memory takes what is left
            halves = message.values == "bfloat16"
            indices, values = select_feedback(residual, x, self._count(x, site), halves=halves)
        payload = message.write(indices, values)
        if message.is_lossy and not halves:  # else `select_feedback` has left it there
            put(x, indices, values - message.read_values(payload, indices))
        return payload, x

    def decode(self, payload: Payload, like: Tensor, site: Site) -> Tensor:
        """Scatter into zeros."""
        return self.combine([payload], like, site)

    def combine(self, payloads: Sequence[Payload], like: Tensor, site: Site) -> Tensor:
        """Add all ranks' elements into one dense tensor."""
        message = self._message(like, site)
        vectors = [message.read(p) for p in payloads]
        if self.divide == "senders":
            return mean_over_senders(vectors, site.out(like))
        return scatter_mean(vectors, like.numel(), out=site.out(like))

    def finite(self, payloads: Sequence[Payload]) -> Tensor:
        """Look at the values: whatever is not finite counts as largest, so it is among them.

        Rounded values have scales or means, which tell the same.
        """
        return finite_of(p[-1] for p in payloads)

    @property
    def _values(self) -> str:
        return "float32" if self.values == "float30" else self.values

    @property
    def _regional(self) -> bool:
        return not self.chunk and self.divide == "ranks" and not self.ramp_steps

    def _regions(self, site: Site) -> Regions | None:
        if self.reduce == "gather" or not self._regional:
            return None
        n = sum(site.numels)
        return regions_for(n, math.ceil(self.ratio * n), site, forced=self.reduce == "regions")

    def _select(self, x: Tensor, site: Site) -> tuple[Tensor, Tensor]:
        if self.chunk:
            return select_chunks(x, site.numels, self.chunk, self._ratio(site))
        return select(x, self._count(x, site))

    def _message(self, x: Tensor, site: Site) -> Message:
        kind = self._values if x.dtype is torch.float32 else None
        numels = tuple(site.numels) if kind == "int2" else ()
        return Message(x.numel(), self._count(x, site), self.compact, kind, numels)

    def _count(self, x: Tensor, site: Site) -> int:
        if self.chunk:
            return chunk_count(site.numels, self.chunk, self._ratio(site))
        return math.ceil(self._ratio(site) * x.numel())

    def _ratio(self, site: Site) -> float:
        return ramped(self.ratio, self.ratio_from, self.ramp_steps, site.step)
