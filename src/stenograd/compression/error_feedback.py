"""Error feedback: what a compressor loses in one step it sends in a later one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stenograd.compression.contract import Compressor, Exchange, Site, State
from stenograd.data.requests import Rounds, settle
from stenograd.errors import MethodError

__all__ = ["ErrorFeedback"]


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Compressor):
    """Add what was lost before compressing again: `v = x + r`, `average = mean(C(v))`, `r' = v - C(v)`.

    So over any number of steps the sum of what was sent plus the residual is the sum of all x, on every
    rank. The residual is float32 (float64 for float64 tensors), flat like x, kept per parameter.

    Args:
        inner: the compressor to correct.

    Raises:
        MethodError: inner is lossless, so there is nothing to feed back.

    Example:
        >>> import torch
        >>> from stenograd.compressors.topk import TopK
        >>> from stenograd.simulate import exchange
        >>> method = ErrorFeedback(inner=TopK(ratio=0.25))
        >>> (first,) = exchange(method, [torch.tensor([0.1, 0.9, -0.3, 0.2])])
        >>> (second,) = exchange(method, [torch.zeros(4)], [first.state])
        >>> second.average
        tensor([ 0.0000,  0.0000, -0.3000,  0.0000])

    Reference: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al.,
    "Error Feedback Fixes SignSGD", ICML 2019.
    """

    inner: Compressor

    def __post_init__(self) -> None:
        if self.inner.lossless:
            raise MethodError(
                f"{self.inner} loses nothing, so feedback has nothing to add: leave feedback out"
            )
        if self.inner.amplifies:
            raise MethodError(
                f"{self.inner} scales up what it sends, so its residual would grow without bound: "
                "leave out unbiased or feedback"
            )

    @classmethod
    def examples(cls) -> Iterator[Compressor]:
        """Yield nothing: the conformance suite wraps every compressor by itself."""
        return iter(())

    @property
    def biased(self) -> bool:
        """One exchange is as biased as the inner one; the sum over steps is not."""
        return self.inner.biased

    def one_round(self, world_size: int) -> bool:
        """As inside."""
        return self.inner.one_round(world_size)

    def settles(self, world_size: int) -> bool:
        """As inside; the residual's memory is what it gains."""
        return self.inner.settles(world_size)

    @property
    def votes(self) -> bool:
        """As inside."""
        return self.inner.votes

    def detects(self, world_size: int) -> bool:
        """As inside."""
        return self.inner.detects(world_size)

    def init(self, like: Tensor, site: Site) -> State:
        """Start with nothing lost."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        residual = torch.zeros(like.numel(), dtype=dtype, device=like.device)
        return {**self.inner.init(like, site), "residual": residual}

    def rounds(self, x: Tensor, state: State, site: Site, *, want_error: bool = False) -> Rounds[Exchange]:
        """Correct, exchange, keep the error; see `Compressor.rounds`."""
        residual = state["residual"]
        if x.dtype == residual.dtype:
            done = yield from self.inner.corrected(x, residual, state, site)
        else:
            inside = replace(site, settles=False)  # only the narrowed average tells what is finite
            done = yield from self.inner.rounds(residual + x, state, inside, want_error=True)
            done = done._replace(average=done.average.to(x.dtype))
            if site.settles:
                yield from settle(done.average.isfinite().all())
        average, inner_state, error, finite, overflow = done
        assert error is not None  # asked for
        lost = (error - residual).to(x.dtype) if want_error else None
        return Exchange(average.to(x.dtype), {**inner_state, "residual": error}, lost, finite, overflow)
