"""Stenograd in Ray Train: two and three workers, Ray's own DDP and torchrun as oracles."""

import pytest

pytest.importorskip("ray")

from processes import run_ranks
from small_model import ELEMENTS, SENT_IN_22_STEPS

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ray")
    (answer,) = run_ranks("ray_ranks.py", 1, args=["ray", folder], launcher="none", timeout_s=900)
    return answer


@pytest.fixture(scope="module")
def two(found):
    return found["two"]


def test_dense_equals_rays_own_and_exchanges_once_per_optimizer_step(two):
    """200 batches, 4 per step: 50 exchanges of 4 bytes per element, as a ring of 2 ranks sends them."""
    for rank in two:
        assert rank["methods"]["dense"]["common"] == rank["plain"]["digest"]
        assert rank["plain"]["moved"] > 1e-3
        assert rank["methods"]["dense"]["exchanges"] == 50
        assert 1.0 <= rank["methods"]["dense"]["bytes"] / (50 * 4 * ELEMENTS) < 1.01  # and a few flags


@pytest.mark.parametrize(
    ("method", "least", "most"),
    SENT_IN_22_STEPS,
)
def test_methods_send_what_is_planned_and_leave_ranks_equal(two, method, least, most):
    first, second = (rank["methods"][method] for rank in two)
    assert first["common"] == second["common"]
    assert (first["own"] == second["own"]) is not method.startswith(("local", "diloco"))
    for rank in (first, second):
        assert least <= rank["bytes"] / (4 * ELEMENTS) <= most


def test_torchrun_leads_to_the_same_parameters(two):
    launched = run_ranks("ray_ranks.py", 2, args=["torchrun"], timeout_s=300)
    assert launched == [rank["methods"] for rank in two]


def test_one_nan_on_one_rank_costs_one_step(two):
    for rank in two:
        assert rank["bad"]["bad"] == rank["bad"]["without"] == two[0]["bad"]["bad"]
        assert rank["bad"]["skipped"] == 1


def test_resuming_on_two_workers_changes_no_bit(found, two):
    for before, again in zip(two, found["again"], strict=True):
        assert {method: one["after"] for method, one in again.items()} == before["stopped"]
        assert not any(one["resharded"] for one in again.values())


def test_resuming_on_three_workers_keeps_what_is_owed_and_every_ranks_steps(found):
    """Residuals of 3 ranks add up to those of 2; `local` starts from the mean of the 2 ranks' parameters."""
    for rank in found["three"]:
        top, local = rank["topk:ratio=0.05"], rank["local:every=4"]
        assert top["resharded"]
        assert local["resharded"]
        assert top["owed"] <= 1e-6 < top["owed at all"]
        assert local["start"] <= 1e-6 < local["ranks differed"]
        for method in rank:
            assert rank[method]["common"] == found["three"][0][method]["common"]


def test_the_hook_of_a_model_that_ray_wrapped_sends_less(two):
    assert two[0]["hooked"]["digest"] == two[1]["hooked"]["digest"]
    for rank in two:
        assert 0 < rank["hooked"]["bytes"] < 0.25 * 2 * 4 * ELEMENTS


@pytest.mark.parametrize("case", ["wrapped", "wrapped after"])
def test_a_model_in_rays_ddp_is_refused_by_distribute(two, case):
    for rank in two:
        assert rank["refused"][case].startswith("ConfigError: ")
        assert "stenograd.ddp.register" in rank["refused"][case]
