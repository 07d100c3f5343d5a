"""Optimizers that distribute() was not given, over the parameters of its model."""

import gc
import warnings

import pytest
import torch
from models import flat, mlp, shards

import stenograd
from stenograd.sync import every_step

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
    before = len(every_step._watchers)
    for close in (True, False):
        model = mlp(0)
        sync = stenograd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "topk")
        assert len(every_step._watchers) == before + 1
        if close:
            sync.close()
        del sync, model
        gc.collect()
        assert len(every_step._watchers) == before
    stenograd.shutdown()
