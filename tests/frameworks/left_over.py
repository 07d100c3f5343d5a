"""What of Stenograd's still lives on a rank, where a training has ended."""

import gc
import threading

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


def _home(hook):
    """Return the module that a hook is from, through what it is wrapped in."""
    for name in ("func", "__wrapped__", "__func__"):
        if hasattr(hook, name):
            return _home(getattr(hook, name))
    return getattr(hook, "__module__", None) or type(hook).__module__
