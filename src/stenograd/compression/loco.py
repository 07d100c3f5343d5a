"""LoCo: error feedback whose residual is a moving average in 8 bits, and is cleared from time to time."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from stenograd.compression.contract import Compressor, Exchange, Feedback, Site, State, Transport
from stenograd.compression.ef21 import require_contraction
from stenograd.data.requests import Rounds
from stenograd.errors import MethodError, bad_value, check_count
from stenograd.kernels.reference.bits import block_views

__all__ = ["LoCo"]

_BLOCK = 512  # elements of the residual per scale: 1 % more memory than the codes alone
_TOP = 127  # codes go from -127 to 127, so that zero is one of them


@dataclass(frozen=True, kw_only=True)
class LoCo(Compressor):
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

    inner: Compressor
    memory: float = 0.8
    reset_steps: int = 1024

    def __post_init__(self) -> None:
        if not 0 <= self.memory < 1:
            raise bad_value("memory", "must be in [0, 1)", self.memory, "use 0.8", MethodError)
        check_count("reset_steps", self.reset_steps, "use 1024", MethodError)
        require_contraction(self.inner, "LoCo")

    @classmethod
    def examples(cls) -> Iterator[Compressor]:
        """Yield nothing: it is a wrapper, and no method by itself."""
        return iter(())

    @property
    def feedback(self) -> Feedback:
        """It feeds back what it has lost by itself."""
        return Feedback.OWN

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

    def transport(self, site: Site) -> Transport:
        """Take the inner compressor's, for x with what is fed back."""
        inner = self.inner.transport(site.wide()).keeping()
        return _Averaged(inner=inner, rounds=inner.rounds, reports_finite=inner.reports_finite)


@dataclass(frozen=True, kw_only=True)
class _Averaged(Transport):
    """The inner compressor's transport, given x and the residual, whose error moves the residual."""

    inner: Transport

    def run(
        self, codec: LoCo, x: Tensor, residual: Tensor | None, state: State, site: Site, want_error: bool
    ) -> Rounds[Exchange]:
        """Correct, exchange, move the average of errors; see `Transport.run`."""
        wide = torch.promote_types(x.dtype, torch.float32)
        lost = _read(state, site).to(wide)
        v = x.to(wide) + lost
        inside = replace(site.wide(), buffer=None)
        done = yield from self.inner.run(
            codec.inner, v if residual is None else v.add_(residual), None, state, inside, True
        )
        assert done.error is not None  # asked for
        error = (done.error - lost).to(x.dtype) if want_error else None
        new, average = dict(done.state), done.average.to(x.dtype)
        ages = [state[f"loco_age/{i}"] + 1 for i in range(len(site.shapes))]
        moved = lost.lerp_(done.error, 1 - codec.memory)  # a r + (1 - a) (v - C(v))
        for i, (age, part) in enumerate(zip(ages, moved.split(site.numels), strict=True)):
            part.mul_(age % codec.reset_steps != 0)  # a factor: the host need not know the age
            new[f"loco_age/{i}"] = age
        return Exchange(average, {**new, **_written(moved, site)}, error, done.finite)


def _read(state: State, site: Site) -> Tensor:
    """Return the residual, in float32."""
    scales = torch.cat(
        [state[f"loco_scales/{i}"] for i in range(len(site.shapes))]
        or [torch.zeros(0, dtype=torch.float32, device=state["loco_codes"].device)]
    )
    values, start = state["loco_codes"].to(torch.float32), 0
    for rows in block_views(values, _BLOCK, site.numels):
        rows.mul_(scales[start : start + len(rows), None])
        start += len(rows)
    return values


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
