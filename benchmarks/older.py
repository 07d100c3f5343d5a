"""Tables of older records, time to an accuracy, and their picture.

python benchmarks/older.py RECORD.json PNG

What measured them has given way to `evidence.py`; they go when its records are there.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness import number, table
from pictures import accuracies
from rivals import Points

__all__ = ["reached", "summary", "time_to_accuracy"]


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


if __name__ == "__main__":
    record = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    print(accuracies(Path(sys.argv[2]), record["results"], record["settings"]["target"]))
