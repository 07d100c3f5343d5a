"""The engine on real gloo ranks, against plain single-process PyTorch."""

import itertools

import pytest
import torch
from models import SMALL_BUCKETS, flat, mlp, shards, step
from torch import nn

import stenograd


def _overflow(rank, method):
    """In step 3 every rank's gradient is finite, and their sum is not."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = stenograd.distribute(model, optimizer, method, bucket_bytes=SMALL_BUCKETS, timeout_s=30)
    kept = None
    for s in range(6):
        xs, ys = shards(s, 2)
        optimizer.zero_grad()
        largest = model[0].weight.register_hook(lambda g: g.fill_(torch.finfo(g.dtype).max))
        if s != 3:
            largest.remove()
        before = sync.state_dict()["parameters"]
        nn.functional.mse_loss(model(xs[rank]), ys[rank]).backward()
        largest.remove()
        if s == 3:
            after = sync.state_dict()["parameters"]
            kept = all(torch.equal(t, after[n][k]) for n, state in before.items() for k, t in state.items())
        assert sync.finite == (s != 3) == all(torch.isfinite(p.grad).all() for p in model.parameters())
        if sync.finite:
            optimizer.step()
    sync.close()
    return kept, sync.skipped, flat(model)


@pytest.mark.filterwarnings("ignore:.*an average overflowed")
@pytest.mark.parametrize(
    "method",
    [
        *("topk:ratio=0.1", "topk:ratio=0.1,values=float30", "topk:ratio=0.1,values=bfloat16"),
        *("threshold", "qsgd:feedback=true", "powersgd:rank=1"),
    ],
)
def test_a_sum_that_overflows_costs_exactly_that_step(pool, method):
    """Some averages are written over old residuals, but not in a step that is taken back."""
    ranks = pool.run(2, _overflow, method)
    for kept, skipped, parameters in ranks:
        assert kept, "the compressor's state changed in the bad step"
        assert skipped == 1
        assert torch.isfinite(parameters).all()
        assert torch.equal(parameters, ranks[0][2])


def _accumulated(rank, world_size):
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = stenograd.distribute(model, optimizer, "dense", bucket_bytes=SMALL_BUCKETS, timeout_s=30)
    xs, ys = shards(0, 2 * world_size)
    before = sync.traffic.collectives
    with sync.no_sync():
        (nn.functional.mse_loss(model(xs[2 * rank]), ys[2 * rank]) / 2).backward()
    assert sync.traffic.collectives == before, "no_sync must not communicate"
    (nn.functional.mse_loss(model(xs[2 * rank + 1]), ys[2 * rank + 1]) / 2).backward()
    optimizer.step()
    sync.close()
    return flat(model)


def test_no_sync_accumulates(pool):
    """Two halves a rank, each divided by two: the gradient of the whole batch of 4 shards."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    xs, ys = shards(0, 4)
    step(model, optimizer, torch.cat(xs), torch.cat(ys))
    for parameters in pool.run(2, _accumulated, 2):
        torch.testing.assert_close(parameters, flat(model), rtol=1e-6, atol=1e-6)


def _unfreeze(rank):
    model = mlp(rank)
    head = list(model[6].parameters())
    optimizer = torch.optim.SGD(head, lr=0.1)
    sync = stenograd.distribute(model, optimizer, "topk:ratio=0.5", bucket_bytes=SMALL_BUCKETS, timeout_s=30)
    xs, ys = shards(0, 2)
    for s in range(4):
        if s == 2:
            residual = sync.state_dict()["parameters"]["6.weight"]["residual"]
            optimizer.add_param_group({"params": list(model[4].parameters()), "lr": 0.05})
            kept = sync.state_dict()["parameters"]["6.weight"]["residual"]
            assert torch.equal(residual, kept)
            assert residual.any()
        step(model, optimizer, xs[rank], ys[rank])
    sync.close()
    return [p.detach().clone() for p in model.parameters()]


def test_added_param_groups_join_and_keep_the_state_of_others(pool):
    first, second = pool.run(2, _unfreeze)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(first[4], list(mlp(0).parameters())[4]), "the added layer must have moved"


def _mismatch(rank):
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(stenograd.errors.MismatchError, match=r"method.*rank 1 has topk"):
        stenograd.distribute(model, optimizer, "topk" if rank else "dense", timeout_s=30)


def test_ranks_with_other_methods_are_told(pool):
    pool.run(2, _mismatch)


def _silent(rank):
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = stenograd.distribute(model, optimizer, "dense", timeout_s=4)
    if rank == 1:
        return None  # never sends a gradient
    with pytest.raises(stenograd.PeerLost) as caught:
        model(torch.ones(1, 10)).sum().backward()
    del sync
    return str(caught.value)


def test_a_silent_peer_is_a_named_error_within_the_timeout(pool):
    message, _ = pool.run(2, _silent, timeout_s=60)
    assert "rank 0 of 2" in message


def _layout(rank, method):
    model = nn.Sequential(*(nn.Linear(n, n, bias=False) for n in (16, 32, 32, 16)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, method, bucket_bytes=16384) as sync:
        return [bucket.names for bucket in sync._exchange.buckets]


@pytest.mark.parametrize(
    ("method", "first", "last"),
    [(m, True, True) for m in ("dense", "fp16", "qsgd:bits=4", "terngrad", "lowbit:feedback=loco")]
    + [("topk:ratio=0.1", True, True), ("sign:dense_below=0", False, True), ("topk:ratio=0.05", False, True)]
    + [("topk:ratio=0.01", False, False), ("powersgd", False, False), ("threshold", False, False)],
)
def test_the_first_and_last_gradients_travel_apart_where_many_bytes_do(pool, method, first, last):
    """Of 1, 4, 4 and 1 KiB the first are apart once they fill a quarter of 16, the last as far as they do."""
    names = [f"{i}.weight" for i in (3, 2, 1, 0)]
    cuts = [0, *([2] if first else []), *([3] if last else []), 4]
    wanted = [tuple(names[a:b]) for a, b in itertools.pairwise(cuts)]
    assert pool.run(2, _layout, method) == [wanted] * 2
