"""Ranks that run `stenograd train` in processes forked from one that imported torch, and may be killed."""

from __future__ import annotations

import importlib
import multiprocessing as mp
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Killing", "context", "train"]


@dataclass(frozen=True)
class Killing:
    """When which ranks are killed.

    Args:
        step: number of the step, from 1, during which it happens.
        after_s: seconds from that step's beginning.
        ranks: who.
    """

    step: int
    after_s: float
    ranks: tuple[int, ...]


def context() -> Any:
    """Return how to make processes: by forking this one, once it has imported what they need.

    Importing torch and loading compiled kernels costs seconds, so it is done here, before any thread runs.
    """
    importlib.import_module("warm")
    return mp.get_context("fork")


def train(
    making: Any,
    workers: int,
    arguments: Sequence[object],
    killing: Killing | None = None,
    limit_s: float = 120.0,
) -> tuple[list[int], str]:
    """Run `stenograd train ARGUMENTS` on so many ranks.

    Returns:
        The ranks' exit codes, minus the signal for one that was killed, and what all of them printed.

    Raises:
        TimeoutError: a rank did not end.
    """
    with tempfile.TemporaryDirectory(prefix="drill-", ignore_cleanup_errors=True) as folder:
        argv = ["stenograd", "train", *map(str, arguments)]
        crew = [
            making.Process(target=_rank, args=(rank, workers, folder, argv, killing))
            for rank in range(workers)
        ]
        deadline = time.monotonic() + limit_s
        try:
            for process in crew:
                process.start()
            for process in crew:
                process.join(max(0.1, deadline - time.monotonic()))
            codes = [process.exitcode for process in crew]
        finally:
            for process in crew:
                process.kill()
                process.join()
        logs = [Path(folder, f"log{rank}") for rank in range(workers)]
        output = "\n".join(log.read_text(errors="replace") for log in logs if log.exists())
        if None in codes:
            raise TimeoutError(
                f"ranks {[r for r, c in enumerate(codes) if c is None]} did not end:\n{output}"
            )
        return [code for code in codes if code is not None], output


def _rank(rank: int, workers: int, folder: str, argv: list[str], killing: Killing | None) -> None:
    log = os.open(Path(folder) / f"log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    place = {"RANK": rank, "WORLD_SIZE": workers, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": workers}
    os.environ.update({key: str(value) for key, value in place.items()}, STENOGRAD_STORE=f"{folder}/store")
    import torch

    from stenograd.cli import main

    torch.set_num_threads(1)
    if killing is not None and rank in killing.ranks:
        _arm(killing)
    sys.argv = argv
    code = main()
    with suppress(Exception):
        from stenograd.launch.process_group import shutdown

        shutdown()
    sys.exit(code)


def _arm(killing: Killing) -> None:
    """Let this process kill itself with signal 9, which nothing can catch, some time into a step."""
    from stenograd.cli.loop import Trainer

    take_step = Trainer._step

    def die() -> None:
        time.sleep(killing.after_s)
        os.kill(os.getpid(), signal.SIGKILL)

    def step(self: Any, indices: Any) -> Any:
        if self.taken + 1 == killing.step:
            threading.Thread(target=die, daemon=True).start()
        return take_step(self, indices)

    Trainer._step = step  # type: ignore[method-assign]
