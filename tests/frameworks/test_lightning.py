"""Stenograd inside Lightning's Trainer and Fabric, on real ranks, which run lightning_training.py."""

from pathlib import Path

import pytest

pytest.importorskip("lightning")
pytestmark = pytest.mark.frameworks

from lightning_cases import MATRICES, METHODS, PARAMETERS, SAVED, WIDE  # noqa: E402
from processes import run_ranks  # noqa: E402

SCRIPT = "lightning_training.py"
DENSE_BYTES = 4 * PARAMETERS  # per step and rank: of two ranks, each sends 2 (N-1)/N = 1 times the gradients


@pytest.fixture(scope="module")
def trained():
    return run_ranks(SCRIPT, 2, args=["methods"])


@pytest.fixture(scope="module")
def in_fabric(tmp_path_factory):
    return run_ranks(SCRIPT, 2, args=["fabrics", tmp_path_factory.mktemp("fabric")])


@pytest.fixture(scope="module")
def broken():
    return run_ranks(SCRIPT, 2, args=["broken"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module")
def saved(folder):
    return run_ranks(SCRIPT, 2, args=["save", folder])


def planned_bytes(how):
    """The least and the most that one of two ranks should send in 50 steps, in bytes, counted by hand.

    topk:ratio=0.05 sends 5 % of the elements, each with a value of 2 bytes and an index of at most 4.
    sign sends a bit for each element of the matrices, and the biases in 4 bytes; powersgd:rank=2 two factors
    of 2 (32 + 64) elements for each matrix, and the biases, all in 2 bytes. local and diloco send all
    parameters once per round, and gossip to one neighbour once per step; local and gossip once more for the
    consensus after 50 steps, where the outer parameters of diloco are at hand. Scales, padding and flags
    take at most 15 % more.
    """
    small = 4 * (WIDE + 64)
    least, most = {
        "topk:ratio=0.05": (0.05 * PARAMETERS * 2, 0.05 * PARAMETERS * 6),
        "sign": (MATRICES / 8 + small, MATRICES / 8 + small),
        "powersgd:rank=2": (2 * 2 * 2 * (WIDE + 64) + small / 2,) * 2,
        "local:every=4": (DENSE_BYTES * (12 + 1) / 50,) * 2,
        "diloco:every=10": (DENSE_BYTES * 5 / 50,) * 2,
        "gossip": (DENSE_BYTES * (50 + 1) / 50,) * 2,
    }[how]
    return 50 * least, 50 * most * 1.15


@pytest.mark.parametrize("where", ["trained", "in_fabric"])
def test_dense_is_the_frameworks_own_ddp_bit_for_bit(where, request):
    one, other = request.getfixturevalue(where)
    dense = one["dense"] if where == "in_fabric" else one["dense"]["digest"]
    assert one["ddp"] == other["ddp"] == dense
    if where == "trained":
        assert one["dense"]["step"] == 50
        assert DENSE_BYTES * 50 <= one["dense"]["bytes"] <= DENSE_BYTES * 50 * 1.02


@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize("where", ["trained", "in_fabric"])
def test_replicas_are_equal_and_bytes_are_as_planned(where, how, request):
    one, other = request.getfixturevalue(where)
    assert one[how]["digest"] == other[how]["digest"]
    assert one[how]["finite"]
    least, most = planned_bytes(how)
    for mine in (one, other):
        assert least <= mine[how]["bytes"] <= most


def test_under_accumulation_of_4_there_is_one_exchange_per_optimizer_step(trained, in_fabric):
    for one in trained:
        assert one["accumulated"]["step"] == one["accumulated rounds"]["step"] == 12
    for one in in_fabric:
        assert one["accumulated topk:ratio=0.05"]["step"] == one["accumulated local:every=4"]["step"] == 12
    assert trained[0]["accumulated"]["digest"] == trained[1]["accumulated"]["digest"]


@pytest.mark.parametrize("how", ["dense", "topk:ratio=0.05"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_nan_on_one_rank_costs_one_step(broken, optimizer, how):
    """20 steps of which one is bad leave what 19 steps without its batch leave, with clipped gradients."""
    for one in broken:
        assert one[f"{optimizer} {how}"]["skipped"] == 1
        assert one[f"{optimizer} {how}"]["finite"]
        assert one[f"{optimizer} {how}"]["digest"] == one[f"{optimizer} {how} without"]["digest"]


def test_under_local_sgd_a_nan_costs_one_rank_one_step(broken, in_fabric):
    assert [one["local"]["skipped"] for one in broken] == [0, 1]
    assert broken[0]["local"]["digest"] == broken[1]["local"]["digest"]
    assert all(one["local"]["finite"] for one in broken)
    assert [one["nan"]["skipped"] for one in in_fabric] == [1, 1]
    assert all(one["nan"]["finite"] for one in in_fabric)
    assert in_fabric[0]["nan"]["digest"] == in_fabric[1]["nan"]["digest"]


def test_manual_optimization_with_two_optimizers(broken):
    one, other = broken
    assert one["manual dense"]["digest"] == one["manual ddp"] == other["manual ddp"]
    assert one["manual local:every=4"]["digest"] == other["manual local:every=4"]["digest"]
    assert one["manual local:every=4"]["step"] == 10  # max_steps counts the steps of both


def test_validation_sees_the_consensus(broken):
    """After 5 and 10 of 10 steps, neither of which ends a round of 4."""
    one, other = broken
    assert one["validated"]["seen"] == other["validated"]["seen"]
    assert len(set(one["validated"]["seen"])) == 2
    assert one["validated"]["step"] == 10


@pytest.mark.parametrize("how", SAVED)
def test_stop_and_resume_is_bit_for_bit(saved, in_fabric, how):
    """After 7 of 12 steps: in the middle of a round."""
    for one in saved:
        assert one[how]["resumed"] == one[how]["whole"]
        assert one[how]["kept"] == ["step=7.ckpt", "step=7.ckpt.stenograd"]
    for one in in_fabric:
        assert one[f"saved {how}"]["resumed"] == one[f"saved {how}"]["whole"]
        assert one[f"saved {how}"]["rest"] == []


@pytest.mark.parametrize("how", SAVED)
def test_a_checkpoint_saved_by_hand_after_fit_goes_on_bit_for_bit(saved, how):
    """Although fit leaves the consensus in the model, the rank's own parameters are saved."""
    for one in saved:
        assert one[how]["by hand"] == one[how]["one batch"]


def test_removed_checkpoints_leave_nothing(saved):
    assert saved[0]["removed"] == ["one/step=9.ckpt", "one/step=9.ckpt.stenograd"]


def test_a_checkpoint_without_its_folder_is_refused_and_one_of_lightning_alone_is_not(saved):
    for one in saved:
        assert len(one["plain"]["said"]) == 1
        assert "copy both" in one["plain"]["lost"]


def test_three_ranks_continue_what_two_saved(saved, folder):
    """The sum of the ranks' residuals stays, up to rounding; then the three are equal."""
    three = run_ranks(SCRIPT, 3, args=["reshard", folder])
    for how in SAVED:
        assert len({one[how]["digest"] for one in three}) == 1
        assert all(one[how]["step"] == 12 and one[how]["finite"] for one in three)
    sums = three[0]["topk:ratio=0.05"]["sums"]
    assert sums.keys() == saved[0]["sums"].keys() != set()
    for name, total in saved[0]["sums"].items():
        assert sums[name] == pytest.approx(total, rel=1e-5)
        assert total > 0


def test_lightnings_own_launcher_finds_the_strategy_by_name_and_logs_traffic(tmp_path):
    (one,) = run_ranks(SCRIPT, 2, args=["launched", tmp_path], launcher="none")
    assert one["method"] == "topk"
    assert one["world"] == one["init"] == 2
    logged = (Path(tmp_path) / "log" / "metrics.csv").read_text().splitlines()
    header, last = logged[0].split(","), logged[-1].split(",")
    assert 0 < float(last[header.index("traffic/moved_bytes")]) <= one["bytes"]
    assert one["finite"]


def test_joining_the_ranks_before_lightning_starts_them_is_refused():
    (said,) = run_ranks(SCRIPT, 2, args=["too_early"], launcher="none")
    assert "the Trainer has 2 ranks, but torch.distributed was initialised before with 1" in said
    assert "torchrun" in said


class TestRefusals:
    """Before any process is started."""

    def test_another_hook_beside_the_method(self):
        from stenograd.lightning import StenogradStrategy

        with pytest.raises(ValueError, match=r"ddp_comm_hook cannot stand beside a method.*leave it out"):
            StenogradStrategy("topk", ddp_comm_hook=lambda state, bucket: None)

    def test_options_that_would_have_no_effect(self):
        from stenograd.lightning import StenogradFabricStrategy, StenogradStrategy

        for kind in (StenogradStrategy, StenogradFabricStrategy):
            with pytest.raises(ValueError, match=r"no effect with local.*got static_graph"):
                kind("local:every=4", static_graph=True)

    def test_no_method_is_dense_and_says_so(self):
        from stenograd.lightning import StenogradStrategy

        with pytest.warns(UserWarning, match="travel densely"):
            StenogradStrategy()

    def test_fabric_wants_model_and_optimizer_together_for_rounds(self):
        from torch import nn

        from stenograd.lightning import StenogradFabricStrategy

        with pytest.raises(ValueError, match=r"fabric\.setup\(model, optimizer\)"):
            StenogradFabricStrategy("local:every=4").setup_module(nn.Linear(1, 1))

    def test_a_method_that_compresses_nothing_of_this_model(self):
        from torch import nn

        from stenograd.lightning.attachment import Choice

        with pytest.warns(UserWarning, match="largest tensor has 4 elements.*dense_below=1024"):
            Choice.of("sign")._warn_if_dense(nn.Linear(2, 2))

    def test_a_checkpoint_that_is_not_on_a_disk(self):
        from stenograd.errors import CheckpointError
        from stenograd.lightning.attachment import folder_of

        with pytest.raises(CheckpointError, match="must be on a disk"):
            folder_of("s3://bucket/last.ckpt")
