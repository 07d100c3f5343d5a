"""Ranks of `stenograd train` that a fault hits: each a process forked from one that has imported torch."""

import contextlib
import ctypes
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

MOMENTS = ("collective", "forward", "step", "save")  # of a fault; see `_watch`
_PR_SET_PDEATHSIG = 1


class Rank:
    """A process that runs `stenograd ARGV`; its status and the time of its end when it has `ended`.

    Args:
        argv: arguments of the command line.
        env: variables on top of this process's.
        log: file for its output and errors.
        fault: what to do to it and when. `at` is one of `MOMENTS`, `nth` counts them from 1, `do` is a key
            of the actions in `_arm`; `after_s` delays it (0 if left out), and `mark` is a file that gets the
            time at which it happens (none if left out).
        namespace: network namespace to enter.
    """

    def __init__(self, argv, env, log, fault=None, namespace=None):
        from stenograd.testing.pool import start_context

        self.log, self.status, self.ended_at, self.ended = log, None, 0.0, threading.Event()
        environment = dict(os.environ) | {"OMP_NUM_THREADS": "1"} | {k: str(v) for k, v in env.items()}
        job = (list(map(str, argv)), environment, str(log), fault, namespace)
        self._process = start_context().Process(target=_main, args=job)
        self._process.start()
        self.pid = self._process.pid
        threading.Thread(target=self._await, daemon=True).start()

    def _await(self):
        self._process.join()
        self.ended_at, self.status = time.monotonic(), self._process.exitcode
        self.ended.set()

    def kill(self):
        if not self.ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def train(arguments, workers, faults=None, limit_s=280.0):
    """Run `stenograd train --task digits ARGUMENTS` on so many ranks, with faults by rank; wait for all.

    Returns:
        The ranks' exit codes, minus the signal for one that was killed, and what all of them printed.
    """
    deadline = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        world = {"WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers, "STENOGRAD_STORE": f"{folder}/store"}
        ranks = [
            Rank(
                ["train", "--task", "digits", *arguments],
                world | {"RANK": number, "LOCAL_RANK": number},
                Path(folder, f"log{number}"),
                (faults or {}).get(number),
            )
            for number in range(workers)
        ]
        late = [n for n, r in enumerate(ranks) if not r.ended.wait(max(0.1, deadline - time.monotonic()))]
        for rank in ranks:
            rank.kill()
            rank.ended.wait()
        output = "\n".join(rank.log.read_text(errors="replace") for rank in ranks if rank.log.exists())
    assert not late, f"ranks {late} did not end:\n{output}"
    return [rank.status for rank in ranks], output


def _main(argv, environment, log, fault, namespace):
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the server that forked it
    os.setsid()  # what it leaves behind can be found by its session
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    if namespace is not None:
        from stenograd.emulate.relay import enter

        enter(namespace)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["stenograd", *argv]
    if fault is not None:
        _arm(fault)
    from stenograd.cli import main

    try:
        status = main()
    except SystemExit as left:
        status = left.code
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    # As an interpreter ends that was not forked: with its exit functions, and torch's.
    ctypes.pythonapi.Py_Exit(status if isinstance(status, int) else int(status is not None))


def _arm(fault):
    """Let a fault happen at its moment."""
    action = {
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
        "raise": lambda: 1 // 0,
        "quit": lambda: sys.exit(0),
        "nap": lambda: time.sleep(1e6),
        "mark": lambda: None,
        "term": lambda: os.kill(os.getpid(), signal.SIGTERM),
    }[fault["do"]]
    left = fault["nth"]

    def tick(*_, **__):
        nonlocal left
        left -= 1
        if left != 0:
            return
        if "mark" in fault:
            part = Path(f"{fault['mark']}.part")
            part.write_text(repr(time.monotonic()))
            part.replace(fault["mark"])
        if fault.get("after_s"):
            threading.Timer(fault["after_s"], action).start()
        else:
            action()

    _watch(fault["at"], tick)


def _watch(moment, tick):
    """Call `tick` before every collective, round, evaluation, forward pass of a module or fsync (a save).

    Or within its backward pass, or after an optimizer step.
    """
    if moment == "forward":
        from torch.nn.modules.module import register_module_forward_pre_hook

        register_module_forward_pre_hook(tick)
    elif moment == "step":
        from torch.optim.optimizer import register_optimizer_step_post_hook

        register_optimizer_step_post_hook(tick)
    elif moment == "backward":
        from torch.nn.modules.module import register_module_forward_hook

        def in_backward(module, _, out):
            if out.requires_grad:
                out.register_hook(lambda _: tick())

        register_module_forward_hook(in_backward)
    elif moment == "evaluation":
        from stenograd.cli.loop import Trainer

        Trainer.evaluate = _after(tick, Trainer.evaluate)
    elif moment == "round":
        from stenograd.sync.gossip import GossipSync
        from stenograd.sync.rounds import ParameterSync

        for kind in (GossipSync, ParameterSync):
            kind._meet = _after(tick, kind._meet)
    elif moment == "collective":
        from stenograd.wire.driver import Driver

        Driver.start = _after(tick, Driver.start)
    else:
        os.fsync = _after(tick, os.fsync)


def _after(tick, call):
    def both(*args, **kwargs):
        tick()
        return call(*args, **kwargs)

    return both
