"""A picture of a plan; matplotlib is an extra, and without it there is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from stenograd.checkpoint.files import replacing
from stenograd.planning.plan import Plan
from stenograd.planning.units import rate_text

__all__ = ["draw", "new_figure", "write_figure"]


def new_figure(width: float, height: float) -> Any:
    """Return an empty figure of so many inches; None where matplotlib is not installed."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        return None
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def write_figure(figure: Any, path: Path) -> str:
    """Write a PNG file that is whole or absent, and return one line that says so, or why there is none."""
    if figure is None:
        return f"no {path}: pictures need matplotlib, install it with `pip install stenograd[plots]`"
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=130)
    return f"wrote {path}"


def draw(found: Plan, path: Path) -> str:
    """Draw what a step consists of under each method.

    Returns:
        One line that says what was written, or why nothing was.
    """
    ranked = sorted(found.predictions, key=lambda p: p.seconds[1])
    figure = new_figure(9, 1.6 + 0.3 * len(ranked))
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
    return write_figure(figure, path)
