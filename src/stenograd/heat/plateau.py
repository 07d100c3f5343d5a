"""Detect when a metric has stopped improving."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from stenograd.arguments import choice, number, whole
from stenograd.errors import bad_value

__all__ = ["DetectMetricPlateau"]

_SETTINGS = ("patience", "cooldown", "mode", "threshold", "threshold_mode")
_PROGRESS = ("cooldown_counter", "best", "num_bad_epochs", "mode_worse", "last_epoch")


class DetectMetricPlateau:
    """Detects a plateau: more than `patience` values in a row that are not better than the best one.

    With mode "min", a is better than best if `a < best - threshold * |best|` (threshold_mode "rel") or
    `a < best - threshold` ("abs"); with "max", if `a` exceeds `best` by as much. NaN is never better, and the
    first finite value always is. After a plateau the best value stays, and the count starts at 0 again.

    Args:
        mode: "min" where a lower metric is better, "max" where a higher one is.
        patience: values without improvement that are tolerated, at least 0.
        threshold: by how much a value must be better to count, finite and at least 0.
        threshold_mode: "rel", a fraction of the best value, or "abs", in the metric's units.
        cooldown: values after a plateau that are not counted, at least 0.

    Raises:
        ConfigError: one of them is outside its range.

    Departs from Heat: with mode "max", threshold_mode "rel" and a negative best, better means greater.

    Example:
        >>> plateau = DetectMetricPlateau(patience=2, threshold=0.05)
        >>> [plateau.test_if_improving(loss) for loss in (1.0, 0.9, 0.89, 0.88, 0.87)]
        [False, False, False, False, True]
    """

    def __init__(
        self,
        mode: str = "min",
        patience: int = 10,
        threshold: float = 1e-4,
        threshold_mode: str = "rel",
        cooldown: int = 0,
    ) -> None:
        self.mode = choice("mode", mode, ("min", "max"), "choose 'min' for a loss")
        self.threshold_mode = choice("threshold_mode", threshold_mode, ("rel", "abs"), "choose 'rel'")
        self.patience = whole("patience", patience, "try 2", least=0)
        self.cooldown = whole("cooldown", cooldown, "try 2", least=0)
        self.threshold = number("threshold", threshold, "try 0.0001", least=0)
        self.mode_worse = math.inf if mode == "min" else -math.inf
        self.best = self.mode_worse
        self.cooldown_counter, self.num_bad_epochs, self.last_epoch = 0, 0, 0

    @property
    def in_cooldown(self) -> bool:
        """Whether the next value is ignored."""
        return self.cooldown_counter > 0

    def test_if_improving(self, loss: Tensor | float) -> bool:
        """Take the next value, and return True if the metric is NOT improving (Heat's name says the reverse).

        Args:
            loss: the metric, a number or a tensor of one element.
        """
        value = float(loss.detach() if isinstance(loss, Tensor) else loss)
        self.last_epoch += 1
        if self.is_better(value, self.best):
            self.best = value
            self.num_bad_epochs = 0
        else:
            self.num_bad_epochs += 1
        if self.in_cooldown:
            self.cooldown_counter -= 1
            self.num_bad_epochs = 0
        if self.num_bad_epochs <= self.patience:
            return False
        self.cooldown_counter = self.cooldown
        self.num_bad_epochs = 0
        return True

    def is_better(self, a: float, best: float) -> bool:
        """Return whether a value is better than the best one by more than the threshold."""
        margin = self.threshold
        if self.threshold_mode == "rel" and not math.isinf(best):
            margin *= abs(best)
        return a < best - margin if self.mode == "min" else a > best + margin

    def reset(self) -> None:
        """Forget the best value and the counts, but not `last_epoch`, the number of values seen."""
        self.best = self.mode_worse
        self.cooldown_counter = 0
        self.num_bad_epochs = 0

    def get_state(self) -> dict[str, Any]:
        """Return settings and progress as plain values."""
        return {name: getattr(self, name) for name in (*_SETTINGS, *_PROGRESS)}

    def set_state(self, dic: dict[str, Any]) -> None:
        """Continue from a `get_state()`, settings included.

        Raises:
            ConfigError: dic is not such a state; nothing is changed.
        """
        if not isinstance(dic, dict) or set(dic) != {*_SETTINGS, *_PROGRESS}:
            got = sorted(dic) if isinstance(dic, dict) else type(dic).__name__
            raise bad_value("dic", f"must hold {[*_SETTINGS, *_PROGRESS]}", got, "use get_state()")
        # Made only to be checked: bad settings raise before anything changes.
        DetectMetricPlateau(**{name: dic[name] for name in _SETTINGS})
        for name, value in dic.items():
            setattr(self, name, value)
