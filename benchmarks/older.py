"""Tables of older records: time to an accuracy or a loss, and seconds that were put together.

What measured them has given way to `evidence.py`; they go when its records are there.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from harness import number, table
from rivals import FLOOR, Points

__all__ = ["points", "put_together", "reached", "time_to_accuracy"]

DDP = "ddp"
Curve = Sequence[Sequence[float]]  # steps, validation loss and accuracy


def reached(points: Points, target: float, task: str = "mnist") -> Mapping[str, Any] | None:
    """Return the first point at the target or better: an accuracy at least, a loss at most so large."""
    if task == "text":
        return next((point for point in points if point["eval_loss"] <= target), None)
    return next((point for point in points if point["accuracy"] >= target), None)


def summary(
    points: Mapping[str, Points], target: float, parts: int, base: str = "ddp", task: str = "mnist"
) -> str:
    """Format a line a rival: when it reached the target, for how many bytes, and where it ended."""
    wanted = f"{target:g}" if task == "text" else f"{100 * target:g} %"
    head = ["rival", f"s to {wanted}", f"x faster than {base}", "MB to it", "s in all", "MB in all"]
    first = {name: reached(mine, target, task) for name, mine in points.items()}
    lines = []
    for name, mine in points.items():
        hit, other = first[name], first.get(base)
        cells = ["", "", ""]
        if hit is not None:
            speed = other["seconds"] / hit["seconds"] if other is not None else None
            cells = [number(hit["seconds"]), number(speed, 2), number(hit["host_bytes"] / 1e6)]
        last = mine[-1]
        cells += [number(last["seconds"]), number(last["host_bytes"] / 1e6)]
        if task == "text":
            lines.append([name, *cells, number(last["eval_loss"], 4)])
            continue
        final = [100 * point["accuracy"] for point in mine[-parts:]]
        lines.append([name, *cells, number(final[-1], 2), number(statistics.mean(final), 2)])
    ends = ["final loss"] if task == "text" else ["final accuracy, %", "mean of last epoch, %"]
    return table([*head, *ends], lines)


def time_to_accuracy(told: Mapping[str, Any]) -> str:
    """Format the table of a record."""
    settings = told["settings"]
    task = settings.get("task", "mnist")
    return summary(told["results"], settings["target"], settings["parts"], task=task)


def put_together(told: Mapping[str, Any]) -> str:
    """Format a table for each link of a record."""
    found, links = told["results"]["curves"], told["results"]["steps"]
    targets = sorted({common(found), 2.0, told["settings"]["target"]}, reverse=True)
    return "\n\n".join(f"### {rate}\n\n{_slow_links(found, steps, targets)}" for rate, steps in links.items())


def points(curve: Curve, step: Mapping[str, float]) -> list[dict[str, float]]:
    """Return a curve's evaluations with the time and the bytes that they take on a link.

    Example:
        >>> points([[100, 2.5, 0.3]], {"seconds": 0.5, "host_bytes": 10.0})
        [{'seconds': 50.0, 'host_bytes': 1000.0, 'eval_loss': 2.5, 'accuracy': 0.3}]
    """
    made = []
    for taken, loss, accuracy in curve:
        spent = {name: taken * value for name, value in step.items()}
        made.append({**spent, "eval_loss": loss, "accuracy": accuracy})
    return made


def common(found: Mapping[str, Curve]) -> float:
    """Return the lowest loss that every rival has reached, rounded up to hundredths.

    Example:
        >>> common({"ddp": [[100, 2.5, 0], [200, 2.0, 0]], "topk": [[100, 2.6, 0], [200, 2.333, 0]]})
        2.34
    """
    return math.ceil(100 * max(min(loss for _, loss, _ in curve) for curve in found.values())) / 100


def _slow_links(
    found: Mapping[str, Curve], steps: Mapping[str, Mapping[str, float]], targets: Sequence[float]
) -> str:
    """Format a line per rival: time per step, seconds to every target, and DDP's divided by those."""
    head = ["rival", "ms per step", "kB per step", "steps"]
    for target in targets:
        head += [f"s to {target:g}", "x faster"]
    lines = []
    if FLOOR in steps:
        lines.append([FLOOR, number(1e3 * steps[FLOOR]["seconds"], 0), *[""] * (2 + 2 * len(targets))])
    for rival in (name for name in found if name in steps):
        step = steps[rival]
        line = [f"`{rival}`", number(1e3 * step["seconds"], 0), number(step["host_bytes"] / 1e3, 1)]
        line.append(number(found[rival][-1][0], 0))
        for target in targets:
            mine, base = (_seconds(found[name], steps[name], target) for name in (rival, DDP))
            line += [number(mine, 0), number(base / mine if mine and base else None, 1)]
        lines.append(line)
    return table(head, lines)


def _seconds(curve: Curve, step: Mapping[str, float], target: float) -> float | None:
    """Return the time of the first evaluation at a loss, or None where there is none."""
    hit: dict[str, Any] | None = next((p for p in points(curve, step) if p["eval_loss"] <= target), None)
    return None if hit is None else hit["seconds"]
