"""Pictures of a comparison: accuracy against time and against bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path

from stenograd.cli.rows import Row
from stenograd.planning.picture import new_figure, write_figure

__all__ = ["plot"]


def plot(path: Path, title: str, curves: Mapping[str, Sequence[Row]]) -> str:
    """Draw accuracy against seconds and against megabytes sent, one curve a method.

    Args:
        path: the PNG file to write.
        title: what was trained.
        curves: epochs by method.

    Returns:
        One line that says what was written, or why nothing was.
    """
    figure = new_figure(11, 4.2)
    if figure is None:
        return write_figure(None, path)
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
    return write_figure(figure, path)
