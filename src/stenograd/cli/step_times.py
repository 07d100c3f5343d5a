"""How long training steps took, phase by phase, and on what machine: the contents of steps.json."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from stenograd.comm.agreement import everyone
from stenograd.comm.drivers import AnyDriver
from stenograd.comm.traffic import Traffic

__all__ = ["QUANTILES", "StepTimes", "machine", "report"]

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.9, 0.95)
_PARTS = ("step", "forward", "backward", "wait", "optimizer")
_STEPS_KEPT = 10_000  # enough for quantiles; a list of all would grow for as long as the run takes


class StepTimes:
    """Seconds of the newest 10,000 steps: the whole, and its phases.

    `backward` leaves out `wait`, the part of the exchange that backward did not hide. `optimizer` holds the
    rounds of schedules that meet after a step. Fetching the batch is in `step` only.

    Example:
        >>> times = StepTimes()
        >>> times.note("backward", 0.0, 3.0), times.note("wait", 2.0, 3.0)
        (None, None)
        >>> times.step(4.0)
        >>> times.quantiles()["backward"]["0.5"], times.quantiles()["wait"]["0.5"]
        (2.0, 1.0)
    """

    def __init__(self) -> None:
        self._now: dict[str, float] = {}
        self._kept: dict[str, deque[float]] = {part: deque(maxlen=_STEPS_KEPT) for part in _PARTS}
        self.steps = 0

    def note(self, kind: str, start: float, end: float) -> None:
        """Add a phase to the step under way; kinds are those of `tracing.Phases`."""
        part = "optimizer" if kind == "step" else kind
        self._now[part] = self._now.get(part, 0.0) + end - start

    def step(self, seconds: float) -> None:
        """End a step that took so long in all."""
        now, self._now = self._now, {}
        # waiting happens in hooks within backward; each second counts once
        now["backward"] = now.get("backward", 0.0) - now.get("wait", 0.0)
        for part, kept in self._kept.items():
            kept.append(seconds if part == "step" else now.get(part, 0.0))
        self.steps += 1

    def means(self) -> dict[str, float]:
        """Return each phase's mean in seconds, which holds the rounds of methods that send rarely.

        The first step is left out where there are others: it loads and allocates what later ones find.

        Example:
            >>> times = StepTimes()
            >>> for seconds in (60.0, 1.0, 1.0, 7.0):
            ...     times.step(seconds)
            >>> times.means()["step"], times.quantiles()["step"]["0.5"]
            (3.0, 4.0)
        """
        first = int(1 < self.steps <= _STEPS_KEPT)
        found = {part: list(kept)[first:] for part, kept in self._kept.items()}
        return {part: statistics.fmean(kept) for part, kept in found.items() if kept}

    def quantiles(self) -> dict[str, dict[str, float]]:
        """Return the quantiles of each phase in seconds; empty before the first step."""
        if not self.steps:
            return {}
        levels = torch.tensor(QUANTILES, dtype=torch.float64, device="cpu")
        found = {
            part: torch.tensor(kept, dtype=torch.float64, device="cpu") for part, kept in self._kept.items()
        }
        return {
            part: dict(zip(map(str, QUANTILES), values.quantile(levels).tolist(), strict=True))
            for part, values in found.items()
        }


def machine() -> dict[str, Any]:
    """Return what decides how fast this process computes.

    Example:
        >>> sorted(machine())
        ['cores', 'processor', 'system', 'threads', 'usable_cores']
    """
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "processor": platform.processor() or platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "threads": torch.get_num_threads(),
    }


def report(times: StepTimes, traffic: Traffic, driver: AnyDriver) -> dict[str, Any]:
    """Gather what every rank measured since it started; all ranks call it.

    Args:
        times: this rank's.
        traffic: this rank's ledger.
        driver: the way to the other ranks.

    Returns:
        "ranks": for each rank its steps, means and quantiles in seconds, machine and ledger, in rank order.
    """
    ledger = [asdict(entry) for entry in traffic.entries()]
    took = {"means_s": times.means(), "quantiles_s": times.quantiles()}
    mine = {"steps": times.steps, **took, "machine": machine(), "ledger": ledger}
    told: Sequence[str] = everyone(driver, json.dumps(mine))
    return {"ranks": [json.loads(text) for text in told]}
