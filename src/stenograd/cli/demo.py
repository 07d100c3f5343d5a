"""`stenograd demo`: three methods on digits with two workers, and what is to be seen in the table."""

from __future__ import annotations

import os
from collections.abc import Sequence

from stenograd import tasks
from stenograd.cli import compare
from stenograd.cli.options import Options, Task
from stenograd.cli.report import megabytes, percent
from stenograd.errors import StenogradError
from stenograd.launch.detect import detect

__all__ = ["explain", "run"]

_METHODS = ("dense", "topk:ratio=0.05", "powersgd")  # top-k of 1 % needs more than ten epochs
_EPOCHS = 10  # half of the tasks' own: with kernels to compile, the demo shall end within a minute
_SLOW_LINK = 100e6 / 8  # bytes per second of 100 Mbit/s


def run() -> int:
    """Train under each method, print the table and what it shows, and return the exit status."""
    alone = detect(os.environ).launcher == "alone"
    options = Options(task=_task(), workers=2 if alone else None, epochs=_EPOCHS)
    return compare.run(options, _METHODS, None, explain)


def explain(results: Sequence[compare.Result]) -> str:
    """Say in three lines what a comparison shows, beginning with the first method, which sends everything.

    The seconds on a slow link are computed: bytes divided by 100 Mbit/s.

    Example:
        >>> kept = {"eval_accuracy": 0.9, "compression": 50.0, "moved_bytes_per_step": 5e3}
        >>> full = {"eval_accuracy": 0.9, "compression": 1.0, "moved_bytes_per_step": 250e3}
        >>> text = explain([compare.Result(method="dense", **full), compare.Result(method="topk", **kept)])
        >>> print(text.splitlines()[2])
        At 100 Mbit/s the bytes alone would take per step: dense 20.0 ms, topk 0.4 ms.
    """
    if any(result.error is not None for result in results):
        return ""
    first, others = results[0], results[1:]
    shares = [
        f"{r.method} sends {r.compression:.0f} times less and ends at {percent(float(r.eval_accuracy or 0))}"
        for r in others
    ]
    ends = f"sends {megabytes(_sent(first))} per step and ends at {percent(float(first.eval_accuracy or 0))}"
    times = ", ".join(f"{r.method} {1e3 * _sent(r) / _SLOW_LINK:.1f} ms" for r in results)
    return (
        f"From the same weights and batches {'; '.join([f'{first.method} {ends}', *shares])}.\n"
        "Both workers share this machine, where sending is nearly free, so ms/step shows what "
        "compressing costs.\n"
        f"At 100 Mbit/s the bytes alone would take per step: {times}."
    )


def _sent(result: compare.Result) -> float:
    """Return the bytes that a worker sends per step."""
    return float(result.moved_bytes_per_step or 0)


def _task() -> Task:
    """Return the real digits if scikit-learn, which holds them, is installed, else the drawn ones."""
    try:
        tasks.load(Task.DIGITS.value)
    except StenogradError:
        return Task.GLYPHS
    return Task.DIGITS
