"""Start several copies of a command on this machine as the ranks of one world."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from stenograd.errors import LaunchError, bad_value
from stenograd.launch.detect import STORE_VARIABLE

__all__ = ["SECRET_VARIABLE", "TIMEOUT_VARIABLE", "environment", "python", "run_local", "usable_cores"]

TIMEOUT_VARIABLE = "STENOGRAD_TIMEOUT_S"  # how long `init` waits for the others unless told otherwise

# Known to the ranks of a launch alone: who has it is believed in a roll call.
SECRET_VARIABLE = "STENOGRAD_SECRET"

_POLL_S = 0.02
# After one worker failed, for the others to find out and report it themselves. In the fault drill survivors
# of a killed rank were gone within 0.8 s, and up to 4 s later with ten busy processes per core
# (docs/failures.md).
_GRACE_S = 5.0
_TERM_S = 3.0  # between SIGTERM and SIGKILL
_TAIL_LINES = 10

# prctl(PR_SET_PDEATHSIG, SIGKILL) survives exec. It is set here rather than in a preexec_fn because forking
# a process that runs threads (torch does) and executing Python there may deadlock. If the parent died before
# the call, its death no longer sends the signal, so the worker ends by itself.
_TIE_TO_PARENT = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 9)
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execvp(sys.argv[2], sys.argv[2:])
"""


def run_local(
    argv: Sequence[str], workers: int, *, timeout_s: float = 300.0, env: Mapping[str, str] | None = None
) -> int:
    """Run `workers` copies of a command on this machine, as ranks 0 to workers - 1 of one world.

    They get the variables that torchrun sets and a private file as their rendezvous, so no port is needed.
    `OMP_NUM_THREADS` is set to the cores divided by the workers, unless it is set already. Rank 0 has the
    terminal. The others' standard output is dropped, and of their error output a failure shows the end.
    When a worker fails, the others get five seconds to report it and end, and are then stopped. A worker that
    SIGSTOP holds can do neither, and is killed as soon as the rest have ended. Ctrl-C or SIGTERM to this
    process stops all workers; on Linux they also end when it is killed.

    Args:
        argv: the command and its arguments, at least one string.
        workers: number of copies, >= 1.
        timeout_s: seconds that the workers wait for each other in `init`, > 0; not a limit on the run.
        env: environment of the workers; None for that of this process.

    Returns:
        0 if all succeeded, else the status of the first worker that failed, or 128 plus the signal that
        ended it, or that ended the run.

    Raises:
        ConfigError: `argv` is empty, or `workers` or `timeout_s` is out of range.
        LaunchError: there is no such command.

    Example:
        >>> run_local([sys.executable, "-c", "print('hello')"], 1)  # doctest: +SKIP
        hello
        0
    """
    if not argv:
        raise bad_value("argv", "must name a command", list(argv), "give a program and its arguments")
    if workers < 1:
        raise bad_value("workers", "must be at least 1", workers, "use the number of cores or GPUs")
    if not timeout_s > 0:
        raise bad_value("timeout_s", "must be above 0 seconds", timeout_s, "leave it at 300")
    base = dict(os.environ if env is None else env)
    if shutil.which(argv[0], path=base.get("PATH")) is None:
        raise LaunchError(f"there is no command {argv[0]!r}: give a program on the PATH or a path to one")
    with tempfile.TemporaryDirectory(prefix="stenograd-", ignore_cleanup_errors=True) as directory:
        run = _Run(argv, _variables(base, workers, timeout_s, directory), workers, Path(directory))
        with _sigterm_interrupts():
            return run.until_all_ended()


def python(code: str) -> list[str]:
    r"""Return a command that runs code of Stenograd in a Python of its own.

    As with `python -c`, but the current folder is not where modules come from first: a program's own
    `queue.py` or `types.py` there would otherwise stand in for Python's.

    Example:
        >>> command = python("import queue; print(queue.__name__)")
        >>> subprocess.run(command, check=True, capture_output=True).stdout
        b'queue\n'
    """
    ours = str(Path(__file__).resolve().parents[2])  # the package itself may have come from that folder
    start = f"import sys; sys.path[:] = [*(path for path in sys.path if path), {ours!r}]; "
    return [sys.executable, "-c", start + code]


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables of this process for the length of a block.

    Example:
        >>> with environment({"STENOGRAD_EXAMPLE": "1"}):
        ...     os.environ["STENOGRAD_EXAMPLE"]
        '1'
        >>> "STENOGRAD_EXAMPLE" in os.environ
        False
    """
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = old


class _Terminated(BaseException):
    """SIGTERM arrived: not an Exception, so that only `_Run` catches it."""


@contextmanager
def _sigterm_interrupts() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may change handlers
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise _Terminated

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _variables(base: dict[str, str], workers: int, timeout_s: float, directory: str) -> dict[str, str]:
    """Build the environment that all workers share, without the variables of an outer torchrun's agent."""
    kept = {key: value for key, value in base.items() if not key.startswith("TORCHELASTIC_")}
    own = {
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        STORE_VARIABLE: str(Path(directory) / "store"),
        TIMEOUT_VARIABLE: str(timeout_s),
    }
    given = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // workers)),
        SECRET_VARIABLE: secrets.token_hex(16),
    }
    return given | kept | own


class _Run:
    """The workers of one run: starts, watches, stops and reports on them."""

    def __init__(self, argv: Sequence[str], env: dict[str, str], workers: int, directory: Path) -> None:
        self.argv, self.env, self.workers, self.directory = list(argv), env, workers, directory
        self.processes: list[subprocess.Popen[bytes]] = []

    def until_all_ended(self) -> int:
        try:
            for rank in range(self.workers):
                self._start(rank)
            failed = self._watch()
            if failed is None:
                return 0
            self._wait(_GRACE_S)
            rank_0_failed_itself = bool(self.processes[0].poll())  # then its error is on the terminal
            self._stop()
            self._report(failed, rank_0_failed_itself)
            code = self.processes[failed].returncode
            return code if code >= 0 else 128 - code
        except KeyboardInterrupt:
            self._wait(_TERM_S)  # the terminal sent it to the workers too
            return 128 + signal.SIGINT
        except _Terminated:
            return 128 + signal.SIGTERM
        finally:
            self._stop()

    def _start(self, rank: int) -> None:
        tie = [sys.executable, "-I", "-S", "-c", _TIE_TO_PARENT, str(os.getpid())]
        command = (tie if sys.platform == "linux" else []) + self.argv
        env = self.env | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        if rank == 0:
            self.processes.append(subprocess.Popen(command, env=env))
            return
        null = subprocess.DEVNULL
        with self._errors(rank).open("wb") as errors:
            self.processes.append(subprocess.Popen(command, env=env, stdin=null, stdout=null, stderr=errors))

    def _watch(self) -> int | None:
        """Wait for the first failure and return its rank, or None if all succeed.

        Of failures seen at once a death by signal comes first, since it is never caused by another worker's.
        """
        while True:
            codes = [process.poll() for process in self.processes]
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                return min(failed, key=lambda rank: ((codes[rank] or 0) > 0, rank))
            if None not in codes:
                return None
            time.sleep(_POLL_S)

    def _wait(self, limit_s: float) -> None:
        """Wait until all have ended, but no longer than the limit, nor for those that SIGSTOP has stopped.

        A stopped worker can neither report a failure nor act on SIGTERM, so waiting for it would always cost
        both limits, 8 s.
        """
        deadline = time.monotonic() + limit_s
        while any(process.poll() is None and not _is_stopped(process) for process in self.processes):
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_S)

    def _stop(self) -> None:
        try:
            for process in self.processes:
                process.terminate()  # does nothing to one that has ended
            self._wait(_TERM_S)
        finally:  # also at a second Ctrl-C
            for process in self.processes:
                process.kill()
            for process in self.processes:
                process.wait()

    def _report(self, rank: int, rank_0_failed_itself: bool) -> None:
        """Print which worker failed, and the end of its errors unless rank 0 has printed its own."""
        code = self.processes[rank].returncode
        tail = [] if rank == 0 else self._errors(rank).read_text(errors="replace").strip().splitlines()
        line = f"stenograd: worker {rank} "
        if code < 0:
            line += f"was killed by {_signal_name(-code)}"
        else:
            line += f"exited with status {code}" + (f": {tail[-1].strip()}" if tail else "")
        print(line, file=sys.stderr)
        if not rank_0_failed_itself and len(tail) > 1:
            print(*(f"  {text}" for text in tail[-_TAIL_LINES:]), sep="\n", file=sys.stderr)
        sys.stderr.flush()

    def _errors(self, rank: int) -> Path:
        return self.directory / f"stderr-{rank}"


def _is_stopped(process: subprocess.Popen[bytes]) -> bool:
    """Return whether SIGSTOP or the like has stopped a child; False where the system cannot tell."""
    if not hasattr(os, "waitid"):  # Windows, and macOS before Python 3.13
        return False
    try:  # WNOWAIT: the status of one that ended stays for Popen
        return os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
