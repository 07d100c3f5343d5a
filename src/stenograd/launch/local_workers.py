"""Ranks as processes of this machine: started, watched, and ended together, however this process ends."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from stenograd.errors import LaunchError, bad_value
from stenograd.launch.detect import OPEN_VARIABLE, STORE_VARIABLE
from stenograd.stopping import SAME_S, STOPPED, requested

__all__ = [
    "SECRET_VARIABLE",
    "TIMEOUT_VARIABLE",
    "Workers",
    "environment",
    "python",
    "run_local",
    "usable_cores",
]

TIMEOUT_VARIABLE = "STENOGRAD_TIMEOUT_S"  # how long `init` waits for the others unless told otherwise

# Known to the ranks of a launch alone: who has it is believed in a roll call.
SECRET_VARIABLE = "STENOGRAD_SECRET"

_POLL_S = 0.02
# After one worker failed, for the others to find out and report it themselves. In the fault drill survivors
# of a killed rank were gone within 0.8 s, and up to 4 s later with ten busy processes per core
# (docs/failures.md).
_GRACE_S = 5.0
# Five failures running that come this soon after a start are no accident: the worker cannot start.
_EARLY_S, _EARLY_MOST = 10.0, 5
_TERM_S = 3.0  # between SIGTERM and SIGKILL
_TAIL_LINES = 10
_PASSED_ON = [signal.SIGTERM, *([signal.SIGUSR1] if hasattr(signal, "SIGUSR1") else [])]

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
    argv: Sequence[str],
    workers: int,
    *,
    timeout_s: float = 300.0,
    env: Mapping[str, str] | None = None,
    stop_s: float | None = None,
    open_run: bool = False,
    keep: bool = False,
) -> int:
    """Run `workers` copies of a command on this machine, as ranks 0 to workers - 1 of one world.

    They get the variables that torchrun sets and a private file as their rendezvous, so no port is needed.
    `OMP_NUM_THREADS` is set to the cores divided by the workers, unless it is set already. Rank 0 has the
    terminal. The others' standard output is dropped, and of their error output a failure shows the end.
    When a worker fails, the others get five seconds to report it and end, and are then stopped. A worker that
    SIGSTOP holds can do neither, and is killed as soon as the rest have ended. Ctrl-C or SIGTERM to this
    process stops all workers; on Linux they also end when it is killed.

    SIGTERM and SIGUSR1 are passed on. Workers then have `stop_s` to save and end (see `stenograd.stop_on`),
    unless a second SIGTERM comes more than 5 seconds later. Those that exit with status 75 did so: that is
    no failure to report, and the status returned. Where `stop_on` has noted a signal before, none is started.

    Args:
        argv: the command and its arguments, at least one string.
        workers: number of copies, >= 1.
        timeout_s: seconds that the workers wait for each other in `init`, > 0; not a limit on the run.
        stop_s: seconds between SIGTERM and SIGKILL, >= 0; None for 3.
        env: environment of the workers; None for that of this process.
        open_run: whether they form an open run (`STENOGRAD_OPEN`), whose store is a file. Then all have the
            terminal, one that fails ends nobody else, and the run has succeeded if one has.
        keep: in an open run, whether a worker that fails is started again, until one has succeeded, or it has
            failed five times within 10 seconds of its start.

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
    if keep and not open_run:
        raise bad_value(
            "keep", "must be False without open_run", keep, "others cannot go on without a worker"
        )
    base = dict(os.environ if env is None else env)
    if shutil.which(argv[0], path=base.get("PATH")) is None:
        raise LaunchError(f"there is no command {argv[0]!r}: give a program on the PATH or a path to one")
    with tempfile.TemporaryDirectory(prefix="stenograd-", ignore_cleanup_errors=True) as directory:
        shared = _variables(base, workers, timeout_s, directory)
        if open_run:
            shared[OPEN_VARIABLE] = str(Path(directory) / "open")
        signals, stop_s = _Signals(), _TERM_S if stop_s is None else stop_s
        with signals.noting():
            if requested():  # before the handlers were these: nobody would pass that on
                said = f"stenograd: asked to stop before any worker started (status {STOPPED})"
                print(said, file=sys.stderr, flush=True)
                return STOPPED
            if open_run:
                return _tend(argv, shared, workers, Path(directory), signals, stop_s, keep)
            return _run(argv, shared, workers, Path(directory), signals, stop_s)


class Workers:
    """Processes that are ranks, in rank order; whoever starts some calls `stop` at the end.

    Args:
        folder: for their logs.
        grouped: whether the processes that a worker starts are killed with it. Ctrl-C on the terminal does
            not reach such workers.

    Attributes:
        processes: those that were started.
    """

    def __init__(self, folder: Path, *, grouped: bool = False) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._folder, self._grouped = folder, grouped

    def start(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Literal["nothing", "errors", "all"],
        cores: Sequence[int] = (),
    ) -> None:
        """Start the next rank.

        Args:
            command: program and arguments.
            env: its whole environment.
            log: what is kept of what it prints; for "nothing" it has the terminal instead.
            cores: those that it may use; none for all.
        """
        streams: dict[str, Any] = {}
        before = os.sched_getaffinity(0) if cores else set()
        try:
            if cores:
                os.sched_setaffinity(0, cores)  # of this thread, and so of what it starts
            # The file is made even where it stays empty: `text` reads that of any worker that has failed.
            with self.log(len(self.processes)).open("wb") as file:
                if log != "nothing":
                    out = file if log == "all" else subprocess.DEVNULL
                    streams = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": file}
                process = subprocess.Popen(command, env=env, start_new_session=self._grouped, **streams)
        finally:
            if before:
                os.sched_setaffinity(0, before)
        self.processes.append(process)

    def start_again(self, rank: int, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start a rank that has ended once more, with the terminal."""
        self.processes[rank] = subprocess.Popen(command, env=env, start_new_session=self._grouped)

    def log(self, rank: int) -> Path:
        """Return the file that holds what a rank printed."""
        return self._folder / f"rank{rank}.log"

    def text(self, rank: int) -> str:
        """Return what a rank printed, as far as it is kept."""
        return self.log(rank).read_text(errors="replace")

    def failed(self, *, besides: int = 0) -> int | None:
        """Return a rank that has failed, if there is one, by another status than that one.

        Of several, one that a signal has ended comes first: that is never caused by another's failure.
        """
        codes = [process.poll() for process in self.processes]
        failed = [rank for rank, code in enumerate(codes) if code and code != besides]
        return min(failed, key=lambda rank: ((codes[rank] or 0) > 0, rank), default=None)

    def running(self) -> list[int]:
        """Return the ranks that have not ended."""
        return [rank for rank, process in enumerate(self.processes) if process.poll() is None]

    def wait(self, limit_s: float, until: Callable[[], bool] = bool) -> None:  # bool() is False
        """Wait until all have ended, but no longer than the limit, nor for those that SIGSTOP has stopped.

        It also ends when `until()` is true.

        A stopped worker can neither report a failure nor act on SIGTERM, so waiting for it would always cost
        the whole limit.
        """
        deadline = time.monotonic() + limit_s
        while any(not _is_stopped(self.processes[rank]) for rank in self.running()):
            if time.monotonic() > deadline or until():
                return
            time.sleep(_POLL_S)

    def stop(self, term_s: float) -> None:
        """End all that still run, by SIGTERM, and those that do not heed it within `term_s` by SIGKILL."""
        try:
            if term_s > 0:
                for process in self.processes:
                    process.terminate()  # does nothing to one that has ended
                self.wait(term_s)
        finally:  # also at a second Ctrl-C
            for rank in self.running():
                with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
                    if self._grouped:
                        os.killpg(self.processes[rank].pid, signal.SIGKILL)
                    else:
                        self.processes[rank].kill()
            for process in self.processes:
                process.wait()  # else they stay in the system's table


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


@contextlib.contextmanager
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


class _Signals:
    """Signals to this process, noted to be passed on to workers."""

    def __init__(self) -> None:
        self._noted: list[int] = []
        self._passed = 0
        self._first: float | None = None  # time of the first SIGTERM
        self.again = False  # whether another one has come that no launcher has sent with the first

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Note them in a `with` block of the main thread; only that may change handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._note) for number in _PASSED_ON}
        try:
            yield
        finally:
            for number, handler in before.items():
                # None stands for a handler that C code installed, which Python cannot give back.
                signal.signal(number, signal.SIG_DFL if handler is None else handler)

    @property
    def end(self) -> bool:
        """Whether SIGTERM has come."""
        return self._first is not None

    def pass_on(self, workers: Workers) -> None:
        """Send what came since the last time."""
        # The slice is a copy: a signal that comes during the loop is added to the list, and sent next time.
        for number in self._noted[self._passed :]:
            self._passed += 1
            for rank in workers.running():
                workers.processes[rank].send_signal(number)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._noted.append(number)
        if number == signal.SIGTERM:
            now = time.monotonic()
            self._first = now if self._first is None else self._first
            self.again |= now - self._first > SAME_S


def usable_cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _variables(base: dict[str, str], workers: int, timeout_s: float, directory: str) -> dict[str, str]:
    """Build the environment that all workers share, without the variables of an outer torchrun's agent."""
    # `agree_on_start` and `train` read them, and would act as if torchrun might restart these workers.
    kept = {key: value for key, value in base.items() if not key.startswith("TORCHELASTIC_")}
    own = {
        "WORLD_SIZE": str(workers),
        "LOCAL_WORLD_SIZE": str(workers),
        STORE_VARIABLE: str(Path(directory) / "store"),
        TIMEOUT_VARIABLE: str(timeout_s),
    }
    # The caller's values win over these two, but not over what makes a rank of it.
    given = {
        "OMP_NUM_THREADS": str(max(1, usable_cores() // workers)),
        SECRET_VARIABLE: secrets.token_hex(16),
    }
    return given | kept | own


def _run(
    argv: Sequence[str],
    shared: dict[str, str],
    count: int,
    folder: Path,
    signals: _Signals,
    stop_s: float,
) -> int:
    """Run a command on so many workers, pass on signals, and return its status."""
    command, workers = _tied(argv), Workers(folder)
    try:
        for rank in range(count):
            env = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            workers.start(command, env, "nothing" if rank == 0 else "errors")
        while workers.failed() is None and workers.running():
            time.sleep(_POLL_S)
            signals.pass_on(workers)
            if signals.end:
                return _ended(workers, signals, stop_s)
        failed = workers.failed()
        if failed is None:
            return 0
        if workers.processes[failed].returncode == STOPPED:  # asked by another way than this process
            workers.wait(stop_s, lambda: signals.end)
            failed = workers.failed(besides=STOPPED)
            if failed is None and not workers.running():
                return STOPPED
        workers.wait(_GRACE_S, lambda: signals.end)
        rank_0_failed_itself = bool(workers.processes[0].poll())  # then its error is on the terminal
        workers.stop(_TERM_S)
        failed = workers.failed(besides=STOPPED) if failed is None else failed
        if failed is None:
            return STOPPED
        code = workers.processes[failed].returncode
        _report(failed, code, workers.text(failed).strip().splitlines(), rank_0_failed_itself)
        return code if code >= 0 else 128 - code
    except KeyboardInterrupt:
        workers.wait(_TERM_S)  # the terminal sent it to the workers too
        return 128 + signal.SIGINT
    finally:
        workers.stop(_TERM_S)


def _tied(argv: Sequence[str]) -> list[str]:
    """Return a command that ends with this process."""
    # -I and -S: nothing of the user's is imported there.
    tie = [sys.executable, "-I", "-S", "-c", _TIE_TO_PARENT, str(os.getpid())]
    return [*(tie if sys.platform == "linux" else []), *argv]


def _tend(
    argv: Sequence[str],
    shared: dict[str, str],
    count: int,
    folder: Path,
    signals: _Signals,
    stop_s: float,
    keep: bool,
) -> int:
    """Run the workers of an open run, start those that fail again if `keep`, and return its status."""
    command, workers = _tied(argv), Workers(folder)
    envs = [shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(count)]
    started, early, over = [time.monotonic()] * count, [0] * count, set[int]()
    try:
        for env in envs:
            workers.start(command, env, "nothing")
        while workers.running():
            time.sleep(_POLL_S)
            signals.pass_on(workers)
            if signals.end:
                return _ended(workers, signals, stop_s)
            for rank, process in enumerate(workers.processes):
                if rank in over or (code := process.poll()) is None:
                    continue
                over.add(rank)
                if code in (0, STOPPED):
                    continue
                # A worker that has run for longer has all its attempts again.
                early[rank] = early[rank] + 1 if time.monotonic() - started[rank] < _EARLY_S else 0
                again = keep and early[rank] < _EARLY_MOST and not _succeeded(workers)
                _report(rank, code, [], True, "; it is started again" if again else "; the others go on")
                if again:
                    over.discard(rank)
                    started[rank] = time.monotonic()
                    workers.start_again(rank, command, envs[rank])
        codes = [process.returncode for process in workers.processes]
        good = _succeeded(workers)
        if good:
            return STOPPED if STOPPED in codes else 0
        return next(code if code > 0 else 128 - code for code in codes if code)
    except KeyboardInterrupt:
        workers.wait(_TERM_S)
        return 128 + signal.SIGINT
    finally:
        workers.stop(_TERM_S)


def _succeeded(workers: Workers) -> bool:
    return any(process.poll() in (0, STOPPED) for process in workers.processes)


def _ended(workers: Workers, signals: _Signals, stop_s: float) -> int:
    """Let workers end that got SIGTERM, and return the status of the run."""
    workers.wait(stop_s, lambda: signals.again)
    workers.stop(0.0)  # `pass_on` has sent SIGTERM already
    codes = {process.returncode for process in workers.processes}
    return STOPPED if codes <= {0, STOPPED} and STOPPED in codes else 128 + signal.SIGTERM


def _report(rank: int, code: int, errors: Sequence[str], rank_0_failed_itself: bool, more: str = "") -> None:
    """Print which worker failed, and the end of its errors unless rank 0 has printed its own."""
    line = f"stenograd: worker {rank} "
    if code < 0:
        line += f"was killed by {_signal_name(-code)}"
    else:
        line += f"exited with status {code}" + (f": {errors[-1].strip()}" if errors else "")
    print(line + more, file=sys.stderr)
    if not rank_0_failed_itself and len(errors) > 1:
        print(*(f"  {text}" for text in errors[-_TAIL_LINES:]), sep="\n", file=sys.stderr)
    sys.stderr.flush()


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
