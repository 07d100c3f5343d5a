"""Stenograd inside Accelerate: two and three fresh gloo ranks, and Accelerate's own training as oracle."""

import pytest

pytest.importorskip("accelerate")

from processes import run_ranks
from small_model import ELEMENTS, SENT_IN_22_STEPS

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("accelerate"))


@pytest.fixture(scope="module")
def two(folder):
    return run_ranks("accelerate_ranks.py", 2, args=["two", folder], timeout_s=900)


def test_dense_equals_accelerate_and_exchanges_once_per_optimizer_step(two):
    """200 batches, 4 per step: 50 exchanges of 4 bytes per element, as a ring of 2 ranks sends them."""
    for rank in two:
        assert rank["dense"]["difference"] <= 1e-6 < rank["dense"]["moved"]
        assert rank["dense"]["exchanges"] == 50
        assert rank["dense"]["bytes"] == 50 * 4 * ELEMENTS


def test_rounds_count_optimizer_steps_under_accumulation(two):
    """32 batches, 4 per step: 8 passes, and a round every second."""
    assert [(rank["dense"]["passes of rounds"], rank["dense"]["rounds"]) for rank in two] == [(8, 4)] * 2


@pytest.mark.parametrize(
    ("method", "least", "most"),
    [*SENT_IN_22_STEPS, ("gossip", 22, 22)],
)
def test_methods_send_what_is_planned_and_leave_ranks_equal(two, method, least, most):
    first, second = (rank["methods"][method] for rank in two)
    rounds = method.startswith(("local", "diloco", "gossip"))
    assert first["common"] == second["common"]
    assert (first["own"] == second["own"]) is not rounds  # 22 steps end in mid-round
    assert first["wrapped"] is not rounds
    for rank in (first, second):
        assert least <= rank["bytes"] / (4 * ELEMENTS) <= most


def test_resuming_on_two_ranks_changes_no_bit(two):
    for rank in two:
        for whole, again in rank["resumed"].values():
            assert whole == again


def test_resuming_on_three_ranks_keeps_what_is_owed_and_every_ranks_steps(two, folder):
    """Residuals of 3 ranks add up to those of 2; `local` starts from the mean of the 2 ranks' parameters."""
    ranks = run_ranks("accelerate_ranks.py", 3, args=["three", folder], timeout_s=600)
    for rank in ranks:
        assert rank["owed"] <= 1e-6 < rank["owed at all"]
        assert rank["mean"] <= 1e-6 < rank["ranks differed"]
        assert rank["after"] == ranks[0]["after"]


def test_one_nan_on_one_rank_costs_one_step(two):
    for rank in two:
        assert rank["bad"]["bad"] == rank["bad"]["without"] == two[0]["bad"]["bad"]
        assert rank["bad"]["skipped"] == 1


def test_local_sgd_equals_accelerates_own(two):
    for rank in two:
        assert rank["local"]["difference"] <= 1e-6
        assert rank["local"]["common"] == two[0]["local"]["common"]
        assert rank["local"]["rounds of 6 steps"] == 3
        assert rank["local"]["bf16 common"] == two[0]["local"]["bf16 common"]
        assert rank["local"]["put back"]


def test_fields_of_the_handler_are_kept(two):
    assert [rank["handler"] for rank in two] == [[True, True]] * 2


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("late", "ConfigError: use must be called before accelerator.prepare"),
        ("twice", "ConfigError: use must be called once per Accelerator"),
        ("hook", "ConfigError: comm_hook must be left out"),
        ("rank 0 only", "ConfigError: register_for_checkpointing would save the state of rank 0 only"),
        ("no optimizer", "StenogradError: a model was prepared without its optimizer"),
        ("later optimizer", "ConfigError: a model of local:every=4 got a further optimizer"),
        ("name", "MethodError: unknown method 'tpk': did you mean 'topk'"),
        ("timeout", "ConfigError: timeout_s must be above 0 seconds, got 0"),
        ("interval", "ConfigError: check_every must be a whole number"),
        ("early", "StenogradError: no model exchanges by dense yet"),
        ("no state", "holds no state of a method"),
        ("other method", "CheckpointError: the checkpoint's method must be 'local:every=8'"),
        ("dense after all", "optimizer.step() applies gradients that no exchange has averaged"),
        ("local and local", "ConfigError: LocalSGD averages parameters where use averages gradients"),
        ("steps", "ConfigError: local_sgd_steps must be at least 1, got 0"),
        ("schedule", "MethodError: LocalSGD, whose local_sgd_steps is the schedule"),
    ],
)
def test_what_would_go_wrong_in_silence_is_said(two, case, says):
    for rank in two:
        assert says in rank["refused"][case]
