"""Heat's DataParallel on real gloo ranks: without blocking it must give what it gives with."""

import io
import warnings

import pytest
import torch
from heat_nets import in_both_modes, loss_of, make, train
from models import buckets_of, flat, mlp, shards
from torch import nn

import stenograd


def _twenty_steps(rank, blocking, method):
    net, optimizers = make(rank, blocking, method=method)
    seen = []
    for s in range(20):
        train(net, optimizers, rank, 2, [s])
        if s % 3 == 2 or s == 19:
            net.flush()
            seen.append(flat(net))
    assert buckets_of(net.sync) >= 3
    net.close()
    return seen


def _epochs(rank, blocking, when, zero):
    """Two epochs of three batches, each followed by an evaluation; there are many ways to zero gradients."""
    net, (optimizer,) = make(rank, blocking)

    def at(moment):
        if when == moment:
            zero(net, optimizer)

    seen = []
    for s in range(6):
        at("before forward")
        loss = loss_of(net, rank, 2, s)
        at("after forward")
        at("before backward")
        loss.backward()
        at("before step")
        optimizer.step()
        at("after step")
        if s % 3 == 2:
            net.eval()
            seen += [flat(net), net(torch.ones(1, 10)).detach()]
            net.train()
    net.close()
    return seen


def _by_hand(net, optimizer):
    for p in net.parameters():
        p.grad = None


ZEROINGS = {
    "before forward": lambda net, o: o.zero_grad(),
    "after forward": lambda net, o: o.zero_grad(),
    "before backward, torch": lambda net, o: o.torch_optimizer.zero_grad(),
    "after step": lambda net, o: o.zero_grad(),
    "after step, torch": lambda net, o: o.torch_optimizer.zero_grad(),
    "after step, zeros": lambda net, o: o.torch_optimizer.zero_grad(set_to_none=False),
    "after step, by hand": _by_hand,
    "after step, module": lambda net, o: net.module.zero_grad(),
    "after step, wrapper": lambda net, o: net.zero_grad(),
    "before step": lambda net, o: o.zero_grad(),
    "before step, torch": lambda net, o: o.torch_optimizer.zero_grad(),
    "never": None,
}


def _inference(rank, blocking):
    """Evaluation in inference mode applies the first update ever, which makes the momentum buffers."""
    net, optimizers = make(rank, blocking)
    train(net, optimizers, rank, 2, [0])
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        net.eval()
        net.train()
    train(net, optimizers, rank, 2, [1, 2])
    net.close()
    return [flat(net)]


class _Odd(nn.Module):
    """A root-level parameter, and layers: frozen, tied, used by rank 0 only, used by nobody."""

    def __init__(self, seed):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.scale = nn.Parameter(torch.randn(10))
            self.first = nn.Linear(10, 10)
            self.tied = nn.Linear(10, 10)
            self.tied.weight = self.first.weight
            self.frozen = nn.Linear(10, 10).requires_grad_(False)
            self.sometimes = nn.Linear(10, 10)
            self.unused = nn.Linear(10, 10)
            self.last = nn.Linear(10, 3)

    def forward(self, x, extra):
        x = self.frozen(self.tied(torch.tanh(self.first(x * self.scale))))
        return self.last(self.sometimes(x) if extra else x)


def _groups(model):
    layers = [model.scale, *model.first.parameters(), model.tied.bias, *model.frozen.parameters()]
    head = [*model.sometimes.parameters(), *model.unused.parameters()]
    groups = [{"params": layers}, {"params": head, "lr": 0.02}]
    return [
        torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.1),
        torch.optim.Adam(model.last.parameters(), lr=0.01),
    ]


def _odd(rank, blocking, own):
    model = _Odd(rank)
    net, optimizers = make(rank, blocking, model=model, optimizers=_groups)
    unused, frozen = model.unused.weight.clone(), model.frozen.weight.clone()
    seen = []
    for s in range(8):
        xs, ys = shards(s, 2)
        loss = nn.functional.mse_loss(net(xs[rank], extra=rank == 0 and s % 2 == 0), ys[rank])
        loss.backward()
        for o in optimizers:
            o.step()
        for o in optimizers:
            (o if own else o.torch_optimizer).zero_grad()
        if s % 3 == 2:
            net.flush()
            seen.append(flat(net))
    net.eval()
    assert torch.equal(model.unused.weight, unused), "weight decay moved what nobody used"
    assert torch.equal(model.frozen.weight, frozen)
    assert model.tied.weight is model.first.weight
    net.close()
    return [*seen, flat(net)]


def _accumulated(rank, blocking):
    """Several backward passes a step: without an exchange, of two forwards in a row, of one graph twice."""
    net, (optimizer,) = make(rank, blocking)
    seen = []
    for s in range(0, 12, 4):
        optimizer.zero_grad()
        loss_of(net, rank, 2, s).backward()
        with net.no_sync():
            loss_of(net, rank, 2, s + 1).backward()
        one, other = loss_of(net, rank, 2, s + 2), loss_of(net, rank, 2, s + 3)
        one.backward(retain_graph=True)
        other.backward()
        one.backward()
        optimizer.step()
        seen.append(net(torch.ones(1, 10)).detach())
    net.close()
    return [*seen, flat(net)]


def _step_habits(rank, blocking):
    """Two steps for one backward pass, a step without any, and clipping, which needs a flush before it."""
    net, (optimizer,) = make(rank, blocking)
    optimizer.step()
    loss_of(net, rank, 2, 0).backward()
    optimizer.step()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    loss_of(net, rank, 2, 1).backward()
    net.flush()
    nn.utils.clip_grad_norm_(net.parameters(), 0.01)
    optimizer.step()
    optimizer.zero_grad()
    net.eval()
    net.close()
    return [flat(net)]


def _schedule(rank, blocking):
    """A rate that a scheduler sets after step() is for the next update; its first call must not warn."""
    net, (optimizer,) = make(rank, blocking)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.torch_optimizer, 0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for s in range(4):
            train(net, [optimizer], rank, 2, [s])
            scheduler.step()
    net.eval()
    assert optimizer.param_groups[0]["lr"] == 0.05 / 16
    net.close()
    return [flat(net)]


def _scaler(rank, blocking):
    """Rank 1 overflows in step 3; in odd steps the program unscales by itself."""
    net, (optimizer,) = make(rank, blocking)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a step is skipped
        for s in range(6):
            optimizer.zero_grad()
            scaler.scale(loss_of(net, rank, 2, s) * (torch.inf if rank and s == 3 else 1.0)).backward()
            if s % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
    net.close()
    assert scaler.get_scale() == 512.0
    assert flat(net).abs().max() < 2
    return [flat(net)]


def _checkpoint(rank, blocking):
    """A state saved while an update waits holds it; loading applies what waits before."""
    whole, optimizers = make(rank, blocking, method="topk:ratio=0.1")
    train(whole, optimizers, rank, 2, range(8))
    whole.close()
    net, (optimizer,) = make(rank, blocking, method="topk:ratio=0.1")
    train(net, [optimizer], rank, 2, range(5))
    file = io.BytesIO()
    torch.save((net.state_dict(), optimizer.state_dict(), net.sync.state_dict()), file)
    train(net, [optimizer], rank, 2, [5, 5])
    file.seek(0)
    for part, state in zip((net, optimizer, net.sync), torch.load(file, weights_only=True), strict=True):
        part.load_state_dict(state)
    train(net, [optimizer], rank, 2, range(5, 8))
    net.close()
    assert torch.equal(flat(net), flat(whole))
    return [flat(net)]


def _thaw(rank, blocking):
    """A layer that is unfrozen joins after a refresh."""
    model = mlp(rank)
    model[4].requires_grad_(False)
    net, optimizers = make(rank, blocking, model=model)
    train(net, optimizers, rank, 2, [0])
    model[4].requires_grad_(True)
    net.refresh()
    train(net, optimizers, rank, 2, [1, 2])
    net.close()
    return [flat(net)]


def _joined(rank, blocking):
    """A parameter group that is added joins, but not while an update waits."""
    net, (optimizer,) = make(
        rank, blocking, optimizers=lambda m: [torch.optim.SGD(m[6].parameters(), lr=0.1)]
    )
    train(net, [optimizer], rank, 2, [0])
    added = {"params": list(net.module[4].parameters()), "lr": 0.05}
    if not blocking:
        with pytest.raises(stenograd.StenogradError, match="a parameter group was added while"):
            optimizer.torch_optimizer.add_param_group(dict(added))
        assert len(optimizer.param_groups) == 1
    net.flush()
    optimizer.torch_optimizer.add_param_group(added)
    train(net, [optimizer], rank, 2, [1, 2])
    net.close()
    return [flat(net)]


class _Rows(nn.Module):
    """A table with sparse gradients, and a head."""

    def __init__(self, seed):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.table = nn.Embedding(12, 4, sparse=True)
            self.head = nn.Linear(4, 3)

    def forward(self, rows):
        return self.head(torch.ones(1, 4) if rows is None else self.table(rows))


def _sparse(rank, blocking, zero):
    """In odd batches rank 1 uses no row."""
    net, optimizers = make(
        rank,
        blocking,
        model=_Rows(rank),
        optimizers=lambda m: [
            torch.optim.SGD(m.table.parameters(), lr=0.1),
            torch.optim.Adam(m.head.parameters(), lr=0.01),
        ],
    )
    seen = []
    for s in range(7):
        rows = None if rank and s % 2 else torch.tensor([s, s + rank, 3][: 1 + s % 3])
        net(rows).square().mean().backward()
        for o in optimizers:
            o.step()
        for o in optimizers:
            zero(o)
        if s % 3 == 2:
            net.flush()
            seen.append(flat(net))
    net.eval()
    net.close()
    return [*seen, flat(net)]


PROGRAMS = {
    **{
        f"20 steps by {method}": lambda rank, blocking, method=method: _twenty_steps(rank, blocking, method)
        for method in ("topk:ratio=0.1", "powersgd:rank=2", "fp16")
    },
    **{
        f"zeroing {how}": lambda rank, blocking, how=how: _epochs(
            rank, blocking, how.partition(", ")[0], ZEROINGS[how]
        )
        for how in ZEROINGS
    },
    **{
        f"sparse rows, {how}": lambda rank, blocking, zero=zero: _sparse(rank, blocking, zero)
        for how, zero in {
            "zeroed": lambda o: o.zero_grad(),
            "torch zeroes": lambda o: o.torch_optimizer.zero_grad(),
            "zeros": lambda o: o.torch_optimizer.zero_grad(set_to_none=False),
        }.items()
    },
    "inference mode": _inference,
    "odd parameters": lambda rank, blocking: _odd(rank, blocking, True),
    "odd parameters, torch zeroes": lambda rank, blocking: _odd(rank, blocking, False),
    "accumulation": _accumulated,
    "steps without a backward pass": _step_habits,
    "scheduler": _schedule,
    "scaler": _scaler,
    "checkpoint": _checkpoint,
    "unfrozen layer": _thaw,
    "added group": _joined,
}


def _both(rank, program):
    # Below 6e-5 it matters whether a gradient is divided by the ranks before or after it is cast to fp16, and
    # a last bit of a weight may then turn the rounding of a later gradient, 5e-4 of it.
    tolerance = 1e-5 if "fp16" in program else 0.0
    return in_both_modes(lambda blocking: PROGRAMS[program](rank, blocking), tolerance)[-1]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_gives_the_same_in_both_modes_and_on_all_ranks(pool, program):
    first, second = pool.run(2, _both, program)
    assert torch.equal(first, second)


def _visibility(rank):
    net, (optimizer,) = make(rank, False)
    train(net, [optimizer], rank, 2, [0])
    first = flat(net)
    assert optimizer.update_next
    assert torch.equal(first, flat(mlp(0))), "the update must wait"
    loss_of(net, rank, 2, 1)
    second = flat(net)
    assert not optimizer.update_next
    assert not torch.equal(first, second), "a forward pass must apply it"
    train(net, [optimizer], rank, 2, [1])
    looks = [net.flush, net.eval, net.state_dict, net.module.state_dict, optimizer.state_dict]
    for look in [*looks, optimizer.torch_optimizer.state_dict]:
        train(net, [optimizer], rank, 2, [2])
        waiting = flat(net)
        look()
        assert not optimizer.update_next
        assert not torch.equal(flat(net), waiting), look
        net.train()
    assert net.eval() is net
    assert net.train() is net
    train(net, [optimizer], rank, 2, [4, 5])
    net.close()
    net.close()
    return flat(net)


def test_an_update_waits_until_someone_looks(pool):
    first, second = pool.run(2, _visibility)
    assert torch.equal(first, second)
