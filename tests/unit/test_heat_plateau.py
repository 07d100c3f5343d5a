"""The plateau detector: the index sets of Heat's own tests, and better means better for any sign."""

import math

import pytest
import torch

from stenograd.errors import ConfigError
from stenograd.heat.plateau import DetectMetricPlateau

SERIES = [1, 0.9, 0.8, 0.7, 0.8, 0.9, 1, 1.1, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]


def _plateaus(detector, series=SERIES):
    return {i for i, loss in enumerate(series) if detector.test_if_improving(loss)}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"mode": "min", "threshold_mode": "abs"}, {6, 9}),
        ({"mode": "min", "threshold_mode": "rel", "cooldown": 1}, {6, 10}),
        ({"mode": "max", "threshold_mode": "abs"}, {3, 6, 10, 13}),
        ({"mode": "max", "threshold_mode": "rel"}, {3, 6, 10, 13}),
    ],
)
def test_index_sets(settings, expected):
    assert _plateaus(DetectMetricPlateau(patience=2, **settings)) == expected


@pytest.mark.parametrize("cut", range(len(SERIES)))
def test_state_moved_to_a_new_detector_in_mid_run_changes_nothing(cut):
    first = DetectMetricPlateau(patience=2, threshold_mode="rel", cooldown=1)
    before = _plateaus(first, SERIES[:cut])
    second = DetectMetricPlateau("max", 5, 0.3, "abs", 4)
    second.set_state(first.get_state())
    assert second.get_state() == first.get_state()
    assert before | {cut + i for i in _plateaus(second, SERIES[cut:])} == {6, 10}


def test_a_constant_series_is_a_plateau_at_every_third_value():
    detector = DetectMetricPlateau(patience=2)
    assert _plateaus(detector, [0.5] * 13) == {3, 6, 9, 12}
    assert detector.best == 0.5, "the best value stays after a plateau"


def test_zero_patience_and_cooldown():
    """Index 1 is the first bad value; the next two are the cooldown, and 4 is bad again."""
    assert _plateaus(DetectMetricPlateau(patience=0, cooldown=2), [1.0] * 8) == {1, 4, 7}
    detector = DetectMetricPlateau(patience=0, cooldown=1)
    _plateaus(detector, [1.0, 1.0])
    assert detector.in_cooldown
    detector.test_if_improving(1.0)
    assert not detector.in_cooldown


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("mode", "better"), [("min", -1), ("max", 1)])
def test_relative_threshold_means_better_for_either_sign_of_the_best(mode, better, sign):
    """A tenth of |best| = 2 is 0.2."""
    detector = DetectMetricPlateau(mode, threshold=0.1, threshold_mode="rel")
    best = 2.0 * sign
    assert detector.is_better(best + 0.21 * better, best)
    assert not detector.is_better(best + 0.19 * better, best)
    assert not detector.is_better(best, best)
    assert not detector.is_better(best - 0.21 * better, best)


@pytest.mark.parametrize("mode", ["min", "max"])
@pytest.mark.parametrize("threshold_mode", ["rel", "abs"])
@pytest.mark.parametrize("threshold", [0.0, 1e-4, 1.0, 3.0])
def test_the_first_finite_value_is_better_and_nan_never(mode, threshold_mode, threshold):
    detector = DetectMetricPlateau(mode, 0, threshold, threshold_mode)
    assert detector.test_if_improving(math.nan)
    assert not detector.test_if_improving(3.0)
    assert detector.best == 3.0
    assert detector.test_if_improving(math.nan)
    assert detector.best == 3.0


def test_tensors_and_reset():
    detector = DetectMetricPlateau(patience=1)
    assert not detector.test_if_improving(torch.tensor(1.0))
    assert not detector.test_if_improving(torch.tensor([[1.0]], requires_grad=True))
    assert (detector.best, detector.num_bad_epochs, detector.last_epoch) == (1.0, 1, 2)
    detector.reset()
    assert (detector.best, detector.num_bad_epochs, detector.last_epoch) == (math.inf, 0, 2)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"mode": "least"}, "mode must be 'min' or 'max', got 'least'"),
        ({"threshold_mode": "relative"}, "threshold_mode must be 'rel' or 'abs'"),
        ({"patience": -1}, "patience must be a whole number of at least 0, got -1"),
        ({"patience": 1.5}, "patience must be a whole number"),
        ({"cooldown": -1}, "cooldown must be"),
        ({"threshold": -0.1}, "threshold must be finite"),
        ({"threshold": math.nan}, "threshold must be finite"),
    ],
)
def test_bad_settings(settings, says):
    with pytest.raises(ConfigError, match=says):
        DetectMetricPlateau(**settings)


@pytest.mark.parametrize("state", [{}, {"best": 1.0}, None])
def test_a_foreign_state_is_refused(state):
    with pytest.raises(ConfigError, match="get_state"):
        DetectMetricPlateau().set_state(state)
