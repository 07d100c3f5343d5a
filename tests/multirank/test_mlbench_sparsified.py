"""MLBench's sparsified SGD with memory on real gloo ranks."""

import copy
import io
import pickle

import pytest
import torch
from models import flat, mlp, shards
from torch import nn

from stenograd.errors import ConfigError, MismatchError
from stenograd.mlbench import CentralizedSparsifiedSGD, SparsifiedAggregation

SHAPES = [(1, 23), (7,), (), (3, 4, 5), (2,), (0, 3)]
K = 5


def _gradient(shape, rank, step):
    return torch.randn(shape, generator=torch.Generator().manual_seed(100 * step + rank))


def _steps(rank, random, average_world=True):
    """Return per step and tensor: movement, memory before plus lr g, and memory after."""
    parameters = [nn.Parameter(torch.full(shape, float(rank))) for shape in SHAPES]  # D: rank 0's are taken
    optimizer = CentralizedSparsifiedSGD(
        parameters,
        lr=0.5,
        sparse_grad_size=K,
        random_sparse=random,
        world_size=3,
        average_world=average_world,
    )
    assert all(bool((p == 0).all()) for p in parameters)
    out = []
    for step in range(6):
        row = []
        before = [(p.detach().clone(), optimizer.state[p]["memory"].clone()) for p in parameters]
        for p in parameters:
            p.grad = _gradient(p.shape, rank, step)
        optimizer.step()
        for p, (old, memory) in zip(parameters, before, strict=True):
            row.append(((old - p.detach()), memory + 0.5 * p.grad, optimizer.state[p]["memory"].clone()))
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


def _backward(model, rank, step):
    xs, ys = shards(step, 2)
    loss = nn.functional.mse_loss(model(xs[rank]), ys[rank])
    loss.backward()
    return loss


def _train(optimizer, model, rank, first, steps):
    for s in range(first, first + steps):
        optimizer.zero_grad()
        _backward(model, rank, s)
        optimizer.step()
        optimizer.update_estimated_weights(s, 10)
    return torch.cat([flat(model), *(w.reshape(-1) for w in optimizer.get_estimated_weights())])


def _sparse(model):
    groups = [{"params": [p], "lr": 0.05 + 0.01 * i} for i, p in enumerate(model.parameters())]
    return CentralizedSparsifiedSGD(groups, lr=0.1, weight_decay=1e-3, random_sparse=True, world_size=2)


def _continued(rank):
    model = mlp(0)
    optimizer = _sparse(model)
    _train(optimizer, model, rank, 0, 4)
    twin_model, twin = copy.deepcopy((model, optimizer))
    pickled_model, pickled = pickle.loads(pickle.dumps((model, optimizer)))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh_model = mlp(7)
    fresh = _sparse(fresh_model)
    fresh_model.load_state_dict(saved[0])
    fresh.load_state_dict(saved[1])
    pairs = [(twin, twin_model), (pickled, pickled_model), (fresh, fresh_model)]
    others = [_train(o, m, rank, 4, 3) for o, m in pairs]
    return _train(optimizer, model, rank, 4, 3), others


def test_saved_copied_and_pickled_optimizers_continue_alike(pool):
    for mine, others in pool.run(2, _continued):
        assert all(torch.equal(mine, other) for other in others)


def _bad_batch(rank):
    w, unused = nn.Parameter(torch.ones(20)), nn.Parameter(torch.ones(3))
    optimizer = CentralizedSparsifiedSGD([w, unused], lr=1.0, weight_decay=0.1, world_size=2)
    kept = []
    for step in range(3):
        w.grad = torch.full((20,), float("nan") if step == 1 and rank == 1 else 1.0)
        before = w.detach().clone(), optimizer.state[w]["memory"].clone()
        optimizer.step()
        kept.append(torch.equal(before[0], w) and torch.equal(before[1], optimizer.state[w]["memory"]))
    return kept, optimizer.skipped, unused.tolist()


def test_a_bad_batch_on_one_rank_changes_nothing_on_any(pool):
    for kept, skipped, unused in pool.run(2, _bad_batch):
        assert (kept, skipped, unused) == ([False, True, False], 1, [1.0] * 3)


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


def _aggregated(rank):
    model = mlp(0)
    aggregation = SparsifiedAggregation(model, sparse_grad_size=K, random_sparse=True)
    applied, total = torch.zeros(1084), torch.zeros(1084)
    for step in range(5):
        model.zero_grad()
        _backward(model, rank, step)
        total += torch.cat([p.grad.reshape(-1) for p in model.parameters()])
        assert aggregation.agg_grad(by_layer=step % 2 == 0)(model, "avg_world")
        applied += torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    with pytest.raises(ConfigError, match="averages gradients, got weights"):
        aggregation.agg_model()(model, "avg_world")
    return applied, total - torch.cat([s["residual"].reshape(-1) for s in aggregation.memory.values()])


def test_what_is_applied_and_what_is_remembered_add_up(pool):
    ranks = pool.run(2, _aggregated)
    torch.testing.assert_close(ranks[0][0], (ranks[0][1] + ranks[1][1]) / 2, rtol=1e-4, atol=1e-6)
