"""The delay between emulated hosts: a process that holds back what they send.

    python relay.py DELAY_S SWITCH HOST0 HOST1 ...    (names of network namespaces)

The kernel's own delay (netem) is missing in many, small virtual machines' above all.

Every host gets two TAP devices, `eth0` in its own namespace and `port0`, `port1`, ... in the switch's. What
a host sends on eth0 appears on its port after the delay; what arrives on the port appears on eth0 at once.
Between two hosts a frame passes one eth0 and so is delayed once.

`Hosts` runs this file as a script, which imports nothing of the package: torch alone would take seconds.
The process stays in the switch's namespace, is killed with it, and ends when its standard input closes, as
it does when the process that started it dies. Its devices vanish with it.
"""

from __future__ import annotations

import ctypes
import gc
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

__all__ = ["READY", "enter", "main"]

READY = "ready"

# linux/if_tun.h, linux/sched.h
_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4 = 0x01, 0x02
_CLONE_NEWNET = 0x40000000  # linux/sched.h; `os` has it from Python 3.12 on

_FRAME_BYTES = 66_000  # the largest segment that the kernel makes, 65,536 bytes, and its headers
_FRAMES_AT_ONCE = 64  # from one device before others get their turn
# More than 10 Gbit/s bring in 100 ms. A shaped host never has as much on the way; what an unshaped one sends
# beyond it is lost, as in a router.
_HELD_BYTES = 128 * 2**20
# What TCP may keep until it is acknowledged. Linux allows 4 MB, of which 2.8 are data: over a ping of 40 ms
# one connection then sends 560 Mbit/s, whatever the link's rate.
_TCP_BYTES = 64 * 2**20


def main(arguments: Sequence[str]) -> None:
    """Make the devices, say that they are there, and forward frames until standard input closes.

    Args:
        arguments: seconds of delay, the switch's namespace, the hosts' namespaces.
    """
    delay_s, switch, *hosts = float(arguments[0]), *arguments[1:]
    _run_before_others()
    outer = []
    for host in hosts:
        enter(host)
        _enlarge_buffers()
        outer.append(_open_tap("eth0"))
    enter(switch)  # last: here the process stays
    ports = [_open_tap(f"port{index}") for index in range(len(hosts))]
    print(READY, flush=True)
    _forward(delay_s, dict(zip(outer, ports, strict=True)), dict(zip(ports, outer, strict=True)))


def _run_before_others() -> None:
    """Be scheduled before the ranks, which keep the cores busy: a frame that waits for a core is late.

    With both of two cores busy, a ping over 5 ms took 10.13 to 10.25 ms.
    """
    gc.disable()  # nothing here makes cycles
    with suppress(OSError):  # some containers forbid it
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))


def enter(namespace: str) -> None:
    """Move this process to a network namespace."""
    # os.setns is there from Python 3.12 on.
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns to {namespace}")


def _enlarge_buffers() -> None:
    """Let TCP use the whole rate of a long link in the present namespace."""
    for kind in ("rmem", "wmem"):  # least, first and most bytes of a connection
        path = f"/proc/sys/net/ipv4/tcp_{kind}"
        with open(path) as file:
            least, first, most = file.read().split()
        with suppress(OSError), open(path, "w") as file:  # some containers forbid it
            file.write(f"{least} {first} {max(int(most), _TCP_BYTES)}")


def _open_tap(name: str) -> int:
    """Make a device in the present namespace; it exists as long as the file is open."""
    import fcntl  # not on Windows, where `hosts` imports this file to say that it cannot emulate

    tap = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    flags = _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR
    fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    # Segments of up to 64 kB come in one piece and without checksums, as over veth; the header that says
    # so is passed on with them.
    fcntl.ioctl(tap, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4)
    return tap


def _forward(delay_s: float, delayed: Mapping[int, int], direct: Mapping[int, int]) -> None:
    """Forward frames until standard input closes.

    Args:
        delay_s: seconds, at least 0.
        delayed: from -> to, for frames that wait.
        direct: from -> to, for frames that do not.
    """
    waiting: deque[tuple[float, int, bytes]] = deque()  # in order, since all wait equally long
    held_bytes = dict.fromkeys(delayed.values(), 0)
    poller = select.epoll()
    for tap in (*delayed, *direct, sys.stdin.fileno()):
        poller.register(tap, select.EPOLLIN)
    while True:
        now = time.monotonic()
        while waiting and waiting[0][0] <= now:
            _, port, frame = waiting.popleft()
            held_bytes[port] -= len(frame)
            _write(port, frame)
        # epoll's own timeout counts whole milliseconds, select's microseconds.
        left_s = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        select.select([poller], [], [], left_s)
        for tap, _ in poller.poll(0):
            if tap in direct:
                for frame in _read(tap):
                    _write(direct[tap], frame)
            elif tap in delayed:
                port = delayed[tap]
                due = time.monotonic() + delay_s
                for frame in _read(tap):
                    if held_bytes[port] < _HELD_BYTES:
                        held_bytes[port] += len(frame)
                        waiting.append((due, port, frame))
            else:
                return


def _read(tap: int) -> list[bytes]:
    frames = []
    with suppress(BlockingIOError):  # until nothing more has come
        for _ in range(_FRAMES_AT_ONCE):
            frames.append(os.read(tap, _FRAME_BYTES))
    return frames


def _write(tap: int, frame: bytes) -> None:
    with suppress(OSError):  # the device is down or full: a frame is lost, as on a wire
        os.write(tap, frame)


if __name__ == "__main__":
    main(sys.argv[1:])
