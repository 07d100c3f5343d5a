"""One training that will be broken: its ranks, folder and hosts, and what can be found there afterwards."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import torch
from rank_processes import MOMENTS, Rank

from stenograd.emulate.hosts import Hosts, ip
from stenograd.testing.methods import by_name

_METHODS = by_name()
_START_S = 120.0  # for a training to reach the moment of its fault
_NAMED = re.compile(r"rank\(s\) ([\d, ]+) (?:did not answer|did not come)")
_DISK_BYTES = 64 << 20


class BrokenTraining:
    """The `with` block makes folder and hosts, and removes them with all processes.

    Args:
        draw: the seed's choices.
        folder: for logs, the meeting file and results.
        timeout_s: what the training gets as `--timeout-s`.
        grace_s: seconds that survivors have on top of it.
        meet: "tcp" or "file".
        on_hosts: whether each rank gets an emulated host.
        size: number of ranks, or None for the seed's choice.

    Attributes:
        ranks: those of the training, in rank order.
        moment: when the fault happens, in words.
        seconds: from the fault to the end of the last rank waited for in `await_end` so far, without those
            that were continued or killed there.
        wrong: what was not as it should be.
    """

    def __init__(self, draw, folder, *, timeout_s, grace_s, meet, on_hosts, size=None):
        self.draw, self.size = draw, size or draw.choice([3, 4])
        self.method, self.meet = draw.choice(_METHODS), meet
        self.ranks, self.moment, self.seconds, self.wrong = [], "", 0.0, []
        self._folder, self._timeout_s, self._grace_s = folder, timeout_s, grace_s
        self._hosts = Hosts(self.size, "none") if on_hosts else None
        self._out = folder / "out"
        self._jobs = 0
        self._fault_at, self._mounted = None, False
        self._env = {"STENOGRAD_DEBUG": "1", "WORLD_SIZE": self.size}
        if meet == "file":
            self._env["STENOGRAD_STORE"] = folder / "store"
        else:
            address = "10.77.0.1" if on_hosts else "127.0.0.1"
            self._env |= {"MASTER_ADDR": address, "MASTER_PORT": _free_port()}

    def __enter__(self):
        if self._hosts is not None:
            self._hosts.__enter__()
            self._env["GLOO_SOCKET_IFNAME"] = "eth0"
        return self

    def __exit__(self, *exc):
        for rank in self.ranks:
            rank.kill()
            rank.ended.wait(10)
        if self._hosts is not None:
            self._hosts.__exit__(None, None, None)
        if self._mounted:
            subprocess.run(["umount", "-l", self._out], check=False)

    @property
    def everyone(self):
        return list(range(self.size))

    def but(self, victim):
        """Return the other ranks."""
        return [rank for rank in self.everyone if rank != victim]

    def fault(self, do):
        """Draw a moment for a fault inside a rank."""
        at = self.draw.choice(MOMENTS)
        nth = self.draw.randrange(1, {"save": 6}.get(at, 120))
        self.moment = f"{at} {nth}"
        return {"at": at, "nth": nth, "do": do, "mark": str(self._folder / "mark")}

    def start(self, faults=None, *, without=None, other_method=None):
        """Start all ranks, the victims with their faults."""
        self._jobs += 1
        out = self._out if self._jobs == 1 else self._folder / f"out{self._jobs}"
        for number in self.everyone:
            if number == without:
                continue
            method = "topk:ratio=0.5" if number == other_method else self.method
            argv = ["train", "--task", "digits", "--method", method, "--epochs", 10000, "--out", out]
            place = {"RANK": number, "LOCAL_RANK": number, "LOCAL_WORLD_SIZE": self.size}
            if self._hosts is not None:
                place |= {"LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": number}
            log = self._folder / f"job{self._jobs}-rank{number}.log"
            namespace = None if self._hosts is None else self._hosts._host(number)
            argv += ["--timeout-s", self._timeout_s]
            self.ranks.append(Rank(argv, self._env | place, log, (faults or {}).get(number), namespace))

    def break_at(self, victim, do):
        """Start all ranks with a fault in one, and wait until its moment."""
        fault = self.fault(do)
        self.start({victim: fault})
        mark, deadline = self._folder / "mark", time.monotonic() + _START_S
        while not mark.exists():
            if time.monotonic() > deadline or self.ranks[victim].ended.is_set():
                raise TimeoutError(f"the moment of the fault ({self.moment}) did not come")
            time.sleep(0.005)
        self._fault_at = float(mark.read_text())
        return fault

    def begin_fault(self):
        """Let the fault happen now."""
        self._fault_at = time.monotonic()

    def await_end(self, ranks):
        """Wait for ranks, which have twice the time that is right, to end by themselves."""
        deadline = time.monotonic() + 2 * (self._timeout_s + self._grace_s)
        for rank in ranks:
            if not self.ranks[rank].ended.wait(max(0.0, deadline - time.monotonic())):
                raise TimeoutError(f"rank {rank} did not end")
            self.seconds = max(self.seconds, self.ranks[rank].ended_at - self._fault_at)

    def resume(self, rank):
        """Continue a stopped rank; its own end counts from now."""
        os.kill(self.ranks[rank].pid, signal.SIGCONT)
        self.begin_fault()

    def cut(self, rank, inside):
        """Take a host's link down, on its own side or the switch's."""
        switch = self._hosts._host(0).replace("host0", "switch")
        namespace, interface = (self._hosts._host(rank), "eth0") if inside else (switch, f"port{rank}")
        ip("-n", namespace, "link", "set", interface, "down")
        self.begin_fault()

    def slow(self, rank, how):
        """Shape what a host sends."""
        words = ["tc", "-n", self._hosts._host(rank), "qdisc", "replace", "dev", "eth0", "root", *how.split()]
        subprocess.run(words, check=True, capture_output=True)
        self.begin_fault()

    def mount(self):
        """Give the results a small disk of their own."""
        self._out.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_DISK_BYTES}", "none", self._out], check=True)
        self._mounted = True

    def fill(self):
        """Leave no byte on that disk."""
        for piece in (1 << 16, 1):
            with contextlib.suppress(OSError), (self._out / "ballast").open("ab", buffering=0) as file:
                while file.write(b"x" * piece):
                    pass
        self.begin_fault()

    def freeze(self):
        """Make that disk read-only, between two writes to it."""
        deadline = time.monotonic() + _START_S
        words = ["mount", "-o", "remount,ro", str(self._out)]
        while subprocess.run(words, check=False, capture_output=True).returncode:
            if time.monotonic() > deadline:
                raise TimeoutError("the disk was never idle")
        self.begin_fault()

    def goes_on(self, ranks):
        """Return whether a job adds two more epochs to its metrics, and none of its ranks ended."""
        before, deadline = self._lines(), time.monotonic() + _START_S
        while self._lines() < before + 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._lines() >= before + 2 and not any(r.ended.is_set() for r in ranks)

    def expect(self, ranks, error, named, text=""):
        """Check the last words and the exit status of ranks.

        Args:
            ranks: whose.
            error: the name of the error, or several names with | between.
            named: the lost ranks that it must name; None where that cannot be known.
            text: what else it must say.
        """
        for rank in ranks:
            said = self.ranks[rank].log.read_text(errors="replace").strip()
            words = re.sub(r"^\[rank\d+\]: ", "", said, flags=re.M).splitlines() or [""]  # torch's prefix
            errors = [w for w in words if re.match(r"(stenograd\.errors\.)?\w+(Error|Lost)\b", w)]
            last = errors[-1] if errors else ""
            name = last.partition(":")[0].removeprefix("stenograd.errors.")
            found = _NAMED.search(last)
            told = sorted(map(int, found[1].split(","))) if found else []
            if not re.fullmatch(error, name) or text not in last:
                self.wrong.append(f"rank {rank} said {last or words[-1]!r}, not {error} {text}")
            elif named and told != sorted(named):
                self.wrong.append(f"rank {rank} named {told}, not {sorted(named)}: {last}")
            if not self.ranks[rank].status:
                self.wrong.append(f"rank {rank} ended with status {self.ranks[rank].status}")

    def finish(self):
        """Check time and what is left: processes, half lines, files that cannot be read."""
        if self.seconds > self._timeout_s + self._grace_s:
            self.wrong.append(f"took {self.seconds:.1f} s")
        for index, rank in enumerate(self.ranks):
            self.wrong += [f"process {pid} of rank {index} is left" for pid in _session(rank.pid)]
        for path in sorted(self._folder.glob("out*/*")):
            if path.name.startswith(".") or path.suffix not in (".pt", ".json", ".jsonl"):
                continue  # a temporary file is not taken for anything
            try:
                _read(path)
            except Exception as error:
                self.wrong.append(f"{path.name} is not whole: {type(error).__name__}: {str(error)[:100]}")

    def told(self):
        """Return what was wrong, and the end of every rank's log."""
        about = f"{self.size} ranks, {self.method}, {self.meet}, {self.moment}, {self.seconds:.1f} s"
        parts = [about, *self.wrong]
        for index, rank in enumerate(self.ranks):
            text = rank.log.read_text(errors="replace").strip()[-1500:] if rank.log.exists() else ""
            parts.append(f"--- {index}: status {rank.status}\n{text}")
        return "\n".join(parts)

    def _lines(self):
        metrics = self._out / "metrics.jsonl"
        return len(metrics.read_text().splitlines()) if metrics.exists() else 0


def _read(path):
    if path.suffix == ".pt":
        torch.load(path, map_location="cpu", weights_only=True)
        return
    text = path.read_text()
    for part in text.splitlines() if path.suffix == ".jsonl" else [text]:
        json.loads(part)
    assert path.suffix == ".json" or not text or text.endswith("\n"), "the last line has no end"


def _session(leader):
    """Return the processes of a session that still run."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words = (entry / "stat").read_text().rpartition(") ")[2].split()
            if leader and int(words[3]) == leader and words[0] != "Z":
                found.append(int(entry.name))
    return found


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
