"""MLBench's dense optimizers on real gloo ranks, against torch's optimizers on the mean gradient."""

import copy
import math
import pickle

import pytest
import torch
from models import flat, mlp, shards
from support.training import descend, on_whole_batches
from torch import nn

from stenograd.errors import ConfigError, MismatchError
from stenograd.mlbench import (
    AllReduceAggregation,
    CentralizedSGD,
    CentralizedSparsifiedSGD,
    CustomCentralizedOptimizer,
    DecentralizedSGD,
    FP16Optimizer,
    GenericCentralizedOptimizer,
    PowerSGD,
)

SGD = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-2, "nesterov": True}


def _backward(model, rank, step):
    xs, ys = shards(step, 3)
    loss = nn.functional.mse_loss(model(xs[rank]), ys[rank])
    loss.backward()
    return loss


def _train(optimizer, model, rank, steps, *, first=0):
    for s in range(first, first + steps):
        xs, ys = shards(s, 2)
        descend(optimizer, nn.functional.mse_loss(model(xs[rank]), ys[rank]))
    return flat(model)


def _weights(rank, by_layer):
    """Return parameters at construction and after each step, and what every rank's own step made of them."""
    model = mlp(rank)
    model[0].bias.requires_grad_(False)
    optimizer = CentralizedSGD(3, model, **SGD, by_layer=by_layer, agg_grad=False)
    seen, alone = [flat(model)], []
    for s in range(3):
        optimizer.zero_grad()
        _backward(model, rank, s)
        twin = copy.deepcopy(optimizer)
        for p, q in zip(twin.model.parameters(), model.parameters(), strict=True):
            p.grad = q.grad
        twin.optimizer.step()
        alone.append(flat(twin.model))
        optimizer.step()
        seen.append(flat(model))
    buffers = torch.cat([s["momentum_buffer"].reshape(-1) for s in optimizer.state.values()])
    return seen, alone, buffers


@pytest.mark.parametrize("by_layer", [False, True])
def test_weights_are_averaged_at_construction_and_after_each_step(pool, by_layer):
    ranks = pool.run(3, _weights, by_layer)
    start = sum(flat(mlp(r)) for r in range(3)) / 3
    torch.testing.assert_close(ranks[0][0][0], start)
    for step in range(4):
        assert all(torch.equal(ranks[0][0][step], seen[step]) for seen, *_ in ranks)
    for step in range(3):
        mean = sum(alone[step] for _, alone, _ in ranks) / 3
        torch.testing.assert_close(ranks[0][0][step + 1], mean, rtol=1e-5, atol=1e-6)
    assert not torch.equal(ranks[0][2], ranks[1][2])  # momentum is never averaged


def _equal_from_the_start(rank, dtype):
    model = mlp(0).to(dtype)
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = -torch.inf
    before = flat(model)
    CentralizedSGD(3, model, **SGD, agg_grad=False)
    return torch.equal(flat(model), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_that_are_equal_keep_every_bit_at_construction(pool, dtype):
    """As after loading a checkpoint: the mean of three equal numbers was another one."""
    assert pool.run(3, _equal_from_the_start, dtype) == [True] * 3


def _with_a_scaler(rank):
    model = mlp(0)
    scaler = torch.amp.GradScaler("cpu")
    for optimizer in (
        CentralizedSGD(2, model, **SGD),
        CentralizedSparsifiedSGD(model.parameters(), lr=0.1, world_size=2),
        DecentralizedSGD(rank, [1 - rank], model, lr=0.1),
    ):
        scaler.scale(model(torch.ones(1, 10)).sum()).backward()
        with pytest.raises(ConfigError, match="a GradScaler lets one rank alone skip a step"):
            scaler.step(optimizer)


def test_a_scaler_with_which_one_rank_would_skip_alone_is_refused(pool):
    """The others waited for it; where it overflowed once, steps of other batches were paired from then on."""
    pool.run(2, _with_a_scaler)


def _denominators(rank, world_size):
    """g_r = r + 1: the sum is N (N + 1) / 2; weights and gradients, denom 8."""
    out = []
    for agg_grad in (True, False):
        for divide_before in (False, True):
            model = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(model.weight)
            inner = torch.optim.SGD(model.parameters(), lr=1.0)
            optimizer = CustomCentralizedOptimizer(
                model, world_size, inner, agg_grad=agg_grad, average_custom=True, divide_before=divide_before
            )
            model.weight.grad = torch.full((1, 1), rank + 1.0)
            assert optimizer.step(denom=torch.tensor([8.0])) is True  # MLBench's programs ask it
            out.append(-model.weight.item())
    return out


@pytest.mark.parametrize("world_size", [1, 3])
def test_custom_denominator_works_everywhere_d_m3(pool, world_size):
    """N=3: 6/8 = .75; N=1: 1/8; the sum of the weights -g_r over 8 is the same."""
    for values in pool.run(world_size, _denominators, world_size):
        assert values == pytest.approx([world_size * (world_size + 1) / 16] * 4)


def _clipped(rank, agg_grad):
    model = nn.Linear(5, 3, bias=False)
    nn.init.zeros_(model.weight)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = CustomCentralizedOptimizer(
        model, 3, inner, agg_grad=agg_grad, average_world=True, grad_clip=1.0
    )
    model.weight.grad = torch.full((3, 5), float(rank + 1))
    optimizer.step()
    return -flat(model)


@pytest.mark.parametrize("agg_grad", [True, False])
def test_clipping_is_on_the_averaged_gradient(pool, agg_grad):
    """Mean gradient 2 on 15 elements, norm 2 sqrt(15), clipped to 1: 1/sqrt(15) each; with weights, too."""
    for update in pool.run(3, _clipped, agg_grad):
        torch.testing.assert_close(update, torch.full((15,), 1 / math.sqrt(15)), rtol=1e-5, atol=0)


def _closures(rank):
    """the closure recomputes gradients; SGD, Custom, and weights."""
    out = []
    for make in (
        lambda m: CentralizedSGD(3, m, **SGD),
        lambda m: CustomCentralizedOptimizer(
            m, 3, torch.optim.Adam(m.parameters(), lr=0.01), average_world=True
        ),
        lambda m: CentralizedSGD(3, m, **SGD, agg_grad=False),
    ):
        model = mlp(0)
        optimizer = make(model)
        losses = []
        for s in range(3):

            def closure(s=s, optimizer=optimizer, model=model):
                optimizer.zero_grad()
                return _backward(model, rank, s)

            losses.append(optimizer.step(closure).item())
        out.append((flat(model), losses))
    return out


def test_a_closures_gradients_are_averaged_d_m2(pool):
    ranks = pool.run(3, _closures)
    for case, torchs in enumerate(
        [lambda p: torch.optim.SGD(p, **SGD), lambda p: torch.optim.Adam(p, lr=0.01)]
    ):
        torch.testing.assert_close(ranks[0][case][0], on_whole_batches(torchs, 3, 3), rtol=1e-4, atol=1e-5)
    for case in range(3):
        assert all(torch.equal(ranks[0][case][0], other[case][0]) for other in ranks)
    assert ranks[0][0][1] != ranks[1][0][1]  # each rank's own loss, a number


def _overflow(rank, divide_before):
    layer = nn.Linear(1, 2, bias=False).half()
    layer.weight.grad = torch.full((2, 1), 60000.0, dtype=torch.float16)
    AllReduceAggregation(3, divide_before=divide_before).agg_grad()(layer, "avg_world")
    return layer.weight.grad.float()


def test_divide_before_keeps_half_precision_sums_finite(pool):
    """3 x 60000 is beyond 65504, the mean is not."""
    assert torch.isinf(pool.run(3, _overflow, False)[0]).all()
    torch.testing.assert_close(
        pool.run(3, _overflow, True)[2], torch.full((2, 1), 60000.0), rtol=2e-3, atol=0
    )


def _collectives(rank, by_layer):
    model = mlp(0)
    optimizer = CentralizedSGD(2, model, lr=0.1, by_layer=by_layer)
    before = optimizer.traffic.collectives
    _train(optimizer, model, rank, 1)
    return optimizer.traffic.collectives - before, len(list(model.parameters()))


def test_by_layer_is_a_collective_a_parameter(pool):
    assert pool.run(2, _collectives, False)[0][0] == 1
    count, parameters = pool.run(2, _collectives, True)[0]
    assert count == parameters


def _pickled_elsewhere(rank):
    """Every rank goes on with rank 0's pickle; dense averages remember nothing of the rank that made it."""
    model = mlp(0)
    optimizer = CentralizedSGD(2, model, **SGD)
    _train(optimizer, model, rank, 1)
    box = [pickle.dumps(optimizer)]
    torch.distributed.broadcast_object_list(box, 0)
    other = pickle.loads(box[0])
    theirs = _train(other, other.model, rank, 2, first=1)
    return theirs, _train(optimizer, model, rank, 2, first=1)


def test_another_ranks_pickle_continues_alike(pool):
    for theirs, mine in pool.run(2, _pickled_elsewhere):
        assert torch.equal(theirs, mine)


def _refused(rank):
    """What is said about a wrong world size, and about models that differ."""
    with pytest.raises(ConfigError) as size:
        CentralizedSGD(4, mlp(0), lr=0.1)
    with pytest.raises(MismatchError) as shape:
        GenericCentralizedOptimizer(2, nn.Linear(2, 2 + rank))
    with pytest.raises(MismatchError) as option:
        CentralizedSGD(2, mlp(0), lr=0.1, by_layer=rank == 1)
    return str(size.value), str(shape.value), str(option.value)


def test_ranks_that_disagree(pool):
    for size, shape, option in pool.run(2, _refused):
        assert size.startswith("world_size must be 2, the number of ranks that were launched, got 4")
        assert shape.startswith("ranks differ in parameter weight: rank 0 has (2, 2)")
        assert option.startswith("ranks differ in by_layer: rank 0 has False, rank 1 has True")


def _made(face, lr=0.1):
    model = mlp(0)
    if face == "weights":
        return model, CentralizedSGD(2, model, lr=lr, agg_grad=False)
    if face == "powersgd":
        return model, PowerSGD(model, lr=lr, world_size=2)
    if face == "sparsified":
        rule = {"weight_decay": 0.1, "sparse_grad_size": 4}
        return model, CentralizedSparsifiedSGD(model.parameters(), lr, **rule, world_size=2)
    if face == "fp16":
        fp = FP16Optimizer(model.bfloat16(), 2, average_world=True)
        fp.set_optimizer(torch.optim.SGD([fp.fp32_params], lr=lr))
        return model, fp
    return model, CentralizedSGD(2, model, lr=lr)


def _parting_rates(rank, face):
    model, optimizer = _made(face)

    def train():
        for step in range(10):
            optimizer.zero_grad()
            x = torch.ones(2, 10, dtype=next(model.parameters()).dtype)
            getattr(optimizer, "backward_loss", torch.Tensor.backward)(model(x).square().mean())
            optimizer.step()
            if rank and not step:
                optimizer.param_groups[0]["lr"] = 0.05

    if face == "weights":
        train()
        return flat(model)
    with pytest.raises(MismatchError, match=r"rates: rank 0 has \[0\.1\], rank 1 has \[0\.05\]"):
        train()
    return None


@pytest.mark.parametrize("face", ["sgd", "powersgd", "sparsified", "fp16", "weights"])
def test_learning_rates_that_part_are_an_error(pool, face):
    """Not where the weights themselves are averaged."""
    first, second = pool.run(2, _parting_rates, face)
    assert first is second is None or torch.equal(first, second)


def _other_denominators(rank, agg_grad):
    model = mlp(0)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = CustomCentralizedOptimizer(model, 2, inner, agg_grad=agg_grad, average_custom=True)

    def train():
        for _ in range(9):
            model(torch.ones(2, 10)).square().mean().backward()
            optimizer.step(denom=torch.tensor([2.0 + rank]))

    with pytest.raises(MismatchError, match=r"denom: rank 0 has \[2\.0\], rank 1 has \[3\.0\]"):
        train()


@pytest.mark.parametrize("agg_grad", [True, False])
def test_ranks_that_divide_by_other_numbers_are_told(pool, agg_grad):
    pool.run(2, _other_denominators, agg_grad)


def _other_optimizers(rank):
    with pytest.raises(MismatchError, match=r"lr of .*0\.1, rank 1 has 0\.2"):
        _made("sgd", lr=0.1 + 0.1 * rank)
    _made("weights", lr=0.1 + 0.1 * rank)  # each rank steps as it likes


def test_ranks_with_other_optimizers_inside_are_told(pool):
    pool.run(2, _other_optimizers)
