"""One training that will be broken: its ranks, folder and hosts, and what can be found there afterwards."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import torch
from forked_ranks import MOMENTS, ForkedRanks, Rank

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))
from stenograd.emulate.hosts import Hosts, ip
from stenograd.testing.methods import by_name

__all__ = ["METHODS", "FaultRun", "Verdict"]

METHODS = by_name()
_START_S = 60.0  # for a training to reach the moment of its fault
_NAMED = re.compile(r"rank\(s\) ([\d, ]+) (?:did not answer|did not come)")
_DISK_BYTES = 64 << 20


@dataclass
class Verdict:
    """What one run showed; no `wrong` means that all was as it should be."""

    kind: str
    seed: int
    what: str = ""
    seconds: float = 0.0
    errors: set[str] = field(default_factory=set)
    wrong: list[str] = field(default_factory=list)


class FaultRun:
    """The `with` block makes folder and hosts, and removes them with all processes.

    Args:
        forks: where ranks come from.
        draw: the seed's choices.
        size: number of ranks.
        folder: for logs, the meeting file and results.
        timeout_s: what the training gets as `--timeout-s`.
        grace_s: seconds that survivors have on top of it.
        meet: "tcp" or "file".
        on_hosts: whether each rank gets an emulated host.

    Attributes:
        ranks: those of the training, in rank order.
        moment: when the fault happens, in words.
        seconds: from the fault to the end of the last rank waited for in `await_end` so far, without those
            that were continued or killed there.
    """

    def __init__(
        self,
        forks: ForkedRanks,
        draw: Random,
        size: int,
        folder: Path,
        timeout_s: float,
        grace_s: float,
        meet: str,
        on_hosts: bool,
    ) -> None:
        self.draw, self.size, self.ranks, self.moment, self.seconds = draw, size, list[Rank](), "", 0.0
        self.method = draw.choice(METHODS)
        self._forks, self._folder, self._timeout_s, self._grace_s = forks, folder, timeout_s, grace_s
        self._hosts = Hosts(size, "none") if on_hosts else None
        self._out = folder / "out"
        self._began = self._jobs = 0
        self._fault_at: float | None = None
        self._mounted = False
        self._env = {"OMP_NUM_THREADS": "1", "STENOGRAD_DEBUG": "1", "WORLD_SIZE": str(size)}
        if meet == "file":
            self._env["STENOGRAD_STORE"] = str(folder / "store")
        else:
            self._env |= {
                "MASTER_ADDR": "10.77.0.1" if on_hosts else "127.0.0.1",
                "MASTER_PORT": _free_port(),
            }

    def __enter__(self) -> FaultRun:
        if self._hosts is not None:
            self._hosts.__enter__()
            self._env["GLOO_SOCKET_IFNAME"] = "eth0"
        return self

    def __exit__(self, *exc: object) -> None:
        for index in range(len(self.ranks)):
            self.kill(index)
        for rank in self.ranks:
            rank.ended.wait(10)
        if self._hosts is not None:
            self._hosts.__exit__(None, None, None)
        if self._mounted:
            subprocess.run(["umount", "-l", self._out], check=False)

    def fault(self, do: str) -> dict[str, Any]:
        """Draw a moment for a fault inside a rank."""
        at = self.draw.choice(MOMENTS)
        nth = self.draw.randrange(1, {"save": 6}.get(at, 120))
        self.moment = f"{at} {nth}"
        return {"at": at, "nth": nth, "do": do, "mark": str(self._folder / "mark")}

    def start(
        self, faults: Mapping[int, Any], *, without: int | None = None, other_method: int | None = None
    ) -> None:
        """Start all ranks."""
        self._jobs += 1
        out = self._out if self._jobs == 1 else self._folder / f"out{self._jobs}"
        for rank in range(self.size):
            method = "topk:ratio=0.5" if rank == other_method else self.method
            argv = [
                "train",
                "--task",
                "digits",
                "--method",
                method,
                "--epochs",
                "10000",
                "--timeout-s",
                str(self._timeout_s),
            ]
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(self.size)}
            namespace = None
            if self._hosts is not None:
                place |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": str(rank)}
                namespace = self._host(rank)
            log = self._folder / f"job{self._jobs}-rank{rank}.log"
            if rank == without:
                self.ranks.append(Rank(log, status=0))
                self.ranks[-1].ended.set()
                continue
            argv += ["--out", str(out)]
            fault, env = faults.get(rank), self._env | place
            self.ranks.append(self._forks.start(argv, env, log, fault=fault, namespace=namespace))

    def await_fault(self, rank: int) -> None:
        """Wait until the moment of the fault."""
        mark, deadline = self._folder / "mark", time.monotonic() + _START_S
        while not mark.exists():
            if time.monotonic() > deadline or self.ranks[rank].ended.is_set():
                raise TimeoutError(f"the moment of the fault ({self.moment}) did not come")
            time.sleep(0.005)
        self._fault_at = float(mark.read_text())

    def begin_fault(self) -> None:
        """Let the fault happen now."""
        self._fault_at = time.monotonic()

    def await_end(self, ranks: Sequence[int]) -> None:
        """Wait for ranks to end by themselves.

        Raises:
            TimeoutError: they did not within twice the time that they have.
        """
        assert self._fault_at is not None
        deadline = time.monotonic() + 2 * (self._timeout_s + self._grace_s)
        for rank in ranks:
            if not self.ranks[rank].ended.wait(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} did not end")
            self.seconds = max(self.seconds, self.ranks[rank].ended_at - self._fault_at)

    def resume(self, rank: int) -> None:
        """Continue a stopped rank; its own end counts from now."""
        os.kill(self.ranks[rank].pid, signal.SIGCONT)
        self.begin_fault()

    def kill(self, rank: int) -> None:
        """Kill a rank, if it still runs."""
        if not self.ranks[rank].ended.is_set():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.ranks[rank].pid, signal.SIGKILL)
            self.begin_fault()

    def cut(self, rank: int, inside: bool) -> None:
        """Take a host's link down, on its own side or the switch's."""
        place = (
            (self._host(rank), "eth0")
            if inside
            else (self._host(0).replace("host0", "switch"), f"port{rank}")
        )
        ip("-n", place[0], "link", "set", place[1], "down")
        self.begin_fault()

    def slow(self, rank: int, how: str) -> None:
        """Shape what a host sends."""
        words = ["tc", "-n", self._host(rank), "qdisc", "replace", "dev", "eth0", "root", *how.split()]
        subprocess.run(words, check=True, capture_output=True)
        self.begin_fault()

    def mount(self) -> None:
        """Give the results a small disk of their own."""
        self._out.mkdir()
        size = f"size={_DISK_BYTES}"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", self._out], check=True)
        self._mounted = True

    def fill(self) -> None:
        """Leave no byte on that disk."""
        with contextlib.suppress(OSError), (self._out / "ballast").open("wb", buffering=0) as file:
            while file.write(b"x" * (1 << 16)):
                pass
        with contextlib.suppress(OSError), (self._out / "ballast").open("ab", buffering=0) as file:
            while file.write(b"x"):
                pass
        self.begin_fault()

    def freeze(self) -> None:
        """Make that disk read-only, between two writes to it."""
        words = ["mount", "-o", "remount,ro", str(self._out)]
        deadline = time.monotonic() + _START_S
        while subprocess.run(words, check=False, capture_output=True).returncode:
            if time.monotonic() > deadline:
                raise TimeoutError("the disk was never idle")
        self.begin_fault()

    def goes_on(self, ranks: Sequence[Rank]) -> bool:
        """Return whether a job adds two more epochs to its metrics, and none of its ranks ended."""
        metrics, before = self._out / "metrics.jsonl", self._lines()
        deadline = time.monotonic() + _START_S
        while self._lines() < before + 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        return metrics.exists() and self._lines() >= before + 2 and not any(r.ended.is_set() for r in ranks)

    def expect(
        self, verdict: Verdict, ranks: Sequence[int], error: str, named: Sequence[int] | None, text: str = ""
    ) -> None:
        """Check the last words and the exit status of ranks.

        Args:
            verdict: gets what is wrong.
            ranks: whose.
            error: the name of the error, or several names with | between.
            named: the lost ranks that it must name; None where that cannot be known.
            text: what else it must say.
        """
        for rank in ranks:
            text_of = self.ranks[rank].log.read_text(errors="replace").strip()
            words = re.sub(r"^\[rank\d+\]: ", "", text_of, flags=re.M).splitlines() or [""]  # torch's prefix
            last = next(
                (w for w in reversed(words) if re.match(r"(stenograd\.errors\.)?\w+(Error|Lost)\b", w)), ""
            )
            name = last.partition(":")[0].removeprefix("stenograd.errors.")
            found = _NAMED.search(last)
            told = sorted(map(int, found[1].split(","))) if found else []
            verdict.errors.add(name or "none")
            if not re.fullmatch(error, name) or text not in last:
                verdict.wrong.append(f"rank {rank} said {last or words[-1]!r}, not {error} {text}")
            elif named and told != sorted(named):
                verdict.wrong.append(f"rank {rank} named {told}, not {sorted(named)}: {last}")
            if not self.ranks[rank].status:
                verdict.wrong.append(f"rank {rank} ended with status {self.ranks[rank].status}")

    def leftovers(self) -> list[str]:
        """Return what is wrong with what is left: processes, half lines, files that cannot be read."""
        wrong = [
            f"process {pid} of rank {i} is left" for i, r in enumerate(self.ranks) for pid in _session(r.pid)
        ]
        for path in sorted(self._folder.glob("out*/*")):
            if path.name.startswith(".") or path.suffix not in (".pt", ".json", ".jsonl"):
                continue  # a temporary file is not taken for anything
            try:
                _read(path)
            except Exception as error:
                wrong.append(f"{path.name} is not whole: {type(error).__name__}: {str(error)[:100]}")
        return wrong

    def logs(self) -> str:
        """Return the end of every rank's log."""
        parts = []
        for index, rank in enumerate(self.ranks):
            text = rank.log.read_text(errors="replace").strip()[-1500:] if rank.log.exists() else ""
            parts.append(f"--- {index}: status {rank.status}\n{text}")
        return "\n".join(parts)

    def _lines(self) -> int:
        metrics = self._out / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0

    def _host(self, rank: int) -> str:
        assert self._hosts is not None
        return self._hosts._host(rank)


def _read(path: Path) -> None:
    if path.suffix == ".pt":
        torch.load(path, map_location="cpu", weights_only=True)
        return
    text = path.read_text()
    for part in text.splitlines() if path.suffix == ".jsonl" else [text]:
        json.loads(part)
    if path.suffix == ".jsonl" and text and not text.endswith("\n"):
        raise ValueError("the last line has no end")


def _session(leader: int) -> list[int]:
    """Return the processes of a session that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "stat").read_text().rpartition(") ")[2].split()
            if leader and int(words[3]) == leader and words[0] != "Z":
                found.append(int(entry.name))
    return found


def _free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])
