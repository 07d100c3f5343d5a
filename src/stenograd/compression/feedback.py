"""What corrects the errors of a compressor: error feedback, EF21 and LoCo."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from stenograd.compression.contract import (
    Average,
    Compressor,
    Exchange,
    Facts,
    Feedback,
    Kind,
    Replaced,
    Site,
    State,
    StateKind,
)
from stenograd.errors import MethodError, bad_value, check_count
from stenograd.kernels.bits import block_views, scale_blocks
from stenograd.wire.requests import Rounds, mean

__all__ = ["EF21", "ErrorFeedback", "LoCo", "Wrapper"]

_HALF = torch.finfo(torch.float16).max / 2  # the other half is for x itself
_BLOCK = 512  # elements of LoCo's residual per scale: 1 % more memory than the codes alone
_TOP = 127  # codes go from -127 to 127, so that zero is one of them


@dataclass(frozen=True, kw_only=True)
class Wrapper(Compressor):
    """A compressor around another one, whose facts it takes over but for what it changes itself.

    Args:
        inner: the compressor inside.
    """

    inner: Compressor

    @classmethod
    def examples(cls) -> Iterator[Compressor]:
        """Yield nothing: it is no method by itself, and suites wrap every compressor that suits."""
        return iter(())

    def _require_contraction(self) -> None:
        """Refuse a compressor whose errors are not its own to correct."""
        if not self.inner.feedback.biased or not self.inner.facts(Site(shapes=())).average.is_mean:
            raise MethodError(
                f"{type(self).__name__} needs a biased compressor whose average is a mean, such as topk, got "
                f"{self.inner}: leave feedback out"
            )


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Wrapper):
    """Add what was lost before compressing again: `v = x + r`, `average = mean(C(v))`, `r' = v - C(v)`.

    So over any number of steps the sum of what was sent plus the residual is the sum of all x, on every
    rank. The residual is float32 (float64 for float64 tensors), flat like x, kept per parameter.

    An average must fit in x's own type. What of a residual is beyond half of float16's range is held back
    for later steps, `v = x + clamp(r)`: else it would make every later step overflow.
    With GradScaler r keeps the scale at which it was lost, so a change of scale weighs what is owed wrongly.

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

    state_kinds: ClassVar[Mapping[str, StateKind]] = {"residual": Kind.SUM}

    decay: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.decay <= 1:
            raise bad_value(
                "feedback_decay", "must be in (0, 1]", self.decay, "1 forgets nothing", MethodError
            )
        if self.inner.feedback is Feedback.EXACT:
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

    @property
    def feedback(self) -> Feedback:
        """One exchange is as biased as the inner one; the sum over steps is not."""
        return self.inner.feedback

    def init(self, like: Tensor, site: Site) -> State:
        """Start with nothing lost."""
        return {**self.inner.init(like, site), "residual": _zeros(like)}

    def facts(self, site: Site) -> Facts:
        """A residual in another type than x keeps its memory to itself."""
        inner = self.inner.facts(_wide(site))
        # With a decay the inner compressor never sees the residual, so it cannot write over it.
        in_place = site.dtype in (torch.float32, torch.float64) and self.decay == 1
        return replace(inner, linear=False, frees_residual=inner.frees_residual and in_place)

    def exchange(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Correct, exchange, keep the error."""
        own, inner = state["residual"], self.inner
        # Whoever asks for what was lost besides what was owed needs the old residual after the exchange.
        inside = replace(_wide(site), error=True, frees_residual=site.frees_residual and not site.error)
        narrow = x.dtype is torch.float16
        owed = own.clamp(-_HALF, _HALF) if narrow else own
        if self.decay != 1:  # not the kernels' way, which adds whole residuals while it selects or rounds
            v = x.add_(own, alpha=self.decay) if x.dtype == own.dtype else x + self.decay * owed
            done = yield from inner.exchange(v, None, state, inside)
        elif x.dtype == own.dtype:
            done = yield from inner.exchange(x, own, state, inside)
        else:
            done = yield from inner.exchange(owed + x, None, state, inside)
        error = done.error
        assert error is not None  # asked for
        if narrow:
            error = error.add(nn.functional.softshrink(own, _HALF), alpha=self.decay)  # what was held back
        lost = (error - self.decay * own).to(x.dtype) if site.error else None
        return Exchange(done.average.to(x.dtype), {**done.state, "residual": error}, lost, done.finite)


@dataclass(frozen=True, kw_only=True)
class EF21(Wrapper):
    """Send differences: `c = C(v - h)`, `h = h + c`, `G = G + mean(c)`, and deliver G, with `v = x`.

    So h, what the others know of this rank, comes closer to x at every step as long as x changes slowly, and
    `G = mean(h)` always. Nothing is owed: error feedback adds lost gradients to later ones, this replaces an
    outdated one. With eta below 1, `v = (1 - eta) v + eta x` is a momentum that takes the noise of small
    batches out of what is compressed (EF21-SGDM); use an optimizer without momentum then.

    The first exchange of a bucket sends x itself: with G = 0 the first steps would go nearly nowhere. Three
    to four tensors like x are kept in float32 or wider. With GradScaler h follows the scale of the loss, so
    after a change of scale G is wrong until h has caught up.

    Args:
        inner: the compressor C, a biased contraction such as top-k.
        eta: weight of the new gradient, in (0, 1]; 1 for plain EF21.

    Raises:
        MethodError: eta outside its range; inner is unbiased or lossless, or its average is not a mean.

    Example:
        >>> import torch
        >>> from stenograd.compressors.topk import TopK
        >>> from stenograd.simulate import exchange
        >>> method, x = EF21(inner=TopK(ratio=0.5)), torch.tensor([1.0, 2.0])
        >>> (first,) = exchange(method, [x])
        >>> (second,) = exchange(method, [torch.tensor([1.5, 5.0])], [first.state])
        >>> first.average, second.average  # 3 is the larger of the differences 0.5 and 3
        (tensor([1., 2.]), tensor([1., 5.]))

    Reference: Richtárik et al., "EF21: A New, Simpler, Theoretically Better, and Practically Faster Error
    Feedback", NeurIPS 2021; Fatkhullin et al., "Momentum Provably Improves Error Feedback!", NeurIPS 2023.
    """

    state_kinds: ClassVar[Mapping[str, StateKind]] = {
        "ef21_known": Replaced(by="ef21_mean"),
        "ef21_momentum": Kind.MEAN,
    }
    feedback = Feedback.OWN  # what others do not know of x is in h

    eta: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.eta <= 1:
            raise bad_value(
                "eta", "must be in (0, 1]", self.eta, "use 0.1, or 1 for no momentum", MethodError
            )
        self._require_contraction()

    def init(self, like: Tensor, site: Site) -> State:
        """Start with nothing known, and no tensor begun."""
        still = _zeros(like)
        state = {**self.inner.init(like, site), "ef21_known": still, "ef21_mean": still.clone()}
        if self.eta < 1:
            state["ef21_momentum"] = still.clone()
        begun = torch.zeros((), dtype=still.dtype, device="cpu")  # where reading it makes nobody wait
        return state | {f"ef21_begun/{i}": begun.clone() for i in range(len(site.shapes))}

    def facts(self, site: Site) -> Facts:
        """As many rounds as for x itself; with eta below 1 a moving average is delivered."""
        average = Average.MEAN if self.eta == 1 else Average.VELOCITY
        inner = self.inner.facts(_wide(site))
        return replace(inner, linear=False, finite=False, frees_residual=False, average=average)

    def exchange(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Send what changed, the first time all of x, and keep what all know."""
        known, total = state["ef21_known"], state["ef21_mean"]
        v = x.to(known.dtype, copy=True)
        v = v if residual is None else v.add_(residual)
        names = [f"ef21_begun/{i}" for i in range(len(site.shapes))]
        begun = [one > 0 for one in torch.stack([state[name] for name in names]).tolist()]
        if self.eta < 1:
            before = state["ef21_momentum"].split(site.numels)
            for part, old, runs in zip(v.split(site.numels), before, begun, strict=True):
                part.copy_(torch.lerp(old, part, self.eta) if runs else part)  # v <- (1 - eta) v + eta x
        new = dict(state)
        inside = replace(_wide(site), buffer=None, error=True, frees_residual=False)
        # A tensor that nobody used keeps its state, and must not keep its neighbours from being compressed:
        # where others have begun it starts from h = 0.
        if any(begun):
            done = yield from self.inner.exchange(v - known, None, state, inside)
            assert done.error is not None  # asked for
            new |= done.state
            # h + c = v - (v - h - c)
            new["ef21_known"], new["ef21_mean"] = v - done.error, total + done.average
        else:
            pieces = []
            for piece in v.tensor_split(self.inner.facts(inside).rounds):  # as at every other step
                # copied: the driver may average in place, and v stays as h
                pieces.append((yield from mean(piece.clone())))
            new["ef21_known"], new["ef21_mean"] = v, torch.cat(pieces)
        new |= {name: torch.ones_like(state[name]) for name in names}
        if self.eta < 1:
            # Never one memory for two keys: `put_back` writes a tensor's old state into each of them.
            new["ef21_momentum"] = v.clone() if new["ef21_known"] is v else v
        average = site.out(x).copy_(new["ef21_mean"])  # the caller may change it, so it is no state
        error = (x - new["ef21_known"]).to(x.dtype) if site.error else None
        return Exchange(average, new, error)


@dataclass(frozen=True, kw_only=True)
class LoCo(Wrapper):
    """Feed back a moving average of what was lost: `v = x + r`, `r <- Q8(a r + (1 - a) (v - C(v)))`.

    a is `memory`. Q8 rounds to the nearest of 255 steps of the largest magnitude in each block of 512, so the
    residual takes a byte per element where `ErrorFeedback` takes four. The average takes the noise out of
    single errors, and the r of a tensor is cleared after every `reset_steps` exchanges in which the tensor
    was used, so that no error of Q8 stays for long. So unlike with `ErrorFeedback` not all that was lost is
    sent later.

    Meant for values of 4 bits (`lowbit:feedback=loco`), where single errors are small. With GradScaler r
    follows the scale of the loss, and has the wrong weight after a change until it has caught up.

    Args:
        inner: the compressor C, biased, such as lowbit.
        memory: weight of the old average, in [0, 1).
        reset_steps: exchanges of a tensor between two clearings of its r, 1 to 2^31 - 1.

    Raises:
        MethodError: a value outside its range; inner is unbiased or lossless, or its average is not a mean.

    Example:
        >>> from stenograd.compressors.lowbit import LowBit
        >>> from stenograd.simulate import exchange
        >>> method, x = LoCo(inner=LowBit(format="int2"), memory=0.5), torch.tensor([4.0, 1.5])
        >>> (first,) = exchange(method, [x])
        >>> (second,) = exchange(method, [x], [first.state])
        >>> first.average, second.average  # half of the lost 1.5 makes it 2.25, nearer to 4 than to 0
        (tensor([4., 0.]), tensor([4., 4.]))

    Reference: Xie et al., "LoCo: Low-Bit Communication Adaptor for Large-scale Model Training", arXiv
    2407.04480.
    """

    state_kinds: ClassVar[Mapping[str, StateKind]] = {"loco_codes": Kind.CLEAR, "loco_scales": Kind.CLEAR}
    feedback = Feedback.OWN  # it feeds back what it has lost by itself

    memory: float = 0.8
    reset_steps: int = 1024

    def __post_init__(self) -> None:
        if not 0 <= self.memory < 1:
            raise bad_value("memory", "must be in [0, 1)", self.memory, "use 0.8", MethodError)
        check_count("reset_steps", self.reset_steps, "use 1024", MethodError)
        self._require_contraction()

    def init(self, like: Tensor, site: Site) -> State:
        """Start with nothing lost."""
        codes = torch.zeros(like.numel(), dtype=torch.int8, device=like.device)
        state = {**self.inner.init(like, site), "loco_codes": codes}
        for i, numel in enumerate(site.numels):
            state[f"loco_scales/{i}"] = torch.zeros(
                -(-numel // _BLOCK), dtype=torch.float32, device=like.device
            )
            state[f"loco_age/{i}"] = torch.zeros((), dtype=torch.int64, device=like.device)
        return state

    def facts(self, site: Site) -> Facts:
        """The inner compressor's, for x with what is fed back."""
        return replace(self.inner.facts(_wide(site)), linear=False, frees_residual=False)

    def exchange(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Correct, exchange, move the average of errors."""
        wide = torch.promote_types(x.dtype, torch.float32)
        lost = _read(state, site).to(wide)
        v = x.to(wide) + lost
        inside = replace(_wide(site), buffer=None, error=True, frees_residual=False)
        v = v if residual is None else v.add_(residual)
        done = yield from self.inner.exchange(v, None, state, inside)
        assert done.error is not None  # asked for
        error = (done.error - lost).to(x.dtype) if site.error else None  # before lerp_, which overwrites it
        new, average = dict(done.state), done.average.to(x.dtype)
        ages = [state[f"loco_age/{i}"] + 1 for i in range(len(site.shapes))]
        moved = lost.lerp_(done.error, 1 - self.memory)  # a r + (1 - a) (v - C(v))
        for i, (age, part) in enumerate(zip(ages, moved.split(site.numels), strict=True)):
            part.mul_(age % self.reset_steps != 0)  # a factor: the host need not know the age
            new[f"loco_age/{i}"] = age
        return Exchange(average, {**new, **_written(moved, site)}, error, done.finite)


def _wide(site: Site) -> Site:
    """Return the site of x as float32, unless it is wider: what a residual is added to becomes that."""
    wide = torch.promote_types(site.dtype, torch.float32)
    return site if wide == site.dtype else replace(site, dtype=wide)


def _zeros(like: Tensor) -> Tensor:
    """Return zeros of the type in which errors are kept."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return torch.zeros(like.numel(), dtype=dtype, device=like.device)


def _read(state: State, site: Site) -> Tensor:
    """Return the residual, in float32."""
    scales = torch.cat(
        [state[f"loco_scales/{i}"] for i in range(len(site.shapes))]
        or [torch.zeros(0, dtype=torch.float32, device=state["loco_codes"].device)]
    )
    return scale_blocks(state["loco_codes"].to(torch.float32), scales, _BLOCK, site.numels)


def _written(values: Tensor, site: Site) -> State:
    """Return a residual as codes and scales; a block that is not finite, which no state keeps, as zeros."""
    codes = torch.empty(values.numel(), dtype=torch.int8, device=values.device)
    scales = [values.new_zeros(0, dtype=torch.float32)]
    for rows, out in zip(*(block_views(t, _BLOCK, site.numels) for t in (values, codes)), strict=True):
        scale = (rows.abs().amax(1, keepdim=True) / _TOP).to(torch.float32)
        scales.append(scale.view(-1))
        out.copy_((rows / torch.where(scale == 0, 1.0, scale)).nan_to_num_(0.0).round_().clamp_(-_TOP, _TOP))
    counts = [-(-numel // _BLOCK) for numel in site.numels]
    parts = torch.cat(scales).split(counts)
    return {"loco_codes": codes, **{f"loco_scales/{i}": part.clone() for i, part in enumerate(parts)}}
