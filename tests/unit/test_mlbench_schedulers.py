"""Learning rates step by step, through torch's own scheduler interface."""

import copy
import math

import pytest
import torch

from stenograd.errors import ConfigError
from stenograd.mlbench import schedulers as s


def _optimizer(lr=10.0):
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)


TABLES = {
    "warm-up 0 to 10 in 5": (lambda o: s.LRLinearWarmUp(o, 0, 10, 5), [0, 2, 4, 6, 8, 10, 10, 10]),
    "warm-up 4 to 8 in 2": (lambda o: s.LRLinearWarmUp(o, 4, 8, 2), [4, 6, 8, 8]),
    "no warm-up": (lambda o: s.LRLinearWarmUp(o, 0, 3, 0), [3, 3]),
    "milestones 2, 3": (lambda o: s.MultiStepLRLinearWarmUp(o, 0.5, [2, 3], 10), [10, 10, 5, 2.5, 2.5]),
    "milestones 7, 8 after a warm-up": (
        lambda o: s.MultiStepLRLinearWarmUp(o, 0.5, [7, 8], 10, 0, 5),
        [0, 2, 4, 6, 8, 10, 10, 5, 2.5, 2.5],
    ),
    "10 / (1 + t)": (lambda o: s.TimeDecayLR(o, 1), [10 / (i + 1) for i in range(6)]),
    "10 / sqrt(t)": (s.SQRTTimeDecayLR, [10 / math.sqrt(max(1, i)) for i in range(6)]),
    "sqrt(W / t)": (
        lambda o: s.SQRTTimeDecayLRWithWarmup(o, 8, 0, 2),
        [0, 4, 8, *(8 * math.sqrt(2 / t) for t in range(3, 8))],
    ),
    "sparsified": (lambda o: s.SparsifiedSGDLR(o, 2, 0.5, 0.5), [4, 4 / 1.5, 4 / 2.5, 4 / 3.5]),
    "exponential warm-up, regular decays": (
        lambda o: s.ExponentialWarmupMultiStepLR(o, 10, 2, 4, decay_steps=3),
        [0.1, 1, 10, 10, 5, 5, 2.5, 2.5, 1.25, 1.25, 1.25, 1.25],
    ),
    "shares of the iterations": (
        lambda o: s.ExponentialWarmupMultiStepLR(o, 10, 0.2, 0.4, 0.2, 2, 0.1),
        [0.1, 1, 10, 10, 1, 1, 0.1, 0.1, 0.1],
    ),
    "no decay before the end": (lambda o: s.ExponentialWarmupMultiStepLR(o, 3), [10, 10, 10, 5]),
    "polynomial": (lambda o: s.PolyDecayLRLinearWarmup(o, 0, 4, 2, 4), [0, 2, 4, 2.25, 1, 0.25, 0, 0]),
    "linear to a floor": (
        lambda o: s.PolyDecayLRLinearWarmup(o, 0, 4, 0, 2, min_lr=1, power=1),
        [4, 2.5, 1, 1],
    ),
}


@pytest.mark.parametrize("name", TABLES)
def test_rates_step_by_step_and_after_a_checkpoint(name):
    """At each step the state goes into a fresh scheduler, which must continue as if nothing had happened."""
    make, rates = TABLES[name]
    optimizer = _optimizer()
    scheduler, seen = make(optimizer), []
    for _ in rates:
        seen.append(optimizer.param_groups[0]["lr"])
        assert scheduler.get_last_lr() == [seen[-1]]
        optimizer.step()
        scheduler.step()
        saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
        optimizer = _optimizer()
        scheduler = make(optimizer)
        optimizer.load_state_dict(saved[0])
        scheduler.load_state_dict(saved[1])
    assert seen == pytest.approx(rates)


def test_each_group_keeps_its_own_rate_where_none_is_given():
    params = [{"params": [torch.zeros(1)], "lr": lr} for lr in (1.0, 3.0)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    scheduler = s.TimeDecayLR(optimizer, 1)
    optimizer.step()
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5, 1.5]


@pytest.mark.parametrize("per_batch", [False, True])
def test_plateaus_count_once_warm(per_batch):
    """Two epochs of two batches warm up to 4; then one bad epoch is borne and the second halves the rate."""
    optimizer = _optimizer()
    batches = 2 if per_batch else None
    how = {"factor": 0.5, "patience": 1, "verbose": True}  # as in MLBench's programs; torch has no `verbose`
    scheduler = s.ReduceLROnPlateauWithWarmup(optimizer, 0.0, 4.0, 2, batches, **how)
    seen = []
    for loss in (9, 9, 1, 1, 1, 1):
        for _ in range(2):
            seen.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            if per_batch:
                scheduler.batch_step()
        scheduler.step(loss)
        assert scheduler.get_last_lr() == [optimizer.param_groups[0]["lr"]]
    warm = [0, 1, 2, 3] if per_batch else [0, 0, 2, 2]
    assert seen == [*warm, 4, 4, 4, 4, 4, 4, 2, 2]
    assert scheduler.finished_warmup


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda o: s.MultiStepLRLinearWarmUp(o, 0.5, [3, 2], 10), "milestones must be ascending"),
        (lambda o: s.MultiStepLRLinearWarmUp(o, 0.5, [5, 6], 10, 0, 5), "milestones must be after step 5"),
        (lambda o: s.LRLinearWarmUp(o, 0, 1, -1), "warmup_duration must be at least 0"),
        (lambda o: s.TimeDecayLR(o, 0), "beta must be above 0"),
        (lambda o: s.SparsifiedSGDLR(o, 1, 0, 1), "l2_coef must be above 0"),
        (lambda o: s.SQRTTimeDecayLRWithWarmup(o, 1, 0, 0), "warmup_steps must be at least 1"),
        (lambda o: s.PolyDecayLRLinearWarmup(o, 0, 1, 0, 0), "decay_steps must be above 0"),
        (
            lambda o: s.ExponentialWarmupMultiStepLR(o, 10, decay_interval=0),
            "decay_interval must be at least 1",
        ),
    ],
)
def test_bad_arguments(make, says):
    with pytest.raises(ConfigError, match=says):
        make(_optimizer())
