"""Pictures of a comparison and of a plan; matplotlib is an extra, and without it there are none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from stenograd.checkpoint.files import replacing
from stenograd.cli.loop import Row
from stenograd.planning.link import rate_text
from stenograd.planning.plan import Plan

__all__ = ["draw_curves", "draw_plan"]


def draw_curves(path: Path, title: str, curves: Mapping[str, Sequence[Row]]) -> str:
    """Draw accuracy against seconds and against megabytes sent, one curve a method.

    Args:
        path: the PNG file to write.
        title: what was trained.
        curves: epochs by method.

    Returns:
        One line that says what was written, or why nothing was.
    """
    figure = _new_figure(11, 4.2)
    if figure is None:
        return _write_figure(None, path)
    if not curves:
        return f"no {path}: no method finished an epoch"
    by_time, by_bytes = figure.subplots(1, 2, sharey=True)
    for place, (method, rows) in enumerate(curves.items()):
        accuracy = [100 * row.eval_accuracy for row in rows]
        style = {"marker": "osD^vPX*"[place % 8], "markersize": 3, "linewidth": 1.2, "label": method}
        by_time.plot(list(accumulate(row.seconds for row in rows)), accuracy, **style)
        sent = [row.dense_bytes / row.compression / 1e6 for row in rows]
        by_bytes.plot(list(accumulate(sent)), accuracy, **style)
    by_time.set(xlabel="seconds, evaluation included", ylabel="evaluation accuracy, %", title=title)
    by_bytes.set(xlabel="MB sent per worker", xscale="log", title="the same, by bytes")
    for axes in (by_time, by_bytes):
        axes.grid(alpha=0.3)
    figure.legend(*by_time.get_legend_handles_labels(), loc="outside right center")
    return _write_figure(figure, path)


def draw_plan(found: Plan, path: Path) -> str:
    """Draw what a step consists of under each method.

    Returns:
        One line that says what was written, or why nothing was.
    """
    ranked = sorted(found.predictions, key=lambda p: p.seconds[1])
    figure = _new_figure(9, 1.6 + 0.3 * len(ranked))
    if figure is not None:
        axes, left = figure.subplots(), np.zeros(len(ranked))
        for part in ("computing", "coding", "latency", "bandwidth"):
            ms = np.array([1e3 * p.parts_s[part] for p in ranked])
            axes.barh([p.method for p in ranked], ms, left=left, label=part)
            left = left + ms  # not in place: the bars may hold the array
        axes.invert_yaxis()
        rate = rate_text(found.link.bps)
        axes.set(xlabel="ms per step", title=f"{found.work['name'] or 'training'}, {rate}")
        axes.legend()
    return _write_figure(figure, path)


def _new_figure(width: float, height: float) -> Any:
    """Return an empty figure of so many inches; None where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _write_figure(figure: Any, path: Path) -> str:
    """Write a PNG file that is whole or absent, and return one line that says so, or why there is none."""
    if figure is None:
        return f"no {path}: pictures need matplotlib, install it with `pip install stenograd[plots]`"
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=130)
    return f"wrote {path}"
