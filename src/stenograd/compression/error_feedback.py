"""Error feedback: what a compressor loses in one step it sends in a later one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from stenograd.compression.contract import Compressor, Exchange, Feedback, Site, State, Transport
from stenograd.data.finite import Finite
from stenograd.data.requests import Rounds
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
        if self.inner.feedback is Feedback.NEVER:
            raise MethodError(
                f"{self.inner} scales up what it sends, so its residual would grow without bound: "
                "leave out unbiased or feedback"
            )

    @classmethod
    def examples(cls) -> Iterator[Compressor]:
        """Yield nothing: the conformance suite wraps every compressor by itself."""
        return iter(())

    @property
    def feedback(self) -> Feedback:
        """One exchange is as biased as the inner one; the sum over steps is not."""
        return self.inner.feedback

    def init(self, like: Tensor, site: Site) -> State:
        """Start with nothing lost."""
        dtype = torch.promote_types(like.dtype, torch.float32)
        residual = torch.zeros(like.numel(), dtype=dtype, device=like.device)
        return {**self.inner.init(like, site), "residual": residual}

    def transport(self, site: Site) -> Transport:
        """Take the inner compressor's; a residual in another type than x keeps its memory to itself."""
        inner = self.inner.transport(site)
        inner = inner if site.dtype in (torch.float32, torch.float64) else inner.keeping()
        return _Corrected(
            inner=inner,
            rounds=inner.rounds,
            reports_finite=inner.reports_finite,
            frees_residual=inner.frees_residual,
            votes=inner.votes,
        )


@dataclass(frozen=True, kw_only=True)
class _Corrected(Transport):
    """The inner compressor's transport, given the residual, whose error is the next residual."""

    inner: Transport

    def run(
        self,
        codec: ErrorFeedback,
        x: Tensor,
        residual: Tensor | None,
        state: State,
        site: Site,
        want_error: bool,
    ) -> Rounds[Exchange]:
        """Correct, exchange, keep the error; see `Transport.run`."""
        mine = state["residual"]
        # Whoever asks for what was lost besides what was owed needs the old residual after the exchange.
        inner = self.inner if self.frees_residual and not want_error else self.inner.keeping()
        if x.dtype == mine.dtype:
            done = yield from inner.run(codec.inner, x, mine, state, site, True)
        else:
            done = yield from inner.run(codec.inner, mine + x, None, state, site, True)
        error, finite = done.error, done.finite
        assert error is not None  # asked for
        average = done.average.to(x.dtype)
        if finite is not None and average.dtype != done.average.dtype:
            finite = finite.clamp(max=Finite.YES)  # what is bounded in float32 may be infinite in x's type
        lost = (error - mine).to(x.dtype) if want_error else None
        return Exchange(average, {**done.state, "residual": error}, lost, finite)
