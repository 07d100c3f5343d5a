"""Dynamic loss scale: as large as 16-bit gradients bear."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from stenograd.errors import bad_value

__all__ = ["DynamicLossScaler"]


class DynamicLossScaler:
    """Divides the scale by a factor at each overflow; multiplies after `scale_window` good steps in a row.

    Args:
        init_scale: first scale, above 0.
        scale_factor: above 1.
        scale_window: steps, at least 1.
        max_scale: largest scale, at least init_scale; None is no limit.

    Attributes:
        loss_scale: the scale of the next step.

    Raises:
        ConfigError: a value is outside its range.

    Example:
        >>> scaler = DynamicLossScaler(init_scale=1024, scale_window=2)
        >>> scales = []
        >>> for overflow in (False, False, True, False, False):
        ...     scaler.update_scale(overflow)
        ...     scales.append(scaler.loss_scale)
        >>> scales
        [1024, 2048.0, 1024.0, 1024.0, 2048.0]
    """

    def __init__(
        self,
        init_scale: float = 2.0**15,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        max_scale: float | None = None,
    ) -> None:
        if not 0 < init_scale < math.inf:
            raise bad_value("init_scale", "must be finite and above 0", init_scale, "use 1024")
        if not 1 < scale_factor < math.inf:
            raise bad_value("scale_factor", "must be finite and above 1", scale_factor, "use 2")
        if scale_window < 1:
            raise bad_value("scale_window", "must be at least 1", scale_window, "use 128")
        if max_scale is not None and not max_scale >= init_scale:
            raise bad_value("max_scale", f"must be at least init_scale ({init_scale})", max_scale, "raise it")
        self.loss_scale = init_scale
        self.scale_factor = scale_factor
        self.scale_window = scale_window
        self.max_scale = max_scale
        self._iter = 0
        self._last_overflow_iter = -1

    def update_scale(self, overflow: bool) -> None:
        """Take note of one step."""
        if overflow:
            self.loss_scale /= self.scale_factor
            self._last_overflow_iter = self._iter
        elif (self._iter - self._last_overflow_iter) % self.scale_window == 0:
            self.loss_scale *= float(self.scale_factor)
            if self.max_scale is not None:
                self.loss_scale = min(self.loss_scale, self.max_scale)
        self._iter += 1

    @staticmethod
    def has_overflow(grad_norm: Tensor | float) -> bool:
        """Return whether a norm is infinite or NaN."""
        return not bool(torch.isfinite(torch.as_tensor(grad_norm)).all())

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the counters."""
        return {"scale": self.loss_scale, "iter": self._iter, "last_overflow_iter": self._last_overflow_iter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a saved state."""
        self.loss_scale = state["scale"]
        self._iter, self._last_overflow_iter = int(state["iter"]), int(state["last_overflow_iter"])
