"""MLBench's learning rates as torch schedulers: functions of the number t of `step()` calls made."""

from __future__ import annotations

import math

import torch

from stenograd.errors import bad_value
from stenograd.mlbench.plateau import ReduceLROnPlateauWithWarmup
from stenograd.mlbench.rate import RateOfStep
from stenograd.mlbench.warmup import (
    LRLinearWarmUp,
    MultiStepLRLinearWarmUp,
    PolyDecayLRLinearWarmup,
    SQRTTimeDecayLRWithWarmup,
)

__all__ = [
    "ExponentialWarmupMultiStepLR",
    "LRLinearWarmUp",
    "MultiStepLRLinearWarmUp",
    "PolyDecayLRLinearWarmup",
    "ReduceLROnPlateauWithWarmup",
    "SQRTTimeDecayLR",
    "SQRTTimeDecayLRWithWarmup",
    "SparsifiedSGDLR",
    "TimeDecayLR",
]


class SparsifiedSGDLR(RateOfStep):
    """`lr = gamma / l2_coef / max(1, shifting_param + t)`.

    Args:
        optimizer: whose groups to set.
        gamma: numerator.
        l2_coef: strength of the L2 penalty, above 0.
        shifting_param: offset of t.

    Raises:
        ConfigError: l2_coef is not above 0.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> SparsifiedSGDLR(optimizer, gamma=2.0, l2_coef=0.5, shifting_param=8).get_last_lr()
        [0.5]

    Reference: Stich, Cordonnier, Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, gamma: float, l2_coef: float, shifting_param: float
    ) -> None:
        if not l2_coef > 0:
            raise bad_value("l2_coef", "must be above 0", l2_coef, "use 1 / number of samples")
        self.shifting_param = shifting_param
        super().__init__(optimizer, gamma / l2_coef)

    def value(self, t: int, base: float) -> float:
        """Return the decayed rate."""
        return base / max(1, self.shifting_param + t)


class TimeDecayLR(RateOfStep):
    """`lr = lr_0 / (beta + t)`, with lr_0 the rate that each group has.

    Args:
        optimizer: whose groups to set.
        beta: above 0.

    Raises:
        ConfigError: beta is not above 0.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=10.0)
        >>> [TimeDecayLR(optimizer, beta=1).value(t, 10.0) for t in range(4)]
        [10.0, 5.0, 3.3333333333333335, 2.5]
    """

    def __init__(self, optimizer: torch.optim.Optimizer, beta: float) -> None:
        if not beta > 0:
            raise bad_value("beta", "must be above 0", beta, "use 1 to start from the optimizer's rate")
        self.beta = beta
        super().__init__(optimizer)

    def value(self, t: int, base: float) -> float:
        """Return the decayed rate."""
        return base / (self.beta + t)


class SQRTTimeDecayLR(RateOfStep):
    """`lr = lr_0 / sqrt(max(1, t))`, with lr_0 the rate that each group has.

    Args:
        optimizer: whose groups to set.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=10.0)
        >>> [SQRTTimeDecayLR(optimizer).value(t, 10.0) for t in (0, 1, 4)]
        [10.0, 10.0, 5.0]
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer)

    def value(self, t: int, base: float) -> float:
        """Return the decayed rate."""
        return base / math.sqrt(max(1, t))


class ExponentialWarmupMultiStepLR(RateOfStep):
    """`lr_0 0.01^((W-t)/W)` for `t <= W`, lr_0, and from step R `lr_0 f^min(K, 1 + floor((t-R)/I))`.

    Args:
        optimizer: whose groups to set.
        iterations: steps of the whole training, at least 1.
        warmup_steps: W; a float is a share of iterations. At most R.
        remain_steps: R, when decay starts; a float is a share of iterations.
        decay_interval: I, steps between decays; a float is a share of iterations; None spreads all decays
            over the steps after R.
        decay_steps: K, largest number of decays, at least 1.
        decay_factor: f.

    Raises:
        ConfigError: iterations, decay_steps or decay_interval is below 1.

    Example:
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
        >>> scheduler = ExponentialWarmupMultiStepLR(optimizer, 16, warmup_steps=2, remain_steps=8)
        >>> [round(scheduler.value(t, 1.0), 4) for t in (0, 1, 2, 7, 8, 10, 15)]
        [0.01, 0.1, 1.0, 1.0, 0.5, 0.25, 0.0625]
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        iterations: int,
        warmup_steps: float = 0,
        remain_steps: float = 1.0,
        decay_interval: float | None = None,
        decay_steps: int = 4,
        decay_factor: float = 0.5,
    ) -> None:
        def steps(given: float) -> int:
            return int(given * iterations) if isinstance(given, float) else given

        self.remain_steps, self.decay_steps, self.decay_factor = (
            steps(remain_steps),
            decay_steps,
            decay_factor,
        )
        self.warmup_steps = min(steps(warmup_steps), self.remain_steps)
        spread = max(1, (iterations - self.remain_steps) // max(1, decay_steps))
        self.decay_interval = spread if decay_interval is None else steps(decay_interval)
        lowest = {"iterations": iterations, "decay_steps": decay_steps, "decay_interval": self.decay_interval}
        for name, got in lowest.items():
            if got < 1:
                raise bad_value(name, "must be at least 1", got, "count in steps, not epochs")
        super().__init__(optimizer)

    def value(self, t: int, base: float) -> float:
        """Return the rate of this step."""
        if self.warmup_steps and t <= self.warmup_steps:
            return float(base * 0.01 ** ((self.warmup_steps - t) / self.warmup_steps))
        if t < self.remain_steps:
            return base
        decays = min(self.decay_steps, 1 + (t - self.remain_steps) // self.decay_interval)
        return float(base * self.decay_factor**decays)
