"""Goals for a tracker: what a benchmark task must reach, and the line that reports the time it took."""

from __future__ import annotations

from stenograd.mlbench.tracker import Goal, Tracker

__all__ = [
    "task1_time_to_accuracy_goal",
    "task1_time_to_accuracy_light_goal",
    "task2_time_to_accuracy_goal",
    "task2_time_to_accuracy_light_goal",
    "task3_time_to_perplexity_goal",
    "task4_time_to_bleu_goal",
    "time_to_accuracy_goal",
]


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
