"""The user's training as the planner takes it: a model, its optimizer, some batches and a loss."""

from __future__ import annotations

import copy
import importlib
import importlib.util
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from stenograd.devices import cuda_devices
from stenograd.errors import ConfigError, bad_value, first_line

__all__ = ["Trial", "Work", "load_trial", "untouched"]

_BATCHES = 4  # enough to see data-dependent methods differ, few enough to keep


@dataclass(frozen=True)
class Trial:
    """What is trained, for `stenograd plan --trial FILE.py:FUNCTION` and `stenograd.plan`.

    Args:
        model: the module; a copy of it is trained, on the device where it is.
        optimizer: over the model's parameters.
        batches: of one worker, any iterable; the first four are used, and an iterator loses those.
        loss: `loss(model, batch)` returns the scalar to call `backward()` on.

    Example:
        >>> model = nn.Linear(4, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> trial = Trial(model, optimizer, [torch.ones(2, 4)], lambda model, batch: model(batch).mean())
        >>> trial.loss(trial.model, trial.batches[0]).shape
        torch.Size([])
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    batches: Iterable[Any]
    loss: Callable[[nn.Module, Any], Tensor]


class Work:
    """A copy of a trial that may be trained.

    Args:
        trial: stays as it is.
        batches: those of the trial that were taken, see `first_batches`.

    Raises:
        ConfigError: the model or the optimizer cannot be copied.
    """

    def __init__(self, trial: Trial, batches: list[Any]) -> None:
        try:
            self.model, self.optimizer = copy.deepcopy((trial.model, trial.optimizer))
        except Exception as cause:  # whatever the user's modules do when they are copied
            raise ConfigError(
                f"model and optimizer must be copyable, got {first_line(cause)}: make them in the function "
                "of --trial FILE.py:FUNCTION and hand over nothing that was trained"
            ) from cause
        self._batches, self._loss, self._next = batches, trial.loss, 0
        self.model.train()

    def step(self) -> None:
        """Take a training step."""
        batch = self._batches[self._next % len(self._batches)]
        self._next += 1
        self.optimizer.zero_grad()
        self._loss(self.model, batch).backward()
        self.optimizer.step()


def first_batches(trial: Trial) -> list[Any]:
    """Return the batches that are used.

    Raises:
        ConfigError: there is none.
    """
    found = list(islice(trial.batches, _BATCHES))
    if not found:
        raise bad_value("batches", "must hold at least one batch", found, "give a list of some")
    return found


@contextmanager
def untouched(trial: Trial) -> Iterator[None]:
    """Put all random generators back as they were when a `with` block ends."""
    kept = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=cuda_devices(trial.model.parameters())):
            yield
    finally:
        random.setstate(kept[0])
        np.random.set_state(kept[1])


def load_trial(text: str) -> Trial:
    """Call the function that `FILE.py:FUNCTION` or `package.module:FUNCTION` names.

    Raises:
        ConfigError: there is no such file, module or function, or it returns something else.
    """
    place, colon, name = text.rpartition(":")
    if not colon or not place or not name:
        raise bad_value("the trial", "must be FILE.py:FUNCTION", text, "write train.py:build")
    ours, sys.argv = sys.argv, [place]  # a script that reads its arguments finds none, and not ours
    try:
        module = _from_file(Path(place)) if place.endswith(".py") else _from_package(place)
        make = getattr(module, name, None)
        if not callable(make):
            raise bad_value("the trial", f"must name a function in {place}", name, "look at its spelling")
        trial = make()
    finally:
        sys.argv = ours
    if not isinstance(trial, Trial):
        kind = type(trial).__name__
        raise bad_value(f"{name}()", "must return a stenograd.Trial", kind, "see docs/planning.md")
    return trial


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise bad_value("the trial", "must name a file that exists", str(path), "look at its spelling")
    name = path.stem if _is_free(path) else f"_stenograd_trial_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # the name ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up
    sys.path.insert(0, str(path.parent.resolve()))  # for good, as for a script: its functions import later
    spec.loader.exec_module(module)
    return module


def _is_free(path: Path) -> bool:
    """Return whether a file's module may have the file's name, so that what is pickled is found by it.

    Not where another module has that name, loaded or not yet: `queue.py` would stand in for Python's.
    """
    try:
        known = importlib.util.find_spec(path.stem)
    except (ImportError, AttributeError, ValueError):  # a name with dots, or a module without a spec
        return False
    return known is None or (known.origin is not None and Path(known.origin).resolve() == path.resolve())


def _from_package(name: str) -> Any:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))  # as with python -m
    try:
        return importlib.import_module(name)
    except ImportError as cause:
        wanted = f"must name a module that can be imported ({first_line(cause)})"
        raise bad_value("the trial", wanted, name, "or write FILE.py:FUNCTION") from cause
