"""Who is still there: every rank answers a small listener of its own, however long its step takes.

A collective that failed does not tell which rank is to blame: gloo reports the neighbour whose connection
broke, and that may be a survivor who has just given up. So a rank whose collective failed asks all others
directly. A dead rank refuses, a stopped one and one that is cut off are silent, and a living one answers from
a thread, busy or not. Before it leaves, a survivor tells the others whom it found missing, so that those who
notice later do not take it for the lost one. No store is needed, so rank 0 may be the one that is gone.
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

_TELL_S = 0.5  # for survivors to take note


@dataclass(frozen=True)
class Absent:
    """What a survivor found out.

    Attributes:
        lost: ranks that do not answer, or that other survivors missed; ascending.
        late: ranks that answer, but have come to fewer collectives than this rank, and have not given up.
    """

    lost: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)


class Presence:
    """One rank's listener, and its way to ask the others.

    Args:
        rank: this rank.
        host: address of this machine at which the others reach it.

    Attributes:
        card: what the others need to ask this rank; give them to `meet`.
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
        self._told: dict[int, list[int]] = {}
        self._others: dict[int, tuple[str, int, str]] = {}
        self._server = LineServer(host, self._answer)
        self.card = json.dumps([*self._server.address, self._token])

    def meet(self, cards: Mapping[int, str]) -> None:
        """Take the cards of the others; this rank's own is left out."""
        self._others = {r: tuple(json.loads(card)) for r, card in cards.items() if r != self.rank}

    def absent(self, group: str, grace_s: float) -> Absent:
        """Ask all others, and tell those that answer what was found; call it before leaving.

        Args:
            group: name of the group in which a collective failed, as counted in `came`.
            grace_s: seconds that the others have to answer.
        """
        self._gave_up = True
        replies = self._ask(self._others, {"from": self.rank, "group": group}, grace_s)
        leavers = dict(self._told)  # gave up before, and may have ended since
        silent = set(self._others) - set(replies) - set(leavers)
        lost = sorted(silent.union(*leavers.values()) - {self.rank})
        mine = self.came[group]
        behind = {r for r, reply in replies.items() if reply["came"] < mine and not reply.get("gave_up")}
        rest = {r: place for r, place in self._others.items() if r not in silent}
        self._ask(rest, {"from": self.rank, "lost": lost}, min(grace_s, _TELL_S))
        return Absent(lost, sorted(behind - set(lost)))

    def go_on_without(self, lost: Sequence[int]) -> None:
        """Forget what was found, and the lost ranks; for survivors that have formed a new group."""
        self._others = {rank: place for rank, place in self._others.items() if rank not in lost}
        self._told = {}
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
            self._told[asker] = [rank for rank in lost if self._knows(rank)]
        came = self.came[str(question.get("group"))]  # a Counter does not keep what it is only asked for
        return json.dumps({"rank": self.rank, "came": came, "gave_up": self._gave_up}).encode() + b"\n"

    def _knows(self, rank: object) -> TypeGuard[int]:
        """Return whether this is the number of another rank; what others say must not fill the memory."""
        return type(rank) is int and rank in self._others  # True == 1, but is no rank

    def _ask(
        self, places: Mapping[int, tuple[str, int, str]], question: Mapping[str, Any], limit_s: float
    ) -> dict[int, dict[str, Any]]:
        """Return the replies by rank, of those that came in time."""

        async def ask(host: str, port: int, token: str) -> dict[str, Any]:
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(json.dumps({**question, "to": token}).encode() + b"\n")
                reply: dict[str, Any] = json.loads(await reader.readline())
                return reply
            finally:
                writer.close()

        async def ask_all() -> list[dict[str, Any] | BaseException]:
            asked = (asyncio.wait_for(ask(*place), limit_s) for place in places.values())
            return await asyncio.gather(*asked, return_exceptions=True)

        if not places:
            return {}
        try:  # in a thread of its own: the caller's may run an event loop
            replies = bounded(lambda: asyncio.run(ask_all()), limit_s + 1.0)
        except (OSError, RuntimeError, TimeoutError):
            return {}
        return {
            rank: reply
            for rank, reply in zip(places, replies, strict=True)
            if isinstance(reply, dict) and reply.get("rank") == rank and isinstance(reply.get("came"), int)
        }


def attend(rank: int, find_host: Callable[[], str]) -> Presence | None:
    """Start to answer, or return None where this machine has no address; then nobody can name this rank.

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
