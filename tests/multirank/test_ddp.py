"""Stenograd's methods as a DDP communication hook on gloo, with several buckets."""

import io

import pytest
import torch
from models import ALL_METHODS, buckets_of, flat, mlp, shards, step
from torch.nn.parallel import DistributedDataParallel

import stenograd
from stenograd.testing.pool import RanksFailed

TINY_MB = 0.0001  # four buckets, after DDP has rebuilt them


def _ddp(rank, method=None, seed=0, bucket_cap_mb=TINY_MB):
    model = DistributedDataParallel(mlp(seed), bucket_cap_mb=bucket_cap_mb)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, stenograd.ddp.register(model, method, timeout_s=30) if method else None


def _run(model, optimizer, rank, world_size, first, steps):
    for s in range(first, first + steps):
        xs, ys = shards(s, world_size)
        step(model, optimizer, xs[rank], ys[rank])


def _identity(rank, world_size):
    plain, plain_optimizer, _ = _ddp(rank)
    hooked, hooked_optimizer, hook = _ddp(rank, "dense")
    for s in range(10):
        _run(plain, plain_optimizer, rank, world_size, s, 1)
        _run(hooked, hooked_optimizer, rank, world_size, s, 1)
        assert torch.equal(flat(plain), flat(hooked)), f"differs after step {s}"
    hook.close()
    return buckets_of(hook)


@pytest.mark.parametrize("world_size", [2, 3])
def test_identity_equals_plain_ddp_bit_for_bit(pool, world_size):
    assert min(pool.run(world_size, _identity, world_size)) >= 3


def _identical(rank, world_size, method):
    model, optimizer, hook = _ddp(rank, method)
    _run(model, optimizer, rank, world_size, 0, 8)
    hook.close()
    return flat(model), buckets_of(hook), hook.traffic.payload_bytes


@pytest.mark.parametrize("method", ALL_METHODS)
def test_every_method_trains_and_keeps_ranks_identical(pool, method):
    ranks = pool.run(3, _identical, 3, method)
    assert ranks[0][1] >= 3
    assert ranks[0][2] > 0
    assert torch.isfinite(ranks[0][0]).all()
    for parameters, *_ in ranks[1:]:
        assert torch.equal(parameters, ranks[0][0])


def _powersgd_once(rank, world_size):
    model, optimizer, hook = _ddp(rank, "powersgd:rank=2")
    _run(model, optimizer, rank, world_size, 0, 4)
    hook.close()
    return buckets_of(hook)


def test_powersgd_with_four_buckets_on_three_ranks_finishes_10_of_10(pool):
    """PyTorch's own PowerSGD hook finished 0 of 10 here: it issues rounds in an order that timing decides."""
    finished = [pool.run(3, _powersgd_once, 3, timeout_s=60) for _ in range(10)]
    assert len(finished) == 10
    assert all(buckets >= 4 for run in finished for buckets in run)


def _resumed(rank, world_size, method, bucket_cap_mb):
    """12 steps in one go; 7 + save + load into fresh objects + 5; the same without the hook's state."""
    whole, optimizer, hook = _ddp(rank, method, bucket_cap_mb=bucket_cap_mb)
    _run(whole, optimizer, rank, world_size, 0, 12)
    hook.close()
    model, optimizer, hook = _ddp(rank, method, bucket_cap_mb=bucket_cap_mb)
    _run(model, optimizer, rank, world_size, 0, 7)
    file = io.BytesIO()
    torch.save((model.module.state_dict(), optimizer.state_dict(), hook.state_dict()), file)
    hook.close()
    ends = [flat(whole)]
    for keeps_state in (True, False):
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        model, optimizer, hook = _ddp(rank, method, seed=5, bucket_cap_mb=bucket_cap_mb)
        model.module.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        if keeps_state:
            hook.load_state_dict(saved[2])
        _run(model, optimizer, rank, world_size, 7, 5)
        hook.close()
        ends.append(flat(model))
    return ends


@pytest.mark.parametrize(("method", "bucket_cap_mb"), [("topk:ratio=0.1", 25), ("powersgd:rank=2", TINY_MB)])
def test_state_is_saved_and_restored(pool, method, bucket_cap_mb):
    """Loaded, the run goes on as if uninterrupted, though DDP's first buckets differ; without, it does not.

    Top-k selects by bucket, so it is compared in one bucket; PowerSGD works by tensor.
    """
    for whole, resumed, forgetful in pool.run(2, _resumed, 2, method, bucket_cap_mb):
        torch.testing.assert_close(resumed, whole, rtol=1e-5, atol=1e-6)
        assert (forgetful - whole).abs().max() > 1e-4


def _nan_step(rank, world_size, method):
    model, optimizer, hook = _ddp(rank, method)
    lost = []
    for s in range(10):
        xs, ys = shards(s, world_size)
        optimizer.zero_grad()
        loss = (model(xs[rank]) - ys[rank]).square().mean()
        (loss * (float("nan") if s == 4 and rank == 1 else 1.0)).backward()
        if all(torch.isfinite(p.grad).all() for p in model.parameters()):
            optimizer.step()
        else:
            lost.append(s)
    hook.close()
    return lost, flat(model)


@pytest.mark.parametrize("method", ["dense", "topk:ratio=0.1", "powersgd:rank=2", "sign", "qsgd"])
def test_one_nan_step_costs_one_step(pool, method):
    ranks = pool.run(2, _nan_step, 2, method)
    assert [lost for lost, _ in ranks] == [[4], [4]]
    assert torch.equal(ranks[0][1], ranks[1][1])


def test_a_model_without_ddp_is_refused():
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        stenograd.ddp.register(mlp(0), "dense")


def _python_reducer(rank):
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return _ddp(rank, "dense")


def test_a_reducer_that_calls_no_hook_is_refused(pool):
    """Torch has the option; a training with it would send nothing by the method."""
    with pytest.raises(RanksFailed) as failed:
        pool.run(2, _python_reducer)
    for told in failed.value.errors.values():
        assert 'StenogradError: DDP runs with torch._dynamo.config.optimize_ddp = "python_reducer"' in told
