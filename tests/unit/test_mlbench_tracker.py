"""The tracker with a clock of its own: every second lands in the right total, goals fire once."""

import pytest

from stenograd.errors import ConfigError
from stenograd.mlbench.tracker import (
    Tracker,
    task1_time_to_accuracy_goal,
    task1_time_to_accuracy_light_goal,
    task2_time_to_accuracy_goal,
    task2_time_to_accuracy_light_goal,
    task3_time_to_perplexity_goal,
    task4_time_to_bleu_goal,
)

STEPS = ["load", "fwd_pass", "comp_loss", "backprop", "agg", "opt_step", "comp_metrics"]


class Metric:
    def __init__(self, name):
        self.name = name


class Clock:
    """Shows half a second more each time it is looked at."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 0.5
        return self.now


def _batch(tracker):
    tracker.batch_start()
    for step in STEPS:
        getattr(tracker, f"record_batch_{step}")()
    tracker.batch_end()


def _totals(tracker):
    kinds = ("train", "preprocess", "communication", "compute", "metrics", "val")
    return [getattr(tracker, f"get_total_{kind}_time")() for kind in kinds]


def test_each_interval_belongs_to_the_name_that_ends_it():
    """Eight half seconds a batch, four of them computation; the last one has no kind."""
    tracker = Tracker([], 0, 0, clock=Clock())
    _batch(tracker)
    assert _totals(tracker) == [4.0, 0.5, 0.5, 2.0, 0.5, 0.0]
    _batch(tracker)
    assert _totals(tracker) == [8.0, 1.0, 1.0, 4.0, 1.0, 0.0]
    tracker.epoch_end()
    _batch(tracker)
    assert tracker.epoch_metrics["agg"] == {0: 1.0, 1: 0.5}
    assert tracker.epoch_metrics["CumulativeTrainTimeEpoch"] == {0: 8.0, 1: 4.0}


def test_names_may_be_given_their_kind():
    tracker = Tracker([], 0, 0, communication_steps="send", compute_steps=["fwd_pass"], clock=Clock())
    tracker.batch_start()
    for step in ("fwd_pass", "backprop", "send", "send"):
        tracker.record_batch_step(step)
    tracker.batch_end()
    assert _totals(tracker) == [2.5, 0, 1.0, 0.5, 0, 0]


def test_validation_is_timed():
    """Between start and end the clock is looked at once more: one second a validation."""
    clock = Clock()
    tracker = Tracker([], 0, 0, clock=clock)
    for _ in range(2):
        tracker.validation_start()
        clock()
        tracker.validation_end()
    assert tracker.get_total_val_time() == 2.0
    with pytest.raises(ConfigError, match="must follow validation_start"):
        tracker.validation_end()


def test_a_run_starts_once():
    tracker = Tracker([], 0, 0, clock=Clock())
    tracker.start()
    assert tracker.start_time == 0.5
    with pytest.raises(ConfigError, match="may be called once"):
        tracker.start()


def test_averages_are_by_samples_and_by_mode_and_start_afresh():
    """(2 * 1 + 5 * 3) / 4 = 4.25."""
    tracker = Tracker([Metric("Prec@1")], 0, 0)
    tracker.record_loss(2.0, n=1)
    tracker.record_loss(5.0, n=3)
    tracker.validation()
    tracker.record_loss(9.0)
    assert tracker.epoch_stats["train_loss"].avg == 4.25
    assert tracker.epoch_stats["val_loss"].avg == 9.0
    assert str(tracker) == "loss 9 | Prec@1 0"
    tracker.epoch_end()
    assert tracker.epoch_stats["train_loss"].count == 0
    assert [(name, value) for *_, name, value, _ in tracker.history] == [
        ("train_loss", 2.0),
        ("train_loss", 5.0),
        ("val_loss", 9.0),
    ]


def test_a_long_run_keeps_the_newest_statistics_and_averages_all():
    """0 to 24,999: the mean is 12,499.5, and what is kept starts at 15,000. The list grew without bound."""
    passed_on = []
    tracker = Tracker([], 0, 0, goal=lambda name, value, _: passed_on.append(value))
    for value in range(25_000):
        tracker.record_loss(value)
    assert tracker.epoch_stats["train_loss"].avg == 12_499.5
    assert [value for *_, value, _ in tracker.history] == list(range(15_000, 25_000))
    assert passed_on == list(range(25_000))


def test_marks_of_a_batch_that_nobody_starts_are_bounded():
    """An optimizer marks two per step, though the loop calls no batch_start: 12,000 marks, 10,000 kept."""
    tracker = Tracker([], 0, 0, clock=Clock())
    for _ in range(6_000):
        tracker.record_batch_agg()
        tracker.record_batch_opt_step()
    assert len(tracker.batch_times) == 10_000
    assert tracker.batch_times[-1] == ("opt_step", 6_000.0)
    _batch(tracker)
    assert _totals(tracker) == [4.0, 0.5, 0.5, 2.0, 0.5, 0.0]


@pytest.mark.parametrize(
    ("minimize", "values", "best"),
    [(False, [3, 5, 4], 1), (True, [3, 1, 2], 1), (False, [-3, -5, -1], 2), (True, [0, 4, 4], 0)],
)
def test_the_best_epoch_is_that_of_the_primary_metric_in_validation(minimize, values, best):
    primary, other = Metric("a"), Metric("b")
    tracker = Tracker([primary, other], 0, 0, minimize=minimize)
    was_best = []
    for value in values:
        tracker.train()
        tracker.record_metric(primary, -100 if minimize else 100)
        tracker.validation()
        tracker.record_metric(other, -100 if minimize else 100)
        tracker.record_metric(primary, value)
        was_best.append(tracker.is_best())
        tracker.epoch_end()
    assert tracker.best_epoch == best
    assert tracker.best_metric_value == values[best]
    assert was_best[best]


@pytest.mark.parametrize(
    ("goal", "name", "misses", "hits", "says"),
    [
        (task1_time_to_accuracy_goal(), "Prec@1", 79.9, 80, "80% Top 1 Validation Accuracy"),
        (task1_time_to_accuracy_light_goal(), "Prec@1", 69.9, 70, "70% Top 1 Validation Accuracy"),
        (task2_time_to_accuracy_goal(), "Prec@1", 88.9, 89.5, "89% Top 1 Validation Accuracy"),
        (task2_time_to_accuracy_light_goal(), "Prec@1", 79, 80, "80% Top 1 Validation Accuracy"),
        (task3_time_to_perplexity_goal(), "Perplexity", 70.1, 70, "Validation Perplexity of 70"),
        (task4_time_to_bleu_goal(), "BLEU-Score", 23.9, 24, "Validation BLEU-Score of 24"),
    ],
)
def test_goals_fire_in_validation_only_and_once(goal, name, misses, hits, says):
    tracker = Tracker([], 0, 0, goal=goal, clock=Clock())
    _batch(tracker)
    tracker.record_stat(f"global_{name}", hits)
    assert not tracker.goal_reached
    tracker.validation()
    tracker.record_stat(f"global_{name}", misses)
    assert not tracker.goal_reached
    tracker.record_stat(f"global_{name}", hits)
    assert tracker.goal_reached
    first = tracker.goal_result
    assert first == (
        f"{says} reached in 4.000 seconds, Compute: 2.000 seconds, Communication: 0.500 seconds, "
        "Metrics Computation: 0.500 seconds, Pre-processing: 0.500 seconds"
    )
    _batch(tracker)
    tracker.record_stat(f"global_{name}", hits)
    assert tracker.goal_result == first
