"""What of Stenograd's still lives on a rank, where a training has ended."""

import gc
import threading
import time

import torch.distributed as dist

from stenograd.sync import steps


def left_over(model, *optimizers):
    """Name the threads, the process groups, and the hooks on a model, its parameters and its optimizers."""
    gc.collect()
    groups = dist.distributed_c10d._world.pg_names.values() if dist.is_initialized() else ()
    holders = [*model.modules(), *model.parameters(), *optimizers]
    found = [thread.name for thread in threading.enumerate()] + list(groups)
    for holder in holders:
        for name, value in vars(holder).items():
            hooks = value.values() if name.endswith("_hooks") and hasattr(value, "values") else [value]
            found += [f"{_home(hook)} in {name}" for hook in hooks if callable(hook)]
    found += [_home(watcher) for watcher in steps._watchers.values()]
    return sorted(what for what in found if what.startswith("stenograd"))


def left_when_dropped(model, *optimizers, limit_s=10.0):
    """Return what is left over where all was dropped and nothing closed: a thread may still be about to end.

    An executor that is gone wakes its thread, and nobody joins it: a finalizer that did could run on that
    very thread. Until it has ended, it may also hold what it did last, which a later collection then takes.
    """
    deadline = time.monotonic() + limit_s
    while True:
        working = any(thread.name.startswith("stenograd") for thread in threading.enumerate())
        left = left_over(model, *optimizers)  # after the look at threads: one that has ended holds nothing
        if not (left and working) or time.monotonic() > deadline:
            return left
        time.sleep(0.01)


def _home(hook):
    """Return the module that a hook is from, through what it is wrapped in."""
    for name in ("func", "__wrapped__", "__func__"):
        if hasattr(hook, name):
            return _home(getattr(hook, name))
    return getattr(hook, "__module__", None) or type(hook).__module__
