"""Which network interfaces reach the other hosts, and how fast; plain TCP, without torch."""

from __future__ import annotations

import contextlib
import json
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stenograd.launch.detect import World
from stenograd.launch.rendezvous import Store, tell_all

__all__ = ["Reach", "best", "interfaces", "time_interfaces"]

_SIOCGIFADDR = 0x8915  # Linux: asks for an interface's IPv4 address
_PINGS, _PING_BYTES = 20, 64
_CHUNK = 1 << 18
_BULK_S = 0.4  # eight round trips at 50 ms, in which TCP's window grows
_CONNECT_S = 3.0  # an interface that needs more is of no use
_LIMIT_S = (
    10.0  # for timing one pair of hosts in all: 20 round trips of 0.4 s, and a full buffer; others wait
)
_BULK, _PING, _END = b"b", b"p", b"e"


@dataclass(frozen=True)
class Reach:
    """What one interface gives between neighbouring hosts.

    Attributes:
        name: of the interface, the same on all hosts.
        address: on rank 0's host.
        failed: of how many pairs of hosts the connection failed.
        pairs: number of pairs that were tried.
        reason: why the first of them failed, or "".
        rtt_ms: the slowest pair's median round trip of 64 bytes, in milliseconds.
        mbit_s: the slowest pair's rate in one direction, in Mbit/s.
    """

    name: str
    address: str
    failed: int
    pairs: int
    reason: str
    rtt_ms: float
    mbit_s: float


def interfaces() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one; on Linux only, elsewhere nothing.

    Example:
        >>> interfaces().get("lo", "127.0.0.1")
        '127.0.0.1'
    """
    if sys.platform != "linux":
        return {}
    import fcntl  # does not exist on Windows

    found: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has none
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found[name] = socket.inet_ntoa(answer[20:24])  # after name (16), family (2), port (2)
    return found


def best(found: Sequence[Reach]) -> Reach | None:
    """Return the interface with the highest rate of those that reach all hosts; None where there is none.

    Example:
        >>> slow = Reach("eth0", "10.0.0.1", 0, 2, "", rtt_ms=0.3, mbit_s=940.0)
        >>> fast = Reach("ib0", "10.1.0.1", 0, 2, "", rtt_ms=0.1, mbit_s=9000.0)
        >>> best([slow, fast]).name
        'ib0'
    """
    whole = [one for one in found if not one.failed]
    return max(whole, key=lambda one: one.mbit_s, default=None)


def time_interfaces(store: Store, world: World, limit_s: float = 60.0) -> list[Reach]:
    """Time all interfaces that every host has, between neighbouring hosts; all ranks call it.

    One rank of each host takes part. Hosts stand in a ring, and each sends to the next; pairs that share no
    host are timed at once. Ranks on one host are timed over the loopback interface.

    Args:
        store: where the ranks met; nobody else uses it meanwhile.
        world: this process's rank.
        limit_s: seconds to wait for the other ranks each time, > 0.

    Returns:
        What was found, the same on all ranks, in rank 0's order.

    Raises:
        LaunchError: ranks did not answer in time; it names them.
    """

    def everyone(what: str, value: Mapping[str, Any]) -> list[dict[str, Any]]:
        received = tell_all(store, world, f"interfaces/{what}", json.dumps(value), limit_s)
        return [json.loads(text) for text in received]

    cards = everyone("card", {"host": _host(), "interfaces": interfaces()})
    leaders = _leaders([str(card["host"]) for card in cards], world.world_size)
    names = [
        name
        for name, address in cards[0]["interfaces"].items()
        if all(name in cards[leader]["interfaces"] for leader in leaders)
        and address.startswith("127.") == (len({card["host"] for card in cards}) == 1)
    ]
    own: dict[str, dict[str, Any]] = {}
    pairs = list(zip(leaders, [*leaders[1:], *leaders[:1]], strict=True))
    # A ring of an odd number of hosts needs a third turn, so that no host is in two pairs at once.
    turns = [pairs[0:-1:2], pairs[1::2], pairs[-1:]] if len(pairs) % 2 else [pairs[0::2], pairs[1::2]]
    for name in names:
        address = cards[world.rank]["interfaces"][name] if world.rank in leaders else None
        with _serving(world.rank, address) as port:
            ports = [one["port"] for one in everyone(f"{name}/port", {"port": port})]
            for number, turn in enumerate(turns):
                for sender, receiver in turn:
                    if sender == world.rank:
                        there = {**cards[receiver], "port": ports[receiver]}
                        own[name] = _timed(cards[sender], there, name, receiver)
                everyone(f"{name}/{number}", {})  # all pairs are done before the next turn
    received = [one for one in everyone("found", own) if one]
    return [_worst(name, cards[0]["interfaces"][name], [one[name] for one in received]) for name in names]


def _leaders(hosts: Sequence[str], world_size: int) -> list[int]:
    """Return the first rank of each host, or ranks 0 and 1 where there is one host."""
    first = [hosts.index(host) for host in dict.fromkeys(hosts)]
    return first if len(first) > 1 else list(range(min(world_size, 2)))


def _host() -> str:
    """Return what no two hosts have in common: names alone repeat in containers, boot ids on one kernel."""
    boot = ""
    with contextlib.suppress(OSError):  # only Linux has it
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    addresses = [address for address in interfaces().values() if not address.startswith("127.")]
    return " ".join([socket.gethostname(), boot, *sorted(addresses)])


def _worst(name: str, address: str, received: Sequence[Mapping[str, Any]]) -> Reach:
    reasons = [str(one["reason"]) for one in received if one["reason"]]
    good = [one for one in received if not one["reason"]]
    return Reach(
        name,
        address,
        failed=len(reasons),
        pairs=len(received),
        reason=next(iter(reasons), ""),
        rtt_ms=max((float(one["rtt_ms"]) for one in good), default=0.0),
        mbit_s=min((float(one["mbit_s"]) for one in good), default=0.0),
    )


def _timed(own: Mapping[str, Any], other: Mapping[str, Any], name: str, rank: int) -> dict[str, Any]:
    """Connect to another host's address on an interface, and time it."""
    here, there = own["interfaces"][name], other["interfaces"][name]
    if here == there and own["host"] != other["host"]:  # as bridges of containers often have
        return {"reason": f"both hosts have the address {here} there"}
    deadline = time.monotonic() + _LIMIT_S
    try:
        with socket.create_connection((there, other["port"]), _CONNECT_S, (here, 0)) as link:
            # else a small write may wait until the one before is acknowledged
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            answered = int.from_bytes(_read(link, 4, deadline), "big")
            if answered != rank:  # an address that somebody between the hosts translates
                return {"reason": f"{there} leads to rank {answered}, not to {rank}"}
            rtt_s = _round_trip(link, deadline)
            return {"reason": "", "rtt_ms": 1e3 * rtt_s, "mbit_s": _rate(link, deadline) / 1e6}
    except OSError as error:
        return {"reason": f"{here} to {there}: {error}"}


def _round_trip(link: socket.socket, deadline: float) -> float:
    taken = []
    for _ in range(_PINGS):
        start = time.perf_counter()
        _until(link, deadline).sendall(_PING * _PING_BYTES)
        _read(link, _PING_BYTES, deadline)
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _rate(link: socket.socket, deadline: float) -> float:
    """Return bit/s that arrive, headers not counted; the other side says when it has all."""
    sent, start = 0, time.perf_counter()
    while time.perf_counter() - start < _BULK_S:
        _until(link, deadline).sendall(_BULK * _CHUNK)
        sent += _CHUNK
    _until(link, deadline).sendall(_END)
    _read(link, 1, deadline)
    return 8 * sent / (time.perf_counter() - start)


def _until(link: socket.socket, deadline: float) -> socket.socket:
    """Let the next call of a socket wait no longer than this: sockets have a limit for each call."""
    link.settimeout(max(deadline - time.monotonic(), 0.001))
    return link


def _read(link: socket.socket, count: int, deadline: float) -> bytes:
    got = b""
    while len(got) < count:
        more = _until(link, deadline).recv(count - len(got))
        if not more:
            raise ConnectionError("the other side hung up")
        got += more
    return got


@contextmanager
def _serving(rank: int, address: str | None) -> Iterator[int]:
    """Answer pings and count bulk data at one address of this machine; gives the port, 0 for none."""
    server = None
    if address is not None:
        with contextlib.suppress(OSError):  # it is gone: who connects tells that
            server = socket.create_server((address, 0))
    if server is None:
        yield 0
        return
    with server:
        threading.Thread(target=_accept, args=(server, rank), daemon=True).start()
        yield server.getsockname()[1]


def _accept(server: socket.socket, rank: int) -> None:
    while True:
        try:
            link, _ = server.accept()
        except OSError:  # closed: the timing is over
            return
        with link, contextlib.suppress(OSError):  # whoever breaks off: the next is served
            deadline = time.monotonic() + _LIMIT_S
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.sendall(rank.to_bytes(4, "big"))
            while data := _until(link, deadline).recv(_CHUNK):
                if data[:1] == _PING:
                    link.sendall(data)
                # The end may come in one piece with data before it, so the last byte decides.
                elif data[-1:] == _END:
                    link.sendall(_END)
