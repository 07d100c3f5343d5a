"""Ranks in milliseconds: a server that has imported everything forks one process for each.

Starting Python and importing torch takes seconds, so that a hundred runs of three ranks would take most of
their time to begin. Each rank is still a process of its own, with its own interpreter exit.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Forks", "Rank"]

_START_S = 120.0
_POLL_S = 0.01


@dataclass
class Rank:
    """A process of the server: its number, and its status and the time of its end when it has ended."""

    log: Path
    pid: int = 0
    status: int | None = None
    ended_at: float = 0.0
    started: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)


class Forks:
    """The server, while the `with` block lasts; several threads may use it at once."""

    def __enter__(self) -> Forks:
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
            fault: what to do to it and when; see `injected.arm`.
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
    from injected import arm, die_with_parent, enter

    die_with_parent()
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
        arm(job["fault"])


if __name__ == "__main__":
    from injected import preload

    preload()
    this_job = _serve()
    if this_job is not None:
        _become_rank(this_job)
        from stenograd.cli import main

        sys.exit(main())
