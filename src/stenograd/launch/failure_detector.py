"""A failure detector: every rank answers roll calls from a thread, however long its step takes.

A collective that failed does not tell which rank is to blame: gloo reports the neighbour whose connection
broke, and that may be a survivor that has just given up. So a rank whose collective failed asks all others
directly. A dead rank refuses the connection; a stopped rank, or one that is cut off, is silent; a living
rank answers from a thread, busy or not. One that drops the connection, for want of room or descriptors, is
asked again until the time is over. Before it leaves, a survivor tells the others which ranks it found
missing, so that ranks that notice later do not take the survivor for the lost one. No store is needed, so
the lost rank may be rank 0, which hosts the store.

Questions and answers carry an HMAC-SHA256 under a key that is made of STENOGRAD_SECRET and the asked rank's
token. Tokens lie in the rendezvous, where strangers may read them if it is a port; the secret never travels.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import hmac
import json
import os
import secrets
import selectors
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from stenograd.errors import LaunchError
from stenograd.launch.local_workers import SECRET_VARIABLE
from stenograd.launch.network import bounded, unshared

__all__ = ["Absent", "FailureDetector", "LineServer", "attend"]

_TELL_S = 0.5  # at least, for telling survivors; those that are told have answered already
_AGAIN_S = 0.1  # until a rank that dropped the question is asked again
# The asker's own want of descriptors, memory or ports, which says nothing about the rank it would ask.
_OWN_WANT = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL}

_LINE_BYTES = 1 << 16  # a question names its group, by up to 7 bytes per rank
# For the whole line, from the moment of the connection; on a full link a lost packet alone costs seconds.
_LINE_S = 5.0
# They are read side by side, each with a limit for its line: read one after another, with a limit per read,
# one client that sent a byte every 0.5 s, or 50 idle ones, made a living rank look lost in a roll call of
# 2 s, in 2 of 2 tries each.
_ROOM = 64
_PAUSE_S = 0.05  # after accept failed, or the loop would spin while no descriptor is free


@dataclass(frozen=True)
class Absent:
    """Which ranks a survivor found lost or late.

    Attributes:
        lost: ranks that do not answer; ascending. What others report removes no rank that answers, and a
            rank that this one had no descriptor or memory to ask is not counted.
        late: ranks that answer and have not given up, but have come to fewer collectives than this rank.
    """

    lost: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)


class FailureDetector:
    """One rank's failure detector: answers roll calls, and holds one when a collective has failed.

    Args:
        rank: this rank.
        host: address of this machine at which the others reach it.

    Attributes:
        card: address and token with which others can ask this rank, and a proof that it has the secret;
            pass it to their `meet`.
        came: number of collectives that this rank came to, by name of the group.

    Example:
        >>> one, two = FailureDetector(0, "127.0.0.1"), FailureDetector(1, "127.0.0.1")
        >>> one.meet({0: one.card, 1: two.card})
        >>> one.came["world"] += 1
        >>> one.absent("world", 1.0)
        Absent(lost=[], late=[1])
        >>> two.close()
        >>> one.absent("world", 1.0)
        Absent(lost=[1], late=[])
        >>> one.close()
    """

    def __init__(self, rank: int, host: str) -> None:
        self.rank = rank
        self._token = secrets.token_hex(8)
        self.came: Counter[str] = Counter()
        self._gave_up = False
        self._reported_lost: dict[int, list[int]] = {}  # by the rank that reported it
        self._others: dict[int, tuple[str, int, str]] = {}
        self._secret = os.environ.get(SECRET_VARIABLE, "")
        with unshared():
            self._server = LineServer(host, self._answer)
        place = [*self._server.address, self._token]
        self.card = json.dumps([*place, self._proof(rank, place)])

    def meet(self, cards: Mapping[int, str]) -> None:
        """Learn the addresses of all ranks; this rank's own is left out.

        Raises:
            LaunchError: a rank has another STENOGRAD_SECRET, or a stranger has changed its card.
        """
        received = {r: json.loads(card) for r, card in cards.items() if r != self.rank}
        foreign = [r for r, (*place, proof) in received.items() if proof != self._proof(r, place)]
        if foreign:
            raise LaunchError(
                f"rank(s) {', '.join(map(str, foreign))} and rank {self.rank} have different values of "
                f"{SECRET_VARIABLE}: export the same one on all hosts, or none"
            )
        self._others = {r: tuple(place) for r, (*place, _) in received.items()}
        self._server.room += 2 * len(received)  # each asks, and tells; what was there is for strangers

    def absent(self, group: str, grace_s: float) -> Absent:
        """Hold a roll call before leaving: ask all others, and tell those that answer what was found.

        Args:
            group: name of the group in which a collective failed, as counted in `came`.
            grace_s: seconds that the others have to answer, all together; telling them takes as long again
                at most.
        """
        self._gave_up = True  # before asking: who asks meanwhile must not take this rank for late
        replies, unasked = self._ask(self._others, {"from": self.rank, "group": group}, grace_s)
        leavers = dict(self._reported_lost)  # they gave up before, and may have ended since
        silent = set(self._others) - set(replies) - set(leavers) - unasked
        reported = set[int]().union(*leavers.values()) - set(replies) - {self.rank}
        lost = sorted(silent | reported)
        own = self.came[group]
        behind = {r for r, reply in replies.items() if reply["came"] < own and not reply.get("gave_up")}
        answering = {r: address for r, address in self._others.items() if r not in silent}
        slowest_s = max((reply["took_s"] for reply in replies.values()), default=0.0)
        self._ask(answering, {"from": self.rank, "lost": lost}, min(grace_s, max(_TELL_S, 2.0 * slowest_s)))
        return Absent(lost, sorted(behind - set(lost)))

    def go_on_without(self, lost: Sequence[int]) -> None:
        """Forget what was found, and the lost ranks; for survivors that have formed a new group."""
        self._others = {rank: address for rank, address in self._others.items() if rank not in lost}
        self._reported_lost = {}
        self._gave_up = False

    def close(self) -> None:
        """Stop answering."""
        self._server.close()

    def _answer(self, line: bytes) -> bytes:
        received = json.loads(line)
        if not isinstance(received, list) or [type(part) for part in received] != [str, str]:
            return b""
        said, mac = received
        # Bytes, because compare_digest raises for text beyond ASCII, which a stranger may send.
        if not hmac.compare_digest(mac.encode(), self._mac(self._token, said).encode()):
            return b""
        question = json.loads(said)
        if not isinstance(question, dict):
            return b""
        asker, lost = question.get("from"), question.get("lost")
        if self._knows(asker) and isinstance(lost, list):
            self._reported_lost[asker] = [rank for rank in lost if self._knows(rank)]
        came = self.came[
            str(question.get("group"))
        ]  # reading a Counter adds no key, so strangers cannot fill it
        reply = json.dumps({"rank": self.rank, "came": came, "gave_up": self._gave_up})
        # The question holds a number that is used once, so that an answer heard before cannot be repeated.
        return json.dumps([reply, self._mac(self._token, said + reply)]).encode() + b"\n"

    def _mac(self, token: str, text: str) -> str:
        key = hashlib.sha256(f"{self._secret} {token}".encode()).digest()
        return hmac.new(key, text.encode(), "sha256").hexdigest()

    def _proof(self, rank: int, place: Sequence[Any]) -> str:
        return self._mac("card", json.dumps([rank, *place]))

    def _knows(self, rank: object) -> TypeGuard[int]:
        """Return whether this is another rank's number; strangers' claims must not fill the memory."""
        return type(rank) is int and rank in self._others  # not isinstance: True == 1, but is not a rank

    def _ask(
        self, addresses: Mapping[int, tuple[str, int, str]], question: Mapping[str, Any], limit_s: float
    ) -> tuple[dict[int, dict[str, Any]], set[int]]:
        """Put a question to ranks all at once, within one limit.

        Returns:
            The replies that came, by rank, each with the seconds it took; and the ranks that could not be
            asked for a reason that lies with this one.
        """
        start, unasked = time.monotonic(), set[int]()

        async def ask(rank: int, host: str, port: int, token: str) -> dict[str, Any] | None:
            while True:
                try:
                    # Only the last attempt decides whether this rank was able to ask.
                    unasked.discard(rank)
                    if reply := await self._asked(host, port, token, question):
                        return {**reply, "took_s": time.monotonic() - start}
                except (ConnectionRefusedError, ValueError):  # nobody listens there, or a stranger
                    return None
                except OSError as error:
                    if error.errno in _OWN_WANT:
                        unasked.add(rank)
                await asyncio.sleep(_AGAIN_S)

        async def ask_all() -> list[dict[str, Any] | BaseException | None]:
            asked = (asyncio.wait_for(ask(rank, *place), limit_s) for rank, place in addresses.items())
            return await asyncio.gather(*asked, return_exceptions=True)

        if not addresses:
            return {}, unasked
        try:  # in a thread of its own: the caller's may run an event loop
            # One second more, so that asyncio's limit comes first: it keeps the replies that have come.
            replies = bounded(lambda: asyncio.run(ask_all()), limit_s + 1.0)
        except (OSError, RuntimeError, TimeoutError):  # it could not ask at all
            return {}, set(addresses)
        found = {
            rank: reply
            for rank, reply in zip(addresses, replies, strict=True)
            if isinstance(reply, dict) and reply.get("rank") == rank and isinstance(reply.get("came"), int)
        }
        return found, unasked

    async def _asked(
        self, host: str, port: int, token: str, question: Mapping[str, Any]
    ) -> dict[str, Any] | None:
        """Ask one rank once; None where it dropped the connection.

        Raises:
            OSError: no connection, or a broken one.
            ValueError: a stranger answers there.
        """
        reader, writer = await asyncio.open_connection(host, port)
        try:
            said = json.dumps({**question, "once": secrets.token_hex(8)})
            writer.write(json.dumps([said, self._mac(token, said)]).encode() + b"\n")
            line = await reader.readline()
            if not line.endswith(b"\n"):
                return None
            try:
                reply, mac = json.loads(line)
                if hmac.compare_digest(str(mac).encode(), self._mac(token, said + reply).encode()):
                    received: dict[str, Any] = json.loads(reply)
                    return received
            except TypeError as error:  # no list of two texts
                raise ValueError("a stranger answers there") from error
            raise ValueError("a stranger answers there")
        finally:
            writer.close()


def attend(rank: int, find_host: Callable[[], str]) -> FailureDetector | None:
    """Start a failure detector; None where this machine has no address, so that nobody can ask this rank.

    Args:
        rank: this rank.
        find_host: returns the address at which the others reach this machine.

    Example:
        >>> detector = attend(0, lambda: "127.0.0.1")
        >>> detector.close()
    """
    try:
        return FailureDetector(rank, find_host())
    except OSError:
        return None


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
                # The oldest is due first, because all visitors get equally long.
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
                got = peer.recv(_LINE_BYTES - len(line))
            except BlockingIOError:
                return
            line += got
            if line.endswith(b"\n"):  # one send is enough: the send buffer of a fresh connection is empty
                peer.send(self._answer(bytes(line)))
            elif got and b"\n" not in got and len(line) < _LINE_BYTES:
                return
        self._drop(peer)

    def _drop(self, peer: socket.socket) -> None:
        del self._visitors[peer]
        self._selector.unregister(peer)
        peer.close()
