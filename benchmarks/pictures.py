"""Pictures of measurements, as PNG files."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["bands", "step_times", "timeline"]

_MARKERS = "osD^vPX*"
# Read on white and on black: a contrast of more than 3 to either.
_GREY, _COLOURS = "#7d8590", {"ddp": "#d9662b", "bf16": "#8a6fd1", "diloco": "#1f8fd6"}
_LINKS = ("#2f9e77", "#1f8fd6", "#d9662b", "#8a6fd1")
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
        figure = _figure(6.0, len(models) * (0.27 * len(runs[0]["rows"]) + 1.1) + 0.5)
    except ImportError:
        return f"no {path}: {_NO_MATPLOTLIB}"
    panels = figure.subplots(len(models), 1, squeeze=False)[:, 0]
    for axes, model in zip(panels, models, strict=True):
        for place, run in enumerate(run for run in runs if run["model"] == model):
            rows = [row for row in run["rows"] if not row.get("refused")]
            axes.plot(
                [row["ms"] for row in rows],
                [row["rival"] for row in rows],
                _MARKERS[place % len(_MARKERS)],
                color=_LINKS[place % len(_LINKS)],
                markersize=8,
                label="no limit" if run["rate"] == "none" else run["rate"],
            )
        axes.set(xscale="log", title=f"{model}: ms per step")
        axes.invert_yaxis()
        _plain_ticks(axes.xaxis)
        _for_any_page(axes, labels=11)
    return _written(figure, panels[0], path)


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
        figure = _figure(6.0, 0.36 * len(ranks) + 1.7)
    except ImportError:
        return f"no {path}: {_NO_MATPLOTLIB}"
    axes = figure.subplots()
    for rank in ranks:
        took = [at / 60 for at, members in rounds if rank in members]
        axes.plot(took, [rank] * len(took), "|", color="#2f9e77", markersize=7)
    for kind, marker, colour in (
        ("kill", "X", "#d9662b"),
        ("freeze", "s", "#8a6fd1"),
        ("cut", "o", "#1f8fd6"),
    ):
        own = [fault for fault in faults if fault["kind"] == kind]
        x, y = [fault["at"] / 60 for fault in own], [fault["rank"] - 0.36 for fault in own]
        axes.plot(x, y, marker, color=colour, markersize=9, label=kind)
    axes.set(xlabel="minutes", ylabel="worker", yticks=ranks)
    axes.invert_yaxis()
    _for_any_page(axes)
    return _written(figure, axes, path)


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
    drawn.sort(key=lambda name: runs[0][name][-1][1])
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
            ha="center"
            if right
            else "right",  # the first ends left of the others, which its label would cross
        )
        right = max(right, seconds[-1])
    axes.set(xscale="log", xlabel="wall seconds of training")
    axes.set_ylabel("validation loss")
    axes.set_xlim(right=2 * right)
    axes.set_title(title)
    axes.margins(y=0.16)
    _plain_ticks(axes.xaxis)
    _for_any_page(axes)
    figure.savefig(path, dpi=160, transparent=True)
    return f"wrote {path}"


def _for_any_page(axes: Any, labels: int = 13) -> None:
    """Colour and size everything but the lines so that it can be read on white, on black, and at 400 px."""
    axes.grid(alpha=0.25, which="both")
    axes.tick_params(labelsize=labels, colors=_GREY, which="both")
    for text in (axes.title, axes.xaxis.label, axes.yaxis.label):
        text.set_fontsize(15)
        text.set_color(_GREY)
    for spine in axes.spines.values():
        spine.set_color(_GREY)


def _written(figure: Any, axes: Any, path: Path) -> str:
    """Write a figure with a legend above it, and say so."""
    marks, names = axes.get_legend_handles_labels()
    figure.legend(
        marks,
        names,
        loc="outside upper center",
        ncols=min(4, len(names)),
        fontsize=13,
        labelcolor=_GREY,
        frameon=False,
        columnspacing=1.0,
        handletextpad=0.2,
    )
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
