"""One hook on the steps of all optimizers of this process, for all that want to look at them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from stenograd.sync.closures import Changed

__all__ = ["Watch", "Watcher", "watch_every_step"]

Watcher: TypeAlias = Callable[[torch.optim.Optimizer, Any, Any], Changed]

# Replaced, never changed: another thread, or the end of an object's life in the middle of a step, must not
# change what somebody iterates over. torch's own dictionary of hooks gets one of ours, and keeps it.
_watchers: dict[int, Watcher] = {}
_numbers = itertools.count()
_lock = threading.RLock()
_hooked = False


class Watch:
    """Looks at every step until it is removed.

    Args:
        number: of the watcher.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def remove(self) -> None:
        """End it; may be called twice."""
        global _watchers
        with _lock:
            _watchers = {n: w for n, w in _watchers.items() if n != self._number}


def watch_every_step(watcher: Watcher) -> Watch:
    """Call something before every step of every optimizer, with the arguments that torch's hooks get.

    Args:
        watcher: returns None, or changed arguments.
    """
    global _watchers, _hooked
    number = next(_numbers)
    watch = Watch(number)  # before: what has no handle could not be ended
    with _lock:
        _watchers = {**_watchers, number: watcher}
        if not _hooked:
            register_optimizer_step_pre_hook(torch.compiler.disable(_before))
            _hooked = True
    return watch


def _before(optimizer: torch.optim.Optimizer, args: Any, given: Any) -> Changed:
    changed: Changed = None
    for watcher in _watchers.values():
        new = watcher(optimizer, args, given)
        if new is not None:
            changed = args, given = new
    return changed
