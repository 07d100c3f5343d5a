"""Small network helpers without torch: bounded waits, ports, addresses and the loopback interface."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

__all__ = [
    "GLOO_INTERFACE",
    "Door",
    "Knocks",
    "Sockets",
    "address_towards",
    "await_port",
    "bounded",
    "opened",
    "own_address",
    "sever",
    "silent",
    "unshared",
    "use_loopback",
]

T = TypeVar("T")

GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"

_POLL_S = 0.1
_DESCRIPTORS = "/dev/fd"
_BACKLOG = 128
_TCP_INFO_BYTES, _U32, _ESTABLISHED = 64, struct.Struct("=I"), 1  # struct tcp_info of linux/tcp.h

Sockets = frozenset[tuple[int, int]]  # descriptor and inode of each
_ours: set[tuple[int, int]] = set()  # descriptor and inode of the sockets that `unshared` saw


def bounded(call: Callable[[], T], limit_s: float) -> T:
    """Run a call that may block forever outside Python, and stop waiting after a limit.

    Args:
        call: what to run, in a thread that ends with the process.
        limit_s: seconds to wait for it.

    Returns:
        What the call returned.

    Raises:
        TimeoutError: it did not come back in time.
        BaseException: whatever the call raised.

    Example:
        >>> bounded(lambda: 1 + 1, 5.0)
        2
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    thread.join(max(0.1, limit_s))
    if errors:
        raise errors[0]
    if not results:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return results[0]


def await_port(host: str, port: int, deadline: float) -> None:
    """Wait until somebody listens at an address.

    Args:
        host: name or address.
        port: 1 to 65535.
        deadline: time on `time.monotonic`'s clock, in seconds, at which to give up.

    Raises:
        OSError: nobody listened in time; the error of the last attempt.
    """
    while True:
        try:
            # At least 0.1: a timeout of 0 does not wait, and one below 0 is a ValueError, not an OSError.
            socket.create_connection((host, port), timeout=max(0.1, deadline - time.monotonic())).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
        time.sleep(_POLL_S)


def address_towards(host: str, port: int) -> str:
    """Return the address that this machine uses to reach another one; nothing is sent.

    Args:
        host: name or address of the other machine, or of this one.
        port: 1 to 65535.

    Raises:
        OSError: there is no route to it.

    Example:
        >>> address_towards("127.0.0.1", 29500)
        '127.0.0.1'
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # UDP: it chooses the route, and no packet leaves
        return str(probe.getsockname()[0])


def own_address() -> str:
    """Return an IPv4 address of this host that other hosts can use, or its name if it has none."""
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        address = socket.gethostbyname(name)
        if not address.startswith("127."):
            return address
    return name


def use_loopback() -> bool:
    """Bind gloo to the loopback interface, unless the user chose one.

    The host name of a lone machine often does not resolve, and gloo would look it up.

    Returns:
        Whether this set `GLOO_SOCKET_IFNAME`.
    """
    if GLOO_INTERFACE in os.environ:
        return False
    try:
        names = {name for _, name in socket.if_nameindex()}
    except (AttributeError, OSError):
        return False
    for loopback in ("lo", "lo0"):  # Linux, macOS
        if loopback in names:
            os.environ[GLOO_INTERFACE] = loopback
            return True
    return False


@contextmanager
def unshared() -> Iterator[None]:
    """Keep the sockets that are opened in the block from processes that this one forks or starts.

    A child of a killed rank, such as a worker of a `DataLoader`, would otherwise hold the rank's connections
    open until it ends itself, 5 to 32 s later, and the others would not notice before.

    Example:
        >>> with unshared():
        ...     pass  # make a process group
    """
    before = _sockets()
    yield
    for number, inode in _sockets() - before:
        with contextlib.suppress(OSError):  # another thread's, closed meanwhile
            # This is for programs that are started; a forked child gives the sockets up in `_let_go`.
            os.set_inheritable(number, False)
            _ours.add((number, inode))


@contextmanager
def opened() -> Iterator[list[Sockets]]:
    """Put the connections that are opened in the block in a list, at its end, for `sever`.

    Example:
        >>> with opened() as found:
        ...     pass  # make a process group
        >>> found
        [frozenset()]
    """
    before, found = _sockets(), list[Sockets]()
    yield found
    connected = set[tuple[int, int]]()
    for number, inode in _sockets() - before:
        with contextlib.suppress(OSError):  # another thread's, closed meanwhile
            if not _listens(number):
                connected.add((number, inode))
    found.append(frozenset(connected))


def sever(sockets: Sockets) -> None:
    """End connections at once, so that whoever waits for something from there gets an error."""
    for number, inode in sockets:
        with contextlib.suppress(OSError):  # closed since
            if os.fstat(number).st_ino == inode:  # else the number is another file's by now
                with socket.socket(fileno=os.dup(number)) as copy:
                    # Not a close: gloo owns the descriptor, and its thread must see the connection end.
                    copy.shutdown(socket.SHUT_RDWR)


def silent(sockets: Sockets, limit_s: float) -> bool:
    """Return whether a peer has acknowledged nothing for so long, though it was sent something.

    TCP itself goes on for a quarter of an hour. A peer that is slow or frozen acknowledges: its kernel does.
    """
    if sys.platform != "linux":
        return False  # no such information, and the timeout decides
    for number, inode in sockets:
        with contextlib.suppress(OSError):  # closed since
            if os.fstat(number).st_ino == inode:
                with socket.socket(fileno=os.dup(number)) as copy:
                    # Read below: tcpi_state, tcpi_retransmits, tcpi_rto and tcpi_last_ack_recv. The last
                    # does not suffice: it grows on an idle connection, too, which waits for nothing.
                    info = copy.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
                state, repeats = info[0], info[2]
                (timeout_us,), (heard_ms,) = (_U32.unpack_from(info, at) for at in (8, 56))
                # The timeout doubles with each repetition, so this is the time since the first one was due.
                waited_s = timeout_us * (1 - 0.5**repeats) / 1e6
                if state == _ESTABLISHED and waited_s >= limit_s and heard_ms >= 1e3 * limit_s:
                    return True
    return False


class Door:
    """A port of this process at which others knock, to learn whether they reach it; nothing is said there.

    Args:
        address: of this host, at which others reach it.

    Raises:
        OSError: the address is none of this host's.
    """

    def __init__(self, address: str) -> None:
        family, *_ = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        self._socket = socket.create_server((address, 0), family=family, backlog=_BACKLOG)
        self._socket.setblocking(False)
        self.address = address, int(self._socket.getsockname()[1])

    def clear(self) -> bool:
        """Send those away that have knocked; return whether somebody has."""
        # Bounded, because the thread that sends heartbeats calls this, and somebody may knock without end.
        for count in range(_BACKLOG):
            try:
                self._socket.accept()[0].close()
            except OSError:
                return count > 0
        return True

    def close(self) -> None:
        """Let nobody knock any more."""
        self._socket.close()


class Knocks:
    """Attempts to reach doors, all at once; `close` ends those that have not answered.

    Args:
        doors: their addresses and ports, by name.
    """

    def __init__(self, doors: Mapping[str, tuple[str, int]]) -> None:
        self._tried: dict[str, socket.socket] = {}
        self.answered = set[str]()
        for name, address in doors.items():
            with contextlib.suppress(OSError):  # no descriptor is left, or no such name: nothing is known
                family, kind, protocol, _, there = socket.getaddrinfo(*address, type=socket.SOCK_STREAM)[0]
                self._tried[name] = tried = socket.socket(family, kind, protocol)
                tried.setblocking(False)
                tried.connect_ex(there)

    def unanswered(self) -> set[str]:
        """Return the names of the doors that have not answered yet; the others are in `answered`."""
        for name, tried in [*self._tried.items()]:
            with contextlib.suppress(OSError):  # not yet
                tried.getpeername()
                self.answered.add(name)
                self._tried.pop(name).close()
        return {*self._tried}

    def close(self) -> None:
        """Wait for no more."""
        while self._tried:
            self._tried.popitem()[1].close()


def _sockets() -> set[tuple[int, int]]:
    """Return descriptor and inode of this process's TCP sockets; none where the system does not tell."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError, ValueError):  # closed since: the listing's own is among them
                status = os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode) and _port(int(name)):
                    found.add((int(name), status.st_ino))
    return found


def _port(number: int) -> int:
    """Return the port of this machine that a TCP socket uses; 0 for any other socket."""
    # Of a copy, because the object closes its descriptor.
    with socket.socket(fileno=os.dup(number)) as copy:
        inet = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
        return int(copy.getsockname()[1]) if inet else 0


def _listens(number: int) -> bool:
    with socket.socket(fileno=os.dup(number)) as copy:  # of a copy, as above
        return bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _let_go() -> None:
    """Give up the parent's sockets in a child that was forked; the parent's connections stay as they are.

    Connections that were accepted later have the port of a listener. /dev/null takes each number, so that
    objects of the parent which think that they own it close nothing of the child's.
    """
    if not _ours:
        return
    with contextlib.suppress(OSError):
        ports = set()
        for number, inode in _ours:
            with contextlib.suppress(OSError):
                if os.fstat(number).st_ino == inode and _listens(number):
                    ports.add(_port(number))
        null = os.open(os.devnull, os.O_RDWR)
        for number, inode in _sockets():
            if (number, inode) in _ours or _port(number) in ports:
                os.dup2(null, number, inheritable=False)
        os.close(null)
    _ours.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
