"""DASO's epoch machine against the traces of the original, and the batches that synchronise in a node."""

import pytest

from stenograd.heat.across import BLOCKING, Plan, Skips
from stenograd.heat.plateau import DetectMetricPlateau


def trace(plan, losses):
    """The skips after each epoch, where they change."""
    stability = DetectMetricPlateau(patience=2, threshold=0.05)
    skips, out = plan.first(), []
    for index, loss in enumerate(losses):
        new = plan.after_epoch(index + 1, skips, lambda loss=loss: stability.test_if_improving(loss))
        if new != skips:
            out.append((index, *new))
        skips = new
    return out


def test_constant_loss_and_default_settings():
    assert trace(Plan(40), [1.0] * 40) == [
        (3, 4, 1, 1),
        (6, 2, 1, 1),
        (9, 1, 1, 1),
        (12, 8, 2, 2),
        (15, 4, 1, 1),
        (18, 2, 1, 1),
        (21, 1, 1, 1),
        (24, 8, 2, 2),
        (27, 4, 1, 1),
        (30, 2, 1, 1),
        (33, 1, 1, 1),
        (35, 0, 0, 0),
    ]


def test_sixteen_skips_lower_the_wait_one_by_one():
    assert trace(Plan(40, max_global_skips=16), [1.0] * 28) == [
        (3, 4, 1, 1),
        (6, 2, 1, 1),
        (9, 1, 1, 1),
        (12, 16, 4, 4),
        (15, 8, 2, 3),
        (18, 4, 1, 2),
        (21, 2, 1, 1),
        (24, 1, 1, 1),
        (27, 16, 4, 4),
    ]


def test_four_skips():
    assert trace(Plan(40, max_global_skips=4), [1.0] * 13) == [
        (3, 4, 1, 1),
        (6, 2, 1, 1),
        (9, 1, 1, 1),
        (12, 4, 1, 1),
    ]


def test_an_improving_loss_changes_nothing_until_the_cool_down():
    assert trace(Plan(40), [0.9**i for i in range(40)]) == [(3, 4, 1, 1), (35, 0, 0, 0)]


def test_without_warm_up_the_first_batch_cycles():
    plan = Plan(10, warmup_epochs=0, cooldown_epochs=2)
    assert plan.first() == Skips(4, 1, 1)
    assert trace(plan, [1.0] * 10) == [(3, 2, 1, 1), (6, 1, 1, 1), (7, 0, 0, 0)]


@pytest.mark.parametrize("most", [1, 2, 3])
def test_few_skips_start_there_and_never_leave_the_range(most):
    plan = Plan(60, max_global_skips=most)
    stability = DetectMetricPlateau(patience=2)
    skips = plan.first()
    seen = []
    for epoch in range(1, 56):
        skips = plan.after_epoch(epoch, skips, lambda: stability.test_if_improving(1.0))
        if epoch >= 4:
            seen.append(skips)
            assert 1 <= skips.global_skip <= most
            assert skips.local_skip == 1
            assert 0 <= skips.batches_to_wait <= skips.global_skip
    assert seen[0] == Skips(most, 1, 1)
    assert Skips(most, 1, 1) in seen[-15:]  # cycles start over


def test_no_skips_at_all_is_always_blocking():
    assert trace(Plan(20, warmup_epochs=0, max_global_skips=0), [1.0] * 20) == []


def test_a_large_reduction_restarts_the_cycle():
    changes = trace(Plan(60, skip_reduction_factor=10), [1.0] * 40)
    assert changes[:3] == [(3, 4, 1, 1), (6, 1, 1, 1), (9, 8, 2, 2)]
    assert (12, 1, 1, 1) in changes


def test_no_cycling_phase():
    plan = Plan(4, warmup_epochs=2, cooldown_epochs=2)
    assert not plan.cycles
    assert plan.first() == BLOCKING
    assert trace(plan, [1.0] * 4) == []


def test_batches_that_synchronise_inside_the_node():
    """Skips 8, local 2, wait 2: off after the merge in batches 3, 5, 7, and again from 11 on."""
    off = [b for b in range(20) if not Skips(8, 2, 2).is_local_sync(b, 19)]
    assert off == [3, 5, 7, 11, 13, 15]
    assert all(Skips(4, 1, 1).is_local_sync(b, 11) for b in range(12))
    assert all(BLOCKING.is_local_sync(b, 11) for b in range(12))
    assert Skips(16, 4, 4).is_local_sync(5, 5)  # the last batch always
