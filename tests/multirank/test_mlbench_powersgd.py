"""MLBench's PowerSGD on real gloo ranks."""

import copy
import os

import pytest
import torch
from models import flat, mlp, shards
from support.training import descend
from torch import nn

from stenograd.errors import CheckpointError, MismatchError
from stenograd.heat.daso import DASO
from stenograd.mlbench import DecentralizedSGD, PowerSGD

SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}


class Tensors(nn.Module):
    """Parameters of given shapes."""

    def __init__(self, *shapes, dtype=torch.float32):
        super().__init__()
        self.p = nn.ParameterList(torch.zeros(s, dtype=dtype) for s in shapes)


def _gradient(shape, rank, step=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + rank))


def _full_rank(rank, by_layer):
    model = Tensors((5, 6))
    optimizer = PowerSGD(model, lr=1.0, world_size=3, rank=8, by_layer=by_layer)
    model.p[0].grad = _gradient((5, 6), rank)
    optimizer.step()
    return -model.p[0].detach()


@pytest.mark.parametrize("by_layer", [False, True])
def test_full_rank_is_the_mean(pool, by_layer):
    mean = sum(_gradient((5, 6), r) for r in range(3)) / 3
    for update in pool.run(3, _full_rank, by_layer):
        torch.testing.assert_close(update, mean, rtol=1e-6, atol=1e-6)


SHAPES = [(20, 30), (9,), (8, 4, 3, 3), (), (1, 1), (40, 2)]


def _feedback(rank, shapes, by_layer, reuse_query):
    """sum_r e_r + N applied = sum_r (g_r + e_r_old); 1-D exact; the global generator untouched."""
    model = Tensors(*shapes)
    arguments = {"world_size": 3, "rank": 2, "by_layer": by_layer, "reuse_query": reuse_query}
    optimizer = PowerSGD(model, lr=1.0, **arguments)
    before = torch.get_rng_state()
    out = []
    for step in range(4):
        old = flat(model)
        wanted = torch.cat([s["residual"].reshape(-1) for s in optimizer.aggregation.memory.values()])
        for p in model.p:
            p.grad = _gradient(p.shape, rank, step)
        wanted += torch.cat([p.grad.reshape(-1) for p in model.p])
        optimizer.step()
        left = torch.cat([s["residual"].reshape(-1) for s in optimizer.aggregation.memory.values()])
        out.append((wanted, left, old - flat(model)))
    one_d = {
        n: s["residual"]
        for (n, p), s in zip(model.named_parameters(), optimizer.aggregation.memory.values(), strict=True)
        if p.ndim < 2
    }
    assert torch.equal(before, torch.get_rng_state())
    return out, one_d


@pytest.mark.parametrize("reuse_query", [False, True])
@pytest.mark.parametrize("by_layer", [False, True])
@pytest.mark.parametrize("shapes", [SHAPES, [(20, 30)], [(9,)]], ids=["mix", "no 1-D", "only 1-D"])
def test_error_feedback_d_m5(pool, shapes, by_layer, reuse_query):
    ranks = pool.run(3, _feedback, shapes, by_layer, reuse_query)
    for step in range(4):
        wanted = sum(r[0][step][0] for r in ranks)
        left = sum(r[0][step][1] for r in ranks)
        applied = ranks[0][0][step][2]
        torch.testing.assert_close(left + 3 * applied, wanted, rtol=1e-4, atol=1e-4)
        assert all(torch.equal(applied, r[0][step][2]) for r in ranks)
    for _, one_d in ranks:
        assert not any(bool(e.any()) for e in one_d.values())


def _train(optimizer, model, rank, first, steps, world_size=2):
    for s in range(first, first + steps):
        xs, ys = shards(s, world_size)
        descend(optimizer, nn.functional.mse_loss(model(xs[rank]), ys[rank]))
    return flat(model)


def _older(rank):
    """A state as it was once written, and one of another rank."""
    model = mlp(0)
    optimizer = PowerSGD(model, **SGD, reuse_query=True, world_size=2, rank=2)
    _train(optimizer, model, rank, 0, 4)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    kind = "PowerSGD(rank=2, warm_start=True, seed=0, alternate=False, values='float32')"
    saved[1]["aggregation"]["method"] = f"ErrorFeedback(inner={kind}, decay=1.0)"
    fresh = PowerSGD(mlp(7), **SGD, reuse_query=True, world_size=2, rank=2)
    fresh.model.load_state_dict(saved[0])
    fresh.load_state_dict(saved[1])
    saved[1]["aggregation"]["rank"] = 5
    ends = [_train(o, o.model, rank, 4, 3) for o in (optimizer, fresh)]
    with pytest.raises(CheckpointError, match="the checkpoint's rank must be"):
        fresh.load_state_dict(saved[1])
    return torch.equal(*ends)


def test_older_states_still_load_and_those_of_another_rank_are_refused(pool):
    assert pool.run(2, _older) == [True, True]


def _alone(rank):
    model, plain = mlp(0), mlp(0)
    a = _train(PowerSGD(model, **SGD, rank=1), model, 0, 0, 5, 1)
    b = _train(torch.optim.SGD(plain.parameters(), **SGD), plain, 0, 0, 5, 1)
    return torch.equal(a, b)


def test_alone_it_is_sgd(pool):
    assert pool.run(1, _alone) == [True]


def _other_kernels(rank):
    """Rank 1 is without numba, or told to be."""
    before = os.environ.get("STENOGRAD_KERNELS")
    os.environ["STENOGRAD_KERNELS"] = ["numba", "reference"][rank]
    model, told = mlp(0), []
    daso = DASO(torch.optim.SGD(model.parameters(), lr=0.1), 10, node_size=1, timeout_s=30)
    for attach in (
        lambda: PowerSGD(model, lr=1.0, world_size=2),
        lambda: DecentralizedSGD(rank, [1 - rank], model, lr=0.1, timeout_s=30),
        lambda: daso.set_model(model),
    ):
        with pytest.raises(MismatchError) as refused:
            attach()
        told.append(str(refused.value))
    os.environ.pop("STENOGRAD_KERNELS", None)
    if before is not None:
        os.environ["STENOGRAD_KERNELS"] = before
    return told


def test_ranks_with_other_kernels_are_told(pool):
    """Their averages differ in the last bits, and the ranks drifted apart without a word."""
    says = "ranks differ in kernels: rank 0 has numba, rank 1 has reference: make them equal"
    assert pool.run(2, _other_kernels) == [[says] * 3] * 2
