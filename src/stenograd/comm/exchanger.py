"""One step's exchange: buckets go in as they fill, averages and new states come out together.

All collectives are issued by one thread, bucket after bucket, while the caller computes the next gradients.
New states take effect only when every rank's every bucket was finite, so one bad batch costs one step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from stenograd.catalog.method import Method
from stenograd.comm.driver import Driver, Pipeline
from stenograd.comm.piggyback import Flags
from stenograd.comm.saved_state import check_state
from stenograd.comm.step_end import End, Outcome, not_finite, on, record, shows_finite, warn_of_overflow
from stenograd.comm.traffic import CONTROL, Label
from stenograd.compression.contract import Exchange, Site, State
from stenograd.data.buckets import Bucket, KeptState, join_state, keep, put_back, split_state
from stenograd.data.requests import Rounds
from stenograd.errors import StenogradError, first_line

__all__ = ["Exchanger"]

_FORMAT = 1  # of state_dict(); a reader refuses others
_RIDE_BYTES = 1 << 20  # of a dense bucket, which flags make one copy more


_Filled: TypeAlias = tuple[int, Tensor, torch.cuda.Event | None]


class Exchanger:
    """Runs a method over buckets, step after step.

    Args:
        method: what to run.
        driver: the way to the other ranks.
        want_errors: whether outcomes tell what compression lost.
        waits: whether the caller waits for `finish` at once, and is done with a step's averages when it fills
            the next; then their memory is kept, `finish` works in the caller's thread, which would only wait,
            and a method of one collective needs no other.

    Attributes:
        scale: what the caller multiplies by when it fills buckets, if it `waits`; else 1.
    """

    def __init__(
        self, method: Method, driver: Driver, *, want_errors: bool = False, waits: bool = False
    ) -> None:
        self.method = method
        self.compressor = method.compressor
        self.driver = driver
        self.step = 0
        self.skipped = 0
        self._reported = False  # an overflow
        self._failure: BaseException | None = None
        self._device = torch.device("cpu")  # for what travels besides the buckets
        self._want_errors = want_errors
        self._waits = waits
        self._inline = waits and self.compressor.one_round(driver.world_size)
        self._scaled = waits and self.compressor.takes_scaled
        self.scale = 1.0 / driver.world_size if self._scaled else 1.0
        # Where a non-finite input shows in the average by itself and there is no state to harm, no
        # agreement on finiteness is needed.
        self._detects = self.compressor.detects(driver.world_size)
        self._settles = waits and self.compressor.settles(driver.world_size)
        self._guarded = not (self.compressor.propagates or self._detects)
        self.buckets: list[Bucket] = []
        self._sites: list[Site] = []
        self._flats: list[Tensor | None] = []
        self._lent: set[int] = set()
        self._averages: dict[int, Tensor] = {}
        self._states: list[State] = []
        self._spare: dict[str, dict[str, Tensor]] = {}  # state of parameters that wait for their bucket
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stenograd")
        self._jobs: list[Future[None]] = []
        self._held: _Filled | None = None
        self._begin()

    def arrange(self, buckets: Sequence[Bucket], device: torch.device | None = None) -> None:
        """Use these buckets from the next step on; state follows its parameters.

        Args:
            buckets: in the order in which they will be submitted; may be empty.
            device: where what travels besides them lives, if there are none.
        """
        self._device = device or self._device
        for index, bucket in enumerate(buckets):
            self.place(index, bucket)
        self._drop_from(len(buckets))
        self._spare = {}

    def place(self, index: int, bucket: Bucket) -> None:
        """Let bucket `index` of this step be `bucket`; state follows its parameters.

        Buckets are placed in order, each before it is submitted, so a layout need not be known in advance.
        """
        if index < len(self.buckets) and self.buckets[index] == bucket:
            return
        self._drop_from(index)
        driver = self.driver
        rank, size = driver.rank, driver.world_size
        site = Site(
            shapes=bucket.shapes,
            rank=rank,
            world_size=size,
            key=index,
            scaled=self._scaled,
            settles=self._settles,
        )
        fresh = self.compressor.init(bucket.empty(), site)
        known = {name: self._spare.pop(name) for name in bucket.names if name in self._spare}
        state = join_state(fresh, bucket, {**split_state(fresh, bucket), **known}) if known else fresh
        self._device = bucket.device if index == 0 else self._device
        self.buckets.append(bucket)
        self._sites.append(site)
        self._flats.append(None)
        self._states.append(state)
        if bucket.device.type == "cuda" and bucket.device not in self._streams:
            self._streams[bucket.device] = torch.cuda.Stream(bucket.device)

    def flat(self, index: int) -> Tensor:
        """Return the memory to fill for a bucket; it belongs to the exchange once submitted.

        Ask again for each step: after a step, the memory may hold the bucket's new state.
        """
        flat = self._flats[index]
        if flat is None:
            flat = self._flats[index] = self.buckets[index].empty()
        return flat

    def lend(self, index: int, x: Tensor) -> bool:
        """Take a tensor, flat and filled, as a bucket of this step instead of the bucket's own memory.

        That saves a pass over memory. The tensor belongs to the exchange from then on, as `flat` does.

        Returns:
            False where it cannot be taken, since the bucket's average will be written to the same memory.
        """
        average = self._averages.get(index)
        if average is not None and average.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
            return False
        self._flats[index] = x
        self._lent.add(index)
        return True

    def submit(self, index: int) -> None:
        """Hand over the next bucket, filled, in order; returns at once.

        The last one waits for `finish`, whose flags it carries.
        """
        self._check_sound()
        self._send_held()
        x = self.flat(index)
        self._held = (index, x, record(x.device))
        if index < len(self.buckets) - 1:
            self._send_held()

    def finish(
        self,
        used: Sequence[bool] = (),
        flags: Sequence[bool] = (),
        *,
        extra: Rounds[Any] | None = None,
        bad: bool = False,
    ) -> Future[Outcome]:
        """End the step after the last bucket; the future holds its outcome, or the first error.

        Args:
            used: whether this rank used each parameter, bucket by bucket; none at all counts as all. What no
                rank used keeps its state: nobody applies its average, so what was sent of it is still owed.
            flags: further flags, as many on all ranks.
            extra: a coroutine that exchanges something else in this step.
            bad: whether what it exchanges is not finite on this rank.
        """
        end = End(used, flags, extra, bad)
        jobs, self._jobs = self._jobs, []
        held, self._held = self._held, None
        if not self._waits:
            return self._thread.submit(self._collect, jobs, held, end)
        done: Future[Outcome] = Future()
        done.set_result(self._collect(jobs, held, end))
        return done

    def join_streams(self) -> None:
        """Make the current CUDA streams wait for the exchange; nothing to do on CPU."""
        for device, stream in self._streams.items():
            torch.cuda.current_stream(device).wait_stream(stream)

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides the next exchange on this rank, keyed by parameter name."""
        counters = {"step": self.step, "skipped": self.skipped}
        return {**self._identity(), **counters, "parameters": self._state_by_name()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a saved `state_dict()`, of any bucketing of the same parameters.

        Raises:
            CheckpointError: it is of another format, method, rank, world size or model; nothing is changed.
        """
        check_state(state, self._identity(), self._state_by_name())
        self.step, self.skipped = int(state["step"]), int(state["skipped"])
        buckets = list(self.buckets)
        self._drop_from(0)
        self._spare = {
            name: {k: t.clone() for k, t in ts.items()} for name, ts in state["parameters"].items()
        }
        for index, bucket in enumerate(buckets):
            self.place(index, bucket)

    def abandon(self) -> None:
        """Forget a step that was begun and will not be finished; only one rank alone can do so."""
        for job in self._jobs:
            job.exception()  # waits; what went wrong in a step that is given up matters no more
        self._failure = None
        self._begin()

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=True)

    def _identity(self) -> dict[str, Any]:
        place = {"rank": self.driver.rank, "world_size": self.driver.world_size}
        return {"format": _FORMAT, "method": self.method.text, **place}

    def _state_by_name(self) -> dict[str, dict[str, Tensor]]:
        out = dict(self._spare)
        for state, bucket in zip(self._states, self.buckets, strict=True):
            out |= split_state(state, bucket)
        return out

    def _drop_from(self, index: int) -> None:
        """Take buckets from `index` on apart; their state waits by parameter name."""
        for state, bucket in zip(self._states[index:], self.buckets[index:], strict=True):
            self._spare |= split_state(state, bucket)
        for parts in (self.buckets, self._sites, self._flats, self._states):
            del parts[index:]
        self._averages = {i: memory for i, memory in self._averages.items() if i < index}

    def _check_sound(self) -> None:
        """Refuse to go on after a step that failed on this rank, and maybe not on others."""
        if self._failure is not None:
            raise StenogradError(
                f"the exchange of step {self.step} failed ({first_line(self._failure)}), so the ranks may be "
                "out of step: restart from a checkpoint"
            ) from self._failure

    def _send_held(self) -> None:
        if self._held is not None and self._inline:
            self._launch(*self._held)
        elif self._held is not None:
            self._jobs.append(self._thread.submit(self._launch, *self._held))
        self._held = None

    def _begin(self) -> None:
        self._jobs, self._held = [], None
        for index in self._lent:
            self._flats[index] = None
        self._lent.clear()
        self._pipeline: Pipeline[Any] = Pipeline(self.driver, patient=self._inline)
        self._bad: dict[int, Tensor] = {}

    @torch.no_grad()
    def _launch(
        self, index: int, x: Tensor, ready: torch.cuda.Event | None, flags: Sequence[bool] | None = None
    ) -> None:
        """Begin a bucket's exchange, with flags that it shall carry; nothing once another one has failed."""
        if self._failure is not None:
            return
        try:
            self._add(index, x, ready, flags)
        except BaseException as error:  # also what a later step must not go on from
            self._failure = error
            raise

    def _add(
        self, index: int, x: Tensor, ready: torch.cuda.Event | None, flags: Sequence[bool] | None
    ) -> None:
        with on(self._streams.get(x.device), ready):
            if self._guarded:
                self._bad[index] = not_finite(x)
                if x.device.type == "cpu" and bool(self._bad[index]):
                    x.zero_()  # compressors need not be defined on NaN; the result is replaced anyway
            site = replace(self._sites[index], step=self.step, spare=self._spare_memory(index, x))
            rounds = self.compressor.rounds(x, self._states[index], site, want_error=self._want_errors)
            if flags is not None:
                self._flags = self._control(flags, x.device)
                rounds = self._flags.carried_by(rounds)
            self._pipeline.add(rounds, Label(bucket=index, method=self.method.text))

    def _control(self, flags: Sequence[bool], device: torch.device) -> Flags:
        """Return what all ranks must know: which of their buckets are not finite, and the caller's flags."""
        mine = torch.tensor([float(f) for f in flags], device=device)
        bad = [self._bad[i].to(device) for i in sorted(self._bad)]
        return Flags(torch.cat([torch.stack(bad), mine]) if bad else mine)

    def _spare_memory(self, index: int, x: Tensor) -> Tensor | None:
        """Return last step's memory for the average of a bucket, if the caller is done with it by now."""
        if not self._waits or self._scaled or self._settles:
            return None  # the average may still be in use, or takes x's own memory or the residual's
        if index not in self._averages:
            self._averages[index] = torch.empty_like(x)
        return self._averages[index]

    @torch.no_grad()
    def _collect(self, jobs: list[Future[None]], held: _Filled | None, end: End) -> Outcome:
        try:
            for job in jobs:
                job.result()
            self._check_sound()
            device = self._device
            rides = held is not None and (not self.compressor.bulky or held[1].nbytes <= _RIDE_BYTES)
            if held is not None:
                self._launch(*held, end.told if rides else None)
            with on(self._streams.get(device), None):
                if not rides:
                    self._flags = self._control(end.told, device)
                    self._pipeline.add(self._flags.alone(), Label(CONTROL, method=self.method.text))
                if end.extra is not None:
                    self._pipeline.add(end.extra, Label(method="sparse"))
                return self._concluded(end)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._spare = {}
            self._begin()

    def _concluded(self, end: End) -> Outcome:
        """Receive all, decide alike on all ranks whether the step counts, and take new states if so."""
        self._pipeline.receive()
        told, count = self._flags.told(), len(self._bad)
        entered, told = told[:count], told[count:]
        elsewhere = end.extra is not None and told.pop(0)
        any_used, any_flags = told[: len(end.used)], told[len(end.used) :]
        sound = not (elsewhere or any(entered))
        # Now, because a compressor may write its average over the old residual as soon as it may settle.
        kept = self._kept(any_used) if sound and not all(any_used) else {}
        done = self._pipeline.finish(sound)
        extra = done.pop() if end.extra is not None else None
        exchanges: list[Exchange] = [exchange for exchange in done if exchange is not None]
        applied = self._decide(exchanges, entered or [False] * len(exchanges), elsewhere)
        if applied:
            for i, parts in kept.items():
                self._states[i] = put_back(self._states[i], self.buckets[i], parts)
        averages, errors = [e.average for e in exchanges], [e.error for e in exchanges]
        return Outcome(averages, any_used, any_flags, applied, errors, extra)

    def _kept(self, any_used: Sequence[bool]) -> dict[int, KeptState]:
        """Copy the state of the parameters that no rank used, by bucket."""
        kept, start = {}, 0
        for i, bucket in enumerate(self.buckets):
            unused = [j for j in range(len(bucket.names)) if not any_used[start + j]]
            start += len(bucket.names)
            if unused:
                kept[i] = keep(self._states[i], bucket, unused)
        return kept

    def _decide(self, exchanges: list[Exchange], entered: Sequence[bool], elsewhere: bool) -> bool:
        """Take the new states if everything was finite on all ranks, else make the harmed averages NaN."""
        found = [not (self._pipeline.verdict or shows_finite(e)) for e in exchanges]
        harmed = [e or f for e, f in zip(entered, found, strict=True)]
        if not (elsewhere or any(harmed)):
            self._commit(exchanges)
            self.step += 1
            return True
        self.skipped += 1
        for exchange, harm in zip(exchanges, harmed, strict=True):
            if harm and not self.compressor.propagates:
                exchange.average.fill_(torch.nan)
        known = [self._guarded or (e.finite is not None and bool(e.finite)) for e in exchanges]
        over = [f and k and not e for f, k, e in zip(found, known, entered, strict=True)]
        if any(over) or any(e.overflow for e in exchanges):
            if self.driver.rank == 0 and not self._reported:
                warn_of_overflow(self.method.text, self.step)
            self._reported = True
        return False

    def _commit(self, exchanges: Sequence[Exchange]) -> None:
        """Take the new states; where one lives in a bucket's memory, the bucket gets the old one's."""
        for i, exchange in enumerate(exchanges):
            old, self._states[i] = self._states[i], exchange.state
            mine = self.flat(i)
            memory = mine.untyped_storage().data_ptr()
            for key, new in exchange.state.items():
                if new is not old[key] and new.untyped_storage().data_ptr() == memory:
                    same = old[key].dtype == mine.dtype and old[key].numel() == mine.numel()
                    self._flats[i] = old[key] if same else torch.empty_like(mine)
