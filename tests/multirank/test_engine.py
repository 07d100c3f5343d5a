"""The engine on real gloo ranks, against plain single-process PyTorch."""

import io
import itertools

import pytest
import torch
from models import ALL_METHODS, SMALL_BUCKETS, flat, mlp, shards, step, train
from torch import nn

import stenograd
from stenograd.testing.pool import RanksFailed

LONG, SAVED = 12, 8  # steps: more than twice the warm-up of the methods that have one, and when to save
BAD = {3: float("nan"), 6: float("inf")}  # in the warm-up of those methods, and after it


def _dense_run(rank, world_size, bucket_bytes, nesterov):
    sgd = {"weight_decay": 1e-2, "nesterov": nesterov}
    parameters, sync, *_ = train(rank, world_size, "dense", 10, bucket_bytes=bucket_bytes, **sgd)
    sync.close()
    return parameters


def _single_process(world_size, nesterov):
    model = mlp(0)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2, nesterov=nesterov
    )
    for s in range(10):
        xs, ys = shards(s, world_size)
        step(model, optimizer, torch.cat(xs), torch.cat(ys))
    return flat(model)


@pytest.mark.parametrize(("bucket_bytes", "nesterov"), [(1, False), (SMALL_BUCKETS, True), (4 << 20, False)])
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_dense_equals_single_process_on_the_concatenated_batch(pool, world_size, bucket_bytes, nesterov):
    """Equal shards: the mean of the ranks' mean gradients is the gradient of the whole batch's mean."""
    ranks = pool.run(world_size, _dense_run, world_size, bucket_bytes, nesterov)
    oracle = _single_process(world_size, nesterov)
    for parameters in ranks:
        torch.testing.assert_close(parameters, oracle, rtol=1e-6, atol=1e-6)


def _interrupted(rank, world_size, method):
    """All steps in one go, saved on the way; and from there on in fresh objects."""

    def steps(model, optimizer, first, last):
        for s in range(first, last):
            xs, ys = shards(s, world_size)
            step(model, optimizer, xs[rank], ys[rank])

    _, sync, model, optimizer = train(rank, world_size, method, SAVED)
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict(), sync.state_dict()), file)
    steps(model, optimizer, SAVED, LONG)
    whole, buckets, counted = flat(model), len(sync._exchange.buckets), sync.step
    sync.close()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model = mlp(99)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = stenograd.distribute(model, optimizer, method, bucket_bytes=SMALL_BUCKETS, timeout_s=30)
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    sync.load_state_dict(saved[2])
    steps(model, optimizer, SAVED, LONG)
    sync.close()
    return whole, flat(model), buckets, counted


@pytest.mark.parametrize("method", ALL_METHODS)
def test_ranks_stay_bit_identical_and_a_saved_training_goes_on_as_if_uninterrupted(pool, method):
    """Nothing brings ranks together again that differ in one bit, so the last step shows every difference."""
    ranks = pool.run(3, _interrupted, 3, method)
    for whole, resumed, buckets, counted in ranks:
        assert buckets >= 3, "the test needs several buckets"
        assert counted == LONG
        assert torch.isfinite(whole).all()
        assert torch.equal(whole, ranks[0][0])
        assert torch.equal(whole, resumed)


def _bad_steps(rank, world_size, method):
    """Two steps are not finite on rank 1 only; bad steps are skipped as GradScaler does."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = stenograd.distribute(model, optimizer, method, bucket_bytes=SMALL_BUCKETS, timeout_s=30)
    skipped, kept = [], True
    for s in range(9):
        xs, ys = shards(s, world_size)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(xs[rank]), ys[rank])
        before = sync.state_dict()["parameters"]
        if s in BAD:
            (loss * (BAD[s] if rank == 1 else 1.0)).backward()
            after = sync.state_dict()["parameters"]
            kept &= all(torch.equal(t, after[n][k]) for n, state in before.items() for k, t in state.items())
        else:
            loss.backward()
        if all(torch.isfinite(p.grad).all() for p in model.parameters()):
            optimizer.step()
        else:
            skipped.append(s)
    sync.close()
    return skipped, kept, flat(model)


@pytest.mark.parametrize("method", ALL_METHODS)
def test_a_bad_step_on_one_rank_costs_exactly_that_step(pool, method):
    ranks = pool.run(2, _bad_steps, 2, method)
    for skipped, kept, parameters in ranks:
        assert skipped == list(BAD)
        assert kept, "the compressor's state changed in a bad step"
        assert torch.equal(parameters, ranks[0][2])


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


class _Odd(nn.Module):
    """Frozen, tied, unused, sometimes used, half-precision and empty parameters."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 6)
        self.tied = self.first
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.unused = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)
        self.narrow = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
        self.empty = nn.Parameter(torch.empty(0, 3))

    def forward(self, x, extra):
        x = self.frozen(self.tied(torch.tanh(self.first(x)))) * self.narrow.float()
        x = x + self.empty.sum()
        return self.sometimes(x) if extra else x


def _odd_model(rank, world_size, method):
    model = _Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    sync = stenograd.distribute(model, optimizer, method, bucket_bytes=100, timeout_s=30)
    unused = model.unused.weight.detach().clone()
    for s in range(4):
        optimizer.zero_grad()
        x = torch.full((2, 6), float(rank + s))
        model(x, extra=rank == 0).sum().backward()
        assert model.unused.weight.grad is None
        assert model.frozen.weight.grad is None
        assert model.sometimes.weight.grad is not None
        optimizer.step()
    assert torch.equal(model.unused.weight, unused), "weight decay moved a parameter that nobody used"
    sync.close()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("method", ["dense", "topk:ratio=0.5", "powersgd:rank=1", "sign", "fp16"])
def test_frozen_tied_unused_mixed_and_empty_parameters(pool, method):
    ranks = pool.run(3, _odd_model, 3, method)
    for parameters in ranks[1:]:
        assert all(torch.equal(a, b) for a, b in zip(parameters, ranks[0], strict=True))


def _partly_used(rank):
    model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = stenograd.distribute(model, optimizer, "dense", timeout_s=30)
    loss = model["a"](torch.ones(1, 1)) * (rank + 1)
    if rank == 2:
        loss = loss + 6 * model["b"](torch.ones(1, 1))
    loss.sum().backward()
    sync.close()
    return model["a"].weight.grad.item(), model["b"].weight.grad.item()


def test_a_parameter_that_some_ranks_did_not_use_counts_as_zeros_there(pool):
    """Rank r's gradient of a is r+1, so the mean is 2; only rank 2 uses b, with gradient 6: (0+0+6)/3."""
    assert pool.run(3, _partly_used) == [(2.0, 2.0)] * 3


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


def _thaw(rank):
    """Layer 4 is in the optimizer from the start, but frozen until step 1."""
    model = mlp(rank)
    model[4].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, "dense", bucket_bytes=SMALL_BUCKETS, timeout_s=30) as sync:
        xs, ys = shards(0, 2)
        step(model, optimizer, xs[rank], ys[rank])
        model[4].requires_grad_(True)
        with pytest.raises(stenograd.StenogradError, match="refresh"):
            step(model, optimizer, xs[rank], ys[rank])
        sync.refresh()
        step(model, optimizer, xs[rank], ys[rank])
    return flat(model)


def test_unfrozen_parameters_need_a_refresh_and_say_so(pool):
    first, second = pool.run(2, _thaw)
    assert torch.equal(first, second)


def _mismatch(rank, kind):
    model = mlp(0) if kind != "shape" or rank == 0 else nn.Linear(10, 3)
    method = "topk:ratio=0.1" if kind == "method" and rank == 1 else "dense"
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(stenograd.errors.MismatchError) as caught:
        stenograd.distribute(model, optimizer, method, timeout_s=30)
    return str(caught.value)


@pytest.mark.parametrize(("kind", "names"), [("shape", "parameter"), ("method", "method")])
def test_ranks_that_differ_are_told_the_first_difference(pool, kind, names):
    for message in pool.run(2, _mismatch, kind):
        assert names in message
        assert "rank 1" in message


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


def _dies(rank):
    import os

    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stenograd.distribute(model, optimizer, "topk", timeout_s=20)
    if rank == 1:
        os._exit(9)
    model(torch.ones(1, 10)).sum().backward()


def test_a_dead_peer_is_a_named_error(pool):
    with pytest.raises(RanksFailed) as caught:
        pool.run(3, _dies, timeout_s=60)
    assert "exit code 9" in caught.value.errors[1]
    assert "PeerLost" in caught.value.errors[0]
    assert "PeerLost" in caught.value.errors[2]


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
