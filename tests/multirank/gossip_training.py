"""Trainings that gossip: on ranks, and as copies of a model in one process with the matrix product W x."""

import copy
import math

import torch
from torch import nn

import stenograd
from stenograd.simulate import ranks
from stenograd.topology import mixing_matrix

OPTIMIZERS = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.5),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
    "still": lambda ps: torch.optim.SGD(ps, lr=0.0),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(20, 16)
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 3)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 5)

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.first(x))))


PARAMETERS = [name for name, _ in Net().named_parameters()]
NBYTES = 4 * sum(p.numel() for p in Net().parameters())


def loss_of(model, rank, step, bad=()):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 20, generator=generator), torch.randint(3, (8,), generator=generator)
    loss = nn.functional.cross_entropy(model(x), y)
    return loss * math.nan if (rank, step) in bad else loss


def apart(model, rank):
    """Move a rank's parameters, so that there is something to mix where steps do nothing."""
    generator = torch.Generator().manual_seed(50 + rank)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) / 5)


def train(driver, text, kind, steps, *, cut=None, bad=(), scattered=False, accumulate=1):
    """Train one rank; with `cut`, save after so many steps and go on with everything new."""
    saved = None
    for begin, end in [(0, steps)] if cut is None else [(0, cut), (cut, steps)]:
        model = Net()
        optimizer = OPTIMIZERS[kind](model.parameters())
        sync = stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30)
        rank, before = sync.rank, sync.traffic.moved_bytes
        if saved is not None:
            sync.load_state_dict(saved[2])
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            sync.after_load()
        elif scattered:
            apart(model, rank)
        for step in range(begin, end):
            optimizer.zero_grad()
            for part in range(accumulate - 1):
                with sync.no_sync():
                    loss_of(model, rank, 100 * part + step).backward()
            loss_of(model, rank, step, bad).backward()
            optimizer.step()
        moved = sync.traffic.moved_bytes - before
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sync.state_dict()))
        with sync.consensus():
            common = copy.deepcopy(model.state_dict())
        assert all(torch.equal(t, saved[0][n]) for n, t in model.state_dict().items())
        done = {"round": sync.round, "skipped": sync.skipped, "share": sync.share, "moved": moved}
        sync.close()
    return {"state": saved[0], "sync": saved[2], "common": common} | done


def simulated(world, *args, **kwargs):
    return ranks(world, lambda driver: train(driver, *args, **kwargs))


def on_rank(rank, *args, **kwargs):
    return train(None, *args, **kwargs)


def weighted(row, values):
    total = torch.zeros_like(values[0])
    for weight, value in zip(row.tolist(), values, strict=True):
        if weight:
            total.add_(value, alpha=weight)
    return total


def plain(world, text, kind, steps, bad=(), scattered=False):
    """The same in one process: deep copies, and the matrix product in rank order, before or after steps."""
    how = stenograd.method(text).schedule
    models = [Net() for _ in range(world)]
    optimizers = [OPTIMIZERS[kind](m.parameters()) for m in models]
    for rank, model in enumerate(models):
        if scattered:
            apart(model, rank)
    mixings = 0

    @torch.no_grad()
    def mix():
        matrix = mixing_matrix(how.topology(world), world, mixings)
        tensors = [[*m.parameters()] for m in models]
        if how.buffers == "average":
            tensors = [[*m.parameters(), *(b for b in m.buffers() if b.is_floating_point())] for m in models]
        for same in zip(*tensors, strict=True):
            mixed = [weighted(matrix[rank], same) for rank in range(world)]
            for p, value in zip(same, mixed, strict=True):
                p.copy_(value)

    for step in range(1, steps + 1):
        due = step % how.every == 0
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step - 1, bad).backward()
        if due and how.order == "combine-then-adapt":
            mix()
        for model, optimizer in zip(models, optimizers, strict=True):
            if all(p.grad.isfinite().all() for p in model.parameters()):
                optimizer.step()
        if due and how.order == "adapt-then-combine":
            mix()
        mixings += due
    return [m.state_dict() for m in models]


def equal(done, wanted):
    for rank, (mine, theirs) in enumerate(zip(done, wanted, strict=True)):
        for name, value in theirs.items():
            assert torch.equal(mine["state"][name], value), (rank, name)


def flat(state):
    return torch.cat([state[name].reshape(-1) for name in PARAMETERS]).double()
