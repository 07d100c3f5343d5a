"""What happened when, on every rank, as a file for Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias, TypeVar

from torch import Tensor
from torch.autograd import profiler

__all__ = ["KINDS", "MAX_EVENTS", "Event", "Tracer", "as_json", "hand_over", "span", "write"]

MAX_EVENTS = 200_000
KINDS = ("forward", "backward", "wait", "encode", "collective", "decode", "step", "ready", "full")

# Kind, start and end in seconds of the rank's own clock, and what else is known.
T = TypeVar("T")
Event: TypeAlias = tuple[str, float, float, Mapping[str, Any]]

_NOTHING = nullcontext()
_INSTANTS = ("ready", "full")
_ROWS = {"forward": 0, "backward": 0, "wait": 0, "step": 0, "ready": 0, "full": 0, "encode": 1, "decode": 1}
_ROW_NAMES = {0: "training", 1: "encode and decode"}
_FIRST_FREE = 2  # collectives overlap each other, so they take as many rows as they need


class Tracer:
    """Collects one rank's events.

    Args:
        max_events: later ones are dropped and counted, at least 1; an event takes about 0.5 kB.

    Attributes:
        events: in the order in which they ended.
        dropped: number of events that came too late.
        names: of parameters, by `id`.

    Example:
        >>> tracer = Tracer(max_events=1)
        >>> tracer.add("encode", 1.0, 1.5, bucket=0)
        >>> tracer.events, tracer.dropped
        ([('encode', 1.0, 1.5, {'bucket': 0})], 0)
    """

    def __init__(self, max_events: int = MAX_EVENTS) -> None:
        self.max_events = max_events
        self.events: list[Event] = []
        self.dropped = 0
        self.names: dict[int, str] = {}

    def add(self, kind: str, start: float, end: float, /, **about: Any) -> None:
        """Note that something lasted from `start` to `end`, by `time.perf_counter`; warn when full."""
        if len(self.events) < self.max_events:
            self.events.append((kind, start, end, about))
            return
        self.dropped += 1
        if self.dropped == 1:
            text = f"the trace is full with {self.max_events} events and leaves out later ones"
            warnings.warn(f"{text}: trace fewer steps, or raise max_events", stacklevel=2)

    def ready(self, bucket: int, parameter: Tensor) -> None:
        """Note that a parameter's gradient is complete; it goes to a bucket, or to none, which is -1."""
        now = time.perf_counter()
        name = self.names.get(id(parameter)) or f"shape {tuple(parameter.shape)}"
        self.add("ready", now, now, parameter=name, bucket=bucket)

    def full(self, bucket: int) -> None:
        """Note that a bucket has all its gradients, and that its turn has come."""
        now = time.perf_counter()
        self.add("full", now, now, bucket=bucket)

    def hand_over(self, thread: Executor, job: Callable[..., T], *args: Any) -> Future[T]:
        """Let a thread do a job; a recorder of programs notes here what waits for what."""
        return thread.submit(job, *args)


def hand_over(tracer: Tracer | None, thread: Executor, job: Callable[..., T], *args: Any) -> Future[T]:
    """Let a thread do a job, and tell the tracer, if there is one."""
    return thread.submit(job, *args) if tracer is None else tracer.hand_over(thread, job, *args)


def span(kind: str, needed: bool = True) -> AbstractContextManager[Any]:
    """Return a context that shows as "stenograd::KIND" in a running `torch.profiler`, and costs nothing else.

    The profiler records the threads of training and of autograd. Methods of several rounds run on a thread of
    their own, which it records only if told to (`profile_all_threads` in its experimental settings).

    Example:
        >>> with span("encode"):
        ...     pass
    """
    if not (needed and profiler._is_profiler_enabled):
        return _NOTHING
    return profiler.record_function(f"stenograd::{kind}")


def as_json(ranks: Sequence[tuple[float, Sequence[Event]]]) -> dict[str, Any]:
    """Return the ranks' events in the Trace Event Format, times in microseconds from the first event.

    Each rank is a process, so a lane of its own, with a row for forward, backward and step, a row for encode
    and decode, and as many rows for collectives as overlap. A backward pass holds the wait for the exchange,
    and the moments at which gradients were ready and buckets full.

    Args:
        ranks: each rank's clock minus rank 0's, in seconds, and its events.

    Example:
        >>> trace = as_json([(0.0, [("step", 2.0, 2.5, {})])])
        >>> [(e["ph"], e["name"]) for e in trace["traceEvents"]]
        [('M', 'process_name'), ('M', 'process_sort_index'), ('M', 'thread_name'), ('X', 'step')]
        >>> trace["traceEvents"][-1]["dur"]
        500000.0

    Reference: "Trace Event Format", Google, 2016, phases X (complete), i (instant) and M (metadata).
    """
    first = min((start - offset for offset, events in ranks for _, start, _, _ in events), default=0.0)
    out: list[dict[str, Any]] = []
    for rank, (offset, events) in enumerate(ranks):
        placed = _placed(events)
        rows = {row: _ROW_NAMES.get(row, f"collectives {row - _FIRST_FREE + 1}") for row, _ in placed}
        out.append(_meta("process_name", rank, 0, {"name": f"rank {rank}"}))
        out.append(_meta("process_sort_index", rank, 0, {"sort_index": rank}))
        out += [_meta("thread_name", rank, row, {"name": name}) for row, name in sorted(rows.items())]
        for row, (kind, start, end, about) in placed:
            how = {"ph": "i", "s": "t"} if kind in _INSTANTS else {"ph": "X", "dur": _us(end - start)}
            place = {"ts": _us(start - offset - first), "pid": rank, "tid": row}
            out.append({"name": kind, "cat": kind, **how, **place, "args": dict(about)})
    return {"traceEvents": out, "displayTimeUnit": "ms"}


def write(path: str | os.PathLike[str], trace: Mapping[str, Any]) -> None:
    """Write a trace in one step: a reader sees the old file or the whole new one."""
    part = f"{os.fspath(path)}.part"
    with open(part, "w") as file:
        json.dump(trace, file, separators=(",", ":"))
    os.replace(part, path)


def _placed(events: Sequence[Event]) -> list[tuple[int, Event]]:
    """Give each event its row, such that collectives of one row do not overlap."""
    free: list[float] = []  # when each row for collectives is free again
    out = []
    for event in sorted(events, key=lambda event: event[1]):
        kind, start, end, _ = event
        row = _ROWS.get(kind)
        if row is None:
            at = next((i for i, since in enumerate(free) if since <= start), len(free))
            free[at : at + 1] = [end]
            row = _FIRST_FREE + at
        out.append((row, event))
    return out


def _meta(name: str, rank: int, row: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": row, "args": dict(args)}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
