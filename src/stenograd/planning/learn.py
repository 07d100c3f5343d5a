"""What methods do to learning, tried on virtual workers in this process for some hundred steps."""

from __future__ import annotations

import math
import statistics
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from stenograd.catalog.method import Method, method
from stenograd.comm.simulate import exchange
from stenograd.comm.simulated_ranks import SimulatedDriver, ranks
from stenograd.errors import bad_value, check_count
from stenograd.planning.advice import DENSE
from stenograd.planning.trial import Trial, Work, untouched
from stenograd.schedules.every_step import EveryStep
from stenograd.sync.distribute import distribute

__all__ = ["Learned", "Learning", "learn", "memory_bytes", "sentence"]

_MOST_BATCHES = 512  # that are kept in memory
_LAST = 10  # the last tenth of the steps makes the loss that is compared
_SILENT_S = 600.0  # a virtual worker that computes so long for one step counts as stuck
# Student's t for 95 % of both sides, by degrees of freedom from 1 on; a normal distribution's from 10 on.
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
_T_MANY = 2.2


@dataclass(frozen=True, kw_only=True)
class Learned:
    """How training under one method went.

    Attributes:
        method: its text.
        differences: the last loss minus dense training's from the same start on the same batches, for each
            seed in which both stayed finite.
        diverged: number of seeds in which it did not, or ended above the first loss where dense did not.
        error: of the average of the first gradients, `||C - mean||^2 / ||mean||^2`, without what feedback
            returns later; None where gradients are not what is averaged.
    """

    method: str
    differences: tuple[float, ...]
    diverged: int
    error: float | None = None

    @property
    def mean(self) -> float:
        """The mean difference; not a number where no seed is left."""
        return statistics.fmean(self.differences) if self.differences else math.nan

    @property
    def margin(self) -> float:
        """Half the width of the 95 % interval of the mean, by Student's t; infinite for one seed.

        Example:
            >>> round(Learned(method="topk", differences=(0.01, 0.02, 0.03), diverged=0).margin, 4)
            0.0248
        """
        count = len(self.differences)
        if count < 2:
            return math.inf
        t = _T[count - 2] if count - 2 < len(_T) else _T_MANY
        return t * statistics.stdev(self.differences) / math.sqrt(count)


@dataclass(frozen=True, kw_only=True)
class Learning:
    """Trainings of virtual workers from the same weights on the same batches.

    Attributes:
        workers, steps, seeds: how many; a seed deals the batches out in another order.
        asked: workers that the plan is for.
        batches: different ones that there were.
        first: dense training's loss in the first step, the mean over workers and seeds.
        last: dense training's mean loss in the last tenth of the steps.
        noise: share of the mean gradient's squared norm that is noise of the batches, at the start.
        results: one for each method.
    """

    workers: int
    steps: int
    seeds: int
    asked: int
    batches: int
    first: float
    last: float
    noise: float
    results: tuple[Learned, ...]

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON-able values."""
        return asdict(self)


def learn(
    trial: Trial,
    methods: Sequence[str | Method],
    *,
    workers: int,
    steps: int = 300,
    seeds: int = 3,
    most_workers: int = 8,
    progress: Callable[[str], None] = lambda text: None,
) -> Learning:
    """Train copies of a trial as virtual workers, densely and under each method, and compare the losses.

    The workers run the real engine with simulated collectives: two compute what two real ones would, bit for
    bit, and more do up to the order in which an all-reduce adds up. Model, optimizer and random generators
    stay as they were. `trial.loss` is called in several threads, in one at a time.

    Args:
        trial: from the weights that matter: an untrained model tells little about a trained one.
        methods: as for `distribute`.
        workers: that the training is planned for.
        steps: of each training, at least 10.
        seeds: number of orders of the batches, from 2.
        most_workers: how many are tried at most: each needs memory, see `memory_bytes`, and time.
        progress: called before each training with what begins.

    Raises:
        ConfigError: an argument breaks its rule, or the trial cannot be copied.

    Example:
        >>> model = torch.nn.Linear(8, 1)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> batches = [torch.randn(4, 8, generator=torch.Generator().manual_seed(i)) for i in range(16)]
        >>> trial = Trial(model, optimizer, batches, lambda model, x: (model(x) - x[:, :1]).square().mean())
        >>> found = learn(trial, ["fp16"], workers=2, steps=10, seeds=2)
        >>> found.results[0].diverged, abs(found.results[0].mean) < 1e-3
        (0, True)
    """
    check_count("workers", workers, "give the number of workers")
    check_count("seeds", seeds, "use 3", most=100)
    if seeds < 2:
        raise bad_value("seeds", "must be at least 2, for a difference to have an interval", seeds, "use 3")
    if steps < _LAST:
        raise bad_value("steps", f"must be at least {_LAST}", steps, "use 300")
    size = min(workers, most_workers)
    chosen = [method(text) for text in methods]
    batches = list(islice(trial.batches, min(size * steps * seeds, _MOST_BATCHES)))
    if not batches:
        raise bad_value("batches", "must hold at least one batch", batches, "give a list of some")
    with untouched(trial), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of doubts about combinations: nobody trains by this
        first = [_gradient(trial, batches, at % len(batches)) for at in range(size)]
        errors = {how.text: _error(how, trial, first) for how in chosen}
        curves = {}
        for how in [method(DENSE), *(how for how in chosen if how.text != DENSE)]:
            for seed in range(seeds):
                progress(f"{how.text}, seed {seed + 1} of {seeds}")
                curves[how.text, seed] = _curve(trial, batches, how, size, steps, seed)
    dense = [curves[DENSE, seed] for seed in range(seeds)]
    return Learning(
        workers=size,
        steps=steps,
        seeds=seeds,
        asked=workers,
        batches=len(batches),
        first=statistics.fmean(curve[0] for curve in dense),
        last=statistics.fmean(map(_last, dense)),
        noise=_noise(first),
        results=tuple(
            _compared(how.text, [curves[how.text, seed] for seed in range(seeds)], dense, errors[how.text])
            for how in chosen
        ),
    )


def memory_bytes(trial: Trial, workers: int) -> int:
    """Return about how much memory `learn` takes for so many virtual workers.

    Counted are parameters, gradients, twice the parameters for the optimizer and as much for the method.

    Example:
        >>> model = torch.nn.Linear(9, 1)
        >>> memory_bytes(Trial(model, torch.optim.SGD(model.parameters()), [], lambda m, b: m(b)), 8)
        1920
    """
    return workers * 6 * sum(p.numel() * p.element_size() for p in trial.model.parameters())


def sentence(found: Learning, of: Learned) -> str:
    """Say what may be said of one method: what was tried, and the paired difference with its interval.

    Example:
        >>> row = Learned(method="topk", differences=(-0.001, 0.002, 0.001), diverged=0)
        >>> numbers = {"first": 2.3, "last": 1.5, "noise": 0.5, "batches": 64, "asked": 4}
        >>> tried = Learning(workers=4, steps=300, seeds=3, results=(row,), **numbers)
        >>> sentence(tried, row)
        'topk: loss +0.00067 +- 0.0038 against dense: no difference seen'
        >>> sentence(tried, Learned(method="sign", differences=(), diverged=3))
        'sign: diverged in 3 of 3 seeds: do not use it as it is; try warmup_steps or a lower learning rate'
    """
    if of.diverged:
        return (
            f"{of.method}: diverged in {of.diverged} of {found.seeds} seeds: do not use it as it is; try "
            "warmup_steps or a lower learning rate"
        )
    if not of.differences:
        return f"{of.method}: nothing can be said, since dense training itself did not learn here"
    seen = "no difference seen"
    if abs(of.mean) > of.margin:
        seen = "a higher loss than dense" if of.mean > 0 else "a lower loss than dense"
    return f"{of.method}: loss {of.mean:+.2g} +- {of.margin:.2g} against dense: {seen}"


def _curve(trial: Trial, batches: list[Any], how: Method, size: int, steps: int, seed: int) -> list[float]:
    """Train virtual workers under a method, and return the mean loss of each step."""
    works = [Work(trial, batches) for _ in range(size)]
    order = list(islice(_order(len(batches), seed), size * steps))
    drawing = threading.Lock()  # random generators are the process's: losses draw in turns, each from a seed

    def train(driver: SimulatedDriver) -> list[float]:
        work, losses = works[driver.rank], []
        with distribute(work.model, work.optimizer, how, group=driver):
            for step in range(steps):
                number = step * size + driver.rank
                work.optimizer.zero_grad()
                with drawing:
                    torch.manual_seed((seed << 32) + number)
                    value = trial.loss(work.model, batches[order[number]])
                value.backward()
                work.optimizer.step()
                losses.append(value.item())
        return losses

    found = ranks(size, train, timeout_s=_SILENT_S)
    return [statistics.fmean(losses) for losses in zip(*found, strict=True)]


def _order(count: int, seed: int) -> Iterator[int]:
    """Deal out numbers of batches: all of them in random order, again and again."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


def _last(curve: Sequence[float]) -> float:
    return statistics.fmean(curve[-max(len(curve) // _LAST, 1) :])


def _compared(
    text: str, curves: Sequence[Sequence[float]], dense: Sequence[Sequence[float]], error: float | None
) -> Learned:
    differences, diverged = [], 0
    for ours, theirs in zip(curves, dense, strict=True):
        end, usual = _last(ours), _last(theirs)
        lost = not math.isfinite(end) or end > ours[0]
        if lost and math.isfinite(usual) and usual <= theirs[0]:
            diverged += 1
        elif math.isfinite(end) and math.isfinite(usual):
            differences.append(end - usual)
    return Learned(method=text, differences=tuple(differences), diverged=diverged, error=error)


def _gradient(trial: Trial, batches: list[Any], at: int) -> Tensor:
    """Return the gradients of one batch at the start, one after another."""
    work = Work(trial, batches)
    work.optimizer.zero_grad()
    torch.manual_seed(at)
    trial.loss(work.model, batches[at]).backward()
    return torch.cat([p.grad.reshape(-1).float() for p in _trained(work.model) if p.grad is not None])


def _trained(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _error(how: Method, trial: Trial, gradients: Sequence[Tensor]) -> float | None:
    """Return the error of the average of the workers' first gradients, relative to the average."""
    compressor = how.compressors(False)[-1]
    shapes = [p.shape for p in _trained(trial.model)]
    if not isinstance(how.schedule, EveryStep) or compressor.own_momentum:
        return None
    if sum(shape.numel() for shape in shapes) != gradients[0].numel():  # some had no gradient
        shapes = [gradients[0].shape]
    average = exchange(compressor, gradients, shapes=shapes)[0].average.reshape(-1).double()
    mean = torch.stack(list(gradients)).double().mean(0)
    return float((average - mean).square().sum() / mean.square().sum().clamp_min(1e-300))


def _noise(gradients: Sequence[Tensor]) -> float:
    """Return which share of the mean gradient's squared norm comes from the choice of batches."""
    if len(gradients) < 2:
        return math.nan
    all_of_them = torch.stack(list(gradients)).double()
    mean = all_of_them.mean(0)
    variance = (all_of_them - mean).square().sum() / (len(gradients) - 1)
    return float(variance / len(gradients) / mean.square().sum().clamp_min(1e-300))
