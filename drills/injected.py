"""What happens inside a rank of a drill: it is armed with a fault before its training begins."""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

__all__ = ["MOMENTS", "arm", "die_with_parent", "enter", "preload"]

MOMENTS = ("collective", "forward", "step", "save")
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1


def preload() -> None:
    """Import and compile all that a rank of `stenograd train` needs; start no thread."""
    import sklearn.datasets
    import torch
    import torch.distributed.nn.functional

    import stenograd.cli.train
    from stenograd.simulate import exchange

    torch.set_num_threads(1)
    sklearn.datasets.load_digits()
    torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)
    for name in stenograd.methods():
        exchange(stenograd.method(name).compressor, [torch.randn(3000) for _ in range(2)])
    gc.collect()
    gc.freeze()  # else every rank walks through a million shared objects when it ends, 1.3 s of a core
    if len(os.listdir("/proc/self/task")) > 1:
        raise SystemExit("a library started a thread while it was imported: forks would be incomplete")


def die_with_parent() -> None:
    """Let the kernel kill this process when the server ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def enter(namespace: str) -> None:
    """Move this process to a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(handle, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    os.close(handle)


def arm(fault: Mapping[str, Any]) -> None:
    """Let a fault happen at a moment.

    Args:
        fault: `at` is one of `MOMENTS`, `nth` counts them from 1, `do` is a key of the actions below, and
            `mark` is a file that gets the time at which it happens.
    """
    action = {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "raise": lambda: 1 // 0,
        "quit": lambda: sys.exit(0),
        "nap": lambda: time.sleep(1e6),
        "mark": lambda: None,
    }[fault["do"]]
    left = fault["nth"]

    def tick(*_: Any, **__: Any) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            part = Path(f"{fault['mark']}.part")
            part.write_text(repr(time.monotonic()))
            part.replace(fault["mark"])
            action()

    _watch(fault["at"], tick)


def _watch(moment: str, tick: Callable[..., None]) -> None:
    """Call `tick` before every collective, forward pass of a module, optimizer step or fsync."""
    if moment == "forward":
        from torch.nn.modules.module import register_module_forward_pre_hook

        register_module_forward_pre_hook(tick)
    elif moment == "step":
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(tick)
    elif moment == "collective":
        from stenograd.comm.driver import Driver

        Driver.start = _after(tick, Driver.start)  # type: ignore[method-assign]
    else:
        os.fsync = _after(tick, os.fsync)


def _after(tick: Callable[..., None], call: Callable[..., Any]) -> Callable[..., Any]:
    def both(*args: Any, **kwargs: Any) -> Any:
        tick()
        return call(*args, **kwargs)

    return both
