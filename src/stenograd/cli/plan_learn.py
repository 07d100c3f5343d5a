"""`stenograd plan --learn`: what methods do to learning, and what may be said of it."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from stenograd.checkpoint.rank_files import read_manifest, read_rank, saved_steps
from stenograd.cli.compare import split_methods
from stenograd.cli.report import megabytes
from stenograd.cli.table import console, show
from stenograd.errors import ConfigError, first_line
from stenograd.planning.advice import DENSE
from stenograd.planning.learn import Learned, Learning, learn, memory_bytes, sentence
from stenograd.planning.plan import Plan
from stenograd.planning.trial import Trial
from stenograd.planning.units import time_text

__all__ = ["load_weights", "show_learning", "tried"]

# What torch.load and load_state_dict raise for files that hold something else, or nothing.
_UNREADABLE = OSError, EOFError, IndexError, KeyError, RuntimeError, TypeError, pickle.UnpicklingError


class _Asked(Protocol):
    """What of `stenograd plan`'s options counts here."""

    @property
    def as_json(self) -> bool: ...
    @property
    def methods(self) -> Sequence[str] | None: ...
    @property
    def learn_steps(self) -> int: ...
    @property
    def learn_seeds(self) -> int: ...
    @property
    def learn_workers(self) -> int: ...


def load_weights(model: nn.Module, path: Path) -> None:
    """Fill a model from a file of `torch.save(model.state_dict())`, or from the newest checkpoint of a run.

    Raises:
        ConfigError: there is nothing to read, or it does not fit the model.
    """
    try:
        if path.is_dir():
            manifest = read_manifest(path, saved_steps(path)[-1])
            weights = read_rank(path, manifest, 0)["model"]
        else:
            weights = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(weights)
    except (
        OSError,
        EOFError,
        IndexError,
        KeyError,
        RuntimeError,
        TypeError,
        pickle.UnpicklingError,
    ) as cause:
        raise ConfigError(
            f"--learn-from {path} cannot be loaded ({first_line(cause)}): give a file of "
            "torch.save(model.state_dict(), ...) of this model, or the folder of stenograd train --out"
        ) from cause


def tried(found: Plan, trial: Trial, asked: _Asked) -> Learning:
    """Train virtual workers under the methods asked for, or the recommended one; say what begins.

    Raises:
        ConfigError: there is nothing to compare with dense.
    """
    texts = [t for t in split_methods(asked.methods) if t != DENSE] if asked.methods else []
    texts = texts or [found.method]
    if texts == [DENSE]:
        raise ConfigError("--learn compares with dense, and dense is recommended: name others by --methods")
    size = min(found.world_size, asked.learn_workers)
    each_s = size * asked.learn_steps * found.profile.floor_s

    def say(text: str) -> None:
        if not asked.as_json:
            console().print(text, soft_wrap=True)

    say(
        f"training {size} virtual workers for {asked.learn_steps} steps, {asked.learn_seeds} times for dense "
        f"and each of {len(texts)} methods: at least {time_text(each_s)} each, about "
        f"{megabytes(memory_bytes(trial, size))} of memory"
    )
    return learn(
        trial,
        texts,
        workers=found.world_size,
        steps=asked.learn_steps,
        seeds=asked.learn_seeds,
        most_workers=asked.learn_workers,
        progress=say,
    )


def show_learning(found: Plan, told: Learning) -> None:
    """Print what came of virtual workers, and what may be said of it."""
    rows = [(r.method, _signed(r), f"{r.diverged} of {told.seeds}", _error(r)) for r in told.results]
    title = (
        f"{told.workers} virtual workers, {told.steps} steps, {told.seeds} seeds; dense: loss "
        f"{told.first:.4g} at first, {told.last:.4g} at last"
    )
    show(("method", "loss against dense (95 %)", "diverged", "error of the first average"), rows, title)
    for line in (*(sentence(told, row) for row in told.results), *beware(found, told)):
        console().print(f"- {line}", soft_wrap=True)


def beware(found: Plan, told: Learning) -> list[str]:
    """Return what else may be said: what the steps leave room for, and what was not tried."""
    seconds = {p.method: p.seconds[1] for p in found.predictions}
    lines = []
    for row in told.results:
        times = seconds[DENSE] / seconds[row.method] if row.method in seconds else 0.0
        if times > 1 and not row.diverged:
            lines.append(
                f"{row.method}: {times:.1f} times as many steps in the same time, so it has room for up to "
                "that many more"
            )
    if told.asked > told.workers:
        lines.append(
            f"tried with {told.workers} of {told.asked} workers: averages over more hide random errors, "
            "hardly a bias"
        )
    if told.batches < told.workers * told.steps:
        times = told.workers * told.steps / told.batches
        lines.append(f"there were {told.batches} batches, so each was seen {times:.3g} times")
    lines.append("where training ends is not predicted: stenograd compare trains to the end")
    return lines


def _signed(row: Learned) -> str:
    return f"{row.mean:+.2g} +- {row.margin:.2g}" if row.differences else "-"


def _error(row: Learned) -> str:
    return "-" if row.error is None else f"{row.error:.2g}"
