"""Emulated hosts on one Linux machine: network namespaces on a bridge, each behind a rate-limited link.

    stenograd emulate --hosts 2 --rate 100mbit -- python train.py

Needs root and the commands `ip` and `tc`. The bridge has a namespace of its own, so the machine's own
network is not touched, and whoever runs this twice at once gets two networks that do not see each other.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from stenograd.emulate import relay
from stenograd.launch.local_workers import Workers

__all__ = [
    "MAX_HOSTS",
    "Hosts",
    "HostsError",
    "command",
    "ip",
    "names",
    "parse_delay",
    "parse_rate",
    "remove",
    "require_rights",
    "sent_bytes",
    "why_not",
]

# Namespaces are called stenograd-PID-NUMBER-switch and stenograd-PID-NUMBER-host0, ...
_PREFIX = "stenograd-"
_NUMBERS = count()
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
# Ctrl-C raises by itself. Windows has no SIGHUP, and shall hear that it cannot emulate.
_ENDINGS = (signal.SIGTERM, *([signal.SIGHUP] if hasattr(signal, "SIGHUP") else []))
MAX_HOSTS = 254  # what 10.77.0.0/24 has addresses for
_POLL_S = 0.1
_START_S = 60.0  # for a Python without torch, and a TAP device for each host
_TAIL_LINES = 15
_COMMAND_S = 30.0  # for `ip` and `tc`, which take milliseconds
_FIRST_PORT = 29500  # below the ephemeral ports; in a namespace of our own nobody else listens
_PACKET_BYTES, _SEGMENT_BYTES = 1514, 1448  # of Ethernet, with headers and without
_MOST_BYTES = 65_536  # in one piece, for the kernel
_LEFT_OUT = ("TORCHELASTIC_", "STENOGRAD_STORE", "OMPI_", "PMI", "SLURM_")  # an outer launcher's variables


class HostsError(RuntimeError):
    """Hosts cannot be emulated here, or a rank on them failed."""


def parse_rate(text: str) -> float | None:
    """Return a link's bits per second, or None for an unshaped one.

    Args:
        text: "none", or a number and kbit, mbit or gbit.

    Example:
        >>> parse_rate("100mbit"), parse_rate("2.5gbit"), parse_rate("none")
        (100000000.0, 2500000000.0, None)
    """
    if text == "none":
        return None
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", text)
    if match is None or float(match[1]) == 0:
        guess = re.match(r"(\d+(?:\.\d+)?)\s*([kmg]?)", text.lower())
        known = guess is not None and float(guess[1]) > 0
        advice = f"write {guess[1]}{guess[2] or 'm'}bit" if guess and known else "write 100mbit"
        raise ValueError(f"rate must be none or like 100mbit or 1gbit, got {text!r}: {advice}")
    return float(match[1]) * _UNITS[match[2]]


def parse_delay(text: str) -> float:
    """Return a link's delay in seconds.

    Args:
        text: "none", or a number and us, ms or s.

    Example:
        >>> parse_delay("20ms"), parse_delay("500us"), parse_delay("none")
        (0.02, 0.0005, 0.0)
    """
    if text == "none":
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(us|ms|s)", text)
    if match is None:
        raise ValueError(f"delay must be none or like 20ms or 500us, got {text!r}: write 20ms")
    return float(match[1]) * _TIME_UNITS[match[2]]


def why_not(delay: str = "none") -> str | None:
    """Return why hosts, with a delay or none, cannot be emulated here, or None where they can."""
    try:
        with Hosts(1, "1gbit", delay=delay):
            return None
    except HostsError as error:
        return str(error)


class Hosts:
    """Hosts 0 to count - 1 at 10.77.0.1, 10.77.0.2, ..., while the `with` block lasts.

    Args:
        count: number of hosts, 1 to 254.
        rate: of each host's link, in either direction: "100mbit", "1gbit", ..., or "none" for unshaped; or
            of what it sends and receives: "100mbit/20mbit".
        delay: that every packet between two hosts takes in addition, one way, so that a ping takes twice
            as long: "20ms", "500us", ..., or "none".
        cores_per_host: cores of this machine that each host has for itself, as a real one has; 0 where all
            share all.

    Raises:
        ValueError: count, rate, delay or cores_per_host is out of range.
        HostsError: hosts cannot be emulated here (raised on entry).

    Example:
        with Hosts(2, "100mbit", delay="5ms") as hosts:
            outputs = hosts.run([sys.executable, "train.py"])
    """

    def __init__(
        self, count: int, rate: str = "none", *, delay: str = "none", cores_per_host: int = 0
    ) -> None:
        if not 1 <= count <= MAX_HOSTS:
            raise ValueError(f"count must be in 1..{MAX_HOSTS}, got {count}")
        self._cores = _shared_out(count, cores_per_host) if cores_per_host else [[] for _ in range(count)]
        self.count, self.rate, self.delay, self.cores_per_host = count, rate, delay, cores_per_host
        up, _, down = rate.partition("/")
        self._up_bps, self._down_bps = parse_rate(up), parse_rate(down or up)
        self._delay_s = parse_delay(delay)
        self._prefix = f"{_PREFIX}{os.getpid()}-{next(_NUMBERS)}-"
        self._runs = 0
        self._relay: subprocess.Popen[str] | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Hosts:
        require_rights()
        remove(self._prefix)  # of a killed process that had this one's number
        _remove_leftovers()
        if threading.current_thread() is threading.main_thread():  # others may not change handlers
            self._handlers = {number: signal.signal(number, _end) for number in _ENDINGS}
        try:
            self._build()
        except BaseException:  # Ctrl-C, too: what is made by then would stay
            self._tear_down()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tear_down()

    def run(
        self,
        command: Sequence[str],
        ranks_per_host: int = 1,
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        echo: bool = False,
    ) -> list[str]:
        """Run a command once a rank, with the variables that torchrun sets, and wait for all.

        Ranks are numbered host by host. Ranks of one host talk to each other at memory speed. Unless set,
        OMP_NUM_THREADS is 1: the ranks share this machine's cores, or their host's.

        Args:
            command: program and arguments.
            ranks_per_host: number of copies on each host, at least 1.
            env: variables on top of this process's.
            timeout_s: seconds after which all ranks are killed.
            echo: show rank 0's output while it comes.

        Returns:
            What each rank wrote to standard output and error.

        Raises:
            HostsError: a rank failed (the others are killed then), the time is over, or the process that
                holds packets back has ended, and the hosts' interfaces with it.
        """
        if ranks_per_host < 1:
            raise ValueError(f"ranks_per_host must be at least 1, got {ranks_per_host}")
        self._runs += 1
        base = {key: value for key, value in os.environ.items() if not key.startswith(_LEFT_OUT)}
        shared = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"} | base | dict(env or {})
        with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as folder:
            ranks = Workers(Path(folder), grouped=True)
            try:
                for host, cores in enumerate(self._cores):
                    for local in range(ranks_per_host):
                        inside = ["ip", "netns", "exec", self._host(host), *command]
                        variables = self._variables(host, local, ranks_per_host)
                        ranks.start(inside, shared | variables, "all", cores)
                self._wait(ranks, timeout_s, echo)
                return [ranks.text(rank) for rank in range(len(ranks.processes))]
            finally:
                ranks.stop(term_s=0.0)

    def start(self, index: int, command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
        """Start a command on a host, and return its process, which the caller has to watch and to end.

        Args:
            index: of the host.
            command: program and arguments.
            env: its whole environment.
        """
        return subprocess.Popen(["ip", "netns", "exec", self._host(index), *command], env=env)

    def cut(self, index: int, *, mend: bool = False) -> None:
        """Unplug a host's cable, or plug it in again; only where no packets are held back (delay)."""
        state = "up" if mend else "down"
        ip("-n", f"{self._prefix}switch", "link", "set", f"port{index}", state)

    def sent_bytes(self) -> list[int]:
        """Return the bytes that each host's interface has sent so far, packet headers included.

        A rank reads its own host's by the function of this name.
        """
        return [sent_bytes("-n", self._host(index)) for index in range(self.count)]

    def relay_cpu_s(self) -> float:
        """Return the processor seconds that the process which holds packets back has taken; 0 without one."""
        if self._relay is None:
            return 0.0
        fields = Path(f"/proc/{self._relay.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # in user and in kernel mode

    def _wait(self, ranks: Workers, timeout_s: float, echo: bool) -> None:
        """Wait until all ranks have succeeded, and show meanwhile what rank 0 writes, if wanted."""
        deadline = time.monotonic() + timeout_s
        letters = codecs.getincrementaldecoder("utf-8")("replace")  # of one, only some bytes may be there
        with ranks.log(0).open("rb") as log:
            while True:
                running, failed = ranks.running(), ranks.failed()  # in this order: all may end in between
                if echo:
                    ended = failed is not None or not running
                    sys.stdout.write(letters.decode(log.read(), ended))
                    sys.stdout.flush()
                if failed is not None:
                    status = ranks.processes[failed].returncode
                    raise _failed(ranks, failed, f"ended with status {status}", echo)
                if not running:
                    return
                if self._relay is not None and self._relay.poll() is not None:
                    what = f"the process that holds packets back ended with status {self._relay.returncode}"
                    raise HostsError(f"{what}; its last lines:\n{self._relay.communicate()[0].strip()}")
                if time.monotonic() > deadline:
                    raise _failed(ranks, running[0], f"did not end within {timeout_s:g} s", echo)
                time.sleep(_POLL_S)

    def _host(self, index: int) -> str:
        return f"{self._prefix}host{index}"

    def _variables(self, host: int, local: int, ranks_per_host: int) -> dict[str, str]:
        return {
            "RANK": str(host * ranks_per_host + local),
            "WORLD_SIZE": str(self.count * ranks_per_host),
            "LOCAL_RANK": str(local),
            "LOCAL_WORLD_SIZE": str(ranks_per_host),
            "GROUP_RANK": str(host),
            "MASTER_ADDR": "10.77.0.1",
            "MASTER_PORT": str(_FIRST_PORT + self._runs % 1000),
            "GLOO_SOCKET_IFNAME": "eth0",
        }

    def _build(self) -> None:
        switch = f"{self._prefix}switch"
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge", "mcast_snooping", "0")
        ip("-n", switch, "link", "set", "br0", "addrgenmode", "none", "up")
        hosts = [self._host(index) for index in range(self.count)]
        for host in hosts:
            ip("netns", "add", host)
        if self._delay_s > 0:  # before the links, which are devices of the relay's
            self._relay = _start_relay(self._delay_s, switch, hosts)
        for index, host in enumerate(hosts):
            port = f"port{index}"
            if self._relay is None:
                ip("-n", switch, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", host)
            # addrgenmode none: no IPv6 address, so no chatter in the byte counters
            ip("-n", switch, "link", "set", port, "master", "br0", "addrgenmode", "none", "up")
            ip("-n", host, "link", "set", "lo", "up")
            ip("-n", host, "addr", "add", f"10.77.0.{index + 1}/24", "dev", "eth0")
            ip("-n", host, "link", "set", "eth0", "addrgenmode", "none", "up")
            self._shape(host, "eth0", self._up_bps)  # what the host sends
            self._shape(switch, port, self._down_bps)  # what it receives
            bursts = [_burst_bytes(rate) for rate in (self._up_bps, self._down_bps) if rate is not None]
            if bursts:
                # Pieces of as many packets as fit a bucket pass it at once. Larger ones would be cut into
                # single packets, each with a timer: at 100 Mbit/s that took half of a core from training.
                pieces = min(bursts) // _PACKET_BYTES * _SEGMENT_BYTES
                ip("-n", host, "link", "set", "eth0", "gso_max_size", str(min(pieces, _MOST_BYTES)))

    def _shape(self, namespace: str, interface: str, bits_per_s: float | None) -> None:
        if bits_per_s is None:
            return
        shape = ["tbf", "rate", f"{bits_per_s:.0f}bit", "burst", str(_burst_bytes(bits_per_s))]
        command("tc", "-n", namespace, "qdisc", "add", "dev", interface, "root", *shape, "latency", "100ms")

    def _tear_down(self) -> None:
        # Whoever asks again to end must not leave half of this undone.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, (*_ENDINGS, signal.SIGINT))
        try:
            remove(self._prefix)
        finally:
            if self._relay is not None:
                self._relay.kill()
                self._relay.communicate()
                self._relay = None
            # Before signals are let through: one that came meanwhile is the program's.
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)


def require_rights() -> None:
    """Check what can be checked before anything is made.

    Raises:
        HostsError: this is not Linux, a command is missing, or this process is not root.
    """
    if sys.platform != "linux":
        raise HostsError(f"emulated hosts need Linux's network namespaces, this is {sys.platform}")
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise HostsError(
                f"emulated hosts need the command {program!r}: install Debian's package iproute2"
            )
    if os.geteuid() != 0:
        raise HostsError("emulated hosts need root to make network namespaces: run this as root (sudo)")


def names(prefix: str) -> list[str]:
    """Return the namespaces whose names start so."""
    return [line.split()[0] for line in ip("netns", "list").splitlines() if line.startswith(prefix)]


def remove(prefix: str) -> None:
    """Remove the namespaces whose names start so, and kill the processes in them."""
    for name in names(prefix):
        # A namespace without a name lives on, with its bridge and links, while a process is in it.
        for pid in ip("netns", "pids", name).split():
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(int(pid), signal.SIGKILL)
        ip("netns", "del", name)  # its interfaces and queues go with it


def sent_bytes(*where: str) -> int:
    """Return the bytes that eth0 has sent, packet headers included.

    An interface counts a piece of several packets with a single header, a token bucket with all of them.

    Args:
        where: `-n` and a namespace; this process's own if there is nothing.
    """
    buckets = json.loads(command("tc", *where, "-s", "-j", "qdisc", "show", "dev", "eth0", "root"))
    if buckets and buckets[0]["kind"] == "tbf":
        return int(buckets[0]["bytes"])
    received = json.loads(ip(*where, "-s", "-j", "link", "show", "dev", "eth0"))
    return int(received[0]["stats64"]["tx"]["bytes"])


def ip(*arguments: str) -> str:
    """Run `ip` and return its output."""
    return command("ip", *arguments)


def command(*words: str) -> str:
    """Run a command and return its output.

    Raises:
        HostsError: it failed, or did not end in time.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=_COMMAND_S)
    except subprocess.TimeoutExpired:
        raise HostsError(f"`{' '.join(words)}` did not end in {_COMMAND_S:g} s") from None
    if done.returncode:
        raise HostsError(
            f"`{' '.join(words)}` failed: {done.stderr.strip()}: emulated hosts need network namespaces, "
            "bridges and token buckets, which some containers forbid"
        )
    return done.stdout


def _failed(ranks: Workers, rank: int, what: str, echo: bool) -> HostsError:
    """Return an error with what a rank wrote last, unless that was shown already."""
    if echo and rank == 0:
        return HostsError(f"rank 0 {what}, see above")
    tail = "\n".join(ranks.text(rank).rstrip().splitlines()[-_TAIL_LINES:])
    return HostsError(f"rank {rank} {what}; its last lines:\n{tail}")


def _shared_out(count: int, each: int) -> list[list[int]]:
    """Return every host's own cores."""
    cores = sorted(os.sched_getaffinity(0))
    if not 0 < each <= len(cores) // count:
        rule = f"must be in 0..{len(cores) // count} for {count} hosts on {len(cores)} cores"
        raise ValueError(f"cores_per_host {rule}, got {each}: take 0 to share all")
    return [cores[host * each :][:each] for host in range(count)]


def _burst_bytes(bits_per_s: float) -> int:
    """Return what a bucket holds.

    What fits it goes at memory speed after a pause, so it holds a millisecond of the rate, but at least
    16 kB, since the kernel sends in pieces of many packets. Each piece takes a timer from who computes: at
    100 Mbit/s pieces of 16 kB took 6 to 12 % of a core, of 32 kB 3 to 4 %.
    """
    bytes_per_s = bits_per_s / 8
    return max(16_384, min(32_768, round(bytes_per_s * 2.5e-3)), round(bytes_per_s * 1e-3))


def _start_relay(delay_s: float, switch: str, hosts: Sequence[str]) -> subprocess.Popen[str]:
    """Start the process that holds back what hosts send, and wait until their devices are there."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", relay.__file__, repr(delay_s), switch, *hosts],
        stdin=subprocess.PIPE,  # closes when this process ends, however it ends
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # Ctrl-C is for this process, which then ends the other
    )
    assert process.stdout is not None
    began, limit = time.monotonic(), threading.Timer(_START_S, process.kill)  # which ends the reading below
    limit.daemon = True
    limit.start()
    try:
        first = process.stdout.readline()
        if first == relay.READY + "\n":
            return process
        # Not `communicate`, which leaves out what was read together with the first line.
        with process:
            said = process.stdout.read()
    finally:
        limit.cancel()
    if time.monotonic() - began >= _START_S:
        raise HostsError(
            f"the process that holds packets back was not ready within {_START_S:g} s: end other programs on "
            "this machine, or emulate fewer hosts"
        )
    why = ((first + said).strip() or f"it ended with status {process.returncode}").splitlines()[-1]
    raise HostsError(f"a delay needs TAP devices (/dev/net/tun), which cannot be made here: {why}")


def _remove_leftovers() -> None:
    """Remove the namespaces of runs that were killed before they could do so themselves."""
    for pid in {name.split("-")[1] for name in names(_PREFIX)}:
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():  # other names are other programs'
            with suppress(HostsError):  # somebody else is removing them
                remove(f"{_PREFIX}{pid}-")


def _end(number: int, frame: object) -> NoReturn:
    raise SystemExit(128 + number)  # unwinds the `with` blocks
