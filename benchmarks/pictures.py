"""Pictures of measurements, as PNG files."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["bands", "step_times", "timeline"]

_MARKERS = "osD^vPX*"
_NO_MATPLOTLIB = "pictures need matplotlib, install it with `pip install stenograd[plots]`"


def step_times(path: Path, runs: Sequence[Mapping[str, Any]]) -> str:
    """Draw ms per step, one panel a model, one line of dots a rival, one kind of dot a link.

    Args:
        path: the PNG file to write.
        runs: each with model, rate and rows, see `bench.rows`.

    Returns:
        One line that says what was written, or why nothing was.
    """
    models = list(dict.fromkeys(run["model"] for run in runs))
    try:
        figure = _figure(4.6 * len(models), 0.32 * len(runs[0]["rows"]) + 1.6)
    except ImportError:
        return f"no {path}: {_NO_MATPLOTLIB}"
    panels = figure.subplots(1, len(models), sharey=True, squeeze=False)[0]
    for axes, model in zip(panels, models, strict=True):
        for place, run in enumerate(run for run in runs if run["model"] == model):
            rows = [row for row in run["rows"] if not row.get("refused")]
            axes.plot(
                [row["ms"] for row in rows],
                [row["rival"] for row in rows],
                _MARKERS[place % len(_MARKERS)],
                label="unshaped" if run["rate"] == "none" else run["rate"],
            )
        axes.set(xscale="log", xlabel="ms per step", title=model)
        _plain_ticks(axes.xaxis)
        axes.grid(alpha=0.3, which="both")
    panels[0].invert_yaxis()
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", title="link")
    figure.savefig(path, dpi=130)
    return f"wrote {path}"


def timeline(path: Path, when: Sequence[str], faults: Sequence[Mapping[str, Any]]) -> str:
    """Draw who took part in rounds, a line a worker, with its faults.

    Args:
        path: the PNG file to write.
        when: of each round the seconds since the first, and its members, in words.
        faults: each with at, kind, rank and seconds, see `storm.py`.

    Returns:
        One line that says what was written, or why nothing was.
    """
    words = [line.split() for line in when]
    rounds = [(float(at), [int(rank) for rank in members]) for at, *members in words]
    ranks = sorted({rank for _, members in rounds for rank in members})
    try:
        figure = _figure(9.0, 0.34 * len(ranks) + 1.5)
    except ImportError:
        return f"no {path}: {_NO_MATPLOTLIB}"
    axes = figure.subplots()
    for rank in ranks:
        took = [at / 60 for at, members in rounds if rank in members]
        axes.plot(took, [rank] * len(took), "|", color="#2a7f62", markersize=7)
    for kind, marker in (("kill", "X"), ("freeze", "s"), ("cut", "o")):
        own = [fault for fault in faults if fault["kind"] == kind]
        x, y = [fault["at"] / 60 for fault in own], [fault["rank"] - 0.36 for fault in own]
        axes.plot(x, y, marker, color="#c0392b", markersize=5, label=kind)
    axes.set(xlabel="minutes", ylabel="worker", yticks=ranks)
    axes.invert_yaxis()
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", title="fault")
    figure.savefig(path, dpi=130)
    return f"wrote {path}"


# Read on white and on black: a contrast of more than 3 to either.
_GREY, _COLOURS = "#7d8590", {"ddp": "#d9662b", "bf16": "#8a6fd1", "diloco": "#1f8fd6"}


def bands(path: Path, seeds: Mapping[str, Mapping[str, Sequence[Sequence[float]]]], title: str) -> str:
    """Draw validation loss against wall seconds: DDP, bf16 and DiLoCo, with the seeds' range.

    Args:
        path: the PNG file to write; its background is transparent, and it is readable at a width of 400 px.
        seeds: by seed and rival, points of steps, seconds, bytes, loss and accuracy.
        title: where it was measured.

    Returns:
        One line that says what was written, or why nothing was.
    """
    try:
        figure = _figure(6.0, 4.2)
    except ImportError:
        return f"no {path}: {_NO_MATPLOTLIB}"
    axes = figure.subplots()
    runs, right = list(seeds.values()), 0.0
    drawn = [n for n in runs[0] if n in _COLOURS or n.partition(":")[0] == "diloco"]
    for name in drawn:
        points = list(zip(*(run[name] for run in runs), strict=True))
        seconds = [statistics.median(p[1] for p in at) for at in points]
        losses = [[p[3] for p in at] for at in points]
        colour = _COLOURS[name if name in _COLOURS else name.partition(":")[0]]
        axes.plot(seconds, [statistics.median(some) for some in losses], color=colour, linewidth=2.5)
        axes.fill_between(seconds, list(map(min, losses)), list(map(max, losses)), color=colour, alpha=0.25)
        label = {"ddp": "DDP", "bf16": "bf16"}.get(name, "DiLoCo in 4 bits")
        axes.annotate(
            label,
            (seconds[-1], statistics.median(losses[-1])),
            (0, -20),
            textcoords="offset points",
            color=colour,
            fontsize=15,
            fontweight="bold",
            ha="center",
        )
        right = max(right, seconds[-1])
    axes.set(xscale="log", xlabel="wall seconds of training")
    axes.set_ylabel("validation loss")
    axes.set_xlim(right=2 * right)
    axes.set_title(title, fontsize=15)
    axes.margins(y=0.16)
    _plain_ticks(axes.xaxis)
    axes.grid(alpha=0.25, which="both")
    axes.tick_params(labelsize=13)
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set_fontsize(15)
        text.set_color(_GREY)
    axes.tick_params(colors=_GREY, which="both")
    for spine in axes.spines.values():
        spine.set_color(_GREY)
    figure.savefig(path, dpi=160, transparent=True)
    return f"wrote {path}"


def _plain_ticks(axis: Any) -> None:
    """Label 1, 2, 5, 10, 20, ... in plain digits."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    low, high = axis.get_view_interval()
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 1000 * low else (1.0,)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())


def _figure(width_in: float, height_in: float) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
