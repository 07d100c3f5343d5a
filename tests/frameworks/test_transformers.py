"""Stenograd inside the Trainer: two and three fresh gloo ranks, a tiny BERT, and the Trainer's own DDP."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from processes import run_ranks

SCRIPT = "transformers_ranks.py"
pytestmark = pytest.mark.frameworks


def test_dense_equals_the_trainer_and_exchanges_once_per_optimizer_step(ran):
    """200 batches, 4 per step, clipped: 50 exchanges of 4 bytes per element, and flags of 41 tensors."""
    for found in ran("dense"):
        assert found["difference"] <= 1e-6 < found["moved"]
        assert found["unused"] is True  # the Trainer's default
        assert found["exchanges"] == 50
        assert 1.0 <= found["bytes"] / (50 * 4 * found["elements"]) < 1.01


@pytest.mark.parametrize("kind", ["InOrder", "Counting"])
@pytest.mark.parametrize("method", ["dense", "local:every=1"])
def test_tokens_count_as_in_one_process(ran, method, kind):
    """Trainer divides each loss by all ranks' tokens, so that a plain mean over ranks is the weighted one.

    Where a Trainer cannot count them, `weight` does.
    """
    for found in ran("weighed", method, kind):
        assert found["ranks"] == 2
        assert found["moved"] > 1e-3
        assert found["difference"] < 1e-6


def test_frozen_parameters_are_not_sent(ran):
    """As with PEFT: 5 steps of the classifier's 66 elements and two flags, and nothing of the encoder's."""
    for rank in ran("frozen"):
        assert rank["elements"] == 66
        assert 1.0 <= rank["bytes"] / (5 * 4 * 66) < 1.05


# What 22 steps send, in multiples of the model, of which 7 % are biases and scales, which sign and powersgd
# send densely, powersgd in 16 bits; see test_accelerate.py for the rest.
@pytest.mark.parametrize(
    ("method", "least", "most"),
    [
        ("topk:ratio=0.05", 0.025 * 22, 0.075 * 22),
        ("sign", 22 / 32, 0.11 * 22),
        ("powersgd:rank=1", 0.035 * 22, 0.055 * 22),
        ("local:every=4", 5, 6),  # the sixth is the mean that ranks take when training ends in mid-round
        ("diloco:every=10", 2, 2.01),
    ],
)
def test_methods_send_what_is_planned_and_end_equal(ran, method, least, most):
    first, second = ran("trained", method)
    rounds = method.startswith(("local", "diloco"))
    assert first["common"] == second["common"]
    assert (first["own"] == second["own"]) is not rounds  # in mid-round before training ends
    assert first["wrapped"] is not rounds
    for rank in (first, second):
        assert least <= rank["logged"] / (4 * rank["elements"]) <= most


@pytest.mark.parametrize("method", ["topk:ratio=0.05", "local:every=4"])
def test_resuming_on_two_ranks_changes_no_bit(ran, method):
    for rank in ran("stopped", method):
        assert rank["whole"] == rank["resumed"]


@pytest.mark.parametrize(("method", "step"), [("dense", 5), ("topk:ratio=0.05", 5), ("local:every=4", 8)])
def test_a_request_to_one_rank_saves_and_ends_at_one_step(ran, method, step):
    for rank in ran("asked", method):
        assert rank["saved"] == [f"checkpoint-{step}"]
        assert rank["stopping"]
        assert rank["whole"] == rank["resumed"]


def test_a_request_past_the_best_step_is_saved_beside_the_best(ran):
    assert ran("asked_past_the_best") == [["checkpoint-1", "checkpoint-5"]] * 2


@pytest.mark.parametrize(("strategy", "evaluated"), [("steps", [1, 2, 3, 4]), ("epoch", [])])
def test_a_request_is_answered_by_one_save_and_no_evaluation(ran, strategy, evaluated):
    """What a batch system leaves may be shorter than an evaluation, and end a second save in its midst."""
    wanted = [*(["evaluated", step] for step in evaluated), ["saved", 5]]
    assert ran("asked_while_evaluating", strategy) == [wanted] * 2


def test_resuming_on_three_ranks_keeps_every_ranks_steps(ran):
    """`local` starts from the mean of the 2 ranks' parameters."""
    ran("stopped", "local:every=4")
    for rank in ran("resharded_rounds", world_size=3):
        assert rank["mean"] <= 1e-6 < rank["ranks differed"]


def test_resuming_on_three_ranks_goes_on_with_ranks_equal(ran):
    ran("stopped", "topk:ratio=0.05")
    assert len(set(ran("resharded_residuals", world_size=3))) == 1


def test_one_nan_on_one_rank_costs_one_step(ran):
    one, other = ran("bad")
    for rank in (one, other):
        assert rank["bad"] == rank["without"] == one["bad"]
        assert rank["skipped"] == 1


def test_rounds_evaluate_and_keep_the_best_of_what_ranks_have_in_common(ran):
    """The weights of checkpoint 5, which are those of the round at step 4, and not those of 10."""
    one, other = ran("best")
    for rank in (one, other):
        assert rank["exported"]
        assert rank["goes on"]
        assert rank["loaded"] == [True, False]
        assert rank["digest"] == one["digest"]
        assert rank["losses"] == one["losses"]
        assert rank["losses"][0] > rank["losses"][1]


def test_a_worker_of_an_open_run_ends_with_the_best(ran):
    """Its parameters are those of the run, so a later training cannot begin anew from the best."""
    assert ran("best_in_an_open_run", world_size=1, launcher="none") == [{"loaded": True}]


METHODS = ["topk:ratio=0.05", "local:every=4", "diloco:every=4"]


def test_a_trainer_may_have_prepared_another_model(ran):
    one, other = ran("referring")
    assert one == other
    assert one["exchanges"] == 3


@pytest.mark.parametrize("method", METHODS)
def test_evaluation_before_training_and_another_trainer_after_it(ran, method):
    """Accelerate wraps no model that it has prepared as it is: ranks would train each by itself."""
    one, other = ran("evaluated", method)
    assert one == other
    assert one["exchanges"] == 3
    assert one["moved"]


@pytest.mark.parametrize("method", METHODS)
def test_a_second_training_goes_on_where_the_first_stood(ran, method):
    one, other = ran("again", method)
    assert one == other
    assert (one["exchanges"], one["syncs"], one["more"]) == (6, 1, True)


@pytest.mark.parametrize("method", METHODS)
def test_no_thread_group_or_hook_is_left_after_train(ran, method):
    assert [rank["left"] for rank in ran("again", method)] == [[[], []]] * 2


@pytest.mark.parametrize("method", METHODS)
def test_an_error_in_train_leaves_no_thread_group_or_hook(ran, method):
    for rank in ran("broken", method):
        assert rank["alive"] != []
        assert rank["left"] == []
        assert rank["loss"] > 0  # and what was trained can be saved and evaluated


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("direction", "in a Trainer by max_grad_norm=0"),
        ("late", "ConfigError: use must be called before trainer.train()"),
        ("several GPUs", "start one process per GPU"),
        ("after", "ConfigError: use must be called before accelerator.prepare"),
        ("other accelerator", "StenogradError: the Trainer has made another Accelerator"),
        ("no state", "holds no state of a method"),
    ],
)
def test_what_would_go_wrong_in_silence_is_said(ran, case, says):
    for rank in ran("refused"):
        assert says in rank[case]
        assert rank["no clipping"] == ""


def test_accelerate_launch_gives_the_same_parameters(ran, folder):
    one, other = ran("launched")
    assert one == other
    assert one["world size"] == 2
    words = [SCRIPT, "launched", folder]
    assert run_ranks("accelerate_launch.py", 2, args=words) == [one, other]
