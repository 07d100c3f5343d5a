"""What a method does in a step, in order: computing, collectives, what they send, what waits for what."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from stenograd.wire.gloo import Route, frames, route, spreads
from stenograd.wire.requests import REDUCTIONS, Op
from stenograd.wire.traffic import moved_bytes

__all__ = [
    "BROADCAST",
    "Collective",
    "Event",
    "Program",
    "at_size",
    "hops",
    "messages",
    "wire_bytes",
    "with_ratio",
]

BROADCAST = "broadcast"
_READING_S = 1e-4  # of Python and PyTorch, for a message of any size; chosen, not fitted


class Collective(NamedTuple):
    """One collective that a rank issues.

    Args:
        op: value of `requests.Op`, or "broadcast".
        nbytes: handed to it by this rank.
        itemsize: bytes of an element.
        size: number of ranks in the group.
        peers: that an exchange with neighbours sends to.
    """

    op: str
    nbytes: int
    itemsize: int = 1
    size: int = 1
    peers: tuple[int, ...] = ()


class Event(NamedTuple):
    """One thing that a thread does.

    Args:
        kind: "issue" a collective; "wait" for one; "post" a job to another thread; "begin" and "done" of a
            job there; "join": wait until a job is done; "decoded": a reply was read; "step": a step ends.
        number: of the collective, the job or the step.
        compute_s: processor seconds before it.
        collective: what is issued.
    """

    kind: str
    number: int = 0
    compute_s: float = 0.0
    collective: Collective | None = None


@dataclass(frozen=True, kw_only=True)
class Program:
    """What one rank does in some periods of a method's schedule, thread by thread.

    Attributes:
        method: how gradients travel.
        world_size: number of ranks.
        period: recorded steps after which the schedule begins again.
        apart: recorded steps from one start of an exchange to the next.
        idle: steps that only compute, and that stand before the last step of each such stretch. They are not
            recorded: `local:every=64` is one recorded step and 63 idle ones.
        lanes: events of each thread, the training's own first.
    """

    method: str
    world_size: int
    period: int = 1
    apart: int = 1
    idle: int = 0
    lanes: tuple[tuple[Event, ...], ...]

    @property
    def steps(self) -> int:
        """Number of training steps in a period."""
        return self.period + self.period // self.apart * self.idle

    @property
    def periods(self) -> int:
        """Number of periods that were recorded."""
        return sum(e.kind == "step" for e in self.lanes[0]) // self.period

    @property
    def collectives(self) -> list[Collective]:
        """All collectives, thread by thread."""
        return [e.collective for lane in self.lanes for e in lane if e.collective is not None]

    @property
    def compute_s(self) -> float:
        """Processor seconds that all threads together spend in a recorded step."""
        return sum(e.compute_s for lane in self.lanes for e in lane) / (self.period * self.periods)

    @property
    def moved_bytes(self) -> float:
        """Bytes that a rank sends per training step, headers not counted."""
        moved = sum(
            moved_bytes(Op(c.op), c.nbytes, c.size, len(c.peers))
            for c in self.collectives
            if c.op != BROADCAST
        )
        return moved / (self.periods * self.steps)

    def scaled(self, times: float, lanes: slice = slice(None)) -> Program:
        """Return the same where some threads compute so many times as long."""
        chosen = range(len(self.lanes))[lanes]
        return replace(
            self,
            lanes=tuple(
                tuple(e._replace(compute_s=e.compute_s * times) for e in lane) if at in chosen else lane
                for at, lane in enumerate(self.lanes)
            ),
        )

    @classmethod
    def from_json(cls, received: Mapping[str, Any]) -> Program:
        """Undo `dataclasses.asdict`, also where JSON stands in between."""

        def event(kind: str, number: int, compute_s: float, about: list[Any] | None) -> Event:
            found = None if about is None else Collective(*about)._replace(peers=tuple(about[4]))
            return Event(kind, number, compute_s, found)

        return cls(
            **{**received, "lanes": tuple(tuple(event(*e) for e in lane) for lane in received["lanes"])}
        )


def hops(op: Op, nbytes: int, world_size: int) -> int:
    """Return how many messages of a collective wait for one another.

    Example:
        >>> hops(Op.MEAN, 1 << 20, 8), hops(Op.GATHER, 1 << 20, 8), hops(Op.GATHER, 100, 8)
        (14, 7, 1)
    """
    if world_size == 1:
        return 0
    return messages(op, world_size) if route(op, nbytes, world_size) is Route.RING else 1


def messages(op: Op, world_size: int) -> int:
    """Return how many messages a rank sends for a collective that reaches all ranks.

    Example:
        >>> messages(Op.MEAN, 8), messages(Op.SCATTER, 8)
        (14, 7)
    """
    return (2 if op in REDUCTIONS else 1) * (world_size - 1)


def wire_bytes(op: Op, nbytes: int, world_size: int, *, itemsize: int = 4, peers: int = 1) -> int:
    """Return what a rank sends for a collective, with the headers that gloo and TCP add.

    Example:
        >>> wire_bytes(Op.MEAN, 1_000_000, 2) / 1_000_000
        1.049878
    """
    if nbytes == 0:
        return 0
    # Such a collective travels as an all-to-all of equal rows (`wire.gloo.route`).
    if spreads(op, nbytes, world_size):
        op, nbytes = Op.SCATTER, world_size * nbytes
    framing = frames(op, nbytes, world_size, itemsize=itemsize, peers=peers)
    return moved_bytes(op, nbytes, world_size, peers) + framing.header_bytes


def with_ratio(program: Program, times: float) -> Program:
    """Return what a sparsifier does that sends so many times as many elements, by arithmetic.

    Messages, and the time to read them but for what each takes in any case, grow with the elements; dense
    averages among them stay.
    """
    lanes = []
    for lane in program.lanes:
        events = []
        for event in lane:
            about, compute_s = event.collective, event.compute_s
            if about is not None and Op(about.op) not in REDUCTIONS:
                about = about._replace(nbytes=math.ceil(about.nbytes * times))
            if event.kind == "decoded":
                fixed_s = min(compute_s, _READING_S)
                compute_s = fixed_s + times * (compute_s - fixed_s)
            events.append(event._replace(compute_s=compute_s, collective=about))
        lanes.append(tuple(events))
    return replace(program, lanes=tuple(lanes))


def at_size(program: Program, world_size: int) -> Program:
    """Return a program for another number of ranks, by arithmetic.

    Collectives keep their bytes per rank. A gather after an all-to-all brings the sums that ranks own, a
    share of the whole each; of any other gather, reading takes in proportion to the ranks. What a method
    does otherwise at another number of ranks, such as top-k, which shares the work from five ranks on, is
    not known.
    """
    times = world_size / program.world_size
    # One thread may issue an all-to-all and another wait for it, and gather the sums then.
    scattered = {
        e.number
        for lane in program.lanes
        for e in lane
        if e.collective is not None
        and (e.collective.op, e.collective.size) == (Op.SCATTER.value, program.world_size)
    }
    lanes = []
    for lane in program.lanes:
        events, owned, grows = [], 0, False
        for event in lane:
            about, compute_s = event.collective, event.compute_s
            owned += event.kind == "wait" and event.number in scattered
            # Groups of a part of the ranks, such as those of a node, keep their size.
            if about is not None and about.size == program.world_size:
                about = about._replace(size=world_size)
                if about.op == Op.GATHER.value:
                    grows = owned == 0
                    if owned:
                        owned -= 1
                        about = about._replace(nbytes=math.ceil(about.nbytes / times))
            if event.kind == "decoded" and grows:
                compute_s *= times
            events.append(event._replace(compute_s=compute_s, collective=about))
        lanes.append(tuple(events))
    return replace(program, world_size=world_size, lanes=tuple(lanes))
