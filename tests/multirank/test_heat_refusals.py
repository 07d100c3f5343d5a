"""DASO names what is wrong: arguments, states, settings that differ, ranks that fail."""

import copy
import time
import warnings

import pytest
import torch
from heat_loops import batch, make
from models import mlp

from stenograd.checkpoint.reshard import alike
from stenograd.errors import CheckpointError, ConfigError, MismatchError, StenogradError
from stenograd.heat.daso import DASO
from stenograd.testing.pool import RanksFailed


def _broken(rank, phase):
    model, daso = make(warmup_epochs=0 if phase == "cycling" else 1, node_size=2)
    daso.last_batch = 8
    try:
        for number in range(8):
            if rank == 3 and number == (4 if phase == "cycling" else 5):
                with torch.no_grad():
                    model[0].weight[0, 0] = torch.inf
            batch(rank, model, daso, number)
    except StenogradError as error:
        return type(error).__name__, number
    finally:
        daso.close()


@pytest.mark.parametrize("phase", ["cycling", "blocking"])
def test_a_rank_that_is_not_finite_is_an_error_on_all_ranks_at_the_same_batch(pool, phase):
    """Group 1, with rank 3, sends in batch 4 and merges in batch 5; or it averages exactly in batch 5."""
    assert pool.run(4, _broken, phase) == [("NonFiniteError", 5)] * 4


def _dies(rank):
    import os

    model, daso = make(warmup_epochs=0, node_size=2, timeout_s=3.0)
    daso.last_batch = 20
    for number in range(10):
        if rank == 3 and number == 2:
            os._exit(1)
        batch(rank, model, daso, number)


def test_a_dead_rank_is_named_within_the_timeout(pool):
    start = time.monotonic()
    with pytest.raises(RanksFailed) as failed:
        pool.run(4, _dies)
    assert time.monotonic() - start < 30
    assert sorted(failed.value.errors) == [0, 1, 2, 3]
    for rank in (0, 1, 2):
        assert "PeerLost" in failed.value.errors[rank]
    assert "rank(s) 3 did not answer" in failed.value.errors[2]


def _chosen_later(rank):
    model = mlp(0)
    daso = DASO(torch.optim.SGD(model.parameters(), lr=0.1), 10, node_size=1, timeout_s=30)
    daso.warmup_epochs, daso.total_epochs, daso.cooldown_epochs = 0, 5, 1
    daso.max_gs, daso.skip_reduction_factor, daso.local_skip_factor = 6, 3, 2
    daso.split_val, daso.cast_dtype = 100, torch.half
    daso.set_model(model)
    skips, chunks = [], len(daso.split_inds)
    for _ in range(5):
        daso.stability.test_if_improving = lambda loss: True  # a plateau after each epoch
        skips.append((daso.global_skip, daso.local_skip, daso.batches_to_wait))
        daso.epoch, daso.current_batch = daso.epoch + 1, 0
        daso.epoch_loss_logic(1.0)
    method = daso.state_dict()["global_method"]
    for name, value in {"split_val": 10, "cast_dtype": torch.float}.items():
        with pytest.raises(ConfigError, match=f"{name} must be set before set_model"):
            setattr(daso, name, value)
    with pytest.raises(ConfigError, match="warmup_epochs must be at least 0, got -1"):
        daso.warmup_epochs = -1
    with pytest.raises(TypeError, match="max_global_skips must be a whole number"):
        daso.max_gs = 2.5
    daso.close()
    return skips, chunks > 1, method, daso.max_gs


def test_attributes_that_are_set_take_effect(pool):
    """Cycling from epoch 0 on: 4, 4 / 3, then anew from 6; and cool-down in epoch 4."""
    for skips, split, method, most in pool.run(2, _chosen_later):
        assert skips == [(4, 1, 1), (1, 1, 1), (6, 3, 3), (2, 1, 2), (0, 0, 0)]
        assert (split, most) == (True, 6)
        assert "fp16" in method


def _cut_short(rank):
    daso = DASO(torch.optim.SGD(mlp(0).parameters(), lr=0.1), 20, warmup_epochs=8)
    daso.epoch = 2
    daso.warmup_epochs = 1
    daso.epoch_loss_logic(1.0)
    return daso.global_skip


def test_warm_up_that_is_cut_short_ends_with_the_epoch(pool):
    assert pool.run(1, _cut_short) == [4]


def _refused(rank, kind, arguments):
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        DASO(**{"local_optimizer": optimizer, "total_epochs": 10, **arguments})
    except kind as error:
        return str(error)


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        (TypeError, {"local_optimizer": "SGD"}, "local_optimizer must be"),
        (TypeError, {"total_epochs": 2.5}, "total_epochs must be a whole number, got 2.5"),
        (TypeError, {"warmup_epochs": "4"}, "warmup_epochs"),
        (TypeError, {"cooldown_epochs": True}, "cooldown_epochs"),
        (TypeError, {"stability_level": "5 %"}, "stability_level"),
        (TypeError, {"comm": "world"}, "comm must be a process group"),
        (TypeError, {"scheduler": 3}, "scheduler must be"),
        (TypeError, {"scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "ReduceLROnPlateau"),
        (TypeError, {"downcast_type": "bfloat16"}, "downcast_type"),
        (TypeError, {"use_mpi_groups": 1}, "use_mpi_groups"),
        (TypeError, {"verbose": None}, "verbose"),
        (ValueError, {"total_epochs": 0}, "total_epochs must be at least 1, got 0"),
        (ValueError, {"warmup_epochs": -1}, "warmup_epochs must be at least 0"),
        (ValueError, {"cooldown_epochs": -1}, "cooldown_epochs"),
        (ValueError, {"max_global_skips": -1}, "max_global_skips"),
        (ValueError, {"sending_chunk_size": 0}, "sending_chunk_size"),
        (ValueError, {"skip_reduction_factor": 1}, "skip_reduction_factor must be at least 2"),
        (ValueError, {"local_skip_factor": 0}, "local_skip_factor"),
        (ValueError, {"downcast_type": torch.float64}, "downcast_type must be torch.bfloat16"),
        (ValueError, {"stability_level": -0.1}, "stability_level"),
        (ValueError, {"node_size": 2}, "node_size must divide the number of ranks, got 2 for 3"),
        (ValueError, {"node_size": 0}, "node_size"),
        (ValueError, {"nodes": [[0, 1]]}, "nodes must hold each of the 3 ranks once"),
        (ValueError, {"nodes": [[0, 1], [1, 2]]}, "nodes"),
        (ValueError, {"nodes": [[0, 1, 2], []]}, "nodes"),
        (ValueError, {"nodes": [[0, 1, 2]], "node_size": 3}, "give node_size or nodes"),
        (ValueError, {"global_method": "sign:majority=true"}, "as they are"),
        (ValueError, {"local_method": "nothing"}, "unknown method"),
        (ValueError, {"timeout_s": 0}, "timeout_s"),
    ],
)
def test_wrong_arguments_are_refused_with_their_names(pool, kind, arguments, message):
    for said in pool.run(3, _refused, kind, arguments):
        assert message in said


def _misused(rank):
    model = mlp(0)
    daso = DASO(torch.optim.SGD(model.parameters(), lr=0.1), 10, node_size=1)
    for wrong in (lambda: daso.step(), lambda: daso.state_dict()):
        with pytest.raises(StenogradError, match="no model"):
            wrong()
    daso.set_model(model)
    with pytest.raises(ValueError, match=r"last_batch must be .* got None"):
        daso.step()
    daso.last_batch = -1
    with pytest.raises(ValueError, match="last_batch"):
        daso.step()
    with pytest.raises(TypeError, match="loss"):
        daso.epoch_loss_logic("low")
    with pytest.raises(TypeError, match="scaler"):
        daso.add_scaler(1.0)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        daso.set_model([1])
    with pytest.raises(ConfigError, match="optimizer must hold"):
        daso.set_model(mlp(1))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(1, 10)).sum()).backward()
    with pytest.raises(ConfigError, match=r"call daso\.add_scaler\(scaler\) once"):
        scaler.step(daso)
    daso.close()
    daso.close()


def test_misuse_is_named(pool):
    pool.run(1, _misused)


def _own_steps(rank, node_size):
    model, daso = make(node_size=node_size)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for number in range(2):
            daso.local_optimizer.step()
            daso.last_batch = 1
            batch(rank, model, daso, number, world_size=2)
    daso.close()
    return [str(warning.message) for warning in seen]


def test_steps_that_nodes_do_not_hear_of_are_a_warning_once(pool):
    for said in pool.run(2, _own_steps, 1):
        assert len(said) == 1
        assert "stepped outside of daso.step()" in said[0]
    assert pool.run(2, _own_steps, 2) == [[], []]


def _part(path, value):
    """Return a change of one part of a state."""

    def change(state):
        *way, last = path
        for key in way:
            state = state[key]
        state[last] = value

    return change


def _refuses_states(rank):
    """States that do not fit, in every part; what the DASO holds must be the same afterwards."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    arguments = {"warmup_epochs": 0, "node_size": 1, "timeout_s": 30, "local_method": "topk:ratio=0.3"}
    daso = DASO(optimizer, 10, scheduler=schedule, **arguments)
    daso.set_model(model)
    daso.last_batch = 9
    for number in range(3):
        batch(rank, model, daso, number, world_size=2)
    good = copy.deepcopy(daso.state_dict())
    for number in range(3, 5):
        batch(rank, model, daso, number, world_size=2)
    before, said = copy.deepcopy(daso.state_dict()), []
    (group,) = good["across"]["groups"]
    changes = [
        _part(["scheduler"], None),
        _part(["scaler"], {"scale": 2.0}),
        _part(["across", "groups"], {}),
        _part(["across", "groups", group, "arrived"], [torch.ones(1)]),
        _part(["local", "method"], "dense"),
        _part(["local", "parameters"], {}),
        _part(["optimizer", "param_groups"], []),
        _part(["stability"], {"best": 1.0}),
        _part(["skips"], [1]),
        _part(["epoch"], None),
        lambda state: state.pop("last_batch"),
    ]
    for number, change in enumerate(changes):
        state = copy.deepcopy(good)
        change(state)
        try:
            daso.load_state_dict(state)
        except CheckpointError as refused:
            said.append(str(refused))
        assert len(said) == number + 1, f"change {number} was taken"
        assert alike(daso.state_dict(), before), said[-1]
    daso.load_state_dict(good)
    assert alike(daso.state_dict(), good)
    assert not alike(good, before)
    daso.close()
    return said


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(pool):
    """A scheduler on one side only was dropped silently, or a TypeError after half of the state was taken."""
    first, second = pool.run(2, _refuses_states)
    assert first == second
    assert "a scheduler is given now but was not saved: use one in both or in none" in first[0]
    assert "a scaler was saved but is not given now: use one in both or in none" in first[1]
    assert all("nothing was changed" in text for text in first[2:])


def _different(rank):
    make(node_size=2, max_global_skips=8 + rank)


def test_ranks_with_different_settings_are_told(pool):
    with pytest.raises(RanksFailed) as failed:
        pool.run(2, _different)
    assert all("MismatchError" in text and "plan" in text for text in failed.value.errors.values())
    assert MismatchError.__name__ in failed.value.errors[0]
