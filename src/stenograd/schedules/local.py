"""Local SGD: every rank trains by itself, and parameters are averaged from time to time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from stenograd.errors import MethodError, bad_value, check_count
from stenograd.schedules.schedule import Schedule, What

__all__ = ["Local"]

_BUFFERS = ("average", "keep")


@dataclass(frozen=True, kw_only=True)
class Local(Schedule):
    """Average parameters every H steps: `p_r <- p_r - opt(g_r)`, H times, then `p <- mean_r p_r`.

    Optimizer states stay each rank's own. Moves `2 (N-1)/N` times the model every H steps, or what a
    compressor after the slash makes of it: then ranks send differences from what they sent so far, so that
    what a message loses goes with a later one (see `ParameterAverager`).

    Args:
        every: H, counted in backward passes outside `no_sync()`; 1 to 2^31 - 1.
        buffers: "average" for the mean of floating buffers too (running statistics of batch norm), "keep" for
            each rank's own.

    Raises:
        MethodError: every is outside its range, or another word for buffers.

    Example:
        >>> Local(every=4)
        Local(every=4, buffers='average')

    Reference: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019.
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"local": {}}
    summary: ClassVar[str] = "parameters, averaged every few steps (local SGD)"
    what: ClassVar[What] = What.PARAMETERS

    every: int = 8
    buffers: str = "average"

    def __post_init__(self) -> None:
        check_count("every", self.every, "use 8", MethodError)
        if self.buffers not in _BUFFERS:
            wanted = f"must be one of {', '.join(_BUFFERS)}"
            raise bad_value("buffers", wanted, self.buffers, "leave it out for average", MethodError)
