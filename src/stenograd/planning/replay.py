"""Replays a recorded program on a cluster: threads share cores, collectives share links, and both overlap."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from stenograd.errors import StenogradError
from stenograd.planning.cluster import Cluster, Transfer
from stenograd.planning.program import Event, Program

__all__ = ["Span", "Timeline", "replay"]

_AT_ONCE = 2  # collectives of one group: gloo has two threads for them
_PERIODS = 4  # of a program whose exchanges outlast a period: then a period follows others like it
_TINY_S = 1e-12


@dataclass(frozen=True, slots=True)
class Span:
    """What lasted from when to when, in seconds from the first step's start.

    Args:
        kind: "compute", "codec", "collective" or "wait".
        lane: number of the thread; -1 for collectives.
        number: of the collective, else 0.
    """

    kind: str
    lane: int
    number: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """How long a program took.

    Args:
        step_s: seconds of a step, the mean over a period.
        spans: what happened in the last period, if that was asked for.
    """

    step_s: float
    spans: tuple[Span, ...] = ()


@dataclass
class _Lane:
    events: list[Event]
    at: int = 0
    left: float = 0.0  # processor seconds before the event at `at`
    blocked: bool = False
    since: float = 0.0


@dataclass
class _Running:
    number: int
    group: int
    transfer: Transfer
    latency_left: float = 1.0  # a share: how long it lasts depends on whether ranks compute
    wire_left: float = 1.0
    start: float = 0.0


@dataclass
class _Run:
    cluster: Cluster
    lanes: list[_Lane]
    queues: dict[int, deque[_Running]] = field(default_factory=dict)
    active: list[_Running] = field(default_factory=list)
    now: float = 0.0
    arrived: set[int] = field(default_factory=set)
    posted: set[int] = field(default_factory=set)
    finished: set[int] = field(default_factory=set)
    ends: list[float] = field(default_factory=list)
    spans: list[Span] | None = None


def replay(program: Program, cluster: Cluster, *, slower: float = 1.0, spans: bool = False) -> Timeline:
    """Return how long a program's steps take on a cluster.

    One rank stands for all: it computes `slower` times as long as recorded, as the slowest of them does, and
    a collective ends everywhere when it ends here. Threads, and what gloo spends on sending, share the rank's
    cores in equal parts. Of each process group at most two collectives are under way at once, in the order of
    issue; those that send at the same time share the links in equal parts, and take as much longer as was
    measured for two. What a token bucket lets pass at once counts for the first of them.

    Args:
        program: from `rehearsal`, for as many ranks as the cluster has.
        cluster: see `Cluster`.
        slower: of computing and coding, above 0.
        spans: whether to return what happened when.

    Raises:
        StenogradError: the program waits for something that never comes, so it was not recorded whole.
    """
    count = _counts(program)
    again = any(e.number < 0 for lane in program.lanes for e in lane)
    periods = _PERIODS if again else 1
    lanes = [
        _Lane([_shifted(e, period, count, slower, cluster) for period in range(periods) for e in lane])
        for lane in program.lanes
    ]
    run = _Run(cluster, lanes, spans=[] if spans else None)
    for lane in lanes:
        lane.left = _cost(lane)
    steps = periods * program.steps
    while len(run.ends) < steps:
        _act(run)
        if len(run.ends) < steps:
            _advance(run, program.method)
    before = run.ends[-program.steps - 1] if periods > 1 else 0.0
    return Timeline((run.ends[-1] - before) / program.steps, tuple(run.spans or ()))


def _counts(program: Program) -> dict[str, int]:
    kinds = [e.kind for lane in program.lanes for e in lane]
    return {"issue": kinds.count("issue"), "post": kinds.count("post")}


def _shifted(event: Event, period: int, count: dict[str, int], slower: float, cluster: Cluster) -> Event:
    """Return an event of a later period, with the numbers that are used there, and what it takes there."""
    by = count["issue" if event.kind in ("issue", "wait") else "post"] * period
    compute, codec = event.compute_s * slower, event.codec_s * slower
    if event.collective is not None:
        codec += cluster.issue_s(event.collective)
    return Event(event.kind, event.number + by, compute, codec, event.collective)


def _cost(lane: _Lane) -> float:
    return (
        lane.events[lane.at].compute_s + lane.events[lane.at].codec_s if lane.at < len(lane.events) else 0.0
    )


def _act(run: _Run) -> None:
    """Let every thread do what it can do without time passing."""
    moved = True
    while moved:
        moved = False
        for number, lane in enumerate(run.lanes):
            while lane.at < len(lane.events) and lane.left <= _TINY_S:
                event = lane.events[lane.at]
                _note_computing(run, number, lane, event)
                if not _done(run, event):
                    lane.blocked = True
                    break
                if lane.blocked and run.spans is not None:
                    run.spans.append(Span("wait", number, event.number, lane.since, run.now))
                lane.blocked, lane.since = False, run.now
                lane.at += 1
                lane.left = _cost(lane)
                moved = True
    _admit(run)


def _note_computing(run: _Run, number: int, lane: _Lane, event: Event) -> None:
    if run.spans is None or lane.blocked or run.now <= lane.since:
        return
    middle = lane.since + (run.now - lane.since) * event.compute_s / (event.compute_s + event.codec_s)
    run.spans.append(Span("compute", number, 0, lane.since, middle))
    if event.codec_s:
        run.spans.append(Span("codec", number, 0, middle, run.now))
    lane.since = run.now


def _done(run: _Run, event: Event) -> bool:
    """Do an event if nothing holds it up, and tell whether it is done."""
    kind, number = event.kind, event.number
    if kind == "issue":
        assert event.collective is not None
        group = event.collective.group
        transfer = run.cluster.transfer(event.collective)
        run.queues.setdefault(group, deque()).append(_Running(number, group, transfer))
    elif kind == "post":
        run.posted.add(number)
    elif kind == "done":
        run.finished.add(number)
    elif kind == "step":
        run.ends.append(run.now)
    elif kind == "wait":
        return number < 0 or number in run.arrived
    elif kind == "begin":
        return number < 0 or number in run.posted
    elif kind == "join":
        return number < 0 or number in run.finished
    return True


def _admit(run: _Run) -> None:
    for group, queue in run.queues.items():
        while queue and sum(r.group == group for r in run.active) < _AT_ONCE:
            running = queue.popleft()
            running.start, about = run.now, running.transfer
            if any(other.transfer.inside == about.inside for other in run.active):
                running.transfer = about._replace(wire_s=about.wire_s + about.at_once_s)
            run.active.append(running)


def _advance(run: _Run, method: str) -> None:
    """Let time pass until something ends."""
    computing = [lane for lane in run.lanes if lane.at < len(lane.events) and lane.left > _TINY_S]
    sending = [r for r in run.active if r.latency_left <= 0]
    crowded = bool(computing) and run.cluster.cores - len(computing) < 1
    waiting = [(r, _lasts(r.transfer, crowded)) for r in run.active if r.latency_left > 0]
    demands = [_demand(r, sending) for r in sending]
    waking = [min(r.transfer.latency_cpu_s / lasts, 1.0) if lasts else 0.0 for r, lasts in waiting]
    level = _level([1.0] * len(computing) + demands + waking, run.cluster.cores)
    speeds: list[tuple[_Running, float]] = []
    for r, demand in zip(sending, demands, strict=True):
        share = _share(r, sending) * (min(demand, level) / demand if demand else 1.0)
        speeds.append((r, share / r.transfer.wire_s if r.transfer.wire_s else math.inf))
    speed = min(1.0, level)
    ends = [lane.left / speed for lane in computing]
    ends += [r.wire_left / s for r, s in speeds] + [r.latency_left * lasts for r, lasts in waiting]
    if not ends:
        raise StenogradError(f"{method}: its recording waits for what never comes: please report this")
    passed = min(ends)
    run.now += passed
    for lane in computing:
        lane.left -= passed * speed
    for r, lasts in waiting:
        left = r.latency_left - passed / lasts if lasts else 0.0
        r.latency_left = left if left >= _TINY_S else 0.0
    for r, s in speeds:
        left = 0.0 if s == math.inf else r.wire_left - passed * s
        r.wire_left = left if left >= _TINY_S else 0.0
    for r in [r for r in run.active if r.latency_left <= 0 and r.wire_left <= 0]:
        run.active.remove(r)
        run.arrived.add(r.number)
        if run.spans is not None:
            run.spans.append(Span("collective", -1, r.number, r.start, run.now))


def _lasts(transfer: Transfer, crowded: bool) -> float:
    """Return the seconds before a collective sends."""
    return transfer.busy_latency_s if crowded else transfer.latency_s


def _share(r: _Running, sending: Sequence[_Running]) -> float:
    """Return the part of its link that a collective has."""
    count = sum(other.transfer.inside == r.transfer.inside for other in sending)
    return 1.0 / (count * r.transfer.crowding if count > 1 else 1.0)


def _demand(r: _Running, sending: Sequence[_Running]) -> float:
    """Return how many cores a collective keeps busy at the rate that its link gives it."""
    if r.transfer.wire_s <= 0:
        return 0.0
    return r.transfer.cpu_s / r.transfer.wire_s * _share(r, sending)


def _level(demands: Sequence[float], cores: float) -> float:
    """Return the most cores that anybody gets, where they are shared in equal parts and none gets unused.

    Example:
        >>> _level([1.0, 1.0, 0.2], 2.0), _level([1.0, 0.2], 2.0)
        (0.9, inf)
    """
    if sum(demands) <= cores:
        return math.inf
    left, waiting = cores, sorted(demands)
    while waiting:
        equal = left / len(waiting)
        if waiting[0] > equal:
            return equal
        left -= waiting.pop(0)
    return math.inf
