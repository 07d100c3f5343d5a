"""Learning rates that start low: linear warm-up, alone and before a decay."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

import torch

from stenograd.errors import bad_value
from stenograd.mlbench.rate import RateOfStep

__all__ = [
    "LRLinearWarmUp",
    "MultiStepLRLinearWarmUp",
    "PolyDecayLRLinearWarmup",
    "SQRTTimeDecayLRWithWarmup",
]


class LRLinearWarmUp(RateOfStep):
    """Linear warm-up: `lr = scaled_lr t/D + init_lr (1 - t/D)` until `t = D`, then `scaled_lr`.

    Args:
        optimizer: whose groups to set.
        init_lr: rate at t = 0, >= 0.
        scaled_lr: rate from t = D on, >= 0.
        warmup_duration: D, >= 0; 0 for no warm-up.

    Raises:
        ConfigError: warmup_duration is negative.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> scheduler = LRLinearWarmUp(optimizer, init_lr=0, scaled_lr=10, warmup_duration=5)
        >>> optimizer.step()
        >>> scheduler.step()
        >>> scheduler.get_last_lr()
        [2.0]

    Reference: Goyal et al., "Accurate, large minibatch SGD", 2017.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, init_lr: float, scaled_lr: float, warmup_duration: float
    ) -> None:
        if warmup_duration < 0:
            raise bad_value("warmup_duration", "must be >= 0", warmup_duration, "use 0 for no warm-up")
        self.init_lr, self.warmup_duration = init_lr, warmup_duration
        super().__init__(optimizer, scaled_lr)

    def value(self, t: int, base: float) -> float:
        """Return the rate while warming up, then what `after` says."""
        if t > self.warmup_duration or not self.warmup_duration:
            return self.after(t, base)
        progress = t / self.warmup_duration
        return base * progress + self.init_lr * (1 - progress)

    def after(self, t: int, base: float) -> float:
        """Return the rate once warm: the base rate."""
        return base


class MultiStepLRLinearWarmUp(LRLinearWarmUp):
    """Warm-up, then `lr = scaled_lr gamma^(number of milestones <= t)`.

    Args:
        optimizer: whose groups to set.
        gamma: factor at each milestone.
        milestones: ascending steps, all after the warm-up.
        scaled_lr: rate after the warm-up.
        warmup_init_lr: rate at t = 0.
        warmup_duration: steps of warm-up, >= 0.

    Raises:
        ConfigError: the milestones are not sorted, or the first is not after the warm-up.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> scheduler = MultiStepLRLinearWarmUp(optimizer, 0.5, [2, 3], scaled_lr=10)
        >>> [scheduler.value(t, 10) for t in range(4)]
        [10.0, 10.0, 5.0, 2.5]
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        gamma: float,
        milestones: Sequence[int],
        scaled_lr: float,
        warmup_init_lr: float = 0,
        warmup_duration: int = 0,
    ) -> None:
        self.gamma, self.milestones = gamma, list(milestones)
        if self.milestones != sorted(self.milestones):
            raise bad_value("milestones", "must be ascending", self.milestones, "sort them")
        if self.milestones and warmup_duration >= self.milestones[0]:
            advice = "end the warm-up earlier"
            raise bad_value("milestones", f"must be after step {warmup_duration}", self.milestones, advice)
        super().__init__(optimizer, warmup_init_lr, scaled_lr, warmup_duration)

    def after(self, t: int, base: float) -> float:
        """Return the rate after the milestones passed."""
        return base * self.gamma ** bisect_right(self.milestones, t)


class SQRTTimeDecayLRWithWarmup(LRLinearWarmUp):
    """Warm-up over W steps, then `lr = base_lr sqrt(W / t)`.

    Args:
        optimizer: whose groups to set.
        base_lr: rate at t = W.
        warmup_init_lr: rate at t = 0.
        warmup_steps: W, at least 1.

    Raises:
        ConfigError: warmup_steps is below 1.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> scheduler = SQRTTimeDecayLRWithWarmup(optimizer, 8.0, 0.0, warmup_steps=4)
        >>> [scheduler.value(t, 8.0) for t in (0, 2, 4, 16)]
        [0.0, 4.0, 8.0, 4.0]
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, base_lr: float, warmup_init_lr: float, warmup_steps: int
    ) -> None:
        if warmup_steps < 1:
            raise bad_value("warmup_steps", "must be at least 1", warmup_steps, "use SQRTTimeDecayLR")
        super().__init__(optimizer, warmup_init_lr, base_lr, warmup_steps)

    def after(self, t: int, base: float) -> float:
        """Return the decayed rate."""
        return base * math.sqrt(self.warmup_duration / t)


class PolyDecayLRLinearWarmup(LRLinearWarmUp):
    """Warm-up over W steps, then `lr = scaled_lr ((1-q) + (min_lr/scaled_lr)^(1/power) q)^power`.

    Here `q = min(1, (t-W) / decay_steps)`, so the rate ends at min_lr and stays there.

    Args:
        optimizer: whose groups to set.
        init_lr: rate at t = 0.
        scaled_lr: rate at t = W, above 0.
        warmup_duration: W, >= 0.
        decay_steps: steps from scaled_lr to min_lr, at least 1.
        min_lr: last rate, >= 0.
        power: above 0; 1 decays linearly.

    Raises:
        ConfigError: an argument is outside its range.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> scheduler = PolyDecayLRLinearWarmup(optimizer, 0.0, 4.0, warmup_duration=2, decay_steps=4)
        >>> [scheduler.value(t, 4.0) for t in (1, 2, 4, 6, 9)]
        [2.0, 4.0, 1.0, 0.0, 0.0]
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        init_lr: float,
        scaled_lr: float,
        warmup_duration: int,
        decay_steps: int,
        min_lr: float = 0,
        power: float = 2,
    ) -> None:
        for name, got in (("scaled_lr", scaled_lr), ("decay_steps", decay_steps), ("power", power)):
            if not got > 0:
                raise bad_value(name, "must be above 0", got, "use 1 or more")
        self.decay_steps, self.min_lr, self.power = decay_steps, min_lr, power
        super().__init__(optimizer, init_lr, scaled_lr, warmup_duration)

    def after(self, t: int, base: float) -> float:
        """Return the decayed rate."""
        q = min(1.0, (t - self.warmup_duration) / self.decay_steps)
        last: float = (self.min_lr / base) ** (1 / self.power)
        return float(base * (1 - q + last * q) ** self.power)
