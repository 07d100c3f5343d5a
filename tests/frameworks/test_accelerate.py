"""Stenograd inside Accelerate: two and three fresh gloo ranks, and Accelerate's own training as oracle."""

import pytest

pytest.importorskip("accelerate")

from small_model import ELEMENTS, SENT_IN_22_STEPS

SCRIPT = "accelerate_ranks.py"
pytestmark = pytest.mark.frameworks


def test_dense_equals_accelerate_and_exchanges_once_per_optimizer_step(ran):
    """200 batches, 4 per step: 50 exchanges of 4 bytes per element, as a ring of 2 ranks sends them."""
    for rank in ran("dense"):
        assert rank["difference"] <= 1e-6 < rank["moved"]
        assert rank["exchanges"] == 50
        assert rank["bytes"] == 50 * 4 * ELEMENTS


@pytest.mark.parametrize("method", ["dense", "local:every=1"])
def test_weights_count_tokens_as_one_process_would(ran, method):
    for found in ran("weighed", method):
        assert found["moved"] > 1e-3
        assert found["difference"] < 1e-6


def test_rounds_count_optimizer_steps_under_accumulation(ran):
    """32 batches, 4 per step: 8 passes, and a round every second."""
    assert ran("accumulated_rounds") == [{"passes": 8, "rounds": 4}] * 2


@pytest.mark.parametrize(("method", "least", "most"), [*SENT_IN_22_STEPS, ("gossip", 22, 22.1)])
def test_methods_send_what_is_planned_and_leave_ranks_equal(ran, method, least, most):
    first, second = ran("trained", method)
    rounds = method.startswith(("local", "diloco", "gossip"))
    assert first["common"] == second["common"]
    assert (first["own"] == second["own"]) is not rounds  # 22 steps end in mid-round
    assert first["wrapped"] is not rounds
    for rank in (first, second):
        assert least <= rank["bytes"] / (4 * ELEMENTS) <= most


@pytest.mark.parametrize("method", ["topk:ratio=0.05", "local:every=4"])
def test_resuming_on_two_ranks_changes_no_bit(ran, method):
    for rank in ran("stopped", method):
        assert rank["whole"] == rank["resumed"]


def test_resuming_on_three_ranks_keeps_what_is_owed(ran):
    """Residuals of 3 ranks add up to those of 2."""
    ran("stopped", "topk:ratio=0.05")
    ranks = ran("resharded_residuals", world_size=3)
    for rank in ranks:
        assert rank["owed"] <= 1e-6 < rank["owed at all"]
        assert rank["after"] == ranks[0]["after"]


def test_resuming_on_three_ranks_keeps_every_ranks_steps(ran):
    """`local` starts from the mean of the 2 ranks' parameters."""
    ran("stopped", "local:every=4")
    for rank in ran("resharded_rounds", world_size=3):
        assert rank["mean"] <= 1e-6 < rank["ranks differed"]


def test_one_nan_on_one_rank_costs_one_step(ran):
    one, other = ran("bad")
    for rank in (one, other):
        assert rank["bad"] == rank["without"] == one["bad"]
        assert rank["skipped"] == 1


def test_local_sgd_equals_accelerates_own(ran):
    one, other = ran("local_sgd")
    for rank in (one, other):
        assert rank["difference"] <= 1e-6
        assert rank["common"] == one["common"]
        assert rank["rounds of 6 steps"] == 3
        assert rank["bf16 common"] == one["bf16 common"]
        assert rank["put back"]


@pytest.mark.parametrize("way", ["end of training", "closed", "dropped"])
@pytest.mark.parametrize("method", ["topk:ratio=0.05", "local:every=4", "diloco:every=4", "gossip"])
def test_no_thread_group_or_hook_is_left_and_what_is_prepared_again_goes_on(ran, method, way):
    ranks = ran("ended", method, way)
    for rank in ranks:
        assert rank["alive"] != []
        assert rank["left"] == []
    if way == "closed":
        assert [(rank["steps"], rank["more"]) for rank in ranks] == [(8, True)] * 2
        assert [rank["after"] for rank in ranks] == [rank["whole"] for rank in ranks]


def test_what_a_run_without_a_method_saved_begins_anew(ran):
    for rank in ran("from_own"):
        assert rank["common"] == rank["loaded"] == rank["saved"]
        assert rank["owed"] == 0


@pytest.mark.parametrize("way", ["loop", "round"])
def test_an_error_in_local_sgd_leaves_no_thread_group_or_hook(ran, way):
    for rank in ran("local_sgd_ended", way):
        assert rank["alive"] != []
        assert rank["left"] == []


def test_models_that_share_an_optimizer_are_trained_in_one_process_and_in_rounds(ran):
    """As a text encoder and what it feeds: 10 steps, of which 2 after both were prepared again."""
    (alone,) = ran("shared", "topk:ratio=0.05", launcher="none")
    one, other = ran("shared", "local:every=2")
    for found in (alone, one, other):
        assert found["steps"] == 10
        assert 0 < found["moved"][0] != found["moved"][1]
    assert one["digest"] == other["digest"]


def test_models_prepared_for_evaluation_are_no_hindrance(ran):
    """The one that is trained, too, is wrapped then, where Accelerate would give it back as it is."""
    one, other = ran("evaluated")
    assert one == other
    assert (one["unwrapped"], one["steps"], one["models"]) == (True, [3], 2)


def test_fields_of_the_handler_are_kept(ran):
    assert ran("handler") == [[True, True]] * 2


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
        ("another model", "ConfigError: LocalSGD averages one model"),
        ("steps", "ConfigError: local_sgd_steps must be at least 1, got 0"),
        ("direction", "MethodError: demo delivers a direction"),
        ("its elements", "leave clip_grad_value_ out"),
        ("schedule", "MethodError: LocalSGD, whose local_sgd_steps is the schedule"),
    ],
)
def test_what_would_go_wrong_in_silence_is_said(ran, case, says):
    for rank in ran("refused"):
        assert says in rank[case]
        assert rank["its norm"] == ""
