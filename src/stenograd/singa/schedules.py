"""Schedules: hyper-parameters that change with the number of updates made."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real

from torch import Tensor

from stenograd.arguments import number, typed
from stenograd.errors import bad_value

__all__ = ["Constant", "DecayScheduler", "ExponentialDecay", "as_schedule", "check_value", "values_at"]

_AT_LEAST_0 = ("lr", "momentum", "weight_decay", "epsilon")
_SHARES = ("rho", "beta_1", "beta_2")
_SWITCHES = ("nesterov",)  # on or off, as 1 or 0


class DecayScheduler:
    """A hyper-parameter as a function of the step: `value = call(step)`; subclasses define `call`.

    Args:
        init_value: the value to start from; finite.

    Raises:
        TypeError: init_value is not a number.
        ConfigError: init_value is not finite.

    Departs from SINGA: the step may be a plain number, and the value is one, so that no update waits for the
    accelerator.

    Example:
        >>> class Inverse(DecayScheduler):
        ...     def call(self, step: float) -> float:
        ...         return self.init_value / (1 + step)
        >>> Inverse(0.1)(4)
        0.02
    """

    def __init__(self, init_value: float) -> None:
        self.init_value = _finite("init_value", init_value)

    def __call__(self, step: float | Tensor) -> float:
        """Return the value at a step.

        Args:
            step: number of updates made so far, a number or a tensor of one element.

        Raises:
            TypeError: step is neither a number nor a tensor.
            ConfigError: a tensor has not one element, or the step is not finite.
        """
        if isinstance(step, Tensor):
            if step.numel() != 1:
                raise bad_value("step", "must be one number", tuple(step.shape), "use one element")
            step = step.item()
        _finite("step", step)
        return float(self.call(step))

    def call(self, step: float) -> float:
        """Return the value at a step; subclasses define this."""
        raise NotImplementedError(f"{type(self).__name__} must define call(step)")


class Constant(DecayScheduler):
    """The same value at every step: `value = init_value`.

    Args:
        init_value: the value; finite.

    Example:
        >>> Constant(0.2)(7)
        0.2
    """

    def call(self, step: float) -> float:
        """Return `init_value`."""
        return self.init_value


class ExponentialDecay(DecayScheduler):
    """A value that shrinks geometrically: `value = init_value * decay_rate ** (step / decay_steps)`.

    Args:
        init_value: the value at step 0; finite.
        decay_steps: number of steps after which the value has been multiplied by decay_rate once; > 0.
        decay_rate: the factor; > 0, below 1 to decay.
        staircase: whether to round `step / decay_steps` down, so that the value changes in jumps.

    Raises:
        TypeError: an argument is not a number.
        ConfigError: decay_steps or decay_rate is not positive and finite.

    Example:
        >>> decay = ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5, staircase=True)
        >>> [decay(step) for step in range(5)]
        [0.1, 0.1, 0.05, 0.05, 0.025]
    """

    def __init__(
        self, init_value: float, decay_steps: float, decay_rate: float, staircase: bool = False
    ) -> None:
        super().__init__(init_value)
        self.decay_steps = _finite("decay_steps", decay_steps)
        self.decay_rate = _finite("decay_rate", decay_rate)
        self.staircase = staircase
        number("decay_steps", self.decay_steps, "use 1000 for slow decay", above=0)
        number("decay_rate", self.decay_rate, "use 0.5 to halve the value", above=0)

    def call(self, step: float) -> float:
        """Return the value at a step."""
        exponent = step // self.decay_steps if self.staircase else step / self.decay_steps
        factor: float = self.decay_rate**exponent
        return self.init_value * factor


def as_schedule(name: str, value: object) -> DecayScheduler:
    """Return a hyper-parameter as a schedule: a number becomes a `Constant`.

    Args:
        name: of the hyper-parameter; it determines the range.
        value: a number or a schedule.

    Raises:
        TypeError: value is neither.
        ConfigError: the number, or the value that the schedule starts from, is outside the range.

    Example:
        >>> as_schedule("lr", 0.1)(0)
        0.1
    """
    if isinstance(value, DecayScheduler):
        check_value(name, value.init_value)
        return value
    if name in _SWITCHES:
        return Constant(float(bool(value)))
    given = typed(name, value, Real, "a number or a DecayScheduler", "use 0.1 or ExponentialDecay(...)")
    return Constant(check_value(name, float(given)))


def check_value(name: str, value: float) -> float:
    """Return the value of a hyper-parameter if it lies in its range.

    Raises:
        ConfigError: it does not lie in its range.
    """
    if name in _SHARES and not 0 <= value < 1:
        raise bad_value(name, "must be in [0, 1)", value, "use 0.9 to average over about ten steps")
    return number(name, value, "use 0 for none", least=0 if name in _AT_LEAST_0 else None)


def values_at(step: int, schedules: Mapping[str, DecayScheduler]) -> dict[str, float]:
    """Return the values of hyper-parameters at a step.

    Raises:
        ConfigError: a schedule left its hyper-parameter's range.
    """
    return {name: check_value(name, schedule(step)) for name, schedule in schedules.items()}


def _finite(name: str, value: object) -> float:
    return float(number(name, typed(name, value, Real, "a number", "use an int or a float"), "use a number"))
