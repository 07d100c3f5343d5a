"""Which DASO trains what: the last one that was given a model takes it over from the one before."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch.optim import Optimizer

from stenograd.sync.gradient_sync import GradientSync

__all__ = ["Owner", "hold", "take_over"]


class Owner(Protocol):
    """Whoever trains a model."""

    def give_up(self) -> None:
        """Leave model and optimizer to somebody else."""


class _Held(NamedTuple):
    """Who trains, and what hooks are on the model; these stay there when the owner is forgotten unclosed."""

    owner: weakref.ref[Any]
    sync: weakref.ref[GradientSync]


_held: weakref.WeakKeyDictionary[Any, _Held] = weakref.WeakKeyDictionary()


def hold(owner: Owner, sync: GradientSync, model: nn.Module, optimizer: Optimizer) -> None:
    """Note who trains a model with an optimizer from now on."""
    for thing in (model, optimizer):
        _held[thing] = _Held(weakref.ref(owner), weakref.ref(sync))


def take_over(model: nn.Module, optimizer: Optimizer) -> None:
    """Make whoever holds the model or the optimizer give them up; all ranks call it."""
    for thing in (model, optimizer):
        held = _held.pop(thing, None)
        if held is None:
            continue
        if (owner := held.owner()) is not None:
            owner.give_up()
        if (sync := held.sync()) is not None:
            sync.close()
