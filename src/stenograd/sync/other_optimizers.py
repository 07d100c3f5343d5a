"""Optimizers that were not given to `distribute` and step its parameters all the same."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from stenograd.sync.backward_passes import warn_unexchanged
from stenograd.sync.closures import Changed, after_closure
from stenograd.sync.every_step import Watch, watch_every_step

__all__ = ["watch_others"]

_NAMED = 3  # parameters that a warning lists


class _Sync(Protocol):
    """What is asked of a `distribute`d model."""

    _model: nn.Module
    _optimizers: Sequence[torch.optim.Optimizer]

    def _averaged(self) -> set[int]:
        """Return the ids of the parameters that are averaged."""

    def _skip_bad(self, optimizer: torch.optim.Optimizer, zeros: bool) -> None:
        """Let a step change nothing if the last gradients were not finite."""

    def _exchanges(self) -> int:
        """Return how many exchanges were made, whatever came of them."""


def watch_others(sync: _Sync) -> Watch:
    """Look at the steps of all optimizers of this process, but for those that `sync` was given.

    Where one steps parameters that are averaged, a step after a bad gradient is skipped, as it is with those
    that were given. Where one steps parameters of the model that are not averaged, a warning says so, once.

    Returns:
        What ends it by `remove()`; it does not keep `sync` alive.
    """
    weak = weakref.ref(sync)
    known: WeakKeyDictionary[torch.optim.Optimizer, tuple[int, bool]] = WeakKeyDictionary()
    warned = False

    def act(optimizer: torch.optim.Optimizer, *, zeros: bool = False, again: bool = False) -> None:
        nonlocal warned
        sync = weak()
        if sync is None:
            return
        sync._skip_bad(optimizer, zeros)
        if not warned:
            left_out = _left_out(sync, optimizer)
            if left_out:
                warned = _warn(left_out)

    def exchanges() -> int:
        sync = weak()
        return 0 if sync is None else sync._exchanges()

    watch = after_closure(act, exchanges)

    def before(optimizer: torch.optim.Optimizer, args: Any, given: Any) -> Changed:
        sync = weak()
        if sync is None or any(optimizer is o for o in sync._optimizers):
            return None
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        if known.get(optimizer, (0, False))[0] != count:  # a new one, or one that got parameters
            ids = sync._averaged() | {id(p) for p in sync._model.parameters()}
            holds = any(id(p) in ids for group in optimizer.param_groups for p in group["params"])
            known[optimizer] = count, holds
        return watch(optimizer, args, given) if known[optimizer][1] else None

    handle = watch_every_step(before)
    weakref.finalize(sync, handle.remove).atexit = False
    return handle


def _left_out(sync: _Sync, optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the names of the model's parameters that this step changes and nobody averages."""
    moved = {id(p) for g in optimizer.param_groups for p in g["params"] if p.grad is not None}
    moved -= sync._averaged()
    return [n for n, p in sync._model.named_parameters() if id(p) in moved and p.requires_grad]


def _warn(names: Sequence[str]) -> bool:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return warn_unexchanged(
        f"this rank's own gradients of {', '.join(names[:_NAMED])}{more}, which no optimizer given to "
        "distribute() holds",
        "give it all optimizers, in a list; after close() a model can be attached anew",
    )
