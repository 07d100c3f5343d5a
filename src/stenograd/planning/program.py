"""What a method does in a step, in order: computing, collectives, and what waits for what."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from stenograd.errors import StenogradError

__all__ = ["Collective", "Event", "Program", "median_program"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective that a rank issues.

    Args:
        op: value of `requests.Op`, or "broadcast".
        nbytes: handed to it by this rank.
        itemsize: bytes of an element.
        group: number of the process group, 0 for the first.
        size: number of ranks in the group.
        peers: that an exchange with neighbours sends to.
        sources: that it receives from.
    """

    op: str
    nbytes: int
    itemsize: int = 1
    group: int = 0
    size: int = 1
    peers: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that a thread does.

    Args:
        kind: "issue" a collective; "wait" for one; "post" a job to another thread; "begin" and "done" of a
            job there; "join": wait until a job is done; "step": a training step ends.
        number: of the collective, the job or the step.
        compute_s: processor seconds before it, of everything but coding.
        codec_s: processor seconds before it, of coding; after `compute_s`.
        collective: what is issued.
    """

    kind: str
    number: int
    compute_s: float = 0.0
    codec_s: float = 0.0
    collective: Collective | None = None

    @property
    def form(self) -> tuple[Any, ...]:
        """What must be equal in two runs of a program: all but seconds, peers and bytes that data decide."""
        about = self.collective
        return (self.kind, self.number, *((about.op, about.group, about.size) if about else ()))


@dataclass(frozen=True, kw_only=True)
class Program:
    """What one rank does in some steps, thread by thread.

    Attributes:
        method: how gradients travel.
        world_size: number of ranks.
        steps: number of training steps that it covers, a whole period of the method's schedule.
        idle_steps: how many of these only compute: their computing is not in the lanes.
        lanes: events of each thread, the training's own first.
    """

    method: str
    world_size: int
    steps: int
    idle_steps: int
    lanes: tuple[tuple[Event, ...], ...]

    @property
    def moved(self) -> list[Collective]:
        """All collectives, in the order of issue within each thread."""
        return [e.collective for lane in self.lanes for e in lane if e.collective is not None]

    def scaled(self, compute: float, codec: float) -> Program:
        """Return the same with other speeds of computing; 0 makes it free."""
        lanes = tuple(
            tuple(replace(e, compute_s=e.compute_s * compute, codec_s=e.codec_s * codec) for e in lane)
            for lane in self.lanes
        )
        return replace(self, lanes=lanes)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON-able values, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: Mapping[str, Any]) -> Program:
        """Undo `as_json`."""

        def event(e: Mapping[str, Any]) -> Event:
            about = e["collective"]
            found = None
            if about is not None:
                ends = {key: tuple(about[key]) for key in ("peers", "sources")}
                found = Collective(**{**about, **ends})
            return Event(**{**e, "collective": found})

        lanes = tuple(tuple(event(e) for e in lane) for lane in told["lanes"])
        return cls(**{**told, "lanes": lanes})


def median_program(periods: Sequence[Program]) -> Program:
    """Make one program of several recordings of the same period, with the median of each duration.

    Medians of parts add up to less than the median of the whole, since slow parts come at different places;
    so each thread's durations are stretched to the median of their sums.

    Raises:
        StenogradError: the recordings differ in what is done.
    """
    first = periods[0]
    forms = [[[e.form for e in lane] for lane in p.lanes] for p in periods]
    if any(form != forms[0] for form in forms):
        raise StenogradError(
            f"{first.method}: steps differ in what they exchange, which has no typical step: predict another"
        )
    lanes = []
    for same in zip(*(p.lanes for p in periods), strict=True):
        lane = []
        for events in zip(*same, strict=True):
            compute, codec = (
                statistics.median(getattr(e, key) for e in events) for key in ("compute_s", "codec_s")
            )
            about = events[0].collective
            if about is not None:
                nbytes = [e.collective.nbytes for e in events if e.collective is not None]
                about = replace(about, nbytes=round(statistics.mean(nbytes)))
            lane.append(replace(events[0], compute_s=compute, codec_s=codec, collective=about))
        whole = statistics.median(sum(e.compute_s + e.codec_s for e in one) for one in same)
        parts = sum(e.compute_s + e.codec_s for e in lane)
        stretch = whole / parts if parts else 1.0
        lanes.append(
            tuple(replace(e, compute_s=e.compute_s * stretch, codec_s=e.codec_s * stretch) for e in lane)
        )
    return replace(first, lanes=tuple(lanes))
