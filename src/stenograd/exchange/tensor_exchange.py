"""One step's exchange: tensors go in as they become ready, averages and new states come out together.

All collectives are issued by one thread, bucket after bucket, while the caller computes the next tensors.
New states take effect only when every rank's every bucket was finite, so one bad batch costs one step.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from stenograd.catalog.method import MethodLike, method
from stenograd.checks import Doubt, refuse
from stenograd.compression.contract import Exchange, State
from stenograd.devices import Streams, put, record
from stenograd.errors import StenogradError, first_line
from stenograd.exchange.bucket_states import BucketState, BucketStates, Lane, check_state, same_memory
from stenograd.exchange.buckets import DEFAULT_BUCKET_BYTES, Bucket, assign
from stenograd.wire.drivers import AnyDriver
from stenograd.wire.finite import Finite, is_finite, not_bounded, read
from stenograd.wire.pipeline import Pipeline
from stenograd.wire.requests import REDUCTIONS, Op, Reply, Request, Rounds, mean, summed
from stenograd.wire.traffic import CONTROL, Label

__all__ = ["Flags", "Outcome", "TensorExchange", "Told"]

T = TypeVar("T")
S = TypeVar("S", bound="Told")


class Flags:
    """Flags of one rank, and after an exchange, which of them any rank had set.

    A rank that sets one may ask all to stop with it: infinity stands for 1, and 2 where bytes travel, so that
    costs nothing.

    Args:
        own: 1-D floating tensor of zeros and ones (or infinities), equally long on all ranks.

    Example:
        >>> from stenograd.simulate import run
        >>> from stenograd.wire.requests import gather
        >>> ranks = [Flags(torch.tensor([1.0, 0.0])), Flags(torch.tensor([0.0, 0.0]))]
        >>> told = run([flags.carried_by(gather(torch.tensor([7]))) for flags in ranks])
        >>> told[0], ranks[1].any
        ([(tensor([7]),), (tensor([7]),)], tensor([1, 0], dtype=torch.uint8))
    """

    def __init__(self, own: Tensor) -> None:
        self._own = own
        self._any: Tensor | None = None if own.numel() else own
        self._stop = math.inf  # what stands for a request to stop in `any`

    @property
    def any(self) -> Tensor:
        """After the exchange, above 0 for each flag that any rank has set.

        Raises:
            RuntimeError: there was no exchange.
        """
        if self._any is None:
            raise RuntimeError("the flags were not exchanged yet")
        return self._any

    def asks(self, numbers: Iterable[float]) -> bool:
        """Return whether numbers in `any`, once the host has them, ask all ranks to stop."""
        return any(number >= self._stop for number in numbers)

    def alone(self) -> Rounds[None]:
        """Exchange them in a collective of their own."""
        self._any = yield from mean(self._own)

    def carried_by(self, rounds: Rounds[T]) -> Rounds[T]:
        """Run a coroutine; the flags travel with its first request, or after it where that cannot take them.

        As bytes behind what is gathered, or as numbers behind what is averaged, which copies that once.
        """
        reply: Reply = None
        while True:
            try:
                request = rounds.send(reply)
            except StopIteration as stop:
                if self._any is None:
                    yield from self.alone()
                return stop.value  # type: ignore[no-any-return]  # it has no type parameter
            loaded = self._loaded(request) if self._any is None else None
            reply = (yield request) if loaded is None else self._unloaded(request, (yield loaded))

    def _loaded(self, request: Request) -> Request | None:
        """Return a request with the flags as one more tensor; None where it does not reach all ranks."""
        if request.op is Op.SEVERAL:
            first = self._loaded(request.parts[0])
            return None if first is None else replace(request, parts=(first, *request.parts[1:]))
        rider = self._rider(request)
        return None if rider is None else replace(request, tensors=(*request.tensors, rider))

    def _rider(self, request: Request) -> Tensor | None:
        if request.op in REDUCTIONS:
            # One all-reduce has one type; zeros and ones are exact in each.
            return self._own.to(request.tensors[0].dtype) if request.tensors else self._own
        if request.op is Op.GATHER:
            return self._as_bytes()
        if request.op is Op.SCATTER:
            ranks = len(request.tensors[0])
            return self._as_bytes().expand(ranks, -1)
        return None

    def _as_bytes(self) -> Tensor:
        self._stop = 2.0
        return self._own.clamp(max=self._stop).to(torch.uint8)

    def _unloaded(self, request: Request, reply: Reply) -> Reply:
        """Take the flags of all ranks, and return the reply without them."""
        if request.op is Op.SEVERAL:
            return [self._unloaded(request.parts[0], reply[0]), *reply[1:]]
        if request.op in REDUCTIONS:
            self._any = reply[-1]
            return reply[:-1]
        self._any = torch.stack([other[-1] for other in reply]).amax(0)
        return [other[:-1] for other in reply]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step's exchange gave.

    averages: one flat tensor a bucket; all NaN where a rank's bucket was not finite.
    any_used: whether any rank used each parameter, as given to `finish`.
    any_flags: whether any rank set each of the flags given to `finish`.
    applied: False where a non-finite bucket kept all states as they were.
    errors: what this rank's bucket lost in compression; None where nothing was lost or nobody asked. They may
        live in the buckets' memory.
    extra: what the further coroutine given to `finish` returned.
    stop: whether a rank asked all to stop.
    """

    averages: list[Tensor]
    any_used: Sequence[bool]
    any_flags: Sequence[bool]
    applied: bool
    errors: list[Tensor | None]
    extra: Any = None
    stop: bool = False


@dataclass(frozen=True)
class Told:
    """Base of what a rank tells all others by 0/1 flags: a dataclass of lists of them, which packs itself.

    Example:
        >>> @dataclass(frozen=True)
        ... class Seen(Told):
        ...     bad: list[bool]
        ...     used: list[bool]
        >>> mine = Seen(bad=[False], used=[True, False])
        >>> mine.packed(), mine.unpacked([True, True, True]).used
        ([False, True, False], [True, True])
    """

    def packed(self) -> list[bool]:
        """Return all flags in a row."""
        return list(chain.from_iterable(vars(self).values()))

    def unpacked(self: S, row: Sequence[bool]) -> S:
        """Return what a row of as many flags tells, such as which of them any rank has set."""
        left = iter(row)
        return type(self)(**{key: list(islice(left, len(own))) for key, own in vars(self).items()})


@dataclass(frozen=True)
class _End(Told):
    """What all ranks must hear of at the end of a step; see `TensorExchange.finish`.

    elsewhere: whether something that is exchanged besides buckets is bad; empty where nothing is.
    """

    elsewhere: Sequence[bool]
    used: Sequence[bool]
    flags: Sequence[bool]


def read_end(
    flags: Tensor, exchanges: Mapping[int, Exchange], asked: Sequence[Tensor], doubts: list[Doubt]
) -> tuple[list[float], dict[int, bool], bool]:
    """Read what is known when all has come, alike on all ranks; the host waits once for a device.

    Nobody looks through an average of bounded messages, unless it was written as float16: bounds are those of
    float32, in which sums are taken.

    Args:
        flags: of all ranks, above 0 where any has set one.
        exchanges: those that have ended.
        asked: what the others have asked by `Op.COMMIT`.
        doubts: about what has come.

    Returns:
        The flags' numbers; whether all was finite, new states included, in each exchange that has ended; and
        in those that asked.

    Raises:
        WireError: a doubt was right.
    """
    received = {i: e.finite for i, e in exchanges.items() if e.finite is not None}
    seen = {
        i: _sum(e.average)
        for i, e in exchanges.items()
        if e.finite is None or e.average.dtype is torch.float16
    }
    small = [flags, *received.values(), *seen.values(), *asked, *(good for good, _ in doubts)]
    set_flags, *rest = read(small)
    numbers = iter([number for (number,) in rest])
    codes, sums = ({i: next(numbers) for i in found} for found in (received, seen))
    bounded = [next(numbers) == Finite.BOUNDED for _ in asked]
    refuse(doubts, list(numbers))
    fine = {
        i: codes.get(i, Finite.BOUNDED) == Finite.BOUNDED
        # A sum of finite numbers may overflow; then all of them are looked at.
        and (i not in sums or math.isfinite(sums[i]) or is_finite(e.average))
        for i, e in exchanges.items()
    }
    return set_flags, fine, all(bounded)


def _sum(x: Tensor) -> Tensor:
    """Add up all elements: NaN and infinity stay in a sum."""
    return x.sum(dtype=torch.promote_types(x.dtype, torch.float32))


def warn_of_overflow(method: str, step: int) -> None:
    """Say that the method's numbers were too small for what the ranks gave it."""
    warnings.warn(
        f"{method}: an average overflowed after {step} steps, though every rank's values were finite. Such a "
        "step changes no state and is counted as skipped; later ones are only counted. Clip gradients "
        "(clip_norm=...), lower the loss scale, or use bf16 in place of fp16",
        RuntimeWarning,
        stacklevel=3,
    )


_FORMAT = 1  # of state_dict(); a reader refuses others
# Flags on a dense bucket cost one more copy of it; above this size a collective of their own is cheaper.
_PIGGYBACK_BYTES = 1 << 20

_Filled: TypeAlias = tuple[int, Tensor, Any]  # bucket, and what tells when it is filled


class _Joined(Future[dict[str, Tensor]]):
    """Averages that come from another thread, whose streams are not those of the caller."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def result(self, timeout: float | None = None) -> dict[str, Tensor]:
        """Wait for the averages, and let the caller's streams wait for them."""
        averages = super().result(timeout)
        self._streams.join(averages.values())
        return averages


class TensorExchange:
    """Averages tensors over the ranks by a method, step after step.

    Named tensors go in by `start` or `average`. Whoever makes them one after another, as a backward pass
    does, arranges buckets, fills and submits them one by one, and ends the step by `finish`.

    Args:
        how: the method, or text or a compressor that makes one.
        driver: the way to the other ranks.
        want_errors: whether outcomes tell what compression lost.
        waits: whether the caller waits for `finish` at once, and is done with a step's averages when it fills
            the next; then their memory is kept, `finish` works in the caller's thread, which would only wait,
            and a method of one collective needs no other.
        bucket_bytes: for `start`; a larger tensor is a bucket.

    Attributes:
        step: number of exchanges applied; equal on every rank.
        skipped: number of exchanges that changed no state, because something was not finite.
        finite: whether the last exchange was applied, alike on all ranks.
        share: what this rank's tensors were multiplied by in the last exchange; see `weigh`.

    Example:
        >>> from stenograd.wire.driver import Driver
        >>> exchange = TensorExchange("dense", Driver())
        >>> exchange.average({"w": torch.ones(2), "b": torch.zeros(1)})["w"], exchange.finite
        (tensor([1., 1.]), True)
        >>> exchange.close()
    """

    def __init__(
        self,
        how: MethodLike,
        driver: AnyDriver,
        *,
        want_errors: bool = False,
        waits: bool = False,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self.method = method(how)
        self.method.require_every_step("one exchange")
        self.driver = driver
        self.step = self.skipped = 0
        self.finite, self.share, self._asked = True, 1.0, False
        self._reported = False  # an overflow
        self._failure: BaseException | None = None
        self._device = torch.device("cpu")  # for what travels besides the buckets
        self._want_errors, self._waits, self._bucket_bytes = want_errors, waits, bucket_bytes
        self._slots = BucketStates(self.method, driver, waits=waits, want_errors=want_errors)
        self._streams = Streams()
        # One worker: collectives leave in the order of submission, which is equal on all ranks.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="stenograd")
        self._ending: list[Future[Outcome]] = []  # what `finish` last handed to the thread
        self._jobs: list[Future[None]] = []
        self._held: _Filled | None = None
        self._weight: float | None = None
        self._begin()

    @property
    def buckets(self) -> list[Bucket]:
        """What travels, in the order in which it is submitted."""
        return self._slots.buckets

    def average(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Average named tensors over the ranks, and wait for it; see `start`."""
        return self.start(values).result()

    @torch.no_grad()
    def start(self, values: Mapping[str, Tensor]) -> Future[dict[str, Tensor]]:
        """Begin to average named tensors, equal in names, shapes and types on all ranks.

        Args:
            values: floating; not modified.

        Returns:
            The averages, by name; NaN where some rank's were not finite (`finite` is False then). They may
            lie in memory that the next step fills, which begins once this one has ended. On CUDA, the stream
            on which `result()` is called waits for them.
        """
        wait(self._ending)
        # No bucket for the last gradients: nothing is computed meanwhile that could hide the others.
        buckets = assign(values, self._bucket_bytes, tail=False, dense_below=self.method.dense_below)
        if buckets != self.buckets:
            self.arrange(buckets)
        for index, bucket in enumerate(buckets):
            flat, scale = self.flat(index), self.scale(index)
            for name, view in zip(bucket.names, bucket.views(flat), strict=True):
                torch.mul(values[name], scale, out=view)
            self.submit(index)
        averages = _Joined(self._streams)

        def hand_on(done: Future[Outcome]) -> None:
            failure = done.exception()
            if failure is not None:
                averages.set_exception(failure)
                return
            found = zip(buckets, done.result().averages, strict=True)
            parts = [zip(b.names, b.views(flat), strict=True) for b, flat in found]
            averages.set_result({name: view for part in parts for name, view in part})

        self.finish().add_done_callback(hand_on)
        return averages

    def arrange(
        self,
        buckets: Sequence[Bucket],
        device: torch.device | None = None,
        names: Mapping[str, str] | None = None,
    ) -> list[str]:
        """Use these buckets from the next step on; state follows its parameters.

        Args:
            buckets: in the order in which they will be submitted; may be empty.
            device: where what travels besides them lives, if there are none.
            names: which name each parameter has now, by the name that it had; "" for one that is gone. State
                stays with its parameter. None where names stay.

        Returns:
            Names whose state is dropped, because their parameter is gone or has another shape.
        """
        lost = [] if names is None else self._slots.follow(names, buckets)
        self._device = device or self._device
        for index, bucket in enumerate(buckets):
            self.place(index, bucket)
        self._slots.drop_from(len(buckets))
        self._slots.forget()
        return lost

    def place(self, index: int, bucket: Bucket) -> None:
        """Let bucket `index` be `bucket`, before it is submitted; state follows its parameters."""
        if not self._slots.place(index, bucket):
            return
        self._device = bucket.device if index == 0 else self._device
        self._streams.add(bucket.device)

    def end_at(self, count: int) -> None:
        """Let a step have this many buckets; the state of other parameters waits for its bucket."""
        self._slots.drop_from(count)

    def scale(self, index: int) -> float:
        """Return what to multiply by when a bucket is filled for this step: 1 unless the exchange sums."""
        return self._lane(index).scale

    def flat(self, index: int) -> Tensor:
        """Return the memory to fill for a bucket in this step; it belongs to the exchange once submitted."""
        return self._slots.flat(index)

    def lend(self, index: int, x: Tensor) -> bool:
        """Exchange a flat and filled tensor in place; it then belongs to the exchange, as `flat` does.

        False where it cannot be taken, since the bucket's average will be written to the same memory.
        """
        slot = self._slots[index]
        if slot.average is not None and same_memory(slot.average, x):
            return False
        slot.flat, slot.lent = x, True
        return True

    def state_of(self, index: int) -> State:
        """Return what a bucket's compressor keeps until the next step."""
        return self._slots[index].state

    def set_state(self, index: int, state: State) -> None:
        """Let a bucket's compressor go on from a copy of another state, in its own state's types."""
        slot = self._slots[index]
        slot.state = {key: value.to(slot.state[key].dtype, copy=True) for key, value in state.items()}

    def submit(self, index: int) -> None:
        """Hand over the next filled bucket; the last one waits for `finish`, whose flags it carries."""
        self._check_sound()
        self._send_held()
        x = self.flat(index)
        self._held = (index, x, record(x.device))
        if index < len(self._slots) - 1:
            self._send_held()

    def weigh(self, n: float) -> None:
        """Let averages of the next exchange be `sum_r n_r x_r / sum_r n_r`; before the first bucket.

        All ranks call it or none. They first add up their n: a message of 8 bytes, before buckets are
        encoded, because what a method leaves out stays in units of the gradient. If all are 0, all count
        alike.
        """
        wait(self._ending)  # a step under way has a weight of its own
        self._weight = n

    def weighed(self) -> float:
        """Return what this rank's tensors count for, where 1 is the mean; asks the others once in a step."""
        if self._asked:
            return self.share
        self._asked, self.share = True, 1.0  # that of the step before counts no more
        if self._weight is not None:
            own = put([self._weight], torch.float64, self._device)
            label = Label(CONTROL, method=self.method.text)
            (mean_,) = read([self.driver.run(mean(own), label)], torch.float64)[0]
            self.share = self._weight / mean_ if mean_ > 0 else 1.0
        return self.share

    def finish(
        self,
        used: Sequence[bool] = (),
        flags: Sequence[bool] = (),
        *,
        extra: Rounds[Any] | None = None,
        bad: bool = False,
        stop: bool = False,
    ) -> Future[Outcome]:
        """End the step after the last bucket; the future holds its outcome, or the first error.

        Args:
            used: whether this rank used each parameter, bucket by bucket; none at all counts as all. What no
                rank used keeps its state: nobody applies its average, so what was sent of it is still owed.
            flags: further flags, as many on all ranks.
            extra: a coroutine that exchanges something else in this step.
            bad: whether what it exchanges is not finite on this rank.
            stop: whether this rank asks all to stop. That costs no byte, but needs a flag that is set.
        """
        end = _End([] if extra is None else [bad], used, flags)
        marks = [float(flag and (math.inf if stop else 1.0)) for flag in end.packed()]
        jobs, self._jobs = self._jobs, []
        held, self._held = self._held, None
        done: Future[Outcome] = Future()
        if self._waits:
            done.set_result(self._collect(jobs, held, end, marks, extra))
        else:  # the one worker has done all `jobs` when it comes to this, so it never waits for itself
            done = self._hand_over(self._collect, jobs, held, end, marks, extra)
            self._ending = [done]
        return done

    def join_streams(self, handed: Iterable[Tensor] = ()) -> None:
        """Make the current CUDA streams wait for the exchange; see `Streams.join`."""
        self._streams.join(handed)

    def state_dict(self) -> dict[str, Any]:
        """Return all that decides the next exchange on this rank, keyed by parameter name."""
        counters = {"step": self.step, "skipped": self.skipped}
        return {**self.identity, **counters, "parameters": self._slots.by_name()}

    def load_state_dict(self, state: Mapping[str, Any], *, anew: bool = False) -> None:
        """Take a saved `state_dict()`, of any bucketing of the same parameters; of none if it begins `anew`.

        Raises:
            CheckpointError: it is of another format, method, rank, world size or model; nothing is changed.
        """
        if state.get("method") == repr(self.method.compressor):  # as methods made of objects were once called
            state = {**state, "method": self.method.text}
        check_state(state, self.identity, {} if anew else self._slots.by_name())
        self.step, self.skipped = int(state["step"]), int(state["skipped"])
        self._slots.load(state["parameters"])

    def abandon(self) -> None:
        """Forget a step that was begun and will not be finished; only one rank alone can do so."""
        for job in self._jobs:
            job.exception()  # waits
        self._failure = None
        self._begin()

    def close(self) -> None:
        """Stop the thread."""
        self._thread.shutdown(wait=True)

    def _lane(self, index: int) -> Lane:
        return self._slots.lane(index, self.step)

    @property
    def identity(self) -> dict[str, Any]:
        """What a state must have in common with this exchange to be loaded."""
        place = {"rank": self.driver.rank, "world_size": self.driver.world_size}
        return {"format": _FORMAT, "method": self.method.text, **place}

    def _check_sound(self) -> None:
        """Refuse to go on after a step that failed on this rank, and maybe not on others."""
        if self._failure is not None:
            raise StenogradError(
                f"the exchange of step {self.step} failed ({first_line(self._failure)}), so the ranks may be "
                "out of step: restart from a checkpoint"
            ) from self._failure

    def _begin(self) -> None:
        self._jobs, self._held = [], None
        self._weight, self._asked = None, False
        self._slots.give_back()
        self._bad: dict[int, Tensor] = {}
        self._pipeline: Pipeline[Any] | None = None

    def _running(self) -> Pipeline[Any]:
        """Return this step's pipeline; where each bucket asks for one collective only, none waits."""
        # Found out anew in each step: lanes change when the warm-up ends, and so may the buckets.
        if self._pipeline is None:
            self._inline = self._waits and all(
                self._lane(i).facts.rounds == 1 for i in range(len(self._slots))
            )
            self._pipeline = Pipeline(self.driver, patient=self._inline)
        return self._pipeline

    def _hand_over(self, job: Callable[..., T], *args: Any) -> Future[T]:
        """Let the thread do a job, in the way of whoever watches."""
        if self.driver.tracer is None:
            return self._thread.submit(job, *args)
        return self.driver.tracer.hand_over(self._thread, job, *args)

    def _send_held(self) -> None:
        self._running()
        if self._held is not None and self._inline:
            self._launch(*self._held)
        elif self._held is not None:
            self._jobs.append(self._hand_over(self._launch, *self._held))
        self._held = None

    @torch.no_grad()
    def _launch(self, index: int, x: Tensor, ready: Any, flags: Sequence[float] | None = None) -> None:
        """Begin a bucket's exchange, with flags that it shall carry; nothing once another one has failed."""
        if self._failure is not None:
            return
        slot, lane = self._slots[index], self._lane(index)
        try:
            with self._streams.working(x.device, ready):
                if (share := self.weighed()) != 1.0:
                    # The mean over nothing may be NaN.
                    x.mul_(share) if share else x.zero_()
                if lane.guarded:
                    # What is clipped may be as large as it likes before.
                    most = torch.finfo(x.dtype).max if self.method.clips else None
                    self._bad[index] = not_bounded(x, most)
                    if x.device.type == "cpu" and bool(self._bad[index]):
                        x.zero_()  # compressors need not be defined on NaN; the result is replaced anyway
                # After the look, from which clipping would hide an infinity.
                self.method.clip(x, slot.bucket.numels)
                site = replace(lane.site, step=self.step, buffer=self._buffer(slot, lane, x))
                rounds = lane.compressor.exchange(x, None, slot.state, site)
                rounds = summed(rounds) if lane.sums else rounds
                if flags is not None:
                    self._flags = self._control(flags, x.device)
                    rounds = self._flags.carried_by(rounds)
                self._running().add(rounds, Label(bucket=index, method=self.method.text))
        except BaseException as error:  # also what a later step must not go on from
            self._failure = error
            raise

    def _buffer(self, slot: BucketState, lane: Lane, x: Tensor) -> Tensor | None:
        """Return last step's memory for the average of a bucket, if the caller is done with it by now."""
        if not self._waits or lane.facts.linear or lane.facts.frees_residual:
            return None  # the average may still be in use, or takes x's own memory or the residual's
        if slot.average is None:
            slot.average = torch.empty_like(x)
        return slot.average

    def _control(self, flags: Sequence[float], device: torch.device) -> Flags:
        """Return what all ranks must know: which of their buckets are not finite, and the caller's flags."""
        own = put(flags, torch.float32, device)
        bad = [self._bad[i].to(device) for i in sorted(self._bad)]
        return Flags(torch.cat([torch.stack(bad), own]) if bad else own)

    @torch.no_grad()
    def _collect(
        self,
        jobs: list[Future[None]],
        held: _Filled | None,
        end: _End,
        marks: Sequence[float],
        extra: Rounds[Any] | None,
    ) -> Outcome:
        try:
            for job in jobs:  # before this thread issues collectives of its own
                job.result()
            self._check_sound()
            pipeline, carries = self._running(), False
            if held is not None:
                dense = self._lane(held[0]).facts.linear
                carries = not dense or held[1].nbytes <= _PIGGYBACK_BYTES
                self._launch(*held, marks if carries else None)
            with self._streams.working(self._device):
                # Also where the last bucket has left before anybody knew that it was the last; see `end_at`.
                if not carries:
                    self._flags = self._control(marks, self._device)
                    pipeline.add(self._flags.alone(), Label(CONTROL, method=self.method.text))
                self.weighed()  # if there was no bucket
                if extra is not None:
                    pipeline.add(extra, Label(method="sparse"))
                return self._concluded(pipeline, end)
        except BaseException as error:
            self._failure = error
            raise
        finally:
            # After a failure as well: gradients that were lent must be let go.
            self._begin()

    def _concluded(self, pipeline: Pipeline[Any], end: _End) -> Outcome:
        """Receive all, decide alike on all ranks whether the step counts, and take new states if so."""
        ended = {i: e for i, e in pipeline.receive().items() if isinstance(e, Exchange)}
        numbers, fine, bounded = read_end(self._flags.any, ended, pipeline.asked, pipeline.doubts)
        received, stop = [number > 0 for number in numbers], self._flags.asks(numbers)
        guarded = sorted(self._bad)
        # The guarded buckets' flags stand first, as `_control` has put them; the rest are the end's.
        entered, found = dict(zip(guarded, received, strict=False)), end.unpacked(received[len(guarded) :])
        sound = not (any(found.elsewhere) or any(entered.values()))
        # Before anything is committed, because an average may then take the memory of the old residual.
        kept = self._slots.kept(found.used) if sound and not all(found.used) else {}
        done = pipeline.finish(sound and bounded and all(fine.values()))
        extra = done.pop() if end.elsewhere else None  # it was added last
        exchanges: list[Exchange] = [exchange for exchange in done if isinstance(exchange, Exchange)]
        # Those that asked by COMMIT ended only now. If it was granted, their messages were bounded.
        late = {i: e for i, e in enumerate(exchanges) if i not in fine}
        if pipeline.committed:
            fine |= dict.fromkeys(late, True)
        elif late:
            fine |= read_end(self._flags.any, late, [], [])[1]
        self.finite = sound and all(fine.values())
        if self.finite:
            self._slots.take(exchanges, kept)
            self.step += 1
        else:
            self._reject(exchanges, entered, fine)
        averages, errors = [e.average for e in exchanges], [e.error for e in exchanges]
        return Outcome(averages, found.used, found.flags, self.finite, errors, extra, stop)

    def _reject(
        self, exchanges: Sequence[Exchange], entered: Mapping[int, bool], fine: Mapping[int, bool]
    ) -> None:
        """Keep all states, make harmed averages NaN, and warn once where sums overflowed by themselves."""
        self.skipped += 1
        overflowed = False
        for i, exchange in enumerate(exchanges):
            lane, bad = self._lane(i), entered.get(i, False)
            if bad or (not fine[i] and not lane.facts.linear):  # a sum is not finite by itself
                exchange.average.fill_(torch.nan)
            reported = exchange.finite is not None and int(exchange.finite) != Finite.NO
            overflowed |= not fine[i] and not bad and (lane.guarded or reported)
        if overflowed and not self._reported:
            self._reported = True
            if self.driver.rank == 0:
                warn_of_overflow(self.method.text, self.step)
