"""Predictions for methods on a cluster: how long, what limits them, where they pay, and which to use."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from stenograd.catalog.method import method
from stenograd.comm.traffic import moved_bytes
from stenograd.compressors.cast import Cast
from stenograd.data.requests import Op
from stenograd.errors import bad_value
from stenograd.planning.cluster import Cluster
from stenograd.planning.program import Program
from stenograd.planning.replay import replay
from stenograd.planning.units import rate_text, time_text
from stenograd.schedules.every_step import EveryStep

__all__ = [
    "ACCURACIES",
    "DENSE",
    "Prediction",
    "Slowness",
    "accuracy_of",
    "advised",
    "check_accuracy",
    "predict",
]

ACCURACIES = ("exact", "rounded", "lossy")
DENSE = "dense"
# Methods that close are equally fast: the numerically milder one is chosen, then the one that sends least.
_TIE = 0.02
LEVELS = (0.1, 0.9)  # between which a prediction's interval lies
# What a prediction may be off besides the spread of steps, to either side. Not fitted: it is the goal for the
# median error of predictions.
_RESIDUAL = 0.1
# The least share of a dense step that a method must save. Predictions for the same model and link err mostly
# alike: the errors of 153 methods differed from that of dense in their cell by 5 % in the median.
_LEAST_LEAD = 0.05
_LOWEST_BPS, _HIGHEST_BPS, _GRID = 1e6, 1e11, 11


@dataclass(frozen=True, slots=True)
class Slowness:
    """How many times as long as recorded the slowest worker computes.

    Args:
        at: what 10 % of the steps stay below, the mean, and what 90 % stay below.
        alone: in the median step of a worker that waits for no other.
    """

    at: tuple[float, float, float]
    alone: float


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a step under one method takes.

    Attributes:
        method: its text.
        seconds: of a step: what 10 % of the steps stay below, the mean, and what 90 % stay below.
        moved_bytes: that a worker sends per step, headers not counted.
        collectives: per step.
        saved_s: for each resource, what a step would save if it were free.
        pays: rates in bits per second, ascending, at which the method and dense change places; the method is
            ahead below the last of an odd number of them.
        pays_at_lowest: whether it is ahead of dense at the lowest rate that was looked at.
    """

    method: str
    seconds: tuple[float, float, float]
    moved_bytes: float
    collectives: float
    saved_s: Mapping[str, float]
    pays: tuple[float, ...]
    pays_at_lowest: bool

    @property
    def limit(self) -> str:
        """The resource that would save most."""
        return max(self.saved_s, key=lambda name: self.saved_s[name])

    @property
    def pays_text(self) -> str:
        """Below which rate it is ahead of dense."""
        if not self.pays:
            return "always" if self.pays_at_lowest else "never"
        if len(self.pays) == 1:
            return f"{'below' if self.pays_at_lowest else 'above'} {rate_text(self.pays[0])}"
        return "changes at " + ", ".join(map(rate_text, self.pays))


def accuracy_of(text: str) -> str:
    """Return what a method does to gradients: "exact", "rounded" to 16 bits, or "lossy".

    Rounds in which workers meet seldom count as lossy: they train differently.

    Example:
        >>> [accuracy_of(text) for text in ("dense", "bf16", "topk", "local:every=8")]
        ['exact', 'rounded', 'lossy', 'lossy']
    """
    how = method(text)
    if not isinstance(how.schedule, EveryStep):
        return "lossy"
    if how.lossless:
        return "exact"
    return "rounded" if isinstance(how.compressor, Cast) else "lossy"


def check_accuracy(accuracy: str) -> None:
    """Refuse an unknown word."""
    if accuracy not in ACCURACIES:
        raise bad_value("accuracy", f"must be one of {', '.join(ACCURACIES)}", accuracy, "use lossy")


def predict(programs: Mapping[str, Program], cluster: Cluster, slowness: Slowness) -> tuple[Prediction, ...]:
    """Replay programs on a cluster, dense among them, and find out what limits them and where they pay."""
    rates = [float(rate) for rate in np.geomspace(_LOWEST_BPS, _HIGHEST_BPS, _GRID)]
    usual = slowness.at[1]

    def step_s(text: str, rate: float) -> float:
        return replay(programs[text], cluster.with_rate(rate), slower=usual).step_s

    dense = {rate: step_s(DENSE, rate) for rate in rates}
    found = []
    for text, program in programs.items():
        low, middle, high = (replay(program, cluster, slower=slower).step_s for slower in slowness.at)

        def ahead(rate: float, text: str = text) -> bool:
            if rate not in dense:
                dense[rate] = step_s(DENSE, rate)
            return text != DENSE and step_s(text, rate) < dense[rate]

        leads = [ahead(rate) for rate in rates]
        changes = zip(pairwise(rates), pairwise(leads), strict=True)
        pays = [_between(*ends, a, ahead) for ends, (a, b) in changes if a != b]
        sent = [c for c in program.moved if c.op != "broadcast"]
        moved = sum(moved_bytes(Op(c.op), c.nbytes, c.size, len(c.peers)) for c in sent)
        found.append(
            Prediction(
                method=text,
                seconds=(low * (1 - _RESIDUAL), middle, high * (1 + _RESIDUAL)),
                moved_bytes=moved / program.steps,
                collectives=len(program.moved) / program.steps,
                saved_s=_saved(program, cluster, middle, slowness),
                pays=tuple(pays),
                pays_at_lowest=leads[0],
            )
        )
    return tuple(found)


def _saved(program: Program, cluster: Cluster, middle: float, slowness: Slowness) -> dict[str, float]:
    """Return what a median step saves where one resource is free."""
    usual = slowness.at[1]
    free = {
        "compute": (program.scaled(0.0, 1.0), cluster, usual),
        "codec": (program.scaled(1.0, 0.0), cluster, usual),
        "latency": (program, cluster.without_latency(), usual),
        "bandwidth": (program, cluster.without_limits(), usual),
        "contention": (program, replace(cluster, cores=1e6), usual),
        "stragglers": (program, cluster, slowness.alone),
    }
    return {
        name: max(middle - replay(what, where, slower=slower).step_s, 0.0)
        for name, (what, where, slower) in free.items()
    }


def advised(found: Sequence[Prediction], accuracy: str) -> tuple[str, str]:
    """Choose a method, and say why."""
    dense = next(p for p in found if p.method == DENSE)
    order = {text: ACCURACIES.index(accuracy_of(text)) for text in (p.method for p in found)}
    admitted = [p for p in found if order[p.method] <= ACCURACIES.index(accuracy)]
    fastest = min(p.seconds[1] for p in admitted)
    close = [p for p in admitted if p.seconds[1] <= fastest * (1 + _TIE)]
    # Of equally mild ones the one that sends least: a link may be slower than it was measured, but no faster.
    best = min(close, key=lambda p: (order[p.method], p.moved_bytes, p.seconds[1]))
    if best.method == DENSE:
        return DENSE, f"dense wins: nothing that {accuracy} accuracy admits is more than {_TIE:.0%} faster"
    saved = dense.seconds[1] - best.seconds[1]
    share = saved / dense.seconds[1]
    # Steps are slow or fast for both alike, so the two are compared where both are slow, or both are fast.
    leads = [1 - mine / theirs for mine, theirs in zip(best.seconds, dense.seconds, strict=True)]
    # The model computes the same under both, so where one was recorded with less of it, that was chance.
    chance = max(dense.saved_s["compute"] - best.saved_s["compute"], 0.0) / dense.seconds[1]
    if min(leads) - chance < _LEAST_LEAD:
        return DENSE, (
            f"dense wins: {best.method} would save {time_text(saved)} of {time_text(dense.seconds[1])} "
            f"({share:.0%}), within the error"
        )
    times = dense.seconds[1] / best.seconds[1]
    limit = dense.limit
    return best.method, (
        f"{best.method}: {times:.1f} times as fast as dense, which is limited by {limit}; it is limited by "
        f"{best.limit} and sends {best.moved_bytes / 1e6:.3g} MB per step instead of "
        f"{dense.moved_bytes / 1e6:.3g} MB"
    )


def _between(low: float, high: float, at_low: bool, ahead: Callable[[float], bool]) -> float:
    """Find the rate at which the answer changes, within 1 %, by bisection."""
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if ahead(middle) == at_low else (low, middle)
    return math.sqrt(low * high)
