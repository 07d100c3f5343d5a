"""Long-lived rank processes for tests: importing torch costs seconds, so it is paid once."""

from __future__ import annotations

import multiprocessing as mp
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from stenograd.errors import StenogradError, bad_value
from stenograd.launch.local_workers import environment

__all__ = ["RankPool", "RanksFailed", "start_context"]


class RanksFailed(StenogradError):
    """Some ranks raised or died; `errors` holds what each of them said, by rank."""

    def __init__(self, errors: dict[int, str]) -> None:
        super().__init__(errors)  # pickling an exception keeps its arguments
        self.errors = errors

    def __str__(self) -> str:
        return "\n".join(f"rank {rank}: {text}" for rank, text in sorted(self.errors.items()))


class RankPool:
    """Processes that take turns as ranks of fresh gloo groups.

    Each `run` makes a new process group over a file store of its own, so nothing is left over from the last
    one and no port is needed. A process that dies is replaced.

    Args:
        size: largest number of ranks, at least 1.

    Raises:
        StenogradError: the program has no file, as one from the standard input.

    Example:
        >>> with RankPool(2) as pool:
        ...     pool.run(2, divmod, 7)  # rank 0 returns divmod(0, 7)
        [(0, 0), (0, 1)]
    """

    def __init__(self, size: int) -> None:
        if size < 1:
            raise bad_value("size", "must be at least 1", size, "give the largest number of ranks")
        main = getattr(sys.modules["__main__"], "__file__", None)
        if main is not None and not os.path.exists(main):  # Python runs it again in each process
            raise StenogradError(
                f"the ranks of a pool run the program's file, and there is no {main}: save it as a file"
            )
        self._context = start_context()
        self._members = [_Member(self._context) for _ in range(size)]

    def run(self, world_size: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """Call `fn(rank, *args)` on ranks 0 .. world_size-1 at once and return the results in rank order.

        Args:
            world_size: number of ranks, at most the pool's size.
            fn: a function that can be imported (defined at the top of a module).
            args: picklable arguments.
            timeout_s: seconds in all, after which the ranks that have not answered are killed.

        Raises:
            RanksFailed: some ranks raised, died or did not answer.
        """
        if not 1 <= world_size <= len(self._members):
            raise bad_value(
                "world_size", f"must be in [1, {len(self._members)}]", world_size, "make a larger pool"
            )
        results: dict[int, Any] = {}
        errors: dict[int, str] = {}
        deadline = time.monotonic() + timeout_s
        call = pickle.dumps((fn, args))
        with tempfile.TemporaryDirectory(prefix="stenograd-pool-") as folder:
            files = [Path(folder, f"rank{rank}") for rank in range(world_size)]
            try:
                for rank, file in enumerate(files):
                    job = (rank, world_size, str(Path(folder, "store")), sys.path, call)
                    try:
                        self._members[rank].send(file, job)
                    except OSError:  # it ended between two calls, as by the system for want of memory
                        self._members[rank].stop()
                        self._members[rank] = _Member(self._context)
                        self._members[rank].send(file, job)
                waiting = {self._members[rank].pipe: rank for rank in range(world_size)}
                while waiting:
                    ready = wait(list(waiting), max(deadline - time.monotonic(), 0.0))
                    # Nothing is ready when the time is over: then all that have not answered are late.
                    for pipe in ready or list(waiting):
                        rank = waiting.pop(pipe)
                        late = False, f"no answer in {timeout_s:g} s"
                        ok, value = self._members[rank].receive(files[rank]) if ready else late
                        (results if ok else errors)[rank] = value
            finally:
                # Also where something ends this call from outside: an answer that nobody has read would be
                # taken for that of the next job.
                for rank in set(range(world_size)) - results.keys():
                    self._members[rank].stop()
                    self._members[rank] = _Member(self._context)
        if errors:
            raise RanksFailed(errors)
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """Stop all processes."""
        for member in self._members:
            member.stop()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def start_context(*more: str) -> Any:
    """Choose how processes start: forked, on Linux, from one that has imported things and does nothing else.

    Args:
        more: further modules to import there; too late once that process runs.

    A fresh interpreter spends 3.3 s of processor time on importing torch and `torch._dynamo` (which the first
    optimizer imports), and a fork of one that has both another 1.2 s on numba and the kernels. A fork of one
    with `stenograd.testing.preloaded` has attached a method and taken three steps after 0.1 s.

    Example:
        >>> process = start_context().Process(target=print)
    """
    if sys.platform != "linux":
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    # The server passes over what cannot be imported: without numba, torch is still there.
    context.set_forkserver_preload(["torch._dynamo", *more, "stenograd.testing.preloaded"])
    with environment({"OMP_NUM_THREADS": "1"}):  # or its import would start threads, which forks do not have
        forkserver.ensure_running()
    return context


class _Member:
    """One process and the pipe to it.

    Jobs and answers are files. The pipe holds their names and that an answer is there, each of which fits
    its buffer, so that a process which stops in the middle of a job or of an answer keeps nobody waiting.
    """

    def __init__(self, context: Any) -> None:
        self.pipe, other = context.Pipe()
        # The environment too: a fork has that of the time when the server was started.
        self._process = context.Process(target=_serve, args=(other, dict(os.environ)), daemon=True)
        self._process.start()
        other.close()

    def send(self, file: Path, job: Any) -> None:
        file.write_bytes(pickle.dumps(job))
        self.pipe.send_bytes(os.fsencode(file))

    def receive(self, file: Path) -> tuple[bool, Any]:
        """Return the answer that replaces a job in its file."""
        try:
            self.pipe.recv_bytes()
            ok, value = pickle.loads(file.read_bytes())
        except (EOFError, ConnectionResetError):
            self._process.join(5)
            return False, f"died with exit code {self._process.exitcode}"
        return ok, value

    def stop(self) -> None:
        self.pipe.close()
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    """Answer jobs until the pipe closes."""
    os.environ.clear()
    os.environ.update(environment, OMP_NUM_THREADS="1")
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            file = Path(os.fsdecode(pipe.recv_bytes()))
        except EOFError:
            return
        file.write_bytes(_answer(*pickle.loads(file.read_bytes())))
        pipe.send_bytes(b"")


def _answer(rank: int, world_size: int, store: str, path: list[str], call: bytes) -> bytes:
    from stenograd.launch import process_group

    sys.path[:] = path
    place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({k: str(v) for k, v in place.items()}, STENOGRAD_STORE=store)
    os.environ.pop("STENOGRAD_OPEN", None)  # of whoever exported it for workers
    try:
        fn, args = pickle.loads(call)  # which imports the function, from where the caller finds it
        process_group.init(timeout_s=60)
        return pickle.dumps((True, fn(rank, *args)))
    except BaseException:
        return pickle.dumps((False, traceback.format_exc()))
    finally:
        process_group.shutdown()
