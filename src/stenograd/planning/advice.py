"""Predictions for methods on a network, the values of their keys for it, and which method to use."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stenograd.catalog.method import Method, method
from stenograd.compressors.cast import Cast
from stenograd.planning.formula import Network, step_s
from stenograd.planning.link import number_text, rate_text, time_text
from stenograd.planning.program import Program, with_ratio
from stenograd.planning.rehearsal import stretches
from stenograd.schedules.every_step import EveryStep
from stenograd.schedules.rounds import Rounds

__all__ = [
    "ACCURACIES",
    "DENSE",
    "FRAGMENTS",
    "KEYS",
    "Prediction",
    "accuracy_of",
    "advised",
    "best_keys",
    "open_keys",
    "predict",
    "variants",
    "with_keys",
]

ACCURACIES = ("exact", "rounded", "lossy")
DENSE = "dense"
# Values that are tried for keys that were not written; rounds rarer than 128 steps were not trained with.
KEYS: dict[str, tuple[float, ...]] = {
    "every": (4, 8, 16, 32, 64, 128),
    "ratio": (0.3, 0.1, 0.03, 0.01, 0.003, 0.001),
}
FRAGMENTS = (1, 2, 4, 8)  # recorded one by one, and only with a delay: else one is the fastest
# Among values that are so close to the fastest the one that sends most is taken: it changes learning least.
_CLOSE = 0.03
# Methods that close are equally fast: the numerically milder one is chosen, then the one that sends least.
_TIE = 0.02
# Between which shares of the prediction 80 % of steps lie: 29 of the 33 that were compared with real runs on
# a quiet machine, of which most took longer than predicted (docs/planning.md).
MEASURED = (0.95, 1.2)
# The least share of a dense step that a method must save. Predictions for the same model and link err mostly
# alike: the errors of 153 methods differed from that of dense in their cell by 5 % in the median.
_LEAST_LEAD = 0.05
_RATES = tuple(float(rate) for rate in np.geomspace(1e3, 1e12, 73))  # eight for each factor of ten


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a step under one method takes.

    Attributes:
        method: its text.
        seconds: of a step: what 10 % of the steps stay below, the mean, and what 90 % stay below.
        moved_bytes: that a worker sends per step, headers not counted.
        collectives: per step.
        parts_s: what of the mean is computing, coding, latency and bandwidth.
        pays_below_bps: the highest rate at which it is ahead of dense: 0 for none, infinite for any.
    """

    method: str
    seconds: tuple[float, float, float]
    moved_bytes: float
    collectives: float
    parts_s: Mapping[str, float]
    pays_below_bps: float

    @property
    def limit(self) -> str:
        """The part that takes most."""
        return max(self.parts_s, key=lambda name: self.parts_s[name])

    @property
    def pays_text(self) -> str:
        """Below which rate it is ahead of dense."""
        if not 0 < self.pays_below_bps < math.inf:
            return "always" if self.pays_below_bps else "never"
        return f"below {rate_text(self.pays_below_bps)}"


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


def predict(
    programs: Mapping[str, Program], network: Network, floor_s: float, slower: float
) -> list[Prediction]:
    """Predict programs on a network, dense among them.

    Args:
        programs: by method text.
        network: where they run.
        floor_s: processor seconds of a step that exchanges nothing.
        slower: how many times as long the slowest worker computes, in the mean.
    """
    dense = [step_s(programs[DENSE], replace(network, bps=rate), floor_s, slower=slower) for rate in _RATES]
    found = []
    for text, program in programs.items():
        whole = step_s(program, network, floor_s, slower=slower)
        # by a link that takes no time
        sent_at_once = step_s(program, replace(network, bps=1e15), floor_s, slower=slower)
        parts = {"bandwidth": max(whole - sent_at_once, 0.0)}
        free = step_s(program, replace(network, bps=1e15, hop_s=0.0), floor_s, slower=slower)
        parts["latency"] = max(sent_at_once - free, 0.0)
        # min(), because coding, which is what remains, could otherwise be below 0.
        parts["computing"] = min(slower * floor_s, free)
        parts["coding"] = free - parts["computing"]
        found.append(
            Prediction(
                method=text,
                seconds=(whole * MEASURED[0], whole, whole * MEASURED[1]),
                moved_bytes=program.moved_bytes,
                collectives=len(program.collectives) / program.periods / program.steps,
                parts_s=parts,
                pays_below_bps=0.0 if text == DENSE else _pays(program, network, floor_s, slower, dense),
            )
        )
    return found


def _pays(program: Program, network: Network, floor_s: float, slower: float, dense: Sequence[float]) -> float:
    """Return the highest of the rates at which a method is ahead of dense."""
    for rate, other in zip(reversed(_RATES), reversed(dense), strict=True):
        if step_s(program, replace(network, bps=rate), floor_s, slower=slower) < other:
            return math.inf if rate == _RATES[-1] else rate
    return 0.0


def open_keys(text: str) -> list[str]:
    """Return the keys of a method's text that were not written and may be chosen for a link.

    Example:
        >>> open_keys("topk"), open_keys("diloco:every=8/topk:ratio=0.01"), open_keys("diloco:delay=1/topk")
        (['ratio'], [], ['every', 'ratio', 'fragments'])
    """
    how, found = method(text), []
    if isinstance(how.schedule, Rounds) and stretches(how):
        found.append("every")
    if hasattr(_innermost(how.compressor), "ratio"):
        found.append("ratio")
    if getattr(how.schedule, "delay", 0):
        found.append("fragments")
    return [key for key in found if f"{key}=" not in text.replace(" ", "")]


def with_keys(how: Method, **values: float) -> Method:
    """Return a method with other values of `every`, `fragments` and `ratio`.

    Example:
        >>> print(with_keys(method("local/topk"), every=4, ratio=0.1))
        local:every=4/topk:ratio=0.1
    """
    schedule, compressor = how.schedule, how.compressor
    counts: dict[str, Any] = {key: int(values[key]) for key in ("every", "fragments") if key in values}
    if counts:
        schedule = replace(schedule, **counts)
    if "ratio" in values:
        compressor = _with_ratio(compressor, values["ratio"])
    return replace(how, schedule=schedule, compressor=compressor, text="")


def _innermost(compressor: Any) -> Any:
    return _innermost(compressor.inner) if hasattr(compressor, "inner") else compressor


def _with_ratio(compressor: Any, ratio: float) -> Any:
    if hasattr(compressor, "inner"):
        return replace(compressor, inner=_with_ratio(compressor.inner, ratio))
    return replace(compressor, ratio=ratio)


def variants(program: Program, keys: Sequence[str]) -> Iterator[Program]:
    """Yield what a recorded method does with other values of its keys, by arithmetic; itself first."""
    yield program
    if not keys:
        return
    how, per_round = method(program.method), program.period // program.apart
    everies = KEYS["every"] if "every" in keys else [program.steps]
    ratios = KEYS["ratio"] if "ratio" in keys else [None]
    for every in map(int, everies):
        idle = every // per_round - program.apart
        if "every" in keys and (every % per_round or idle < 0):
            continue
        for ratio in ratios:
            other, values = program, dict[str, float]({"every": every} if "every" in keys else {})
            if ratio is not None:
                values["ratio"] = ratio
                other = with_ratio(program, ratio / _innermost(how.compressor).ratio)
            text = with_keys(how, **values).text
            yield replace(other, method=text, idle=idle if "every" in keys else program.idle)


def best_keys(candidates: Sequence[Program], network: Network, floor_s: float, slower: float) -> Program:
    """Return the candidate that sends most among those that are about as fast as the fastest."""
    took = {p.method: step_s(p, network, floor_s, slower=slower) for p in candidates}
    close = [p for p in candidates if took[p.method] <= min(took.values()) * (1 + _CLOSE)]
    return max(close, key=lambda p: (p.moved_bytes, -took[p.method]))


def advised(found: Sequence[Prediction], accuracy: str) -> tuple[str, str]:
    """Choose a method, and say why."""
    dense = next(p for p in found if p.method == DENSE)
    order = {p.method: ACCURACIES.index(accuracy_of(p.method)) for p in found}
    admitted = [p for p in found if order[p.method] <= ACCURACIES.index(accuracy)]
    # What a lossy method does to accuracy is not predicted, so its gain in time has to be beyond doubt.
    unsure = [p for p in admitted if order[p.method] == 2 and p.seconds[2] >= dense.seconds[0]]
    admitted = [p for p in admitted if p not in unsure]
    fastest = min(p.seconds[1] for p in admitted)
    close = [p for p in admitted if p.seconds[1] <= fastest * (1 + _TIE)]
    # Of equally mild ones the one that sends least: a link may be slower than it was measured, but no faster.
    best = min(close, key=lambda p: (order[p.method], p.moved_bytes, p.seconds[1]))
    share = 1 - best.seconds[1] / dense.seconds[1]
    if best.method == DENSE:
        ahead = min(unsure, key=lambda p: p.seconds[1], default=dense)
        if ahead.seconds[1] < dense.seconds[1]:
            return DENSE, (
                f"dense wins: {ahead.method} may be faster, {_range(ahead)} per step against "
                f"{_range(dense)}, but these ranges overlap"
            )
        return DENSE, f"dense wins: nothing that {accuracy} accuracy admits is more than {_TIE:.0%} faster"
    if share < _LEAST_LEAD:
        saved = time_text(dense.seconds[1] - best.seconds[1])
        return DENSE, (
            f"dense wins: {best.method} would save {saved} of {time_text(dense.seconds[1])} ({share:.0%}), "
            "within the error"
        )
    return best.method, (
        f"{best.method}: {1 / (1 - share):.1f} times as fast as dense, which is limited by {dense.limit}; it "
        f"is limited by {best.limit} and sends {number_text(best.moved_bytes / 1e6)} MB per step instead of "
        f"{number_text(dense.moved_bytes / 1e6)} MB"
    )


def _range(of: Prediction) -> str:
    low, _, high = of.seconds
    return f"{number_text(1e3 * low)} to {number_text(1e3 * high)} ms"
