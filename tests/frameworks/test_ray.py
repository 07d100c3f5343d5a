"""Stenograd in Ray Train: two and three workers, Ray's own DDP and torchrun as oracles."""

import pytest

pytest.importorskip("ray")

from small_model import ELEMENTS, SENT_IN_22_STEPS

SCRIPT = "ray_ranks.py"
KEPT = ["topk:ratio=0.05", "local:every=4"]
pytestmark = [pytest.mark.frameworks, pytest.mark.timeout(700)]  # the first one starts Ray three times


def part(ranks, name):
    """What each worker has found in one part of a training; a part that failed fails only who asks for it."""
    for rank in ranks:
        assert "failed" not in rank[name], rank[name]["failed"]
    return [rank[name]["found"] for rank in ranks]


@pytest.fixture
def found(ran):
    """Three trainings: of two workers, again of two from the first one's checkpoints, and of three."""
    return ran("ray", launcher="none", timeout_s=600)[0]


@pytest.fixture
def two(found):
    return lambda name: part(found["two"], name)


def test_dense_equals_rays_own_and_exchanges_once_per_optimizer_step(two):
    """200 batches, 4 per step: 50 exchanges of 4 bytes per element, as a ring of 2 ranks sends them."""
    for ours, own in zip(two("dense"), two("plain"), strict=True):
        assert ours["common"] == own["digest"]
        assert own["moved"] > 1e-3
        assert ours["exchanges"] == 50
        assert 1.0 <= ours["bytes"] / (50 * 4 * ELEMENTS) < 1.01  # and a few flags


@pytest.mark.parametrize(("method", "least", "most"), SENT_IN_22_STEPS)
def test_methods_send_what_is_planned_and_leave_ranks_equal(two, method, least, most):
    first, second = two(method)
    assert first["common"] == second["common"]
    assert (first["own"] == second["own"]) is not method.startswith(("local", "diloco"))
    for rank in (first, second):
        assert least <= rank["bytes"] / (4 * ELEMENTS) <= most


@pytest.mark.parametrize("method", ["dense", *(method for method, *_ in SENT_IN_22_STEPS)])
def test_torchrun_leads_to_the_same_parameters(ran, two, method):
    assert part(ran("torchrun"), method) == two(method)


def test_one_nan_on_one_rank_costs_one_step(two):
    one, other = two("bad")
    for rank in (one, other):
        assert rank["bad"] == rank["without"] == one["bad"]
        assert rank["skipped"] == 1


@pytest.mark.parametrize("method", KEPT)
def test_resuming_on_two_workers_changes_no_bit(found, two, method):
    again = part(found["again"], method)
    assert [one["after"] for one in again] == two(f"stopped {method}")
    assert not any(one["resharded"] for one in again)


@pytest.mark.parametrize("method", KEPT)
def test_resuming_on_three_workers_leads_to_equal_parameters(found, method):
    three = part(found["three"], method)
    assert len({one["common"] for one in three}) == 1
    assert all(one["resharded"] for one in three)


def test_resuming_on_three_workers_keeps_what_is_owed(found):
    """Residuals of 3 ranks add up to those of 2."""
    for top in part(found["three"], "topk:ratio=0.05"):
        assert top["owed"] <= 1e-6 < top["owed at all"]


def test_resuming_on_three_workers_keeps_every_ranks_steps(found):
    """`local` starts from the mean of the 2 ranks' parameters."""
    for local in part(found["three"], "local:every=4"):
        assert local["start"] <= 1e-6 < local["ranks differed"]


def test_the_hook_of_a_model_that_ray_wrapped_sends_less(two):
    one, other = two("hooked")
    assert one["digest"] == other["digest"]
    for rank in (one, other):
        assert 0 < rank["bytes"] < 0.25 * 2 * 4 * ELEMENTS


@pytest.mark.parametrize("case", ["wrapped", "wrapped after"])
def test_a_model_in_rays_ddp_is_refused_by_distribute(two, case):
    for rank in two("refused"):
        assert rank[case].startswith("ConfigError: ")
        assert "stenograd.ddp.register" in rank[case]
