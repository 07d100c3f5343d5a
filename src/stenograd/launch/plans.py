"""Who takes part in an attempt of an open round: what workers say, and the plan that follows from it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

__all__ = ["Arrival", "Member", "Plan", "in_reach", "planned"]

_BLAMELESS = 2  # attempts of a round that may fail before somebody is left out of the next, whoever it is


class Member(NamedTuple):
    """A worker: its rank, and a name that no other process has had."""

    rank: int
    life: str


@dataclass(frozen=True)
class Arrival:
    """What a worker says when it comes to a round.

    Attributes:
        round: that it comes to.
        state: the round whose outcome it has; -1 for one that has just begun, which so gives nobody anything.
        weight: what it has trained since it last took part.
        given: whether that was given (`Sync.weight`), and not counted in passes.
        host: its machine's, in a word.
        opens: whether the others shall come, too; else it waits until one of them does this.
        groups: connections that it has, by the lives of their members.
        apart: lives of those that it cannot reach.
    """

    round: int
    state: int
    weight: float = 0.0
    given: bool = False
    host: str = ""
    opens: bool = True
    groups: Mapping[str, str] = field(default_factory=dict)
    apart: Sequence[str] = ()


@dataclass(frozen=True)
class Plan:
    """Who takes part in an attempt of a round.

    Attributes:
        round, attempt: which one it is.
        members: in the order of their ranks.
        states, weights, given, hosts: theirs, see `Arrival`.
        group: name of their connection.
    """

    round: int
    attempt: int
    members: tuple[Member, ...]
    states: tuple[int, ...]
    weights: tuple[float, ...]
    given: tuple[bool, ...]
    hosts: tuple[str, ...]
    group: str

    @property
    def at(self) -> str:
        """What the store calls the attempt."""
        return f"{self.round}.{self.attempt}"

    @property
    def donor(self) -> int:
        """Index of the member that gives others what they lack."""
        return self.states.index(max(self.states))

    @property
    def behind(self) -> list[int]:
        """Indices of the members that lack something."""
        newest = max(self.states)
        if newest < 0:  # all begin
            return [i for i in range(len(self.members)) if i != self.donor]
        return [i for i, state in enumerate(self.states) if state < newest]

    @property
    def lives(self) -> str:
        """The members, in a word."""
        return lives_of(self.members)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The members' ranks."""
        return tuple(member.rank for member in self.members)

    @classmethod
    def read(cls, text: bytes) -> Plan:
        """Return the plan that was written as JSON."""
        found: dict[str, Any] = json.loads(text)
        members = tuple(Member(*member) for member in found.pop("members"))
        rest: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in found.items()}
        return cls(members=members, **rest)

    def text(self) -> str:
        """Return the plan as JSON."""
        return json.dumps(asdict(self))


def planned(k: int, attempt: int, come: Mapping[Member, Arrival]) -> Plan:
    """Return the plan for those that have come to an attempt of round k, when enough have."""
    members = in_reach(sorted(come), come, k)  # by k: those that are apart take turns
    members = _without_one(members, come, attempt - _BLAMELESS)
    names = {come[member].groups.get(lives_of(members)) for member in members}  # one if all have it
    group = names.pop() if len(names) == 1 else None
    return Plan(
        k,
        attempt,
        tuple(members),
        tuple(come[member].state for member in members),
        tuple(come[member].weight for member in members),
        tuple(come[member].given for member in members),
        tuple(come[member].host for member in members),
        group or f"{k}.{attempt}",
    )


def in_reach(members: list[Member], come: Mapping[Member, Arrival], turn: int) -> list[Member]:
    """Return members that reach each other: leave out who is apart from most, and in turns where many are.

    Somebody with the newest state stays, whoever that is.
    """
    newest = max((arrival.state for arrival in come.values()), default=-1)
    while True:
        apart = {
            member: sum(
                other.life in come[member].apart or member.life in come[other].apart for other in members
            )
            for member in members
        }
        most = max(apart.values(), default=0)
        if not most:
            return members
        keep = [member for member in members if come[member].state == newest]
        out = [member for member in members if apart[member] and keep != [member]]
        worst = [member for member in out if apart[member] == max(apart[one] for one in out)]
        members = [member for member in members if member != worst[turn % len(worst)]]


def _without_one(members: Sequence[Member], come: Mapping[Member, Arrival], turn: int) -> list[Member]:
    """Leave out one after the other where attempts fail and nobody is lost, as if a link were cut."""
    if turn < 0 or len(members) == 1:
        return [*members]
    out = members[-1 - turn % len(members)]
    left = [member for member in members if member != out]
    newest = max(arrival.state for arrival in come.values())  # somebody must give it to the others
    return left if any(come[member].state == newest for member in left) else [*members]


def lives_of(members: Sequence[Member]) -> str:
    """Return a set of members in a word."""
    return ",".join(member.life for member in members)
