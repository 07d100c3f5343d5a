"""Rehearses methods on a copy of the user's model, at any pretended number of ranks, without a network."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from stenograd.catalog.method import Method, method
from stenograd.comm.drivers import AnyDriver
from stenograd.comm.tensor_exchange import DEFAULT_BUCKET_BYTES
from stenograd.comm.traffic import ATTACH, Label
from stenograd.data.requests import Op, Request, gather
from stenograd.errors import check_count
from stenograd.planning.program import Program, median_program
from stenograd.planning.recorder import Recorder, RehearsalDriver
from stenograd.planning.trial import Trial, Work, first_batches, untouched
from stenograd.schedules.gossip import Gossip
from stenograd.schedules.rounds import Rounds
from stenograd.sync.distribute import distribute

__all__ = ["Profile", "Rehearsed", "periods", "rehearse", "steady", "together", "with_floor"]

_WARM_UP = 2  # periods that are not counted: first steps fill caches and states
_FLOOR_WARM_UP = 2
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


def period_of(how: Method, world_size: int) -> int:
    """Return after how many steps a method's schedule begins again, neighbours included.

    Example:
        >>> period_of(method("topk"), 4), period_of(method("local:every=8"), 4)
        (1, 8)
        >>> [period_of(method("gossip:every=2"), size) for size in (2, 4, 8)]  # at distances 1, 2, 4, ...
        [2, 4, 6]
    """
    every = int(getattr(how.schedule, "every", 1))
    if not isinstance(how.schedule, Gossip) or world_size == 1:
        return every
    graph = how.schedule.topology(world_size)
    steps = [graph.weights(0, world_size, step=step) for step in range(2 * _MOST_TURNS)]
    return every * next(
        turns for turns in range(1, _MOST_TURNS + 1) if steps[turns:][:_MOST_TURNS] == steps[:_MOST_TURNS]
    )


def periods(
    trial: Trial,
    how: Method,
    world_size: int,
    count: int,
    *,
    rank: int = 0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    idle: bool = True,
) -> list[Program]:
    """Record some periods of a method, one after another, on a copy of a trial.

    Args:
        trial: stays as it is; random generators do not, see `untouched`.
        how: the method.
        world_size: number of ranks to pretend.
        count: number of periods, after some that are not recorded.
        rank: which of the ranks this is.
        bucket_bytes: as for `distribute`.
        idle: whether all steps of a period but the last leave the model's computing out; it is noted that
            they do.
    """
    how, recorder = steady(how), Recorder()
    work = Work(trial, first_batches(trial))
    driver = RehearsalDriver(world_size, recorder, rank)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of schedules' doubts: nobody trains by this
        sync = distribute(work.model, work.optimizer, how, group=driver, bucket_bytes=bucket_bytes)
        with sync:
            for each in sync._drivers():
                each.tracer = recorder
            # One more at either end: an exchange that outlasts its period belongs to two of them.
            for number in range(-_WARM_UP, count + 2):
                if number == 0:
                    recorder.begin()
                _period(work, recorder, period_of(how, world_size), idle)
            sync.flush()
            recorder.on = False
    steps = period_of(how, world_size)
    shared: dict[str, Any] = {"method": how.text, "world_size": world_size, "steps": steps}
    return [
        Program(lanes=lanes, idle_steps=steps - 1 if idle else 0, **shared)
        for lanes in recorder.periods()[1 : count + 1]
    ]


def _period(work: Work, recorder: Recorder, steps: int, idle: bool) -> None:
    for step in range(steps):
        if idle and step < steps - 1:
            work.idle_step()
        else:
            work.step()
        recorder.note("step", step)
    recorder.note("period")


def rehearse(
    trial: Trial,
    methods: Sequence[str | Method],
    world_size: int,
    *,
    seconds: float = 20.0,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
) -> Rehearsed:
    """Measure a trial's step, and record what each method does in it.

    Speed drifts while this goes on, so steps without an exchange are measured before and after each method,
    and its durations are brought to the median of all of these.

    Args:
        trial: stays as it is, and so do all random generators.
        methods: as for `distribute`.
        world_size: number of ranks to pretend, at least 1.
        seconds: about how long it may take; at least two periods of each method are recorded.
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
        floor.measure(_FLOOR_WARM_UP)
        floor.reset()
        floor.measure(5, at_most_s=seconds / 8)
        own_s = floor.profile().floor_s
        for number, one in enumerate(methods):
            how = method(one)
            # As if coding took half of a step, and with the periods and steps that are not counted; where it
            # takes longer the methods that follow get less.
            each_s = (began + seconds - time.perf_counter()) / (len(methods) - number)
            count = int(min(max(each_s / (1.5 * own_s) - _WARM_UP - 6, 2), 12))
            before = floor.measure(1)
            try:
                recorded = periods(trial, how, world_size, count, bucket_bytes=bucket_bytes)
                program = median_program(recorded)
            except Exception as why:  # a method that does not fit this model is an answer too
                left_out[how.text] = str(why).splitlines()[0] if str(why) else type(why).__name__
                continue
            programs[how.text] = (program, (before + floor.measure(1)) / 2)
        profile = floor.profile()
    level = statistics.median(profile.cpu_s)
    brought = {
        text: _not_below(with_floor(p.scaled(level / own, level / own), level), level)
        for text, (p, own) in programs.items()
    }
    return Rehearsed(profile=profile, programs=brought, left_out=left_out)


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
        count, at = _LEAST_TOGETHER, -_FLOOR_WARM_UP
        while at < count:
            start = time.perf_counter()
            work.step()
            taken.append(time.perf_counter() - start)
            driver.start(Request(Op.MEAN, (torch.zeros(1),)), label).wait()
            at += 1
            if at == 0:
                each_s = driver.run(gather(torch.tensor(taken[-1], dtype=torch.float64)), label)
                slowest_s = max(float(theirs) for (theirs,) in each_s)
                count = int(min(max(seconds / slowest_s, _LEAST_TOGETHER), _MOST_TOGETHER))
        told = driver.run(gather(torch.tensor(taken[-count:], dtype=torch.float64)), label)
    return tuple(float(s) for s in torch.stack([theirs for (theirs,) in told]).amax(0))


def with_floor(program: Program, floor_s: float) -> Program:
    """Put a step's computing into the steps that were recorded without it.

    What such a step did besides stays: its time beyond that of the shortest of them.
    """
    if not program.idle_steps:
        return program
    main, first, firsts = program.lanes[0], True, []
    for at, event in enumerate(main):
        if first:
            firsts.append(at)
        first = event.kind == "step"
    idle = firsts[: program.idle_steps]
    least = min(main[at].compute_s for at in idle)
    filled = [
        replace(e, compute_s=e.compute_s - least + floor_s) if at in idle else e for at, e in enumerate(main)
    ]
    return replace(program, lanes=(tuple(filled), *program.lanes[1:]))


def _not_below(program: Program, floor_s: float) -> Program:
    """Let no method compute less than a step without an exchange does: what was recorded so was chance."""
    main = program.lanes[0]
    times = program.steps * floor_s / max(sum(e.compute_s for e in main), 1e-9)
    if times <= 1:
        return program
    stretched = tuple(replace(e, compute_s=e.compute_s * times) for e in main)
    return replace(program, lanes=(stretched, *program.lanes[1:]))


class _Floor:
    """Steps of a copy of the trial that exchange nothing."""

    def __init__(self, trial: Trial) -> None:
        self._work = Work(trial, first_batches(trial))
        held = self._work.optimizer.param_groups
        self._parameters = sum(p.numel() for g in held for p in g["params"] if p.requires_grad)
        self.reset()

    def reset(self) -> None:
        """Forget what was measured."""
        self._step_s: list[float] = []
        self._cpu_s: list[float] = []

    def measure(self, count: int, at_most_s: float = 1e9) -> float:
        """Take some steps, at least two, and return their median processor seconds."""
        began = time.perf_counter()
        for number in range(max(count, 2)):
            if number >= 2 and time.perf_counter() - began > at_most_s:
                break
            start, cpu = time.perf_counter(), time.thread_time()
            self._work.step()
            self._step_s.append(time.perf_counter() - start)
            self._cpu_s.append(time.thread_time() - cpu)
        return statistics.median(self._cpu_s[-max(count, 2) :])

    def profile(self) -> Profile:
        """Return all that was measured."""
        return Profile(tuple(self._step_s), tuple(self._cpu_s), self._parameters)
