"""Rehearses methods on a copy of the user's model, at any pretended number of ranks, without a network.

The real engine runs on a driver that sends nothing, and everything that it would send is noted.
"""

from __future__ import annotations

import statistics
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from stenograd.catalog.method import Method, method
from stenograd.errors import MethodError, check_count
from stenograd.exchange.buckets import DEFAULT_BUCKET_BYTES
from stenograd.planning.program import BROADCAST, Collective, Event, Program
from stenograd.planning.trial import Trial, Work, first_batches, untouched
from stenograd.schedules.gossip import Gossip
from stenograd.schedules.rounds import Rounds
from stenograd.sync.distribute import distribute
from stenograd.wire.driver import Driver
from stenograd.wire.drivers import AnyDriver
from stenograd.wire.requests import Op, Request, gather
from stenograd.wire.traffic import ATTACH, Label

__all__ = [
    "Profile",
    "Recorder",
    "RehearsalDriver",
    "Rehearsed",
    "record",
    "rehearse",
    "steady",
    "stretches",
    "together",
]

T = TypeVar("T")


class _Joined(Future[T]):
    """The result of a job that has ended, which notes when a thread asks for it."""

    def __init__(self, recorder: Recorder, number: int) -> None:
        super().__init__()
        self._recorder, self._number = recorder, number

    def result(self, timeout: float | None = None) -> T:
        self._recorder.note("join", self._number)
        return super().result(timeout)


class Recorder:
    """Notes what each thread does, with the processor time in between; an `Observer` of drivers.

    Processor time leaves out what a thread waits, and what other programs take. Nothing is ever waited for
    here, so a job for another thread is done at once, in the thread that hands it over, and only noted as
    the other's: what is recorded then depends on no chance.

    Attributes:
        on: whether to note; what happens meanwhile costs nothing.
        lanes: events of each thread, the training's own first.
    """

    def __init__(self) -> None:
        self.on = False
        self.lanes: list[list[Event]] = [[]]
        self._lane, self._of_thread = 0, dict[int, int]()
        self._since: dict[int, float] = {}  # by real thread: when its last event ended
        self._numbers: dict[str, int] = {}

    def begin(self) -> None:
        """Note from now on."""
        self.skip()
        self.on = True

    def number(self, what: str) -> int:
        """Return the next number of a "collective" or a "job"."""
        self._numbers[what] = self._numbers.get(what, -1) + 1
        return self._numbers[what]

    def note(self, kind: str, number: int = 0, collective: Collective | None = None) -> None:
        """Note an event of the thread that is at work."""
        if not self.on:
            return
        now = time.thread_time()
        # Another thread than before, such as autograd's for a GPU, has a clock of its own.
        compute_s = now - self._since.get(threading.get_ident(), now)
        self.lanes[self._lane].append(Event(kind, number, max(compute_s, 0.0), collective))
        self.skip()  # noting is no time of the program's

    def skip(self) -> None:
        """Leave out what this thread did since its last event."""
        self._since[threading.get_ident()] = time.thread_time()

    def add(self, kind: str, start: float, end: float, /, **about: Any) -> None:
        """Note that decoding has just ended; other events of traces are noted elsewhere."""
        if kind == "decode":
            self.note("decoded")

    def ready(self, bucket: int, parameter: Tensor) -> None:
        """Do nothing: a trial measures when gradients are ready."""

    def full(self, bucket: int) -> None:
        """Do nothing: what follows from it is noted."""

    def hand_over(self, thread: Executor, job: Callable[..., T], *args: Any) -> Future[T]:
        """Do a job as if another thread did it; it begins no earlier than it was posted."""
        number, before = self.number("job"), self._lane
        future = _Joined[T](self, number)
        self.note("post", number)
        if id(thread) not in self._of_thread:
            self._of_thread[id(thread)] = len(self.lanes)
            self.lanes.append([])
        self._lane = self._of_thread[id(thread)]
        self.note("begin", number)
        try:
            future.set_result(job(*args))
        except BaseException as error:  # as an executor does: whoever asks for the result gets it
            future.set_exception(error)
        self.note("done", number)
        self._lane = before
        return future


def _left(group: object) -> None:
    """Leave a group that does not exist."""


class RehearsalDriver(Driver):
    """Rank `rank` of `world_size` ranks that do not exist.

    What it is asked to send comes back as if every rank had the same: a gather brings this rank's message N
    times, an all-to-all its row for itself N times, an average the tensors themselves. So whatever decodes
    messages gets valid ones. Bytes are counted as for real ranks, by the same code.

    Args:
        world_size: number of ranks that are pretended.
        recorder: notes what would be sent.
        rank: this rank's number.

    Example:
        >>> import torch
        >>> from stenograd.wire.requests import gather
        >>> driver = RehearsalDriver(3, Recorder())
        >>> len(driver.run(gather(torch.ones(2)))), driver.traffic.moved_bytes
        (3, 16)
    """

    def __init__(self, world_size: int, recorder: Recorder, rank: int = 0) -> None:
        super().__init__(None)
        self.rank, self.world_size = rank, world_size
        # The ledger that super() made counts for the rank that this process really has.
        self.traffic = type(self.traffic)(rank)
        self._groupless = False
        self._recorder = self.tracer = recorder

    def _issue(self, call: Callable[[], Any], what: str, handed: Tensor) -> Any:
        return call()

    def await_work(self, work: Any, what: str, start: float) -> None:
        """Note that this collective is waited for."""
        self._recorder.note("wait", work)

    def _noted(self, op: str, handed: Tensor, peers: Sequence[int] = ()) -> int:
        number, itemsize = self._recorder.number("collective"), handed.element_size()
        about = Collective(op, handed.numel() * itemsize, itemsize, self.world_size, tuple(peers))
        self._recorder.note("issue", number, about)
        return number

    def _transmit(self, op: Op, handed: Tensor, received: Tensor) -> int:
        number = self._noted(op.value, handed)
        if op is Op.GATHER:
            received.view(self.world_size, -1).copy_(handed.view(1, -1).expand(self.world_size, -1))
        elif op is Op.SCATTER:
            received.copy_(handed[self.rank : self.rank + 1].expand_as(received))
        elif op is Op.MEAN and received is handed:
            handed.mul_(self.world_size)  # it was divided before
        elif op is Op.MEAN:
            received.copy_(handed)
        self._recorder.skip()  # what stands for the network takes no time
        return number

    def _transmit_to(self, peers: Sequence[int], sources: Sequence[int], own: Tensor, other: Tensor) -> int:
        number = self._noted(Op.EXCHANGE.value, own, peers)
        other.copy_(own.view(1, -1).expand_as(other))
        self._recorder.skip()
        return number

    def _transmit_from(self, source: int, tensor: Tensor) -> int:
        return self._noted(BROADCAST, tensor)

    def split(self, parts: Sequence[Sequence[int]], what: str = "part") -> list[Driver | None]:
        """Make a driver for each of several parts of this group, None where this rank is not in it."""
        found: list[Driver | None] = []
        for part in parts:
            members = list(part)
            if self.rank not in members:
                found.append(None)
                continue
            driver = RehearsalDriver(len(members), self._recorder, members.index(self.rank))
            driver._leave = weakref.finalize(driver, _left, ())  # a group of its own already
            driver._leave.atexit = False
            found.append(driver)
        return found

    def check_groupless(self) -> None:
        """Do nothing: a rehearsal is complete."""


_WARM_UP = 1  # periods that are not counted: first steps fill caches and states
_LEAST, _MOST = 3, 8  # periods that are recorded
_FLOOR_STEPS = 2  # without an exchange, before each method and behind the last
_LEAST_TOGETHER, _MOST_TOGETHER = 8, 100
_MOST_TURNS = 32  # of a graph that repeats after log2 of the ranks' number


@dataclass(frozen=True, slots=True)
class Profile:
    """What a step takes that exchanges nothing.

    Args:
        step_s: seconds of each measured step.
        cpu_s: processor seconds of the training's thread in each.
        parameters: number of trained elements.
        together_s: seconds of steps after each of which real ranks waited for one another: the slowest's
            computing; none where there are no ranks.
    """

    step_s: tuple[float, ...]
    cpu_s: tuple[float, ...]
    parameters: int
    together_s: tuple[float, ...] = ()

    @property
    def floor_s(self) -> float:
        """The median step."""
        return statistics.median(self.step_s)

    @property
    def floor_cpu_s(self) -> float:
        """Its processor seconds."""
        return statistics.median(self.cpu_s)


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """What was found without a network.

    Attributes:
        profile: of steps without an exchange.
        programs: by method text, each at the speed of the profile.
        left_out: by method text, why it was not rehearsed.
    """

    profile: Profile
    programs: Mapping[str, Program]
    left_out: Mapping[str, str]


def steady(how: Method) -> Method:
    """Return a method as it is after its warm-up: planning is about the steps that last.

    Example:
        >>> steady(method("topk:warmup_steps=100")).warmup_steps
        0
    """
    schedule = how.schedule
    if isinstance(schedule, Rounds):
        schedule = replace(schedule, after=0)
    return replace(how, warmup_steps=0, schedule=schedule)


def stretches(how: Method) -> bool:
    """Return whether between two exchanges a method only computes, so that `every` can be worked out.

    Example:
        >>> [stretches(method(text)) for text in ("topk", "local", "local:every=2,inside=dense,node_size=2")]
        [False, True, False]
    """
    return isinstance(how.schedule, Gossip) or (isinstance(how.schedule, Rounds) and not how.schedule.inside)


def _shape(how: Method, world_size: int) -> tuple[Method, dict[str, int]]:
    """Return what to record instead of a method, and how its program stands for the whole.

    Example:
        >>> _shape(method("diloco:every=30,fragments=2,delay=1"), 4)[1]
        {'period': 4, 'apart': 2, 'idle': 13}
    """
    if isinstance(how.schedule, Rounds) and how.schedule.quorum:  # planned as if all were there
        how = replace(how, schedule=replace(how.schedule, quorum=0.0, grace=Rounds.grace))
    schedule, every = how.schedule, int(getattr(how.schedule, "every", 1))
    if not stretches(how):
        return how, {"period": every, "apart": every, "idle": 0}
    if isinstance(schedule, Rounds):
        if schedule.seconds:
            raise MethodError(f"{how}: rounds that go by time cannot be planned: count steps, as every=30")
        apart = schedule.delay + 1
        shape = {"period": schedule.fragments * apart, "apart": apart}
        shape["idle"] = every // schedule.fragments - apart
        return replace(how, schedule=replace(schedule, every=shape["period"])), shape
    assert isinstance(schedule, Gossip)
    graph = schedule.topology(world_size)
    steps = [graph.weights(0, world_size, step=step) for step in range(2 * _MOST_TURNS)]
    turns = next(n for n in range(1, _MOST_TURNS + 1) if steps[n:][:_MOST_TURNS] == steps[:_MOST_TURNS])
    shape = {"period": turns, "apart": 1, "idle": every - 1}
    return replace(how, schedule=replace(schedule, every=1)), shape


def record(
    trial: Trial,
    how: Method,
    world_size: int,
    count: int,
    *,
    rank: int = 0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Program:
    """Record some periods of a method on a copy of a trial.

    Args:
        trial: stays as it is; random generators do not, see `untouched`.
        how: the method.
        world_size: number of ranks to pretend.
        count: number of periods, after one that is not recorded.
        rank: which of the ranks this is.
        bucket_bytes: as for `distribute`.
    """
    short, shape = _shape(steady(how), world_size)
    recorder, work = Recorder(), Work(trial, first_batches(trial))
    driver = RehearsalDriver(world_size, recorder, rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schedules' doubts: nobody trains by this
        sync = distribute(work.model, work.optimizer, short, group=driver, bucket_bytes=bucket_bytes)
        with sync:
            for each in sync._drivers():
                each.tracer = recorder
            for number in range(-_WARM_UP, count):
                if number == 0:
                    recorder.begin()
                for step in range(shape["period"]):
                    work.step()
                    recorder.note("step", step)
            recorder.on = False  # what flushing and closing send is no part of a step
            sync.flush()
    lanes = tuple(map(tuple, recorder.lanes))
    return Program(method=how.text, world_size=world_size, lanes=lanes, **shape)


def rehearse(
    trial: Trial,
    methods: Sequence[str | Method],
    world_size: int,
    *,
    seconds: float = 20.0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Rehearsed:
    """Measure a trial's step, and record what each method does in it.

    Speed drifts while this goes on, so steps without an exchange are measured between the methods, and their
    durations are brought to the median of all of these. No method computes less than such a step does: what
    was recorded so was chance.

    Args:
        trial: stays as it is, and so do all random generators.
        methods: as for `distribute`.
        world_size: number of ranks to pretend, at least 1.
        seconds: about how long it may take; at least three periods of each method are recorded.
        bucket_bytes: as for `distribute`.

    Raises:
        ConfigError: world_size is below 1, or the trial cannot be copied.
    """
    check_count("world_size", world_size, "give the number of workers")
    programs: dict[str, tuple[Program, float]] = {}
    left_out: dict[str, str] = {}
    trial = replace(trial, batches=first_batches(trial))  # once: an iterator would give others every time
    began = time.perf_counter()
    with untouched(trial):
        floor = _Floor(trial)
        before = floor.measure(5, at_most_s=seconds / 8)
        own_s = floor.profile().floor_s
        for number, one in enumerate(methods):
            how = method(one)
            # As if coding took half of a step; where it takes longer the methods that follow get less.
            each_s = (began + seconds - time.perf_counter()) / (len(methods) - number)
            steps = each_s / (1.5 * own_s) - _WARM_UP - _FLOOR_STEPS
            count = int(min(max(steps, _LEAST), _MOST))
            try:
                program = record(trial, how, world_size, count, bucket_bytes=bucket_bytes)
            except Exception as why:  # a method that does not fit this model is an answer too
                left_out[how.text] = str(why).splitlines()[0] if str(why) else type(why).__name__
                continue
            after = floor.measure(_FLOOR_STEPS)
            programs[how.text] = (program, (before + after) / 2)
            before = after
        profile = floor.profile()
    level = profile.floor_cpu_s
    brought = {text: _not_below(p.scaled(level / own), level) for text, (p, own) in programs.items()}
    return Rehearsed(profile=profile, programs=brought, left_out=left_out)


def _not_below(program: Program, floor_s: float) -> Program:
    computed = sum(e.compute_s for e in program.lanes[0]) / (program.periods * program.period)
    # Only the training's own thread is scaled: the floor was measured in that one.
    return program.scaled(max(floor_s / max(computed, 1e-9), 1.0), slice(1))


def together(trial: Trial, driver: AnyDriver, seconds: float) -> tuple[float, ...]:
    """Return what steps take on the slowest of some ranks that wait for one another; all of them call it.

    Nothing is exchanged but one number at the end of a step. How far ranks are apart then depends on the
    machines, on what else runs there and on what waking up does to caches; it need not be by chance alone.

    Args:
        trial: stays as it is, and so do all random generators.
        driver: the way to the other ranks.
        seconds: about how long it may take; some steps are measured in any case.
    """
    label, taken = Label(ATTACH), []
    with untouched(trial):
        work = Work(trial, first_batches(trial))
        count, at = _LEAST_TOGETHER, -_FLOOR_STEPS
        while at < count:
            start = time.perf_counter()
            work.step()
            taken.append(time.perf_counter() - start)
            together = torch.zeros(1, dtype=torch.float32, device="cpu")
            driver.start(Request(Op.MEAN, (together,)), label).wait()
            at += 1
            if at == 0:
                each_s = driver.run(gather(torch.tensor(taken[-1], dtype=torch.float64, device="cpu")), label)
                slowest_s = max(float(other) for (other,) in each_s)
                # By the slowest, so that all ranks take as many steps and none waits in vain.
                count = int(min(max(seconds / slowest_s, _LEAST_TOGETHER), _MOST_TOGETHER))
        received = driver.run(gather(torch.tensor(taken[-count:], dtype=torch.float64, device="cpu")), label)
    return tuple(float(s) for s in torch.stack([other for (other,) in received]).amax(0))


class _Floor:
    """Steps of a copy of the trial that exchange nothing."""

    def __init__(self, trial: Trial) -> None:
        self._work = Work(trial, first_batches(trial))
        held: list[dict[str, Any]] = self._work.optimizer.param_groups
        self._parameters = sum(p.numel() for g in held for p in g["params"] if p.requires_grad)
        self._step_s: list[float] = []
        self._cpu_s: list[float] = []
        for _ in range(_FLOOR_STEPS):
            self._work.step()

    def measure(self, count: int, at_most_s: float = 1e9) -> float:
        """Take some steps, at least two, and return their median processor seconds."""
        began, taken = time.perf_counter(), 0
        while taken < 2 or (taken < count and time.perf_counter() - began < at_most_s):
            start, cpu = time.perf_counter(), time.thread_time()
            self._work.step()
            self._step_s.append(time.perf_counter() - start)
            self._cpu_s.append(time.thread_time() - cpu)
            taken += 1
        return statistics.median(self._cpu_s[-taken:])

    def profile(self) -> Profile:
        """Return all that was measured."""
        return Profile(tuple(self._step_s), tuple(self._cpu_s), self._parameters)
