"""Hand a model and its optimizer from one DASO to the next: the last one that was given them trains them."""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch.optim import Optimizer

from stenograd.sync.gradient_sync import GradientSync

__all__ = ["Owner", "hold", "take_over"]


class Owner(Protocol):
    """An object that trains a model."""

    def give_up(self) -> None:
        """Detach from model and optimizer."""


class _Held(NamedTuple):
    """An owner and its hooks, which stay on the model when the owner is collected without `close()`."""

    owner: weakref.ref[Any]
    sync: weakref.ref[GradientSync]


_held: weakref.WeakKeyDictionary[Any, _Held] = weakref.WeakKeyDictionary()


def hold(owner: Owner, sync: GradientSync, model: nn.Module, optimizer: Optimizer) -> None:
    """Record the owner of a model and an optimizer."""
    for thing in (model, optimizer):
        _held[thing] = _Held(weakref.ref(owner), weakref.ref(sync))


def take_over(model: nn.Module, optimizer: Optimizer) -> None:
    """Make the present owner of the model or the optimizer give them up; all ranks call it."""
    for thing in (model, optimizer):
        held = _held.pop(thing, None)
        if held is None:
            continue
        if (owner := held.owner()) is not None:
            owner.give_up()
        if (sync := held.sync()) is not None:
            sync.close()
