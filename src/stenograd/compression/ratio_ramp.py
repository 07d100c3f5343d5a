"""A sparsifier's ratio that falls over the first steps."""

from __future__ import annotations

from stenograd.errors import MethodError, bad_value, check_count

__all__ = ["check_ramp", "ramped"]


def ramped(ratio: float, ratio_from: float, ramp_steps: int, step: int) -> float:
    """Return the ratio of a step: `ratio_from (ratio / ratio_from)^(step / ramp_steps)`, then `ratio`.

    It falls by the same factor at every step, and depends on the step alone, so a restart continues it.

    Args:
        ratio: where it ends, in (0, 1].
        ratio_from: where it begins, in (0, 1].
        ramp_steps: number of steps in between; 0 for no ramp.
        step: number of exchanges before this one.

    Example:
        >>> [round(ramped(0.001, 0.25, 4, step), 4) for step in range(6)]
        [0.25, 0.0629, 0.0158, 0.004, 0.001, 0.001]

    Reference: Lin et al., "Deep Gradient Compression", ICLR 2018, where it falls by a factor per epoch.
    """
    if step >= ramp_steps:
        return ratio
    return float(ratio_from * (ratio / ratio_from) ** (step / ramp_steps))


def check_ramp(ratio: float, ratio_from: float, ramp_steps: int) -> None:
    """Refuse a ratio or a ramp outside its range.

    Raises:
        MethodError: names the key.

    Example:
        >>> check_ramp(0.01, 0.001, 100)
        Traceback (most recent call last):
        stenograd.errors.MethodError: ratio_from must be in [0.01, 1], from the ratio up, got 0.001: use 0.25
    """
    if not 0 < ratio <= 1:
        raise bad_value("ratio", "must be in (0, 1]", ratio, "use 0.01 to send 1 %", MethodError)
    if not ratio <= ratio_from <= 1:
        rule = f"must be in [{ratio}, 1], from the ratio up"
        raise bad_value("ratio_from", rule, ratio_from, "use 0.25", MethodError)
    if ramp_steps != 0:
        check_count("ramp_steps", ramp_steps, "leave it out for no ramp", MethodError)
