"""The gate of emulated links: before a run they are measured, and it is refused if they are not as asked.

    python benchmarks/links.py --hosts 2 --rate 100mbit

Three things are measured between all hosts at once, as a training uses them, while every core is kept busy:
the rate, the time of a message one way, and the processor time that the emulation takes away from what
computes. Seconds from a link that fails would be those of another link.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stenograd.emulate.hosts import Hosts, HostsError, parse_delay, parse_rate

__all__ = ["MOST_LOST", "MOST_OFF", "gate", "wrong"]

MOST_OFF = 0.05  # of the rate and of the latency
MOST_LOST = 0.05  # of a core
# A message takes so long without any delay, through two stacks and until a process wakes up.
_WAY_S = 0.2e-3
_TRIES = 4  # other programs of the machine may have been in the way of one
_IDLE_S, _FLOW_S, _BINS = 1.0, 2.4, 10
_BEGINNING_S = 0.4  # of a flow: what the bucket lets pass at once, and TCP finding its window
_PINGS = 30
_PORT = 29400
_PACKET_BYTES, _SEGMENT_BYTES = 1514, 1448  # of Ethernet as the bucket counts it, and the data in it
_LOOPS = 50_000  # of a spinner between two looks at the clock: about half a millisecond
_FEWEST = 50  # looks, of the 2,000 or so of a second


def gate(hosts: Hosts) -> dict[str, Any]:
    """Measure the links of hosts that are there, and refuse them if they are not as asked.

    Args:
        hosts: entered, with nothing running on them.

    Returns:
        What was asked and what was found, for the record of the run: bits per second of the slowest host,
        seconds one way, and the share lost of the core that lost most; `refused_before` has failed tries.
        `lost_by_core` is what each core lost while data flowed, `lost_to_packets` what it loses to as many
        bytes without the buckets, as on any host (None if the first is in bounds anyway); the emulation's is
        the difference.

    Raises:
        HostsError: rate, latency or lost processor time is out of bounds, by every try.
    """
    if hosts.count < 2:
        return {}
    tries: list[dict[str, Any]] = []
    while len(tries) < _TRIES:
        found = _measured(hosts)
        faults = wrong(found)
        if not faults:
            return found | {"refused_before": tries}
        tries.append(found | {"faults": faults})
    raise HostsError(
        "the emulated link is not what was asked for, so nothing is run on it: "
        f"{'; '.join(tries[-1]['faults'])} ({_TRIES} tries): end other programs on this machine, or ask for "
        "fewer hosts or a slower link"
    )


def wrong(found: dict[str, Any]) -> list[str]:
    """Return what is out of bounds in a measurement of `gate`, in words.

    Example:
        >>> good = {"asked_bps": 1e8, "bps": 9.9e7, "asked_s": 0.0, "latency_s": 1e-4, "lost_of_a_core": 0.02}
        >>> wrong(good), wrong(good | {"bps": 9.4e7, "asked_s": 0.005, "latency_s": 0.0055})
        ([], ['it carries 94.0 Mbit/s, not 100', 'a message takes 5.50 ms one way, not 5.00'])
    """
    faults = []
    asked_bps, bps = found["asked_bps"], found["bps"]
    if asked_bps is not None and abs(bps / asked_bps - 1) > MOST_OFF:
        faults.append(f"it carries {bps / 1e6:.1f} Mbit/s, not {asked_bps / 1e6:g}")
    asked_s, latency_s = found["asked_s"], found["latency_s"]
    if not asked_s <= latency_s <= asked_s * (1 + MOST_OFF) + _WAY_S:
        faults.append(f"a message takes {1e3 * latency_s:.2f} ms one way, not {1e3 * asked_s:.2f}")
    if found["lost_of_a_core"] is None:
        faults.append("the processor time that it takes could not be measured on so busy a machine")
    elif found["lost_of_a_core"] > MOST_LOST:
        faults.append(f"it takes {100 * found['lost_of_a_core']:.1f} % of a core from what computes there")
    return faults


def _measured(hosts: Hosts) -> dict[str, Any]:
    up, _, down = hosts.rate.partition("/")
    rates = [bps for bps in (parse_rate(up), parse_rate(down or up)) if bps is not None]
    bps, latency_s, lost, held = _measure(hosts, 0.0)
    packets: list[float | None] | None = None
    if not rates:  # there are no buckets: all of it is what packets take
        packets = lost
    elif max(filter(None, lost), default=0.0) + held > MOST_LOST:
        with Hosts(hosts.count, "none", cores_per_host=hosts.cores_per_host) as plain:
            packets = _measure(plain, bps)[2]
    pairs = zip(lost, packets or [0.0] * len(lost), strict=True)
    shares = [a - max(b, 0.0) for a, b in pairs if a is not None and b is not None]
    return {
        "hosts": hosts.count,
        "rate": hosts.rate,
        "asked_bps": min(rates) if rates else None,
        "bps": round(bps),
        "asked_s": parse_delay(hosts.delay),
        "latency_s": round(latency_s, 7),
        "lost_of_a_core": None if len(shares) < len(lost) else round(max(*shares, 0.0) + held, 4),
        "lost_by_core": lost,
        "lost_to_packets": packets,
    }


def _measure(hosts: Hosts, pace_bps: float) -> tuple[float, float, list[float | None], float]:
    """Return bits per second, seconds one way, the share that each core lost, and that of the relay.

    Hosts send as much as the link takes, or at a pace.
    """
    with tempfile.TemporaryDirectory() as name:
        cores = sorted(os.sched_getaffinity(0))
        logs = [Path(name) / str(core) for core in cores]
        spinners = [
            subprocess.Popen([sys.executable, __file__, "spin", str(core), str(log)])
            for core, log in zip(cores, logs, strict=True)
        ]
        relay = _Relay(hosts)
        try:
            command = [sys.executable, __file__, "flow", str(pace_bps)]
            told = [json.loads(text) for text in hosts.run(command, timeout_s=60)]
        finally:
            relay.stop()
            for spinner in spinners:
                spinner.kill()
                spinner.wait()
        began = told[0]["began"]
        lines = [log.read_text().splitlines()[:-1] for log in logs]
    lost = [_lost([tuple(map(float, line.split())) for line in core], began) for core in lines]
    return min(rank["bps"] for rank in told), told[0]["latency_s"], lost, relay.share(began)


def _lost(slices: Sequence[Sequence[float]], began: float) -> float | None:
    """Return the share of a core that its spinner lost while data flowed, against before and after, or None.

    What counts is progress in the time in which nobody else was scheduled: other processes are not the
    link's, and those that send and receive are there on real hosts, too. What is lost then are interrupts:
    timers of the buckets, the bridge, and packets on their way. Where others left the spinner too
    little, nothing can be said.
    """
    ended = began + _FLOW_S
    quiet = [s for at, s in slices if began - _IDLE_S < at < began or ended + 0.3 < at < ended + _IDLE_S]
    usual = statistics.median(quiet) if quiet else 0.0
    # Where the machine is itself a guest, its host takes cores away for several milliseconds at a time.
    quiet, busy = (
        [s for s in some if usual / 2 < s < 4 * usual]
        for some in (quiet, [s for at, s in slices if began + _BEGINNING_S < at < ended])
    )
    if min(len(quiet), len(busy)) < _FEWEST:
        return None
    return round(1 - statistics.mean(quiet) / statistics.mean(busy), 4)


class _Relay:
    """Follows the processor time of the process that holds packets back, where there is one."""

    def __init__(self, hosts: Hosts) -> None:
        self._hosts, self._seen = hosts, [(time.monotonic(), hosts.relay_cpu_s())]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()

    def _look(self) -> None:
        while not self._stopped.wait(0.1):
            self._seen.append((time.monotonic(), self._hosts.relay_cpu_s()))

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def share(self, began: float) -> float:
        """Return the share of a core that it took while data flowed."""
        inside = [(at, cpu_s) for at, cpu_s in self._seen if began <= at <= began + _FLOW_S]
        (first, first_s), (last, last_s) = (inside or self._seen)[0], (inside or self._seen)[-1]
        return (last_s - first_s) / max(last - first, 1e-6)


def _spin(core: int, log: Path) -> None:
    """Keep a core busy, and write the time and the seconds that were its own, again and again."""
    os.sched_setaffinity(0, {core})
    with log.open("w", buffering=1) as file:
        while True:
            start, waited_s = time.monotonic(), _waited_s()
            for _ in range(_LOOPS):
                pass
            now = time.monotonic()
            file.write(f"{now} {now - start - (_waited_s() - waited_s)}\n")


def _waited_s() -> float:
    """Return how long this process has waited for its core so far, by the scheduler's count."""
    return int(Path("/proc/self/schedstat").read_text().split()[1]) / 1e9


def _flow(pace_bps: float) -> None:
    """Be a host: send to the next one and receive from the one before, and print what that took."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    server = socket.create_server((f"10.77.0.{rank + 1}", _PORT))
    ahead = _connect(f"10.77.0.{(rank + 1) % size + 1}")
    behind, _ = server.accept()
    behind.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    latency_s = _ping(rank, ahead, behind)
    if rank == 0:
        began = time.monotonic() + _IDLE_S + 0.5
        ahead.sendall(f"{began:<32}".encode())
        behind.recv(32)
    else:
        text = behind.recv(32)
        began = float(text)
        ahead.sendall(text)
    time.sleep(max(0.0, began - time.monotonic()))
    sender = threading.Thread(target=_send, args=(ahead, began + _FLOW_S, pace_bps))
    sender.start()
    bps = _receive(behind, began)
    sender.join()
    time.sleep(max(0.0, began + _FLOW_S + _IDLE_S - time.monotonic()))
    print(json.dumps({"began": began, "bps": bps, "latency_s": latency_s}))


def _connect(address: str) -> socket.socket:
    deadline = time.monotonic() + 20
    while True:
        try:
            made = socket.create_connection((address, _PORT), timeout=20)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made
        except OSError:  # it has not started yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def _ping(rank: int, ahead: socket.socket, behind: socket.socket) -> float:
    """Return half of what a byte takes to the next host and back; the fastest: others waited for a core."""
    taken = [0.0]
    if rank == 1:
        for _ in range(_PINGS):
            behind.sendall(behind.recv(1))
    if rank == 0:
        taken = []
        for _ in range(_PINGS):
            start = time.perf_counter()
            ahead.sendall(b".")
            ahead.recv(1)
            taken.append(time.perf_counter() - start)
    return min(taken) / 2


def _send(ahead: socket.socket, until: float, pace_bps: float) -> None:
    piece, sent, start = bytes(10 * _SEGMENT_BYTES), 0, time.monotonic()
    while time.monotonic() < until:
        ahead.sendall(piece)
        sent += 8 * len(piece)
        if pace_bps:
            time.sleep(max(0.0, start + sent / pace_bps - time.monotonic()))
    ahead.shutdown(socket.SHUT_WR)


def _receive(behind: socket.socket, began: float) -> float:
    """Return the bits per second of whole packets, the median over bins of what came after the beginning.

    In some bins nothing comes: TCP recovers from a full queue, or this process waited for a core.
    """
    room, bins = bytearray(1 << 20), [0] * _BINS
    each_s = (_FLOW_S - _BEGINNING_S) / _BINS
    while count := behind.recv_into(room):
        at = int((time.monotonic() - began - _BEGINNING_S) // each_s)
        if 0 <= at < _BINS:
            bins[at] += count
    return 8 * statistics.median(bins) * _PACKET_BYTES / _SEGMENT_BYTES / each_s


def _command_line() -> None:
    parser = argparse.ArgumentParser(description="Measure an emulated link, and judge it.")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--delay", default="none")
    args = parser.parse_args()
    try:
        with Hosts(args.hosts, args.rate, delay=args.delay) as hosts:
            print(json.dumps(gate(hosts), indent=1))
    except (HostsError, ValueError) as error:
        raise SystemExit(f"links: {error}") from None


if __name__ == "__main__":
    if sys.argv[1:2] == ["spin"]:
        _spin(int(sys.argv[2]), Path(sys.argv[3]))
    elif sys.argv[1:2] == ["flow"]:
        _flow(float(sys.argv[2]))
    else:
        _command_line()
