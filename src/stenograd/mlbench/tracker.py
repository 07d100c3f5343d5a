"""MLBench's tracker: where the time of a batch goes, running averages, the best epoch, and goals of tasks."""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, partialmethod
from itertools import pairwise
from typing import Any

from stenograd.errors import bad_value

__all__ = [
    "AverageMeter",
    "Goal",
    "Tracker",
    "task1_time_to_accuracy_goal",
    "task1_time_to_accuracy_light_goal",
    "task2_time_to_accuracy_goal",
    "task2_time_to_accuracy_light_goal",
    "task3_time_to_perplexity_goal",
    "task4_time_to_bleu_goal",
    "time_to_accuracy_goal",
]

# goal(name of the statistic, its value, tracker): a text once the goal is reached, else None
Goal = Callable[[str, float, "Tracker"], "str | None"]

# Statistics and marks kept, about 2 MB: averages, totals and goals take in all statistics, and marks pile up
# only where an optimizer is given a tracker whose batches nobody starts.
_KEPT = 10_000


@dataclass(slots=True)
class AverageMeter:
    """A running average: `avg = sum of val * n / sum of n`.

    Example:
        >>> meter = AverageMeter()
        >>> meter.update(1.0, n=3)
        >>> meter.update(5.0)
        >>> meter.val, meter.avg, meter.count
        (5.0, 2.0, 4)
    """

    val: float = 0.0
    sum: float = 0.0
    count: float = 0

    @property
    def avg(self) -> float:
        """The average so far; 0 before the first value."""
        return self.sum / self.count if self.count else 0.0

    def update(self, val: float, n: float = 1) -> None:
        """Add a value that stands for n samples."""
        self.val = float(val)
        self.sum += self.val * n
        self.count += n


class Tracker:
    """Follows a training run.

    A batch is a row of marks: `batch_start()`, then `record_batch_...()` after each piece of work, then
    `batch_end()`. The time between two marks belongs to the later one's name. There is a mark for preparing
    (`init`, which counts towards no total) and loading the batch, the forward pass, the loss, the backward
    pass, aggregation, the optimizer's step and metrics; `record_batch_step(name)` makes any other. The
    `get_total_..._time()` return the seconds that all batches spent in each kind of work.

    Args:
        metrics: objects with a `name`; the first decides which epoch is best.
        run_id, rank: of the run and of this process, for `history`.
        goal: called with every statistic as `goal(name, value, tracker)`; returns a text once it is reached.
        communication_steps, compute_steps, metrics_steps, preprocess_steps: names of the marks that count as
            each kind of work.
        minimize: whether a smaller primary metric is better.
        clock: returns the time in seconds.

    Attributes:
        history: the newest 10,000 statistics, as (run_id, rank, name, value, time).
        batch_times: the marks of the present batch as (name, time), at most the newest 10,000.
        epoch_metrics: seconds by name of the mark and epoch.
        epoch_stats: averages of this epoch by statistic. goal_result: the goal's text, once reached.

    Departures from MLBench: time spent in validation is measured, an epoch may be the best with a metric of 0
    or less, the goal's text is kept in `goal_result` instead of printed, and statistics go to `history`, not
    to a dashboard; whoever wants to keep all of them gives a `goal` that passes them on and returns None.

    Example:
        >>> ticks = iter([0.0, 2.0, 5.0, 6.0])
        >>> tracker = Tracker([], run_id=1, rank=0, clock=lambda: next(ticks))
        >>> tracker.batch_start()
        >>> tracker.record_batch_backprop()
        >>> tracker.record_batch_agg()
        >>> tracker.batch_end()
        >>> tracker.get_total_compute_time(), tracker.get_total_communication_time()
        (2.0, 3.0)
        >>> tracker.get_total_train_time()
        6.0
    """

    def __init__(
        self,
        metrics: Sequence[Any],
        run_id: Any,
        rank: int,
        goal: Goal | None = None,
        communication_steps: Sequence[str] | str = ("agg",),
        compute_steps: Sequence[str] | str = ("fwd_pass", "comp_loss", "backprop", "opt_step"),
        metrics_steps: Sequence[str] | str = ("comp_metrics",),
        preprocess_steps: Sequence[str] | str = ("batch_load",),
        minimize: bool = False,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        kinds = {
            "compute": compute_steps,
            "communication": communication_steps,
            "metrics": metrics_steps,
            "preprocess": preprocess_steps,
        }
        self._kind_of = {
            name: kind
            for kind, names in kinds.items()
            for name in ([names] if isinstance(names, str) else names)
        }
        self._clock = clock
        self._total_s: defaultdict[str, float] = defaultdict(float)
        self.batch_times: deque[tuple[str, float]] = deque(maxlen=_KEPT)
        self.epoch_metrics: defaultdict[str, dict[int, float]] = defaultdict(partial(defaultdict, float))
        self.current_epoch = 0
        self.metrics, self.run_id, self.rank = list(metrics), run_id, rank
        self.goal, self.goal_reached = goal, False
        self.goal_result: str | None = None
        self.primary_metric = self.metrics[0] if self.metrics else None
        self.minimize, self.best_epoch = minimize, 0
        self.best_metric_value = float("inf" if minimize else "-inf")
        self.is_training = True
        self.start_time: float | None = None
        self.history: deque[tuple[Any, int, str, float, float]] = deque(maxlen=_KEPT)
        self._validation_start: float | None = None
        self.reset_epoch_stats()

    def batch_start(self) -> None:
        """Start a batch."""
        self.batch_times.clear()
        self.record_batch_step("start")

    def batch_end(self) -> None:
        """End a batch and add up its times."""
        self.record_batch_step("end")
        (_, first), (_, last) = self.batch_times[0], self.batch_times[-1]
        self._total_s["train"] += last - first
        self.epoch_metrics["CumulativeTrainTimeEpoch"][self.current_epoch] += last - first
        for (_, before), (name, after) in pairwise(self.batch_times):
            self.epoch_metrics[name][self.current_epoch] += after - before
            if name in self._kind_of:
                self._total_s[self._kind_of[name]] += after - before

    def record_batch_step(self, name: str) -> None:
        """Mark the end of a piece of work of this batch."""
        self.batch_times.append((name, self._clock()))

    record_batch_init = partialmethod(record_batch_step, "init")
    record_batch_load = partialmethod(record_batch_step, "batch_load")
    record_batch_fwd_pass = partialmethod(record_batch_step, "fwd_pass")
    record_batch_comp_loss = partialmethod(record_batch_step, "comp_loss")
    record_batch_backprop = partialmethod(record_batch_step, "backprop")
    record_batch_agg = partialmethod(record_batch_step, "agg")
    record_batch_opt_step = partialmethod(record_batch_step, "opt_step")
    record_batch_comp_metrics = partialmethod(record_batch_step, "comp_metrics")

    def _total_time(self, kind: str) -> float:
        return self._total_s[kind]

    get_total_train_time = partialmethod(_total_time, "train")
    get_total_compute_time = partialmethod(_total_time, "compute")
    get_total_communication_time = partialmethod(_total_time, "communication")
    get_total_metrics_time = partialmethod(_total_time, "metrics")
    get_total_preprocess_time = partialmethod(_total_time, "preprocess")
    get_total_val_time = partialmethod(_total_time, "validation")

    def start(self) -> None:
        """Mark the start of the run, once."""
        if self.start_time is not None:
            raise bad_value("start", "may be called once", self.start_time, "make a tracker for each run")
        self.start_time = self._clock()

    def train(self) -> None:
        """Count statistics as training's from now on."""
        self.is_training = True

    def validation(self) -> None:
        """Count statistics as validation's from now on."""
        self.is_training = False

    def validation_start(self) -> None:
        """Start the validation timer."""
        self._validation_start = self._clock()

    def validation_end(self) -> None:
        """Stop the validation timer and add what it shows."""
        if self._validation_start is None:
            raise bad_value("validation_end", "must follow validation_start", None, "start the timer first")
        self._total_s["validation"] += self._clock() - self._validation_start
        self._validation_start = None

    def epoch_end(self) -> None:
        """End an epoch: the next one's averages start afresh."""
        self.current_epoch += 1
        self.reset_epoch_stats()

    def reset_epoch_stats(self) -> None:
        """Forget the averages of this epoch."""
        names = ["loss", *(metric.name for metric in self.metrics)]
        self.epoch_stats = {f"{p}_{name}": AverageMeter() for p in ("train", "val") for name in names}

    def record_stat(self, name: str, value: float, n: float = 1, log_to_api: bool = False) -> None:
        """Add a value, an average over n samples, to this epoch's average of a statistic, and ask the goal.

        The statistic is called `train_` or `val_` and the name. log_to_api is ignored: there is no dashboard.
        """
        name = ("train_" if self.is_training else "val_") + name
        self.epoch_stats.setdefault(name, AverageMeter()).update(value, n)
        self.history.append((self.run_id, self.rank, name, float(value), self._clock()))
        if self.goal is not None and not self.goal_reached:
            self.goal_result = self.goal(name, float(value), self)
            self.goal_reached = self.goal_result is not None

    def record_loss(self, value: float, n: float = 1, log_to_api: bool = False) -> None:
        """Add a loss; as `record_stat`."""
        self.record_stat("loss", value, n, log_to_api)

    def record_metric(self, metric: Any, value: float, n: float = 1, log_to_api: bool = False) -> None:
        """Add a metric's value; in validation the primary one decides which epoch is best."""
        self.record_stat(metric.name, value, n, log_to_api)
        primary = self.primary_metric is not None and metric.name == self.primary_metric.name
        if primary and not self.is_training:
            self.update_primary_metric(value)

    def update_primary_metric(self, new_metric_value: float) -> None:
        """Let this epoch be the best if the value is better than all before."""
        value, best = float(new_metric_value), self.best_metric_value
        if value < best if self.minimize else value > best:
            self.best_metric_value, self.best_epoch = value, self.current_epoch

    def is_best(self) -> bool:
        """Return whether this epoch is the best so far."""
        return self.current_epoch == self.best_epoch

    def __str__(self) -> str:
        prefix = "train_" if self.is_training else "val_"
        stats = {k.removeprefix(prefix): m.avg for k, m in self.epoch_stats.items() if k.startswith(prefix)}
        times = [(name, after - before) for (_, before), (name, after) in pairwise(self.batch_times)]
        return " | ".join([f"{k} {v:.3g}" for k, v in stats.items()] + [f"{k} {s:.1e} s" for k, s in times])


def time_to_accuracy_goal(threshold: float) -> Goal:
    """Return the goal `val_global_Prec@1 >= threshold`, a top-1 accuracy in percent.

    Example:
        >>> tracker = Tracker([], 1, 0, goal=time_to_accuracy_goal(70))
        >>> tracker.validation()
        >>> tracker.record_stat("global_Prec@1", 71.5)
        >>> tracker.goal_result
        '70% Top 1 Validation Accuracy reached in 0.000 seconds'
    """
    return _goal("val_global_Prec@1", threshold, f"{threshold:02g}% Top 1 Validation Accuracy")


def task1_time_to_accuracy_goal() -> Goal:
    """Image classification: 80 % top-1 accuracy."""
    return time_to_accuracy_goal(80)


def task1_time_to_accuracy_light_goal() -> Goal:
    """Image classification, light: 70 % top-1 accuracy."""
    return time_to_accuracy_goal(70)


def task2_time_to_accuracy_goal() -> Goal:
    """Linear classification: 89 % accuracy."""
    return time_to_accuracy_goal(89)


def task2_time_to_accuracy_light_goal() -> Goal:
    """Linear classification, light: 80 % accuracy."""
    return time_to_accuracy_goal(80)


def task3_time_to_perplexity_goal(threshold: float = 70) -> Goal:
    """Language modelling: `val_global_Perplexity <= threshold`."""
    return _goal("val_global_Perplexity", threshold, f"Validation Perplexity of {threshold:g}", below=True)


def task4_time_to_bleu_goal(threshold: float = 24) -> Goal:
    """Translation: `val_global_BLEU-Score >= threshold`."""
    return _goal("val_global_BLEU-Score", threshold, f"Validation BLEU-Score of {threshold:g}")


def _goal(statistic: str, threshold: float, what: str, *, below: bool = False) -> Goal:
    def goal(name: str, value: float, tracker: Tracker) -> str | None:
        if name != statistic or not (value <= threshold if below else value >= threshold):
            return None
        seconds = {
            f"{what} reached in": tracker.get_total_train_time(),
            "Compute:": tracker.get_total_compute_time(),
            "Communication:": tracker.get_total_communication_time(),
            "Metrics Computation:": tracker.get_total_metrics_time(),
            "Pre-processing:": tracker.get_total_preprocess_time(),
        }
        shown = (f"{k} {s:.3f} seconds" for at, (k, s) in enumerate(seconds.items()) if s or not at)
        return ", ".join(shown)

    return goal
