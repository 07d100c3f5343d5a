"""A failure detector: every rank answers roll calls from a thread, however long its step takes.

A collective that failed does not tell which rank is to blame: gloo reports the neighbour whose connection
broke, and that may be a survivor that has just given up. So a rank whose collective failed asks all others
directly. A dead rank refuses the connection; a stopped rank, or one that is cut off, is silent; a living
rank answers from a thread, busy or not. Before it leaves, a survivor tells the others which ranks it found
missing, so that ranks that notice later do not take the survivor for the lost one. No store is needed, so
the lost rank may be rank 0, which hosts the store.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from stenograd.launch.line_server import LineServer
from stenograd.launch.network import bounded

__all__ = ["Absent", "Presence", "attend"]

_TELL_S = 0.5  # for telling survivors; those that are asked have answered already, so they are quick


@dataclass(frozen=True)
class Absent:
    """Which ranks a survivor found lost or late.

    Attributes:
        lost: ranks that do not answer, or that other survivors missed; ascending.
        late: ranks that answer and have not given up, but have come to fewer collectives than this rank.
    """

    lost: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)


class Presence:
    """One rank's failure detector: answers roll calls, and holds one when a collective has failed.

    Args:
        rank: this rank.
        host: address of this machine at which the others reach it.

    Attributes:
        card: address and token with which others can ask this rank; pass it to their `meet`.
        came: number of collectives that this rank came to, by name of the group.

    Example:
        >>> one, two = Presence(0, "127.0.0.1"), Presence(1, "127.0.0.1")
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
        self._server = LineServer(host, self._answer)
        self.card = json.dumps([*self._server.address, self._token])

    def meet(self, cards: Mapping[int, str]) -> None:
        """Learn the addresses of all ranks; this rank's own is left out."""
        self._others = {r: tuple(json.loads(card)) for r, card in cards.items() if r != self.rank}

    def absent(self, group: str, grace_s: float) -> Absent:
        """Hold a roll call before leaving: ask all others, and tell those that answer what was found.

        Args:
            group: name of the group in which a collective failed, as counted in `came`.
            grace_s: seconds that the others have to answer.
        """
        self._gave_up = True
        replies = self._ask(self._others, {"from": self.rank, "group": group}, grace_s)
        leavers = dict(self._reported_lost)  # they gave up before, and may have ended since
        silent = set(self._others) - set(replies) - set(leavers)
        lost = sorted(silent.union(*leavers.values()) - {self.rank})
        mine = self.came[group]
        behind = {r for r, reply in replies.items() if reply["came"] < mine and not reply.get("gave_up")}
        answering = {r: address for r, address in self._others.items() if r not in silent}
        self._ask(answering, {"from": self.rank, "lost": lost}, min(grace_s, _TELL_S))
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
        question = json.loads(line)
        if not isinstance(question, dict) or question.get("to") != self._token:
            return b""
        asker, lost = question.get("from"), question.get("lost")
        if self._knows(asker) and isinstance(lost, list):
            self._reported_lost[asker] = [rank for rank in lost if self._knows(rank)]
        came = self.came[
            str(question.get("group"))
        ]  # reading a Counter adds no key, so strangers cannot fill it
        return json.dumps({"rank": self.rank, "came": came, "gave_up": self._gave_up}).encode() + b"\n"

    def _knows(self, rank: object) -> TypeGuard[int]:
        """Return whether this is another rank's number; strangers' claims must not fill the memory."""
        return type(rank) is int and rank in self._others  # not isinstance: True == 1, but is not a rank

    def _ask(
        self, addresses: Mapping[int, tuple[str, int, str]], question: Mapping[str, Any], limit_s: float
    ) -> dict[int, dict[str, Any]]:
        """Put a question to ranks all at once; return the replies that came in time, by rank."""

        async def ask(host: str, port: int, token: str) -> dict[str, Any]:
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(json.dumps({**question, "to": token}).encode() + b"\n")
                reply: dict[str, Any] = json.loads(await reader.readline())
                return reply
            finally:
                writer.close()

        async def ask_all() -> list[dict[str, Any] | BaseException]:
            asked = (asyncio.wait_for(ask(*address), limit_s) for address in addresses.values())
            return await asyncio.gather(*asked, return_exceptions=True)

        if not addresses:
            return {}
        try:  # in a thread of its own: the caller's may run an event loop
            replies = bounded(lambda: asyncio.run(ask_all()), limit_s + 1.0)
        except (OSError, RuntimeError, TimeoutError):
            return {}
        return {
            rank: reply
            for rank, reply in zip(addresses, replies, strict=True)
            if isinstance(reply, dict) and reply.get("rank") == rank and isinstance(reply.get("came"), int)
        }


def attend(rank: int, find_host: Callable[[], str]) -> Presence | None:
    """Start a failure detector; None where this machine has no address, so that nobody can ask this rank.

    Args:
        rank: this rank.
        find_host: returns the address at which the others reach this machine.

    Example:
        >>> presence = attend(0, lambda: "127.0.0.1")
        >>> presence.close()
    """
    try:
        return Presence(rank, find_host())
    except OSError:
        return None
