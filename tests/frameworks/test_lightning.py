"""Stenograd inside Lightning's Trainer and Fabric, on real ranks, which run lightning_training.py."""

import pytest

pytest.importorskip("lightning")
pytestmark = pytest.mark.frameworks

from lightning_cases import MATRICES, METHODS, PARAMETERS, SAVED, WIDE  # noqa: E402

SCRIPT = "lightning_training.py"
DENSE_BYTES = 4 * PARAMETERS  # per step and rank: of two ranks, each sends 2 (N-1)/N = 1 times the gradients


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


def test_dense_is_the_trainers_own_ddp_bit_for_bit(ran):
    one, other = ran("plain")
    assert one["ddp"] == other["ddp"] == one["dense"]["digest"]
    assert one["dense"]["step"] == 50
    assert DENSE_BYTES * 50 <= one["dense"]["bytes"] <= DENSE_BYTES * 50 * 1.02


@pytest.mark.parametrize("how", ["dense", "local:every=1"])
def test_weights_count_rows_as_one_process_would(ran, how):
    for found in ran("weighed", how):
        assert found["moved"] > 1e-3
        assert found["difference"] < 1e-6


def test_dense_is_fabrics_own_ddp_bit_for_bit(ran):
    one, other = ran("fabric_plain")
    assert one["ddp"] == other["ddp"] == one["dense"]


@pytest.mark.parametrize("how", METHODS)
@pytest.mark.parametrize("where", ["trained", "fabric_trained"])
def test_replicas_are_equal_and_bytes_are_as_planned(ran, where, how):
    one, other = ran(where, how)
    assert one["digest"] == other["digest"]
    least, most = planned_bytes(how)
    for mine in (one, other):
        assert mine["finite"]
        assert least <= mine["bytes"] <= most


@pytest.mark.parametrize("how", ["topk:ratio=0.05", "local:every=4"])
@pytest.mark.parametrize("where", ["accumulated", "fabric_accumulated"])
def test_under_accumulation_of_4_there_is_one_exchange_per_optimizer_step(ran, where, how):
    one, other = ran(where, how)
    assert one["step"] == other["step"] == 12
    if where == "accumulated" or how.startswith("topk"):  # in Fabric, 12 steps of `local` end in mid-round
        assert one["digest"] == other["digest"]


@pytest.mark.parametrize("how", ["dense", "topk:ratio=0.05"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_nan_on_one_rank_costs_one_step(ran, optimizer, how):
    """20 steps of which one is bad leave what 19 steps without its batch leave, with clipped gradients."""
    for one in ran("bad", how, optimizer):
        assert one["bad"]["skipped"] == 1
        assert one["bad"]["finite"]
        assert one["bad"]["digest"] == one["without"]["digest"]


def test_under_local_sgd_a_nan_costs_one_rank_one_step(ran):
    one, other = (rank["bad"] for rank in ran("bad", "local:every=4", "sgd"))
    assert [one["skipped"], other["skipped"]] == [0, 1]
    assert one["digest"] == other["digest"]
    assert one["finite"]


def test_a_nan_in_fabric_costs_one_step(ran):
    one, other = ran("fabric_bad")
    assert [one["skipped"], other["skipped"]] == [1, 1]
    assert one["digest"] == other["digest"]
    assert one["finite"]


def test_manual_optimization_with_two_optimizers(ran):
    own, ours = ran("manual", "ddp"), ran("manual", "dense")
    assert ours[0]["digest"] == own[0] == own[1]


def test_manual_optimization_in_rounds(ran):
    one, other = ran("manual", "local:every=4")
    assert one["digest"] == other["digest"]
    assert one["step"] == 10  # max_steps counts the steps of both optimizers


def test_validation_sees_the_consensus(ran):
    """After 5 and 10 of 10 steps, neither of which ends a round of 4."""
    one, other = ran("validated")
    assert one["seen"] == other["seen"]
    assert len(set(one["seen"])) == 2
    assert one["step"] == 10


@pytest.mark.parametrize("how", ["local:every=4", "diloco:every=4"])
def test_the_consensus_is_in_place_when_callbacks_hear_of_the_end(ran, how):
    """So a module exports it, and weights that a callback puts in its place stay."""
    one, other = ran("exported", how)
    assert one["plain"] == one["exported"] == other["plain"] == other["exported"]
    for rank in (one, other):
        assert rank["kept"]
        assert rank["averaged"] != rank["plain"]


def test_averaged_weights_stay_with_which_batch_norms_have_looked_at_data(ran):
    """Lightning's SWA puts them in place one epoch before the end; one step of old gradients follows."""
    one, other = ran("looked")
    assert one["saved"]  # by rank 0; each has averaged its own
    for rank in (one, other):
        assert rank["kept"]
        assert rank["off"] < 0.05


@pytest.mark.parametrize("how", ["topk:ratio=0.05", "local:every=4"])
def test_training_begins_anew_after_a_finder_of_learning_rates(ran, how):
    one, other = ran("found_rate", how)
    assert one["found"]["digest"] == other["found"]["digest"]
    assert one["rate"] == other["rate"] != 0.05
    for name in ("digest", "step", "seen"):
        assert one["found"][name] == one["given"][name]


@pytest.mark.parametrize("how", SAVED)
def test_stop_and_resume_is_bit_for_bit(ran, how):
    """After 7 of 12 steps, in the middle of a round, by a link to the checkpoint."""
    for one in ran("stopped", how):
        assert one["resumed"] == one["whole"]
        assert one["kept"] == ["last.ckpt", "step=7.ckpt", "step=7.ckpt.stenograd"]


@pytest.mark.parametrize("how", ["dense", "topk:ratio=0.05", "local:every=4"])
def test_a_request_to_one_rank_saves_and_ends_at_one_step(ran, how):
    for one in ran("asked", how):
        assert one["step"] == one["trained"] == 4
        assert one["least"] == 3
        assert one["stopping"]
        assert one["same"]
        assert one["resumed"] == one["whole"]


@pytest.mark.parametrize("how", SAVED)
def test_stop_and_resume_in_fabric_is_bit_for_bit(ran, how):
    for one in ran("fabric_stopped", how):
        assert one["resumed"] == one["whole"]
        assert one["rest"] == []


@pytest.mark.parametrize("how", ["local:every=4", "diloco:every=10", "gossip"])
def test_rounds_begin_from_weights_that_fabric_loads_without_a_state_of_ours(ran, how):
    for one in ran("fabric_anew", how):
        assert one == {"model alone": True, "both": True}


@pytest.mark.parametrize("how", SAVED)
def test_a_checkpoint_saved_by_hand_after_fit_goes_on_bit_for_bit(ran, how):
    """Although fit leaves the consensus in the model, the rank's own parameters are saved."""
    for one in ran("by_hand", how):
        assert one["resumed"] == one["whole"]


def test_removed_checkpoints_leave_nothing(ran):
    assert ran("removed")[0] == ["one/step=9.ckpt", "one/step=9.ckpt.stenograd"]


def test_a_checkpoint_without_its_folder_is_refused_and_one_of_lightning_alone_is_not(ran):
    for one in ran("without_ours"):
        assert len(one["said"]) == 1
        assert "copy both" in one["lost"]


def test_what_fabrics_own_strategy_saved_begins_anew(ran):
    for one in ran("fabric_from_own"):
        assert one["whole"] == one["weights"] == one["saved"]


@pytest.mark.parametrize("how", SAVED)
def test_three_ranks_continue_what_two_saved(ran, how):
    """The sum of the ranks' residuals stays, up to rounding; then the three are equal."""
    before = ran("stopped", how)[0]["sums"]
    three = ran("reshard", how, world_size=3)
    assert len({one["digest"] for one in three}) == 1
    assert all(one["step"] == 12 and one["finite"] for one in three)
    assert bool(before) is how.startswith("topk")
    assert three[0]["sums"] == pytest.approx(before, rel=1e-5)
    assert all(total > 0 for total in before.values())


@pytest.mark.parametrize("where", ["nowhere", "step", "validation", "end"])
@pytest.mark.parametrize("how", METHODS)
def test_no_thread_group_or_hook_is_left_after_fit(ran, how, where):
    """Also where something raises in fit, on all ranks."""
    for one in ran("ended", how, where):
        assert one["begun"]
        assert one["broke"] is (where != "nowhere")
        assert one["left"] == []
        if where == "nowhere" or how.startswith("topk"):
            assert one["said"] == ""  # saving went well
        elif where == "step" and how.startswith(("local", "gossip")):
            assert "save in a callback's on_exception" in one["said"]


@pytest.mark.parametrize("way", ["torn down", "dropped"])
@pytest.mark.parametrize("how", METHODS)
def test_no_thread_group_or_hook_is_left_after_fabrics_teardown(ran, how, way):
    for one in ran("fabric_ended", how, way):
        assert one["begun"]
        assert one["alive"] != []
        assert one["left"] == []


def test_lightnings_own_launcher_finds_the_strategy_by_name_and_logs_traffic(ran, folder):
    (one,) = ran("launched", launcher="none")
    assert one["method"] == "topk"
    assert one["world"] == one["init"] == 2
    logged = (folder / "log" / "metrics.csv").read_text().splitlines()
    header, last = logged[0].split(","), logged[-1].split(",")
    assert 0 < float(last[header.index("traffic/moved_bytes")]) <= one["bytes"]
    assert one["finite"]


def test_joining_the_ranks_before_lightning_starts_them_is_refused(ran):
    (said,) = ran("too_early", launcher="none")
    assert "the Trainer has 2 ranks, but torch.distributed was initialised before with 1" in said
    assert "torchrun" in said


def test_clipping_a_direction_is_refused(ran):
    for said in ran("clipped"):
        assert len(said) == 3
        assert all("demo delivers a direction" in text for text in said)
        assert ["gradient_clip_val" in text for text in said] == [True, False, False]


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

        from stenograd.lightning import StenogradStrategy

        with pytest.warns(UserWarning, match="largest tensor has 4 elements.*dense_below=1024"):
            StenogradStrategy("sign")._warn_if_dense(nn.Linear(2, 2))

    def test_a_checkpoint_that_is_not_on_a_disk(self):
        from stenograd.errors import CheckpointError
        from stenograd.lightning.exchanging import folder_of

        with pytest.raises(CheckpointError, match="must be on a disk"):
            folder_of("s3://bucket/last.ckpt")
