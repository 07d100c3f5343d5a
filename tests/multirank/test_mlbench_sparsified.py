"""MLBench's sparsified SGD with memory on real gloo ranks."""

import pytest
import torch
from models import mlp, shards
from torch import nn

from stenograd.errors import ConfigError, MismatchError
from stenograd.mlbench import CentralizedSparsifiedSGD, SparsifiedAggregation

SHAPES = [(1, 23), (7,), (), (3, 4, 5), (2,), (0, 3)]
K = 5


def _steps(rank, random, average_world=True):
    """Return per step and tensor: movement, memory before plus lr g, and memory after."""
    parameters = [nn.Parameter(torch.full(shape, float(rank))) for shape in SHAPES]  # D: rank 0's are taken
    options = {"random_sparse": random, "world_size": 3, "average_world": average_world}
    optimizer = CentralizedSparsifiedSGD(parameters, lr=0.5, sparse_grad_size=K, **options)
    assert all(bool((p == 0).all()) for p in parameters)
    out = []
    for step in range(6):
        row = []
        before = [(p.detach().clone(), optimizer.state[p]["memory"].clone()) for p in parameters]
        generator = torch.Generator().manual_seed(100 * step + rank)
        for p in parameters:
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
        for p, (old, memory) in zip(parameters, before, strict=True):
            row.append((old - p.detach(), memory + 0.5 * p.grad, optimizer.state[p]["memory"].clone()))
        out.append(row)
    return out


@pytest.mark.parametrize("random", [False, True])
def test_k_coordinates_move_by_the_mean_and_leave_the_memory(pool, random):
    """p_old - p_new == sum_r sent_r / N, sent_r = v_r on S; memory zero on S, v_r elsewhere; |S| = k."""
    ranks = pool.run(3, _steps, random)
    for step in range(6):
        for i in range(len(SHAPES)):
            moved = ranks[0][step][i][0]
            sent = [wanted - left for _, wanted, left in (r[step][i] for r in ranks)]
            torch.testing.assert_close(moved, sum(sent) / 3, rtol=1e-5, atol=1e-6)
            support = moved != 0
            assert int(support.sum()) == min(K, moved.numel())
            for r in ranks:
                assert torch.equal(r[step][i][0], moved)
                _, wanted, left = r[step][i]
                assert bool((left[support] == 0).all())
                assert torch.equal(left[~support], wanted[~support])


def test_average_world_false_adds(pool):
    mean, total = (pool.run(3, _steps, True, average)[1][0] for average in (True, False))
    for a, b in zip(mean, total, strict=True):
        torch.testing.assert_close(3 * a[0], b[0])


def _payload(rank):
    w = nn.Parameter(torch.ones(1000))
    optimizer = CentralizedSparsifiedSGD([w], lr=1.0, sparse_grad_size=10, world_size=2)
    before = optimizer.traffic.payload_bytes, optimizer.traffic.collectives
    w.sum().backward()
    optimizer.step()
    with pytest.raises(ConfigError, match="world_size must be 2"):
        CentralizedSparsifiedSGD([w], lr=1.0)
    with pytest.raises(MismatchError, match="sparse_grad_size: rank 0 has 1, rank 1 has 2"):
        CentralizedSparsifiedSGD([w], lr=1.0, sparse_grad_size=1 + rank, world_size=2)
    return optimizer.traffic.payload_bytes - before[0], optimizer.traffic.collectives - before[1]


def test_only_values_travel_in_one_collective(pool):
    """10 float32 values and two flags; no places."""
    assert pool.run(2, _payload) == [(48, 1)] * 2


def _asked(rank):
    ws = [nn.Parameter(torch.full((40,), float(rank))) for _ in range(30)]
    optimizer = CentralizedSparsifiedSGD(ws, lr=1.0, sparse_grad_size=5, world_size=2)
    joining = optimizer.traffic.collectives
    for step in range(3):
        for w in ws:
            w.grad = torch.arange(40.0) + step
        if rank == 0:
            for _ in range(2):
                optimizer.sparsify_gradients(ws[0], 0.1)
        optimizer.step()
    return joining, torch.cat([w.detach() for w in ws])


def test_what_one_rank_takes_out_by_itself_changes_no_draw(pool):
    """Ranks would else average unlike coordinates. They take rank 0's values in few messages."""
    (joining, one), (_, other) = pool.run(2, _asked)
    assert torch.equal(one, other)
    assert joining < 5


def _aggregated(rank):
    model = mlp(0)
    aggregation = SparsifiedAggregation(model, sparse_grad_size=K, random_sparse=True)
    applied, total = torch.zeros(1084), torch.zeros(1084)
    for step in range(5):
        model.zero_grad()
        xs, ys = shards(step, 2)
        nn.functional.mse_loss(model(xs[rank]), ys[rank]).backward()
        total += torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        assert aggregation.agg_grad(by_layer=step % 2 == 0)(model, "avg_world")
        applied += torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    with pytest.raises(ConfigError, match="averages gradients, got weights"):
        aggregation.agg_model()(model, "avg_world")
    return applied, total - torch.cat([s["residual"].reshape(-1) for s in aggregation.memory.values()])


def test_what_is_applied_and_what_is_remembered_add_up(pool):
    ranks = pool.run(2, _aggregated)
    torch.testing.assert_close(ranks[0][0], (ranks[0][1] + ranks[1][1]) / 2, rtol=1e-4, atol=1e-6)
