"""Error feedback: what a compressor loses in one step it sends in a later one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from stenograd.compression.contract import Compressor, Exchange, Feedback, Site, State, Transport
from stenograd.data.requests import Rounds
from stenograd.errors import MethodError, bad_value

__all__ = ["ErrorFeedback"]

_HALF = torch.finfo(torch.float16).max / 2  # the other half is for x itself


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Compressor):
    """Add what was lost before compressing again: `v = x + r`, `average = mean(C(v))`, `r' = v - C(v)`.

    So over any number of steps the sum of what was sent plus the residual is the sum of all x, on every
    rank. The residual is float32 (float64 for float64 tensors), flat like x, kept per parameter.

    An average must fit in x's own type. What of a residual is beyond half of float16's range is held back
    for later steps, `v = x + clamp(r)`: else it would make every later step overflow.

    With a decay beta below 1, `v = x + beta r`: what was lost t steps ago is owed beta^t times. Then the sum
    above does not hold, and neither exactly does the rule by which `checkpoint.reshard` shares residuals.
    Where pseudo-gradients are sent sparsely, the decayed residual takes the place of the outer momentum.

    Args:
        inner: the compressor to correct.
        decay: beta, in (0, 1]; 1 forgets nothing. Below 1 the average has memory of its own in place of the
            residual's.

    Raises:
        MethodError: inner is lossless, so there is nothing to feed back; or decay outside its range.

    Example:
        >>> import torch
        >>> from stenograd.compressors.topk import TopK
        >>> from stenograd.simulate import exchange
        >>> method = ErrorFeedback(inner=TopK(ratio=0.25))
        >>> (first,) = exchange(method, [torch.tensor([0.25, 2.0, -1.0, 0.5])])
        >>> (second,) = exchange(method, [torch.zeros(4)], [first.state])
        >>> second.average
        tensor([ 0.,  0., -1.,  0.])

    Reference: Seide et al., "1-Bit Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al.,
    "Error Feedback Fixes SignSGD", ICML 2019; Sarfi et al., "Communication Efficient LLM Pre-training with
    SparseLoCo", 2025 (decay).
    """

    inner: Compressor
    decay: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise bad_value(
                "feedback_decay", "must be in (0, 1]", self.decay, "1 forgets nothing", MethodError
            )
        if self.inner.lossless:
            raise MethodError(
                f"{self.inner} loses nothing, so feedback has nothing to add: leave feedback out"
            )
        if self.inner.feedback is Feedback.OWN:
            raise MethodError(f"{self.inner} keeps what it has not sent by itself: leave feedback out")
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
        inner = self.inner.transport(site.wide())
        in_place = site.dtype in (torch.float32, torch.float64) and self.decay == 1
        inner = inner if in_place else inner.keeping()
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
        mine, site = state["residual"], site.wide()
        # Whoever asks for what was lost besides what was owed needs the old residual after the exchange.
        inner = self.inner if self.frees_residual and not want_error else self.inner.keeping()
        narrow = x.dtype is torch.float16
        owed = mine.clamp(-_HALF, _HALF) if narrow else mine
        if codec.decay != 1:  # not the kernels' way, which adds whole residuals while it selects or rounds
            v = x.add_(mine, alpha=codec.decay) if x.dtype == mine.dtype else x + codec.decay * owed
            done = yield from inner.run(codec.inner, v, None, state, site, True)
        elif x.dtype == mine.dtype:
            done = yield from inner.run(codec.inner, x, mine, state, site, True)
        else:
            done = yield from inner.run(codec.inner, owed + x, None, state, site, True)
        error = done.error
        assert error is not None  # asked for
        if narrow:
            error = error.add(nn.functional.softshrink(mine, _HALF), alpha=codec.decay)  # what was held back
        lost = (error - codec.decay * mine).to(x.dtype) if want_error else None
        return Exchange(done.average.to(x.dtype), {**done.state, "residual": error}, lost, done.finite)
