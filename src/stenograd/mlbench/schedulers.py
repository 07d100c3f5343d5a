"""MLBench's learning rates as torch schedulers: functions of the number t of `step()` calls made.

Each sets all groups of the optimizer. An argument outside the range that is given for it is a ConfigError.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from stenograd.arguments import number
from stenograd.errors import bad_value

__all__ = [
    "ExponentialWarmupMultiStepLR",
    "LRLinearWarmUp",
    "MultiStepLRLinearWarmUp",
    "PolyDecayLRLinearWarmup",
    "RateOfStep",
    "ReduceLROnPlateauWithWarmup",
    "SQRTTimeDecayLR",
    "SQRTTimeDecayLRWithWarmup",
    "SparsifiedSGDLR",
    "TimeDecayLR",
]

Optimizer: TypeAlias = torch.optim.Optimizer
Rate: TypeAlias = Callable[[int, float], float]  # of t and the base rate


class RateOfStep(LRScheduler):
    """Set `lr = value(t, base)`; all functions of this module return one.

    Args:
        optimizer: whose groups to set.
        value: returns a group's rate from t and the group's base rate.
        base: base rate of all groups; None for the rate that each has.
    """

    def __init__(self, optimizer: Optimizer, value: Rate, base: float | None = None) -> None:
        self.value = value
        if base is not None:
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] = base  # before super, which takes base_lrs from here
        super().__init__(optimizer)

    def get_lr(self) -> list[Any]:
        """Return the rates of all groups, as torch asks for them."""
        return [self.value(self.last_epoch, float(base)) for base in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        """Return the counters; as with torch's LambdaLR, functions are not saved."""
        return {key: value for key, value in super().state_dict().items() if key != "value"}


def SparsifiedSGDLR(optimizer: Optimizer, gamma: float, l2_coef: float, shifting_param: float) -> RateOfStep:
    """Decay as `lr = gamma / l2_coef / max(1, shifting_param + t)`; l2_coef, the L2 penalty, is above 0.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> SparsifiedSGDLR(optimizer, gamma=2.0, l2_coef=0.5, shifting_param=8).get_last_lr()
        [0.5]

    Reference: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
    """
    number("l2_coef", l2_coef, "use 1 / number of samples", above=0, finite=False)
    return RateOfStep(optimizer, lambda t, base: base / max(1, shifting_param + t), gamma / l2_coef)


def TimeDecayLR(optimizer: Optimizer, beta: float) -> RateOfStep:
    """Decay as `lr = lr_0 / (beta + t)`, with lr_0 the rate that each group has, and beta above 0.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=10.0)
        >>> [TimeDecayLR(optimizer, beta=1).value(t, 10.0) for t in range(4)]
        [10.0, 5.0, 3.3333333333333335, 2.5]
    """
    number("beta", beta, "use 1 to start from the optimizer's rate", above=0, finite=False)
    return RateOfStep(optimizer, lambda t, base: base / (beta + t))


def SQRTTimeDecayLR(optimizer: Optimizer) -> RateOfStep:
    """Decay as `lr = lr_0 / sqrt(max(1, t))`, with lr_0 the rate that each group has.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=10.0)
        >>> [SQRTTimeDecayLR(optimizer).value(t, 10.0) for t in (0, 1, 4)]
        [10.0, 10.0, 5.0]
    """
    return RateOfStep(optimizer, lambda t, base: base / math.sqrt(max(1, t)))


def LRLinearWarmUp(
    optimizer: Optimizer, init_lr: float, scaled_lr: float, warmup_duration: float
) -> RateOfStep:
    """Warm up as `lr = scaled_lr t/D + init_lr (1 - t/D)` until `t = D`, then stay at `scaled_lr`.

    D is warmup_duration, at least 0.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> scheduler = LRLinearWarmUp(optimizer, init_lr=0, scaled_lr=10, warmup_duration=5)
        >>> optimizer.step()
        >>> scheduler.step()
        >>> scheduler.get_last_lr()
        [2.0]

    Reference: Goyal et al., "Accurate, large minibatch SGD", 2017.
    """
    return RateOfStep(optimizer, _warm(init_lr, warmup_duration, lambda t, base: base), scaled_lr)


def MultiStepLRLinearWarmUp(
    optimizer: Optimizer,
    gamma: float,
    milestones: Sequence[int],
    scaled_lr: float,
    warmup_init_lr: float = 0,
    warmup_duration: int = 0,
) -> RateOfStep:
    """Warm up as `LRLinearWarmUp` does, then `lr = scaled_lr gamma^(number of milestones <= t)`.

    The milestones are ascending steps, all after the warm-up.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> scheduler = MultiStepLRLinearWarmUp(optimizer, 0.5, [2, 3], scaled_lr=10)
        >>> [scheduler.value(t, 10) for t in range(4)]
        [10.0, 10.0, 5.0, 2.5]
    """
    steps = list(milestones)
    if steps != sorted(steps):
        raise bad_value("milestones", "must be ascending", steps, "sort them")
    if steps and warmup_duration >= steps[0]:
        rule = f"must be after step {warmup_duration}"
        raise bad_value("milestones", rule, steps, "end the warm-up earlier")
    warm = _warm(warmup_init_lr, warmup_duration, lambda t, base: base * gamma ** bisect_right(steps, t))
    return RateOfStep(optimizer, warm, scaled_lr)


def SQRTTimeDecayLRWithWarmup(
    optimizer: Optimizer, base_lr: float, warmup_init_lr: float, warmup_steps: int
) -> RateOfStep:
    """Warm up linearly from warmup_init_lr to base_lr, then `lr = base_lr sqrt(W / t)`.

    W is warmup_steps, at least 1.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> scheduler = SQRTTimeDecayLRWithWarmup(optimizer, 8.0, 0.0, warmup_steps=4)
        >>> [scheduler.value(t, 8.0) for t in (0, 2, 4, 16)]
        [0.0, 4.0, 8.0, 4.0]
    """
    number("warmup_steps", warmup_steps, "use SQRTTimeDecayLR", least=1, finite=False)
    warm = _warm(warmup_init_lr, warmup_steps, lambda t, base: base * math.sqrt(warmup_steps / t))
    return RateOfStep(optimizer, warm, base_lr)


def PolyDecayLRLinearWarmup(
    optimizer: Optimizer,
    init_lr: float,
    scaled_lr: float,
    warmup_duration: int,
    decay_steps: int,
    min_lr: float = 0,
    power: float = 2,
) -> RateOfStep:
    """Warm up linearly, then `lr = scaled_lr ((1-q) + (min_lr/scaled_lr)^(1/power) q)^power`.

    Here `q = min(1, (t - warmup_duration) / decay_steps)`, so the rate ends at min_lr and stays there.
    scaled_lr, decay_steps and power are above 0; power 1 decays linearly.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> scheduler = PolyDecayLRLinearWarmup(optimizer, 0.0, 4.0, warmup_duration=2, decay_steps=4)
        >>> [scheduler.value(t, 4.0) for t in (1, 2, 4, 6, 9)]
        [2.0, 4.0, 1.0, 0.0, 0.0]
    """
    for name, got in (("scaled_lr", scaled_lr), ("decay_steps", decay_steps), ("power", power)):
        number(name, got, "use 1 or more", above=0, finite=False)

    def decayed(t: int, base: float) -> float:
        q = min(1.0, (t - warmup_duration) / decay_steps)
        return float(base * (1 - q + (min_lr / base) ** (1 / power) * q) ** power)

    return RateOfStep(optimizer, _warm(init_lr, warmup_duration, decayed), scaled_lr)


def ExponentialWarmupMultiStepLR(
    optimizer: Optimizer,
    iterations: int,
    warmup_steps: float = 0,
    remain_steps: float = 1.0,
    decay_interval: float | None = None,
    decay_steps: int = 4,
    decay_factor: float = 0.5,
) -> RateOfStep:
    """Set `lr_0 0.01^((W-t)/W)` for `t <= W`, lr_0, and from step R `lr_0 f^min(K, 1 + floor((t-R)/I))`.

    W is warmup_steps, at most R; R is remain_steps, and I decay_interval, where None spreads all decays over
    the steps after R. Each may be a float, which is a share of iterations, the steps of the whole training.
    K is decay_steps and f decay_factor. I, K and iterations are at least 1.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> scheduler = ExponentialWarmupMultiStepLR(optimizer, 16, warmup_steps=2, remain_steps=8)
        >>> [round(scheduler.value(t, 1.0), 4) for t in (0, 1, 2, 7, 8, 10, 15)]
        [0.01, 0.1, 1.0, 1.0, 0.5, 0.25, 0.0625]
    """

    def steps(given: float) -> int:
        return int(given * iterations) if isinstance(given, float) else given

    remain = steps(remain_steps)
    warm = min(steps(warmup_steps), remain)
    spread = max(1, (iterations - remain) // max(1, decay_steps))
    interval = spread if decay_interval is None else steps(decay_interval)
    lowest = {"iterations": iterations, "decay_steps": decay_steps, "decay_interval": interval}
    for name, got in lowest.items():
        number(name, got, "count in steps, not epochs", least=1, finite=False)

    def value(t: int, base: float) -> float:
        if warm and t <= warm:
            return float(base * 0.01 ** ((warm - t) / warm))
        decays = 0 if t < remain else min(decay_steps, 1 + (t - remain) // interval)
        return float(base * decay_factor**decays)

    return RateOfStep(optimizer, value)


class ReduceLROnPlateauWithWarmup(ReduceLROnPlateau):
    """Warm up as `LRLinearWarmUp` does, then follow `torch.optim.lr_scheduler.ReduceLROnPlateau`.

    Args:
        optimizer: whose groups to set.
        warmup_init_lr, scaled_lr: rates at the start and after the warm-up.
        warmup_epochs: epochs of warm-up; 0 for none.
        batches_per_epoch: None warms up in `step`, once per epoch; else in `batch_step`, once per batch.
        kwargs: as for ReduceLROnPlateau. `verbose`, which torch has given up, is ignored.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> scheduler = ReduceLROnPlateauWithWarmup(optimizer, 0.0, 4.0, warmup_epochs=2)
        >>> for loss in (3.0, 2.0):
        ...     scheduler.step(loss)
        ...     print(scheduler.get_last_lr())
        [2.0]
        [4.0]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        warmup_init_lr: float,
        scaled_lr: float,
        warmup_epochs: int,
        batches_per_epoch: int | None = None,
        **kwargs: Any,
    ) -> None:
        self.warmup_init_lr, self.scaled_lr = warmup_init_lr, scaled_lr
        self.warmup_duration = max(0, warmup_epochs) * (batches_per_epoch or 1)
        self.per_batch = batches_per_epoch is not None
        self.batch_idx = 0
        self.optimizer = optimizer
        kwargs.pop("verbose", None)
        # Before super, which takes the groups' present rates for the last ones.
        self._set_rate()
        super().__init__(optimizer, **kwargs)

    @property
    def finished_warmup(self) -> bool:
        """Whether the rate has reached scaled_lr."""
        return self.batch_idx >= self.warmup_duration

    def batch_step(self) -> None:
        """Warm up by one step; nothing once warm."""
        if not self.finished_warmup:
            self.batch_idx += 1
            self._set_rate()

    # torch's own ReduceLROnPlateau.step takes a metric, which LRScheduler.step does not.
    def step(self, metrics: Any, epoch: int | None = None) -> None:  # type: ignore[override]
        """End an epoch: look for a plateau of the metric, once warm."""
        if self.finished_warmup:
            super().step(metrics)
        else:
            self.last_epoch += 1
            if not self.per_batch:
                self.batch_step()

    def _set_rate(self) -> None:
        warm = _warm(self.warmup_init_lr, self.warmup_duration, lambda t, base: base)
        rate = warm(self.batch_idx, self.scaled_lr)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self._last_lr = [rate for _ in self.optimizer.param_groups]


def _warm(init_lr: float, duration: float, after: Rate) -> Rate:
    """Return `base t/D + init_lr (1 - t/D)` up to step D, and what `after` says from then on."""
    number("warmup_duration", duration, "use 0 for no warm-up", least=0, finite=False)

    def value(t: int, base: float) -> float:
        if not duration or t > duration:
            return after(t, base)
        return base * t / duration + init_lr * (1 - t / duration)

    return value
