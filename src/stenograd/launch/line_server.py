"""A thread that answers one line from each connection, and that no stranger at its port can block."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

__all__ = ["LINE_BYTES", "LineServer"]

LINE_BYTES = 1 << 16  # a question names its group, by up to 7 bytes per rank
# For the whole line, from the moment of the connection; on a full link a lost packet alone costs seconds.
_LINE_S = 5.0
# They are read side by side, each with a limit for its line: read one after another, with a limit per read,
# one client that sent a byte every 0.5 s, or 50 idle ones, made a living rank look lost in a roll call of
# 2 s, in 2 of 2 tries each.
_ROOM = 64
_PAUSE_S = 0.05  # after accept failed, or the loop would spin while no descriptor is free


@dataclass
class _Visitor:
    """A connection whose line has not ended yet."""

    deadline: float
    line: bytearray = field(default_factory=bytearray)


class LineServer:
    r"""Reads one line from each connection, answers it and closes the connection, in one thread.

    No connection can keep another waiting: bytes are read as they come, each connection has five seconds for
    its whole line, and where there is no room for another the oldest makes it. A line of more than 64 KiB is
    not answered.

    Args:
        host: address of this machine to listen at.
        answer: called in the thread with each line; returns the answer. If it raises, as a stranger's line
            may make it do, only that connection is dropped.

    Attributes:
        address: host and port at which it listens.
        room: connections whose lines are read at once, at least 1; 64 unless it is set.

    Raises:
        OSError: it cannot listen there.

    Example:
        >>> server = LineServer("127.0.0.1", bytes.upper)
        >>> with socket.create_connection(server.address) as connection:
        ...     connection.sendall(b"hello\n")
        ...     connection.recv(100)
        b'HELLO\n'
        >>> server.close()
    """

    def __init__(self, host: str, answer: Callable[[bytes], bytes]) -> None:
        family, kind, protocol, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        self._answer = answer
        self.room = _ROOM
        self._visitors: dict[socket.socket, _Visitor] = {}  # oldest first
        self._listener = socket.socket(family, kind, protocol)
        try:
            self._listener.bind(address)
            self._listener.listen(socket.SOMAXCONN)
            self._listener.setblocking(False)
            self._end, self._ended = socket.socketpair()
        except OSError:
            self._listener.close()
            raise
        self.address: tuple[str, int] = (str(address[0]), self._listener.getsockname()[1])
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._selector.register(self._ended, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._serve, name="stenograd-failure-detector", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and drop all connections; a second call does nothing."""
        self._end.close()  # which the thread sees at once
        self._thread.join(_LINE_S)

    def _serve(self) -> None:
        try:
            while True:
                soonest = next((visitor.deadline for visitor in self._visitors.values()), None)
                wait_s = None if soonest is None else max(0.0, soonest - time.monotonic())
                ready = {key.fileobj for key, _ in self._selector.select(wait_s)}
                if self._ended in ready:
                    return
                for peer in [peer for peer in self._visitors if peer in ready]:
                    self._read(peer)
                now = time.monotonic()
                for peer in [peer for peer, visitor in self._visitors.items() if visitor.deadline <= now]:
                    self._drop(peer)
                # Only after reading what has come: accepting may drop the oldest, whose line may be complete.
                if self._listener in ready:
                    self._accept()
        finally:
            for peer in [*self._visitors]:
                self._drop(peer)
            self._selector.close()
            self._listener.close()
            self._ended.close()

    def _accept(self) -> None:
        if len(self._visitors) >= self.room:
            self._drop(next(iter(self._visitors)))
        try:
            peer, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):  # the peer has gone already
            return
        except OSError:  # such as EMFILE, where the oldest may hold the last descriptor
            if self._visitors:
                self._drop(next(iter(self._visitors)))
            time.sleep(_PAUSE_S)
            return
        peer.setblocking(False)
        self._visitors[peer] = _Visitor(time.monotonic() + _LINE_S)
        self._selector.register(peer, selectors.EVENT_READ)

    def _read(self, peer: socket.socket) -> None:
        line = self._visitors[peer].line
        with contextlib.suppress(Exception):  # whatever strangers do must not end this thread
            try:
                got = peer.recv(LINE_BYTES - len(line))
            except BlockingIOError:
                return
            line += got
            if line.endswith(b"\n"):  # one send is enough: the send buffer of a fresh connection is empty
                peer.send(self._answer(bytes(line)))
            elif got and b"\n" not in got and len(line) < LINE_BYTES:
                return
        self._drop(peer)

    def _drop(self, peer: socket.socket) -> None:
        del self._visitors[peer]
        self._selector.unregister(peer)
        peer.close()
