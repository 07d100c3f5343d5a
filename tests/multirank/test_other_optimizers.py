"""Optimizers that distribute() was not given, over the parameters of its model."""

import gc
import warnings

import pytest
import torch
from models import flat, mlp, shards
from torch.nn.parallel import DistributedDataParallel

import stenograd
from stenograd.sync import steps

NEVER_AVERAGED = "this rank's own gradients of 0.weight, 0.bias"


def _bad_step(rank, method):
    """A second optimizer trains on; rank 1's gradient is not a number in the second of three steps."""
    model = mlp(0)
    with stenograd.distribute(
        model, torch.optim.SGD(model.parameters(), lr=0.1), method, timeout_s=30
    ) as sync:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for s in range(3):
                xs, ys = shards(s, 2)
                optimizer.zero_grad()
                loss = (model(xs[rank]) - ys[rank]).square().mean()
                (loss * (float("nan") if (s, rank) == (1, 1) else 1.0)).backward()
                before = flat(model)
                optimizer.step()
                if s == 1 and (rank == 1 or "local" not in method):
                    assert torch.equal(flat(model), before)
        return flat(model), sync.skipped, [str(w.message) for w in seen if "not finite" in str(w.message)]


@pytest.mark.parametrize("method", ["dense", "topk:ratio=0.1", "local:every=9"])
def test_a_nan_costs_another_optimizer_one_step_too(pool, method):
    ranks = pool.run(2, _bad_step, method)
    assert all(bool(weights.isfinite().all()) for weights, _, _ in ranks)
    skipped = [0, 1] if "local" in method else [1, 1]
    assert [count for _, count, _ in ranks] == skipped
    assert [len(told) for _, _, told in ranks] == skipped
    if "local" not in method:
        assert torch.equal(ranks[0][0], ranks[1][0])


def _rarely(rank, method, scaled):
    """The repeated program: a steps in each of 8 batches, b in every 4th; rank 0 has a NaN in batch 2.

    With a GradScaler, a's step after that is not called at all, so nobody else hears of it there.
    """
    torch.manual_seed(0)
    a, b = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(a, b)
    often, rarely = (torch.optim.SGD(part.parameters(), lr=0.01) for part in (a, b))
    if method.startswith("hook/"):
        model = DistributedDataParallel(model)
        sync = stenograd.ddp.register(model, method.removeprefix("hook/"), timeout_s=30)
    else:
        sync = stenograd.distribute(model, [often, rarely], method, timeout_s=30)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, enabled=scaled)
    moved, generator = [0, 0], torch.Generator().manual_seed(rank)
    with sync, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for batch in range(1, 9):
            often.zero_grad()
            x = torch.randn(8, 4, generator=generator)
            x[0, 0] = float("nan") if (rank, batch) == (0, 2) else 0.0
            scaler.scale(model(x).square().mean()).backward()
            before = a.weight.clone(), b.weight.clone()
            scaler.step(often)
            if batch % 4 == 0:
                scaler.step(rarely)
                rarely.zero_grad()
            scaler.update()
            moved[0] += not torch.equal(before[0], a.weight)
            moved[1] += not torch.equal(before[1], b.weight)
        return moved, sync.skipped


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("method", ["dense", "topk:ratio=0.9", "hook/dense", "hook/sign", "local:every=20"])
def test_a_nan_costs_another_optimizers_later_steps_nothing(pool, method, scaled):
    """Of eight steps of the one that steps often the second is lost, and of the other's two none."""
    bad, good = pool.run(2, _rarely, method, scaled)
    assert bad == ([7, 2], 1)
    assert good == (([8, 2], 0) if method.startswith("local") else bad)


def _accumulating(rank, method):
    """Two passes per step, each with an exchange; rank 0 has a NaN in the first pass of the second step."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    moved = []
    with stenograd.distribute(model, optimizer, method, timeout_s=30) as sync, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for s in range(3):
            optimizer.zero_grad()
            for part in range(2):
                xs, _ = shards(2 * s + part, 2)
                loss = model(xs[rank]).square().mean()
                (loss * (float("nan") if (rank, s, part) == (0, 1, 0) else 1.0)).backward()
            before = flat(model)
            optimizer.step()
            moved.append(not torch.equal(before, flat(model)))
        return moved, sync.skipped


@pytest.mark.parametrize("method", ["dense", "topk:ratio=0.9"])
def test_a_nan_in_one_pass_of_a_step_costs_the_step(pool, method):
    """Nothing was cleared between its passes, so the second is lost with the first."""
    assert pool.run(2, _accumulating, method) == [([True, False, True], 2)] * 2


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize(
    "method", ["dense", "local:every=2", "diloco:every=2", "gossip", "local:every=2,after=2"]
)
def test_an_overflow_is_counted_whoever_leaves_out_the_step(method, fused):
    """GradScaler does not call an optimizer that is not fused, and leaves a fused one to skip by itself."""
    model = mlp(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    with stenograd.distribute(model, optimizer, method) as sync, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for s in range(4):
            xs, _ = shards(s, 1)
            optimizer.zero_grad()
            loss = model(xs[0]).square().mean() * (1e38 if s in (1, 3) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        assert sync.skipped == 2
        assert flat(model).isfinite().all()


@pytest.mark.parametrize("method", ["dense", "local:every=2"])
def test_parameters_that_nobody_averages_are_told(method):
    """First the head alone, as in transfer learning, then all with an optimizer of their own."""
    model, other = mlp(0), mlp(1)
    sync = stenograd.distribute(model, torch.optim.SGD(model[-1].parameters(), lr=0.1), method)
    steps = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (other, model)]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for m, optimizer, count in zip((other, model, model), [*steps, steps[1]], (0, 1, 1), strict=True):
            m(torch.ones(2, 10)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert sum(NEVER_AVERAGED in str(w.message) for w in seen) == count
    sync.close()
    stenograd.shutdown()


def test_nothing_is_left_behind():
    """Neither close() nor the end of everything that knew the model leaves a hook on all optimizers."""
    gc.collect()  # what earlier tests left is not counted
    before = len(steps._watchers)
    for close in (True, False):
        model = mlp(0)
        sync = stenograd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "topk")
        assert len(steps._watchers) == before + 1
        if close:
            sync.close()
        del sync, model
        gc.collect()
        assert len(steps._watchers) == before
    stenograd.shutdown()
