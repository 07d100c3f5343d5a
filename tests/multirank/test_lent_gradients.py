"""Gradients are exchanged where autograd left them, or copied one by one or together: nobody may notice."""

import math
import time
import warnings

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import stenograd
from stenograd.exchange import filling

# Largest bucket, and the sizes below which one is filled together, and its gradients keep their memory.
WAYS = {
    "lent": (1, 0, 0),
    "one by one": (1 << 20, 0, 0),
    "together": (1 << 20, 1 << 20, 0),
    "kept apart": (1 << 20, 1 << 20, 1 << 20),
}


class _Net(nn.Module):
    """Two layers, the first of which has a second half that is not always used."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.extra = nn.Linear(12, 20), nn.Linear(20, 3), nn.Linear(12, 20)

    def forward(self, x, *, extra):
        return self.second(torch.tanh(self.first(x) + (self.extra(x) if extra else 0)))


def _train(rank, method, way, trouble):
    torch.manual_seed(0)
    bucket_bytes, filling._SMALL_ELEMENTS, filling._FEW_ELEMENTS = WAYS[way]
    model = _Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = stenograd.distribute(model, optimizer, method, bucket_bytes=bucket_bytes)
    flat = torch.zeros(sum(p.numel() for p in model.parameters()))
    if trouble in OWN:
        pieces = flat.split([p.numel() for p in model.parameters()])
        for p, piece in zip(model.parameters(), pieces, strict=True):
            p.grad = piece.view_as(p).detach() if "detached" in trouble else piece.view_as(p)
    g = torch.Generator().manual_seed(1 + rank)
    kept, values, listed = [], [], []
    if trouble == "hooks":  # a gradient that somebody else holds is not ours to change
        for p in model.parameters():
            p.register_hook(kept.append)
    if trouble == "kept in a hook":  # the average belongs into the gradient that the program has seen
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(lambda p: kept.append((p, p.grad)))
    if trouble == "taken":  # a hook of the user's takes a gradient away
        model.second.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for step in range(6):
        # With "unused" first all ranks use all, then one, then none.
        extra = {"unused": step < 2 or (step < 4 and rank == 1)}.get(trouble, True)
        if trouble in OWN:
            flat.zero_()
        elif trouble in LISTED and step:
            torch._foreach_zero_(listed)
        elif trouble == "in place":
            optimizer.zero_grad(set_to_none=False)
        elif trouble not in ("accumulate", "unused") or step % 2 == 0:
            optimizer.zero_grad()
        if trouble == "no_sync":
            with sync.no_sync():
                model(torch.randn(4, 12, generator=g), extra=True).square().mean().backward()
        loss = model(torch.randn(4, 12, generator=g), extra=extra).square().mean()
        bad = trouble.endswith("with a bad step") and step == 2 and rank == 1
        (loss * math.nan if bad else loss).backward(retain_graph=trouble == "graph")
        if trouble in OWN:
            values.append(flat.data_ptr() == model.first.weight.grad.data_ptr())
        if trouble in LISTED:
            listed = listed or [p.grad for p in model.parameters()]
            values += [p.grad is one for p, one in zip(model.parameters(), listed, strict=True)]
        if trouble == "kept in a hook":
            values += [p.grad is one for p, one in kept]
            kept.clear()
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


LOSSY = ["topk:ratio=0.2", "qsgd", "powersgd:rank=2"]
# Gradients are views of a buffer of the program's, or in a list of its own.
OWN = ["own", "own, detached", "own, with a bad step", "own, detached, with a bad step"]
LISTED = ["listed", "listed, with a bad step"]
TROUBLES = ["none", "in place", "accumulate", "no_sync", "hooks", "graph", "clip", "taken", "unused"]
TROUBLES += [*OWN, *LISTED, "kept in a hook"]


def _all(rank, method, ways_of):
    before = filling._SMALL_ELEMENTS, filling._FEW_ELEMENTS
    warnings.filterwarnings("ignore", message="a gradient was not finite")
    try:
        return [[_train(rank, method, way, trouble) for way in ways_of[trouble]] for trouble in TROUBLES]
    finally:
        filling._SMALL_ELEMENTS, filling._FEW_ELEMENTS = before


@pytest.mark.parametrize("method", ["dense", "fp16", "sign:block=64"])
def test_all_ways_give_the_same(pool, method):
    """These methods' averages do not depend on the buckets, nor on whose memory a gradient is zeroed in."""
    for rank in pool.run(2, _all, method, {trouble: list(WAYS) for trouble in TROUBLES}):
        plain, *_ = rank[TROUBLES.index("none")]
        for trouble in ("in place", "own", "own, detached", "listed"):
            for a, b in zip(plain[0], rank[TROUBLES.index(trouble)][0][0], strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        for (alone, untouched), *others in rank:
            for parameters, untouched_too in others:
                assert untouched
                assert untouched_too
                for a, b in zip(alone, parameters, strict=True):
                    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", LOSSY)
def test_ranks_stay_equal(pool, method):
    """Every trouble by every method, every way by every method, and every trouble in every way."""
    ways, at = list(WAYS), LOSSY.index(method)
    some = {trouble: [ways[(i + at + k) % 4] for k in (0, 1)] for i, trouble in enumerate(TROUBLES)}
    first, second = pool.run(2, _all, method, some)
    for mine, others in zip(first, second, strict=True):
        for (ours, untouched), (theirs, _) in zip(mine, others, strict=True):
            assert untouched
            assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has it from 2.10 on")
@pytest.mark.parametrize("way", WAYS)
def test_gradients_may_have_a_type_of_their_own(way, monkeypatch):
    """bfloat16 parameters with float32 gradients: what two passes add up is rounded nowhere."""
    bucket_bytes, *few = WAYS[way]
    for name, value in zip(("_SMALL_ELEMENTS", "_FEW_ELEMENTS"), few, strict=True):
        monkeypatch.setattr(filling, name, value)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 12, sparse=True), _Net()).to(torch.bfloat16)
    for p in model.parameters():
        p.grad_dtype = torch.float32

    def add(extra):
        x = model[0](torch.arange(9))
        model[1](x, extra=extra).float().square().mean().backward()

    def passes():
        for extra in (False, True):
            add(extra)
        return [p.grad.to_dense() for p in model.parameters()]

    wanted = passes()
    model.zero_grad()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, bucket_bytes=bucket_bytes):
        for grad, exact in zip(passes(), wanted, strict=True):
            assert grad.dtype is torch.float32
            assert torch.equal(grad, exact)
    assert not torch.equal(wanted[1], wanted[1].bfloat16().float())


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


class _Made(nn.Module):
    """A weight that a layer makes, plus a parameter: autograd's gradient of this is a view of the other's."""

    def __init__(self):
        super().__init__()
        self.maker, self.added = nn.Linear(3, 400, bias=False), nn.Parameter(torch.zeros(20, 20))

    def forward(self, x):
        made = self.maker(x)
        return made + self.added.view(400)


def _shared(rank, method):
    torch.manual_seed(0)
    model = _Made()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, method, bucket_bytes=1) as sync:
        assert len(sync._exchange.buckets) == 2
        for step in range(3):
            optimizer.zero_grad()
            pull = torch.arange(400.0) % 16 + step  # bfloat16 holds these exactly
            (model(torch.ones(3) * (rank + 1)) * pull).sum().backward()
            for p, mean in ((model.added, pull.view(20, 20)), (model.maker.weight, 1.5 * pull[:, None])):
                torch.testing.assert_close(p.grad, mean.expand_as(p))


@pytest.mark.parametrize("method", ["dense", "fp16", "topk:ratio=1"])
def test_memory_that_a_gradient_shares_is_not_exchanged_in_place(pool, method):
    """The backward pass goes on with it."""
    pool.run(2, _shared, method)


class _Static(torch.autograd.Function):
    """Has its gradient in the same memory in every pass, as a part of a model that is a CUDA graph."""

    memory = torch.zeros(400)

    @staticmethod
    def forward(ctx, weight, pull, copies):
        ctx.pull, ctx.copies = pull, copies
        return weight @ pull

    @staticmethod
    def backward(ctx, grad):
        torch.mul(grad, ctx.pull, out=_Static.memory)
        return _Static.memory.clone() if ctx.copies else _Static.memory.detach(), None, None


def _static(rank, method, copies):
    weight = nn.Parameter(torch.zeros(400))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    model = nn.Module()
    model.register_parameter("weight", weight)
    with stenograd.distribute(model, optimizer, method) as sync:
        for step in range(4):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank)
            _Static.apply(weight, torch.randn(400, generator=generator), copies).backward()
            optimizer.step()
        assert sync.step == 4
    return weight.detach()


@pytest.mark.skipif(not hasattr(torch._C, "_storage_Use_Count"), reason="not told before torch 2.9")
@pytest.mark.parametrize("method", ["dense", "topk:ratio=0.1", "sign"])
def test_no_state_is_kept_where_the_program_writes_its_gradients(pool, method):
    first, second = (pool.run(2, _static, method, copies) for copies in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _in_halves(rank, bucket_bytes):
    """Train halves in turn, the other one frozen; after bad passes steps are left out, as by GradScaler."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    optimizers = [torch.optim.SGD(half.parameters(), lr=0.1) for half in model]
    finite = []
    with stenograd.distribute(model, optimizers, bucket_bytes=bucket_bytes) as sync:
        for bad in ((1,), (), (0, 1), ()):
            for learns in (1, 0):
                for at, half in enumerate(model):
                    half.requires_grad_(at == learns)
                optimizers[learns].zero_grad()
                factor = math.nan if learns in bad and rank == 1 else 1.0
                (model(torch.ones(1, 3)).sum() * factor).backward()
                finite.append(sync.finite)
                if sync.finite:
                    optimizers[learns].step()
        assert all(bool(p.isfinite().all()) for p in model.parameters())
    return finite


@pytest.mark.parametrize("bucket_bytes", [1, 4 << 20])
def test_a_frozen_layer_whose_gradient_is_bad_costs_the_next_pass_at_most(pool, bucket_bytes):
    """If none was cleared since, that pass may belong to the same step; the one after it does not."""
    finite = [False, False, True, True, False, False, True, True]
    assert pool.run(2, _in_halves, bucket_bytes) == [finite] * 2
