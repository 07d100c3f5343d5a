"""Stenograd inside the Trainer: two and three fresh gloo ranks, a tiny BERT, and the Trainer's own DDP."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from processes import run_ranks

pytestmark = pytest.mark.frameworks


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("transformers"))


@pytest.fixture(scope="module")
def two(folder):
    return run_ranks("transformers_ranks.py", 2, args=["two", folder], timeout_s=900)


def test_dense_equals_the_trainer_and_exchanges_once_per_optimizer_step(two):
    """200 batches, 4 per step, clipped: 50 exchanges of 4 bytes per element, and flags of 41 tensors."""
    for rank in two:
        found = rank["dense"]
        assert found["difference"] <= 1e-6 < found["moved"]
        assert found["unused"] is True  # the Trainer's default
        assert found["exchanges"] == 50
        assert 1.0 <= found["bytes"] / (50 * 4 * found["elements"]) < 1.01


def test_frozen_parameters_are_not_sent(two):
    """As with PEFT: 5 steps of the classifier's 66 elements and two flags, and nothing of the encoder's."""
    for rank in two:
        assert rank["dense"]["few elements"] == 66
        assert 1.0 <= rank["dense"]["few bytes"] / (5 * 4 * 66) < 1.05


# What 22 steps send, in multiples of the model, of which 7 % are biases and scales, which sign and powersgd
# send densely, powersgd in 16 bits; see test_accelerate.py for the rest.
@pytest.mark.parametrize(
    ("method", "least", "most"),
    [
        ("topk:ratio=0.05", 0.025 * 22, 0.075 * 22),
        ("sign", 22 / 32, 0.11 * 22),
        ("powersgd:rank=1", 0.035 * 22, 0.055 * 22),
        ("local:every=4", 5, 6),  # the sixth is the mean that ranks take when training ends in mid-round
        ("diloco:every=10", 2, 2),
    ],
)
def test_methods_send_what_is_planned_and_end_equal(two, method, least, most):
    first, second = (rank["methods"][method] for rank in two)
    rounds = method.startswith(("local", "diloco"))
    assert first["common"] == second["common"]
    assert (first["own"] == second["own"]) is not rounds  # in mid-round before training ends
    assert first["wrapped"] is not rounds
    for rank in two:
        assert least <= rank["methods"][method]["logged"] / (4 * rank["dense"]["elements"]) <= most


def test_resuming_on_two_ranks_changes_no_bit(two):
    for rank in two:
        for whole, again in rank["resumed"].values():
            assert whole == again


def test_resuming_on_three_ranks_keeps_every_ranks_steps(two, folder):
    """`local` starts from the mean of the 2 ranks' parameters; top-k goes on with ranks equal."""
    ranks = run_ranks("transformers_ranks.py", 3, args=["three", folder], timeout_s=600)
    for rank in ranks:
        assert rank["mean"] <= 1e-6 < rank["ranks differed"]
        assert rank["after"] == ranks[0]["after"]


def test_one_nan_on_one_rank_costs_one_step(two):
    for rank in two:
        assert rank["bad"]["bad"] == rank["bad"]["without"] == two[0]["bad"]["bad"]
        assert rank["bad"]["skipped"] == 1


def test_rounds_evaluate_and_keep_the_best_of_what_ranks_have_in_common(two):
    """The weights of checkpoint 5, which are those of the round at step 4, and not those of 10."""
    for rank in two:
        assert rank["best"]["exported"]
        assert rank["best"]["loaded"] == [True, False]
        assert rank["best"]["digest"] == two[0]["best"]["digest"]
        assert rank["best"]["losses"] == two[0]["best"]["losses"]
        assert rank["best"]["losses"][0] > rank["best"]["losses"][1]


def test_a_second_training_goes_on_with_the_same_exchange(two):
    for rank in two:
        assert rank["again"] == {"exchanges": 6, "syncs": 1, "digest": two[0]["again"]["digest"]}


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("late", "ConfigError: use must be called before trainer.train()"),
        ("after", "ConfigError: use must be called before accelerator.prepare"),
        ("other accelerator", "StenogradError: the Trainer has made another Accelerator"),
        ("no state", "holds no state of a method"),
    ],
)
def test_what_would_go_wrong_in_silence_is_said(two, case, says):
    for rank in two:
        assert says in rank["refused"][case]


def test_accelerate_launch_gives_the_same_parameters(two, folder):
    ranks = run_ranks(
        "accelerate_launch.py", 2, args=["transformers_ranks.py", "launched", folder], timeout_s=600
    )
    assert ranks == [two[0]["launched"]] * 2
    assert ranks[0]["world size"] == 2
