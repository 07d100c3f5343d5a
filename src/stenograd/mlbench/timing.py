"""Where the time of a batch goes: marks, the kinds of work between them, and their totals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

__all__ = ["BatchTimes"]


class BatchTimes:
    """Adds up the time between marks: each interval belongs to the name of the mark that ends it.

    Args:
        steps: names of marks by kind: "compute", "communication", "metrics" and "preprocess".
        clock: returns the time in seconds.

    Example:
        >>> ticks = iter([0.0, 2.0, 5.0, 6.0])
        >>> times = BatchTimes({"compute": ["backprop"], "communication": "agg"}, lambda: next(ticks))
        >>> times.batch_start()
        >>> times.record_batch_backprop()
        >>> times.record_batch_agg()
        >>> times.batch_end()
        >>> times.get_total_compute_time(), times.get_total_communication_time()
        (2.0, 3.0)
    """

    def __init__(self, steps: Mapping[str, Sequence[str] | str], clock: Callable[[], float]) -> None:
        self._clock = clock
        self.current_epoch = 0
        self.batch_times: list[tuple[str, float]] = []
        self.epoch_metrics: defaultdict[str, dict[int, float]] = defaultdict(dict)
        self._kind_of = {name: kind for kind, names in steps.items() for name in _names(names)}
        self._total_s: defaultdict[str, float] = defaultdict(float)
        self._train_s = 0.0

    def batch_start(self) -> None:
        """Start a batch."""
        self.batch_times = []
        self.record_batch_step("start")

    def batch_end(self) -> None:
        """End a batch and add up its times."""
        self.record_batch_step("end")
        (_, first), (_, last) = self.batch_times[0], self.batch_times[-1]
        self._train_s += last - first
        self._add_to_epoch("CumulativeTrainTimeEpoch", last - first)
        for (_, before), (name, after) in pairwise(self.batch_times):
            self._add_to_epoch(name, after - before)
            if name in self._kind_of:
                self._total_s[self._kind_of[name]] += after - before

    def record_batch_step(self, name: str) -> None:
        """Mark the end of a piece of work of this batch."""
        self.batch_times.append((name, self._clock()))

    def record_batch_init(self) -> None:
        """Mark the end of preparing the batch (charged to no total)."""
        self.record_batch_step("init")

    def record_batch_load(self) -> None:
        """Mark the end of loading the batch."""
        self.record_batch_step("batch_load")

    def record_batch_fwd_pass(self) -> None:
        """Mark the end of the forward pass."""
        self.record_batch_step("fwd_pass")

    def record_batch_comp_loss(self) -> None:
        """Mark the end of computing the loss."""
        self.record_batch_step("comp_loss")

    def record_batch_backprop(self) -> None:
        """Mark the end of the backward pass."""
        self.record_batch_step("backprop")

    def record_batch_agg(self) -> None:
        """Mark the end of communication."""
        self.record_batch_step("agg")

    def record_batch_opt_step(self) -> None:
        """Mark the end of the optimizer's step."""
        self.record_batch_step("opt_step")

    def record_batch_comp_metrics(self) -> None:
        """Mark the end of computing metrics."""
        self.record_batch_step("comp_metrics")

    def get_total_train_time(self) -> float:
        """Return the seconds spent in batches."""
        return self._train_s

    def get_total_compute_time(self) -> float:
        """Return the seconds of batches spent in computation."""
        return self._total_s["compute"]

    def get_total_communication_time(self) -> float:
        """Return the seconds of batches spent in communication."""
        return self._total_s["communication"]

    def get_total_metrics_time(self) -> float:
        """Return the seconds of batches spent in computing metrics."""
        return self._total_s["metrics"]

    def get_total_preprocess_time(self) -> float:
        """Return the seconds of batches spent in loading data."""
        return self._total_s["preprocess"]

    def _add_to_epoch(self, name: str, seconds: float) -> None:
        epochs = self.epoch_metrics[name]
        epochs[self.current_epoch] = epochs.get(self.current_epoch, 0.0) + seconds


def _names(steps: Sequence[str] | str) -> Sequence[str]:
    return [steps] if isinstance(steps, str) else steps
