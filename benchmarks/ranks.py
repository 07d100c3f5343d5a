"""Processes that succeed together or are killed together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from namespaces import HostsError

__all__ = ["Ranks"]

_POLL_S = 0.1
_TAIL_LINES = 15


class Ranks:
    """Processes in rank order; leaving the `with` block kills those that still run, with their children.

    Args:
        timeout_s: seconds that `wait` gives them.
        echo: show rank 0's output while it comes.
    """

    def __init__(self, timeout_s: float, echo: bool) -> None:
        self._timeout_s, self._echo = timeout_s, echo
        self._processes: list[subprocess.Popen[bytes]] = []
        self._shown_bytes = 0

    def __enter__(self) -> Ranks:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        return self

    def __exit__(self, *exc: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._folder.cleanup()

    def start(self, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the next rank."""
        with self._log(len(self._processes)).open("wb") as log:
            process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, so that its children can be killed with it
            )
        self._processes.append(process)

    def wait(self) -> list[str]:
        """Return every rank's output when all have succeeded.

        Raises:
            HostsError: one failed, or the time is over.
        """
        deadline = time.monotonic() + self._timeout_s
        while True:
            codes = [process.poll() for process in self._processes]
            self._show()
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                what = f"rank {failed[0]} ended with status {codes[failed[0]]}"
                raise HostsError(f"{what}; its last lines:\n{self._tail(failed[0])}")
            if None not in codes:
                return [self._text(rank) for rank in range(len(codes))]
            if time.monotonic() > deadline:
                late = codes.index(None)
                what = f"rank {late} did not end within {self._timeout_s:g} s"
                raise HostsError(f"{what}; its last lines:\n{self._tail(late)}")
            time.sleep(_POLL_S)

    def _show(self) -> None:
        if not self._echo:
            return
        with self._log(0).open("rb") as log:
            log.seek(self._shown_bytes)
            new = log.read()
        self._shown_bytes += len(new)
        sys.stdout.write(new.decode(errors="replace"))
        sys.stdout.flush()

    def _tail(self, rank: int) -> str:
        return "\n".join(self._text(rank).rstrip().splitlines()[-_TAIL_LINES:])

    def _text(self, rank: int) -> str:
        return self._log(rank).read_text(errors="replace")

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank{rank}"
