"""Several coroutines at once, whose collectives are issued in an order that never depends on timing."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.autograd import profiler

from stenograd.checks import Doubt, doubts_kept_in, refuse
from stenograd.errors import WireError
from stenograd.wire.finite import Finite, read
from stenograd.wire.requests import Op, Reply, Request, Rounds
from stenograd.wire.traffic import PLAIN, Label, Tally

if TYPE_CHECKING:
    from stenograd.wire.drivers import AnyDriver, AnyPending

__all__ = ["Pipeline"]

T = TypeVar("T")
_NOTHING = nullcontext()


class Pipeline(Generic[T]):
    """Drives several coroutines at once, in an order that never depends on timing.

    When one is added, its first request is issued; then every earlier one takes its reply and issues its
    next request, oldest first. So rounds of neighbouring buckets overlap, and since the order depends on
    counts alone, it is equal on all ranks.

    Args:
        driver: the way to the other ranks.
        patient: whether adding one never waits for earlier ones; all then go on in `finish`.

    Attributes:
        committed: after `finish`, whether coroutines asked by `Op.COMMIT` and all were told to go ahead.
    """

    def __init__(self, driver: AnyDriver, *, patient: bool = False) -> None:
        self._driver, self._patient = driver, patient
        self._running: dict[int, tuple[Rounds[T], AnyPending, Label]] = {}
        self._waiting: dict[int, tuple[Rounds[T], AnyPending | None, Label]] = {}
        self._reading: dict[int, tuple[Rounds[T], AnyPending | None, Label, Request]] = {}
        self._before: dict[int, list[tuple[float, float]]] = {}  # computing that nobody has counted yet
        self._finite: list[Tensor] = []
        self._doubts: list[Doubt] = []
        self._results: dict[int, T] = {}
        self.committed = False
        self._count = 0

    def add(self, rounds: Rounds[T], label: Label = PLAIN) -> None:
        """Start one more coroutine, whose collectives are counted under the label."""
        # Taken before the new one joins them: if its reply were awaited at once, nothing would overlap.
        earlier = [] if self._patient else sorted(self._running)
        self._step(self._count, rounds, None, label)
        self._count += 1
        for index in earlier:
            self._advance(index)

    def receive(self) -> dict[int, T]:
        """Drive all as far as they communicate, and return what those returned that have ended.

        Those that ask by `Op.COMMIT` wait for `finish`. Those that ask by `Op.READ` wait until no other can
        go on, and are answered together: so the host waits for a device once, however many they are.
        """
        while self._running or self._reading:
            # A copy: `_advance` takes each out, and puts it back if it asks for more.
            for index in sorted(self._running):
                self._advance(index)
            if not self._running and self._reading:
                self._read()
        return dict(self._results)

    @property
    def asked(self) -> list[Tensor]:
        """What coroutines have asked by `Op.COMMIT`, each a `Finite`."""
        return self._finite

    @property
    def doubts(self) -> list[Doubt]:
        """What coroutines have found in messages, and nobody has read yet."""
        return self._doubts

    def finish(self, sound: bool | None = None) -> list[T]:
        """Drive all to their ends and return what they returned, in the order in which they were added.

        Args:
            sound: whether the step counts, which those that wait are told; None if that is for them to say.
        """
        self.receive()
        if sound is None:
            sound = all(code == Finite.BOUNDED for (code,) in read(self._finite))
        # Before any coroutine hears that the step is committed: it then writes over its old state.
        self._look()
        self.committed = sound and bool(self._finite)
        for index in sorted(self._waiting):
            rounds, last, label = self._waiting.pop(index)
            with _span("decode"):
                self._send(index, rounds, last, label, self.committed)
        if self._running and self.committed:
            raise WireError("a coroutine asked for a collective after Op.COMMIT, which ends communication")
        self.receive()  # where a step does not count, some ask the other ranks why
        self._look()
        return [self._results[i] for i in range(self._count)]

    def _read(self) -> None:
        waiting = sorted(self._reading.items())
        # Emptied first: a coroutine that gets its numbers may ask for more at once.
        self._reading = {}
        tensors = [t for _, (*_, request) in waiting for t in request.tensors]
        numbers = iter(read(tensors, torch.int64))
        for index, (rounds, last, label, request) in waiting:
            with _span("decode"):
                self._send(index, rounds, last, label, [next(numbers) for _ in request.tensors])

    def _look(self) -> None:
        if self._doubts:
            refuse(self._doubts, [good for (good,) in read([good for good, _ in self._doubts])])

    def _advance(self, index: int) -> None:
        rounds, pending, label = self._running.pop(index)
        self._step(index, rounds, pending, label)

    def _step(self, index: int, rounds: Rounds[T], last: AnyPending | None, label: Label) -> None:
        with _span("wait", last is not None):
            reply = None if last is None else last.wait()
        with _span("encode" if last is None else "decode"):
            self._send(index, rounds, last, label, reply)

    def _send(
        self, index: int, rounds: Rounds[T], last: AnyPending | None, label: Label, reply: Reply
    ) -> None:
        start = time.perf_counter()
        try:
            with doubts_kept_in(self._doubts):
                request = rounds.send(reply)
        except StopIteration as stop:
            self._results[index] = stop.value
            if last is not None:
                self._spent("decode", index, last.tally, label, (start, time.perf_counter()))
            return
        if request.op in (Op.COMMIT, Op.READ):
            self._before.setdefault(index, []).append((start, time.perf_counter()))
        if request.op is Op.COMMIT:
            # `last` stays with it: the seconds of decoding count where the message was counted.
            self._finite += request.tensors
            self._waiting[index] = (rounds, last, label)
            return
        if request.op is Op.READ:
            self._reading[index] = (rounds, last, label, request)
            return
        label = label if last is None else label.next()
        pending = self._driver.start(request, label)
        self._spent("encode", index, pending.tally, label, (start, pending.start))
        self._running[index] = (rounds, pending, label)

    def _spent(self, on: str, index: int, tally: Tally, label: Label, now: tuple[float, float]) -> None:
        """Count when a coroutine computed, also before it asked for what sends nothing and has no tally."""
        for start, end in [*self._before.pop(index, []), now]:
            self._driver.spent(on, tally, start, label, end)


def _span(kind: str, needed: bool = True) -> AbstractContextManager[Any]:
    """Return a context that shows as "stenograd::KIND" in a running `torch.profiler`, and costs nothing else.

    The profiler records the threads of training and of autograd. Methods of several rounds run on a thread of
    their own, which it records only if told to (`profile_all_threads` in its experimental settings).
    """
    if not (needed and profiler._is_profiler_enabled):
        return _NOTHING
    return profiler.record_function(f"stenograd::{kind}")
