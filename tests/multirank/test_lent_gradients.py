"""Gradients that fill a bucket are exchanged where autograd left them: nobody else may notice."""

import time

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import stenograd


def _train(rank, method, bucket_bytes, trouble):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = stenograd.distribute(model, optimizer, method, bucket_bytes=bucket_bytes)
    g = torch.Generator().manual_seed(1 + rank)
    kept, values = [], []
    if trouble == "hooks":  # a gradient that somebody else holds is not ours to change
        for p in model.parameters():
            p.register_hook(kept.append)
    for step in range(6):
        if trouble == "in place":
            optimizer.zero_grad(set_to_none=False)
        elif trouble != "accumulate" or step % 2 == 0:
            optimizer.zero_grad()
        if trouble == "no_sync":
            with sync.no_sync():
                model(torch.randn(4, 12, generator=g)).square().mean().backward()
        loss = model(torch.randn(4, 12, generator=g)).square().mean()
        loss.backward(retain_graph=trouble == "graph")
        if trouble == "hooks":
            copies = [t.clone() for t in kept]
        if trouble == "graph":
            loss.backward()
        if trouble == "clip":
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        if trouble == "hooks":
            values += [torch.equal(a, b) for a, b in zip(kept, copies, strict=True)]
            kept.clear()
        optimizer.step()
    sync.close()
    return [p.detach().clone() for p in model.parameters()], all(values)


TROUBLES = ["none", "in place", "accumulate", "no_sync", "hooks", "graph", "clip"]


def _all(rank, method, bucket_sizes):
    return [[_train(rank, method, nbytes, trouble) for nbytes in bucket_sizes] for trouble in TROUBLES]


@pytest.mark.parametrize("method", ["dense", "fp16", "sign:block=64"])
def test_each_in_a_bucket_of_its_own_equals_all_in_one(pool, method):
    """In one bucket gradients are copied; these methods' averages do not depend on the buckets."""
    for rank in pool.run(2, _all, method, (1, 1 << 20)):
        for (alone, untouched), (together, _) in rank:
            assert untouched
            for a, b in zip(alone, together, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", ["topk:ratio=0.2", "qsgd", "powersgd:rank=2"])
def test_ranks_stay_equal(pool, method):
    first, second = pool.run(2, _all, method, (1,))
    for [(ours, untouched)], [(theirs, _)] in zip(first, second, strict=True):
        assert untouched
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _freed(memory):
    """Whether nothing holds a memory, or stops to: a thread that sent something may end a moment later."""
    deadline = time.monotonic() + 0.3
    while not memory.expired() and time.monotonic() < deadline:
        time.sleep(0.002)
    return memory.expired()


def _held(rank, method):
    """Return for each step and gradient, each a bucket, whether anything still holds its memory."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 200, bias=False), nn.Tanh(), nn.Linear(200, 3, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    held = []
    with stenograd.distribute(model, optimizer, method, bucket_bytes=1024) as sync:
        for _ in range(3):
            model(torch.randn(4, 12)).square().mean().backward()
            optimizer.step()
            memories = [StorageWeakRef(p.grad.untyped_storage()) for p in model.parameters()]
            optimizer.zero_grad()
            held.append([not _freed(memory) for memory in memories])
        assert len(sync._exchange.buckets) == 2
    return held


@pytest.mark.parametrize(
    "method", ["dense", "fp16", "topk:ratio=0.1", "sign", "qsgd:bits=4", "powersgd:rank=1"]
)
def test_memory_of_gradients_is_free_after_zero_grad(pool, method):
    """The next forward pass needs it: holding it cost as much memory as the parameters take.

    Only dense's last bucket stays, because the step's flags travel behind its elements.
    """
    for held in pool.run(2, _held, method):
        assert held == [[method == "dense", False]] * 3
