"""Ranks in milliseconds: a server that has imported everything forks one process per rank, with its faults.

Starting Python and importing torch takes seconds, so that a hundred runs of three ranks would take most of
their time to begin. Each rank is still a process of its own, with its own interpreter exit. It runs
`stenograd ARGV`, and is armed with a fault, if it gets one, before its training begins.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from stenograd.emulate.relay import enter

__all__ = ["MOMENTS", "ForkedRanks", "Rank"]

MOMENTS = ("collective", "forward", "step", "save")  # of a fault; see `_watch`
_START_S = 300.0  # imports and kernels, also on a machine that is busy with much else
_POLL_S = 0.01
_PR_SET_PDEATHSIG = 1


@dataclass
class Rank:
    """A process of the server: its number, and its status and the time of its end when it has ended."""

    log: Path
    pid: int = 0
    status: int | None = None
    ended_at: float = 0.0
    started: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


class ForkedRanks:
    """The server, while the `with` block lasts; several threads may use it at once."""

    def __enter__(self) -> ForkedRanks:
        pipe = subprocess.PIPE
        env = os.environ | {"OMP_NUM_THREADS": "1"}  # with more, BLAS would start threads, which do not fork
        words = [sys.executable, __file__]
        self._server = subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True, env=env)
        self._ranks: list[Rank] = []
        self._lock = threading.Lock()
        self._ready = threading.Event()
        threading.Thread(target=self._listen, daemon=True).start()
        deadline = time.monotonic() + _START_S
        while not self._ready.wait(0.1):
            if self._server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the server did not start: its errors are above")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._server.stdin is not None:
            self._server.stdin.close()  # it kills what still runs, and ends
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._server.wait(10)
        self._server.kill()
        self._server.wait()

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        *,
        fault: Mapping[str, Any] | None = None,
        namespace: str | None = None,
    ) -> Rank:
        """Start `stenograd ARGV` as a rank.

        Args:
            argv: arguments of the command line.
            env: variables on top of the server's.
            log: file for its output and errors.
            fault: what to do to it and when. `at` is one of `MOMENTS`, `nth` counts them from 1, and `do`
                is a key of the actions in `_arm`; `after_s` delays it (0 if left out), and `mark` is a file
                that gets the time at which it happens (none if left out).
            namespace: network namespace to enter.
        """
        rank = Rank(log)
        with self._lock:
            number = len(self._ranks)
            self._ranks.append(rank)
            job = {"id": number, "argv": list(argv), "env": dict(env), "log": str(log)}
            job |= {"fault": fault, "namespace": namespace}
            assert self._server.stdin is not None
            self._server.stdin.write(json.dumps(job) + "\n")
            self._server.stdin.flush()
        if not rank.started.wait(_START_S):
            raise RuntimeError("the server does not answer")
        return rank

    def train(
        self,
        arguments: Sequence[object],
        workers: int,
        faults: Mapping[int, Mapping[str, Any]] | None = None,
        limit_s: float = 120.0,
    ) -> tuple[list[int], str]:
        """Run `stenograd train --task digits ARGUMENTS` on so many ranks of this host, and wait for all.

        Args:
            arguments: of the command, each as `str` writes it.
            workers: number of ranks.
            faults: by rank; see `start`.
            limit_s: seconds after which all are killed.

        Returns:
            The ranks' exit codes, minus the signal for one that was killed, and what all of them printed.

        Raises:
            TimeoutError: a rank did not end.
        """
        argv, deadline = ["train", "--task", "digits", *map(str, arguments)], time.monotonic() + limit_s
        with tempfile.TemporaryDirectory(prefix="drill-", ignore_cleanup_errors=True) as folder:
            shared = {
                "WORLD_SIZE": workers,
                "LOCAL_WORLD_SIZE": workers,
                "STENOGRAD_STORE": f"{folder}/store",
            }
            ranks: list[Rank] = []
            for number in range(workers):
                place = shared | {"RANK": number, "LOCAL_RANK": number}
                env = {key: str(value) for key, value in place.items()}
                fault = (faults or {}).get(number)
                ranks.append(self.start(argv, env, Path(folder, f"log{number}"), fault=fault))
            late = [n for n, r in enumerate(ranks) if not r.ended.wait(max(0.1, deadline - time.monotonic()))]
            for number in late:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(ranks[number].pid, signal.SIGKILL)
                ranks[number].ended.wait()
            output = "\n".join(r.log.read_text(errors="replace") for r in ranks if r.log.exists())
        if late:
            raise TimeoutError(f"ranks {late} did not end:\n{output}")
        return [rank.status for rank in ranks if rank.status is not None], output

    def _listen(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            told = json.loads(line)
            if "ready" in told:
                self._ready.set()
            elif "pid" in told:
                rank = self._ranks[told["id"]]
                rank.pid = told["pid"]
                rank.started.set()
            else:
                rank = self._ranks[told["id"]]
                rank.status, rank.ended_at = told["status"], told["at"]
                rank.ended.set()


def _serve() -> dict[str, Any] | None:
    """Fork a process for each line of standard input; return the job in the child, None in the server."""
    children: dict[int, int] = {}
    _tell({"ready": True})
    buffer, is_open = b"", True
    while is_open or children:
        if is_open and select.select([0], [], [], _POLL_S)[0]:
            piece = os.read(0, 1 << 16)
            is_open = bool(piece)
            *lines, buffer = (buffer + piece).split(b"\n")
            for line in lines:
                job: dict[str, Any] = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    return job
                children[pid] = job["id"]
                _tell({"id": job["id"], "pid": pid})
        if not is_open:
            for pid in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, 9)
        _reap(children)
    return None


def _reap(children: dict[int, int]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        code = os.waitstatus_to_exitcode(status)
        _tell({"id": children.pop(pid), "status": code, "at": time.monotonic()})


def _tell(message: Mapping[str, Any]) -> None:
    os.write(1, json.dumps(message).encode() + b"\n")


def _become_rank(job: Mapping[str, Any]) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # ends with the server, however that ends
    os.setsid()  # what it leaves behind can be found by its session
    log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if job["namespace"] is not None:
        enter(job["namespace"])
    os.environ.update(job["env"])
    sys.argv = ["stenograd", *job["argv"]]
    if job["fault"] is not None:
        _arm(job["fault"])


def _arm(fault: Mapping[str, Any]) -> None:
    """Let a fault happen at its moment; see `ForkedRanks.start`."""
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


def _watch(moment: str, tick: Callable[..., None]) -> None:
    """Call `tick` before every collective, forward pass of a module or fsync, or after an optimizer step."""
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


def _preload() -> None:
    """Import and compile all that a rank of `stenograd train` needs; start no thread."""
    import sklearn.datasets
    import torch
    import torch.distributed.nn.functional

    import stenograd.cli.train
    from stenograd.simulate import exchange

    torch.set_num_threads(1)
    sklearn.datasets.load_digits()
    torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9)  # imports torch's compiler
    for name in stenograd.methods():
        for size in (3_000, 40_000):
            exchange(stenograd.method(name).compressor, [torch.randn(size) for _ in range(2)])
    gc.collect()
    gc.freeze()  # else every rank walks through a million shared objects when it ends, 1.3 s of a core
    if len(os.listdir("/proc/self/task")) > 1:
        raise SystemExit("a library started a thread while it was imported: forks would be incomplete")


if __name__ == "__main__":
    _preload()
    this_job = _serve()
    if this_job is not None:
        _become_rank(this_job)
        from stenograd.cli import main

        sys.exit(main())
