"""Traces a training on all ranks: one file for Perfetto or chrome://tracing, on one clock.

`torch.profiler` shows the spans of `wire/pipeline.py`, but cannot stand in for this. It has no event for a
collective that is under way or has arrived while something else is computed, for a gradient that is ready or
for a bucket that is full; it leaves out the thread of methods of several rounds unless it is told not to; a
program can run only one; and its files are of one rank each, by that rank's clock.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from stenograd.arguments import whole
from stenograd.checkpoint.files import write_atomically
from stenograd.errors import ConfigError, PeerLost, first_line
from stenograd.wire.agreement import agree
from stenograd.wire.drivers import AnyDriver

__all__ = ["MAX_EVENTS", "Event", "Phases", "Tracer", "Tracing", "as_json", "clock_offsets"]

MAX_EVENTS = 200_000

T = TypeVar("T")
# Kind, start and end in seconds of the rank's own clock, and what else is known.
Event: TypeAlias = tuple[str, float, float, Mapping[str, Any]]

_PINGS = 10
_INSTANTS = ("ready", "full")
_ROWS = {"forward": 0, "backward": 0, "wait": 0, "step": 0, "ready": 0, "full": 0, "encode": 1, "decode": 1}
_ROW_NAMES = {0: "training", 1: "encode and decode"}
_FIRST_FREE = 2  # collectives overlap each other, so they take as many rows as they need


class Tracing:
    """Notes forward, backward, step and every exchange while a `with` block lasts; made by `sync.trace`.

    All ranks enter and leave it together, between steps. On leaving, rank 0 writes the file. Where the block
    ends with an error, or on fewer ranks than it began, ranks cannot be expected to answer: then each writes
    its own events to `path.rankR`, with a warning if only this shows that a rank was lost.

    Args:
        path: file to write on rank 0.
        drivers: returns the ways to other ranks whose exchanges are noted, the one to all of them first.
        model: whose forward passes are noted.
        optimizers: whose steps are noted.
        max_events: a rank's events beyond it are left out, with one warning; at least 1.
        before: does what is due on this rank, such as a round that others wait in, before ranks meet here.

    Raises:
        ConfigError: max_events is out of range, or, on every rank, the file cannot be written, or another
            trace is under way.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        drivers: Callable[[], Sequence[AnyDriver]],
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        max_events: int = MAX_EVENTS,
        before: Callable[[], object] = bool,
    ) -> None:
        whole("max_events", max_events, "leave it out")
        self.path, self._drivers, self._before = os.fspath(path), drivers, before
        self.driver, *_ = drivers()
        self._tracer = Tracer(max_events)
        self._tracer.names = {id(p): name for name, p in model.named_parameters()}
        self._phases = Phases(model, optimizers, self._tracer.add)

    def __enter__(self) -> Tracing:
        self._before()
        agree(self.driver, self._check)
        self._clocks = clock_offsets(self.driver)
        self._phases.watch()
        # After the clocks: the all-gathers that compare them are no part of the training.
        for driver in self._drivers():
            driver.tracer = self._tracer
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._before()  # what is due is a part of the training
        except BaseException:
            self._end()
            self._write_own()
            raise
        drivers = self._end()
        if kind is not None or drivers[0] is not self.driver:  # those that are left have another
            self._write_own()
            return
        own = json.dumps([self._tracer.dropped, self._tracer.events]).encode()
        try:
            packed = self.driver.gather_bytes(zlib.compress(own, 1))
            agree(self.driver, lambda: self._write(packed))
        except PeerLost as error:  # the next exchange raises it again, or goes on without them
            self._write_own()
            warnings.warn(
                f"the trace ends without those that were lost: {self._own} has this rank's events only "
                f"({first_line(error)})",
                RuntimeWarning,
                stacklevel=2,
            )

    @property
    def _own(self) -> str:
        return f"{self.path}.rank{self.driver.rank}"

    def _end(self) -> Sequence[AnyDriver]:
        """Note nothing more: events are gathered by an exchange, too."""
        drivers = self._drivers()
        for driver in drivers:
            driver.tracer = None
        self._phases.close()
        return drivers

    def _write_own(self) -> None:
        _write(self._own, as_json([(0.0, self._tracer.events)]))

    def _check(self) -> None:
        if self.driver.tracer is not None:
            raise ConfigError("a trace inside another one cannot be made: let the first one end before")
        if self.driver.rank != 0:
            return
        if os.path.isdir(self.path):
            raise ConfigError(f"the trace must be a file, got the folder {self.path}: give another")
        if os.path.exists(self.path) and not os.path.isfile(self.path):
            raise ConfigError(f"the trace must be a regular file, got {self.path}: give another")
        try:
            with tempfile.TemporaryFile(dir=Path(self.path).parent):
                pass
        except OSError as cause:
            reason = f"got {self.path} ({cause.strerror}): give another"
            raise ConfigError(f"the trace must be a file that can be written, {reason}") from cause

    def _write(self, packed: Sequence[bytes]) -> None:
        if self.driver.rank != 0:
            return
        received = [json.loads(zlib.decompress(part)) for part in packed]
        offsets = [offset for offset, _ in self._clocks]
        trace = as_json([(offset, events) for offset, (_, events) in zip(offsets, received, strict=True)])
        trace["otherData"] = {
            "clock_error_s": [error for _, error in self._clocks],
            "dropped_events": [dropped for dropped, _ in received],
        }
        _write(self.path, trace)


class Tracer:
    """Collects one rank's events; an `Observer` of its drivers.

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
        """Note that a parameter's gradient is complete."""
        now = time.perf_counter()
        name = self.names.get(id(parameter)) or f"shape {tuple(parameter.shape)}"
        self.add("ready", now, now, parameter=name, bucket=bucket)

    def full(self, bucket: int) -> None:
        """Note that a bucket has all its gradients, and that its turn has come."""
        now = time.perf_counter()
        self.add("full", now, now, bucket=bucket)

    def hand_over(self, thread: Executor, job: Callable[..., T], *args: Any) -> Future[T]:
        """Let the thread do the job."""
        return thread.submit(job, *args)


class Phases:
    """Tells by hooks on a model and its optimizers how long each phase of a step lasted.

    A `wait` is the end of a `backward`: what is left of the exchange when all gradients are there. Rounds
    that are held when an optimizer has stepped are a part of `step`.

    Args:
        model: whose passes are followed.
        optimizers: whose steps are followed.
        note: called with "forward", "backward", "wait" or "step", start and end by `time.perf_counter`.

    Example:
        >>> model, seen = nn.Linear(2, 1), []
        >>> phases = Phases(model, [], lambda kind, start, end: seen.append(kind))
        >>> phases.watch()
        >>> model(torch.ones(1, 2)).sum().backward()
        >>> phases.close()
        >>> seen
        ['forward', 'wait', 'backward']
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        note: Callable[[str, float, float], None],
    ) -> None:
        self._model, self._optimizers, self._note = model, list(optimizers), note
        self._handles: list[Any] = []
        self._began: dict[str, float] = {}

    def watch(self) -> None:
        """Begin."""
        self._watch_model(self._model)
        for optimizer in self._optimizers:
            self._watch(optimizer)

    def close(self) -> None:
        """Take all hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def begin(self, kind: str, *_: object) -> None:
        """Note when something begins; a second beginning without an end counts as none."""
        self._began.setdefault(kind, time.perf_counter())

    def end(self, kind: str, *_: object) -> None:
        """Note when it ends."""
        start = self._began.pop(kind, None)
        if start is not None:
            self._note(kind, start, time.perf_counter())

    def _watch_model(self, model: nn.Module) -> None:
        self._handles.append(model.register_forward_pre_hook(self._before_forward))
        self._handles.append(model.register_forward_hook(self._after_forward))

    def _watch(self, optimizer: torch.optim.Optimizer) -> None:
        self._handles.append(optimizer.register_step_pre_hook(partial(self.begin, "step")))
        self._handles.append(optimizer.register_step_post_hook(partial(self.end, "step")))

    def _before_forward(self, *_: object) -> None:
        self._began.pop("forward", None)  # one that failed
        self.begin("forward")

    def _after_forward(self, model: nn.Module, inputs: Any, output: Any) -> None:
        self.end("forward")
        for kind in ("backward", "wait"):  # of a backward pass, or its exchange, that failed
            self._began.pop(kind, None)
        for leaf in _tensors(output):
            if leaf.requires_grad:
                leaf.register_hook(self._on_output_gradient)

    def _on_output_gradient(self, grad: Tensor) -> None:
        """Note that a backward pass begins, and have its end noted.

        This comes before any parameter's gradient, so the first callback runs before the engine's, which
        waits for the exchange, and what that callback queues runs after it.
        """
        # Hooks on tensors stay: a graph that was made before `close` may be walked after it.
        if "backward" in self._began or not self._handles:
            return
        self.begin("backward")
        queue = torch.autograd.Variable._execution_engine.queue_callback

        def computed() -> None:
            self.begin("wait")
            queue(averaged)

        def averaged() -> None:
            self.end("wait")
            self.end("backward")

        queue(computed)


def clock_offsets(driver: AnyDriver) -> list[tuple[float, float]]:
    """Return each rank's clock minus rank 0's, with the largest error it can have, in seconds.

    An all-gather ends nowhere before it began everywhere. So if it began at `b` and ended at `e` by a rank's
    own clock, `b_r - e_0 <= offset <= e_r - b_0`. Of several all-gathers the narrowest bounds count, and the
    middle between them is returned; half their distance is the error. Clocks that drift afterwards are not
    followed.

    Args:
        driver: the way to the other ranks, all of which call this.

    Example:
        >>> from stenograd.wire.driver import Driver
        >>> from stenograd.launch.process_group import init, shutdown
        >>> _ = init()
        >>> clock_offsets(Driver())
        [(0.0, 0.0)]
        >>> shutdown()
    """
    own = []
    for _ in range(_PINGS):
        begin = time.perf_counter()
        driver.gather_bytes(b".")
        own.append((begin, time.perf_counter()))
    received = [json.loads(part) for part in driver.gather_bytes(json.dumps(own).encode())]
    out = [(0.0, 0.0)]
    for other in received[1:]:
        pairs = list(zip(other, received[0], strict=True))
        low = max(begin - end_0 for (begin, _), (_, end_0) in pairs)
        high = min(end - begin_0 for (_, end), (begin_0, _) in pairs)
        out.append(((low + high) / 2, (high - low) / 2))
    return out


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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def _write(path: str, trace: Mapping[str, Any]) -> None:
    write_atomically(Path(path), json.dumps(trace, separators=(",", ":")).encode())


def _placed(events: Sequence[Event]) -> list[tuple[int, Event]]:
    """Give each event its row, such that collectives of one row do not overlap."""
    free: list[float] = []  # when each row for collectives is free again
    out = []
    for event in sorted(events, key=lambda event: event[1]):
        kind, start, end, _ = event
        row = _ROWS.get(kind)
        if row is None:
            at = next((i for i, since in enumerate(free) if since <= start), len(free))
            free[at : at + 1] = [end]  # appends where no row is free
            row = _FIRST_FREE + at
        out.append((row, event))
    return out


def _meta(name: str, rank: int, row: int, args: Mapping[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": row, "args": dict(args)}


def _us(seconds: float) -> float:
    return round(1e6 * seconds, 3)
