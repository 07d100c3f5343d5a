"""What a DistOpt keeps: residuals by parameter through any change, and states that continue bit for bit."""

import pytest
import torch
from models import flat, mlp, shards
from singa_helpers import leaf, moved, push, unit_sgd
from torch import nn

from stenograd.errors import CheckpointError, ConfigError, NonFiniteError
from stenograd.singa import SGD, Adam, DistOpt, NcclIdHolder


def _run(opt, model, rank, first, last):
    for s in range(first, last):
        xs, ys = shards(s, 2)
        loss = nn.functional.mse_loss(model(xs[rank]), ys[rank])
        opt.backward_and_sparse_update(loss, 100, 0.1, topK=True)


def _changing(rank):
    """Rank-equal gradients of 1 or 0; an element is sent where v is among the largest."""
    a, b, opt = leaf(0.0, 0.0), leaf(0.0, 0.0), unit_sgd()
    half = {"spars": 0.25, "topK": True}
    opt.backward_and_sparse_update(push([a, b], [1.0, 1.0]), corr=False, **half)  # corr off first
    assert (opt.sparsInit, opt.gradAccumulation) == (False, [])
    first = sum(moved(a) + moved(b))
    opt.backward_and_sparse_update(push([a, b], [1.0, 1.0]), **half)  # one of four is sent, three wait
    opt.backward_and_update(push([a, b], [0.0, 0.0]))
    opt.backward_and_update_half(push([a], [0.0]))
    opt.backward_and_sparse_update(push([a, b], [0.0, 0.0]), corr=False, **half)
    waiting = sum(float(t.sum()) for t in opt.gradAccumulation)
    opt.backward_and_sparse_update(push([a], [0.0]), spars=0.5)  # b is frozen for a step
    still = sum(float(s["residual"].sum()) for s in opt.get_states()["residuals"].values())
    opt.backward_and_sparse_update(push([a, b], [0.0, 0.0]), threshold=0, spars=0.5)  # two groups, threshold
    rest = sum(float(t.sum()) for t in opt.gradAccumulation)
    return first, waiting, still, rest, sum(moved(a) + moved(b))


def test_residuals_stay_with_their_parameters_through_every_change(pool):
    """Of four ones with corr off one is sent; of four with corr on all, in the end: 1 + 4."""
    for first, waiting, still, rest, total in pool.run(2, _changing):
        assert (first, waiting, rest, total) == (1, 3, 0, 5)
        assert still in (1, 2)  # what b still waits for


def _finalized(rank):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    opt = DistOpt(SGD(lr=0.1), timeout_s=30)
    opt.synchronize(model)
    for step in range(3):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))
        opt.backward_and_partial_update(model(x).square().mean(), threshold=4)
    before = flat(model)
    opt.finalize(model)
    return before, flat(model), model[1].running_mean, opt.partial


def test_finalize_makes_all_ranks_equal(pool):
    """Parameters and BatchNorm's statistics end equal."""
    a, b = pool.run(2, _finalized)
    assert not torch.equal(a[0], b[0])
    torch.testing.assert_close(a[1], (a[0] + b[0]) / 2)
    assert torch.equal(a[1], b[1])
    assert torch.equal(a[2], b[2])
    assert a[3] == b[3] == 0


def _spoilt(rank, dtypes):
    opt, ws = DistOpt(SGD(lr=0.1), timeout_s=30), [torch.ones(2, dtype=d, requires_grad=True) for d in dtypes]
    loss = lambda: sum(w.float().sum() for w in ws)  # noqa: E731
    opt.backward_and_partial_update(loss())
    if rank == 0:
        ws[-1].data[0] = float("nan")
    before = [w.tolist() for w in ws]
    with pytest.raises(NonFiniteError, match="parameters to average must be finite"):
        opt.finalize()
    assert str([w.tolist() for w in ws]) == str(before)
    for _ in dtypes[1:]:  # the other partitions' turns
        opt.backward_and_partial_update(loss())
    with pytest.raises(NonFiniteError, match="parameters to average must be finite"):
        opt.backward_and_partial_update(loss())
    return [bool(w.isnan().any()) for w in ws]


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.float16)])
def test_one_ranks_nan_does_not_spread(pool, dtypes):
    """Nothing is averaged on any rank, parameters of other types included, and all raise."""
    bad, good = pool.run(2, _spoilt, dtypes)
    assert bad == [False] * (len(dtypes) - 1) + [True]
    assert not any(good)


def test_default_optimizers_are_not_shared():
    """Each has a new SGD(lr=0.1)."""
    one, other = DistOpt(), DistOpt()
    assert one.opt is not other.opt
    w = leaf(1.0)
    assert one.lr == DistOpt(torch.optim.SGD([w], lr=0.1)).lr == 0.1
    one(w.sum())
    assert w.item() == pytest.approx(0.9)
    assert other.get_states()["optimizer"]["step_counter"] == 0


def test_states_of_other_runs_are_refused(tmp_path):
    w, opt = leaf(1.0, 2.0), unit_sgd()
    opt.backward_and_sparse_update(w.sum())
    states = opt.get_states()
    with pytest.raises(CheckpointError, match="world_size must be 1, got 4"):
        unit_sgd().set_states({**states, "world_size": 4})
    fresh = unit_sgd()
    fresh.set_states(states)
    with pytest.raises(CheckpointError, match=r"parameter 0 was saved with shape \(2,\), got \(3,\)"):
        fresh.backward_and_sparse_update(leaf(1.0, 2.0, 3.0).sum())
    used = unit_sgd()
    used(leaf(1.0, 2.0, 3.0).sum())
    with pytest.raises(CheckpointError, match=r"parameter 0 has shape \(3,\), got \(2,\)"):
        used.set_states(states)
    with pytest.raises(ConfigError):
        DistOpt(Adam()).set_states({**states, "optimizer": {"moments": {}, "step_counter": 1}})
    with pytest.raises(ConfigError, match="use the same kind of optimizer"):
        DistOpt(torch.optim.SGD([w], lr=0.1)).set_states(states)
    (tmp_path / "broken").write_bytes(b"no state")
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        opt.load(tmp_path / "broken")


def test_names_can_be_given():
    model = mlp(0)
    opt = unit_sgd()
    opt.register(model.named_parameters(), {"lr": 0.0})
    before = flat(model)
    opt.backward_and_sparse_update(model(torch.ones(1, 10)).sum())
    assert torch.equal(flat(model), before)  # the learning rate that was registered
    assert set(opt.get_states()["residuals"]) == dict(model.named_parameters()).keys()
    with pytest.raises(ConfigError, match="must be empty with a PyTorch optimizer"):
        DistOpt(torch.optim.SGD(model.parameters(), lr=1.0)).register(model.parameters(), {"lr": 0.1})


def _named_anew(rank, saved, loaded):
    """Six steps, whole and resumed after three; names come before the first step, later or never."""
    whole, resumed = mlp(0), mlp(0)
    opt, other = (DistOpt(SGD(lr=0.05, momentum=0.9), timeout_s=30) for _ in range(2))
    if saved == "first":
        opt.register(whole.named_parameters(), {})
    if loaded == "first":
        other.register(resumed.named_parameters(), {})
    _run(opt, whole, rank, 0, 1)
    if saved == "later":
        opt.register(whole.named_parameters(), {})
    _run(opt, whole, rank, 1, 3)
    resumed.load_state_dict(whole.state_dict())
    other.set_states(opt.get_states())
    if loaded == "after":
        other.register(resumed.named_parameters(), {})
    _run(opt, whole, rank, 3, 6)
    try:
        _run(other, resumed, rank, 3, 6)
    except CheckpointError as error:
        return str(error)
    return torch.equal(flat(whole), flat(resumed))


def test_names_must_be_those_that_were_saved(pool):
    for saved, loaded in (("first", "first"), ("later", "first"), ("first", "after"), ("never", "never")):
        assert pool.run(2, _named_anew, saved, loaded) == [True, True], (saved, loaded)
    for saved, loaded in (("first", "never"), ("never", "first"), ("never", "after")):
        for error in pool.run(2, _named_anew, saved, loaded):
            assert "state was saved for parameters" in error, (saved, loaded)


def test_two_parameters_cannot_have_one_name():
    a, b = leaf(1.0), leaf(1.0)
    opt = DistOpt(torch.optim.SGD([a, b], lr=0.1))
    opt.register([("w", a)], {})
    for known in (False, True):
        if known:
            opt.register([("v", b)], {})
        with pytest.raises(ConfigError, match="name must be of one parameter, got 'w'"):
            opt.register([("w", b)], {})


def test_a_closed_optimizer_keeps_its_residuals():
    """Of four ones a quarter is sent; the rest waits, is saved, and is sent by later steps."""
    w, opt = leaf(0.0, 0.0, 0.0, 0.0), unit_sgd()
    opt.backward_and_sparse_update(w.sum(), spars=0.25, topK=True)
    opt.close()
    assert sum(float(t.sum()) for t in opt.gradAccumulation) == 3
    assert float(opt.get_states()["residuals"]["0"]["residual"].sum()) == 3
    opt.backward_and_sparse_update((w * 0).sum(), spars=1.0, topK=True)
    assert sum(moved(w)) == 4


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"opt": SGD}, TypeError, "opt must be an optimizer"),
        ({"nccl_id": "token"}, TypeError, "nccl_id must be an NcclIdHolder"),
        ({"buffSize": 0}, ConfigError, "buffSize must be a whole number of at least 1, got 0"),
        ({"world_size": 3}, ConfigError, "world_size must be 1, as .* started rank 0 of 1, got 3"),
        ({"local_rank": 1}, ConfigError, "local_rank must be 0"),
        ({"gpu_per_node": 2}, ConfigError, "gpu_per_node must be 1, as .*, got 2"),
        ({"opt": torch.optim.LBFGS([leaf(1.0)])}, ConfigError, "opt must use gradients once .* got LBFGS"),
        ({"gpu_num": 1}, ConfigError, "local_rank must be 0"),
        ({"local_rank": 0, "gpu_num": 1}, ConfigError, "local_rank and its older name must be equal"),
        ({"nccl_id": NcclIdHolder()}, ConfigError, "world_size must be .* got None"),
        ({"nccl_id": NcclIdHolder(), "world_size": 0}, ConfigError, "world_size must be .* got 0"),
        ({"nccl_id": NcclIdHolder(), "world_size": 2}, ConfigError, r"local_rank must be .* \[0, 2\)"),
        ({"nccl_id": NcclIdHolder(), "world_size": 2, "local_rank": 2}, ConfigError, "got 2"),
        ({"nccl_id": NcclIdHolder(), "num_gpus": 2, "gpu_num": -1}, ConfigError, "got -1"),
        ({"timeout_s": 0}, ConfigError, "timeout_s"),
    ],
)
def test_wrong_arguments_are_refused(arguments, error, message):
    DistOpt(world_size=1, local_rank=0, gpu_per_node=1, num_gpus=1)  # what is right is taken
    with pytest.raises(error, match=message):
        DistOpt(**arguments)
