"""One small training under any schedule, by ranks that are threads of this process."""

import copy
import math

import torch
from torch import nn

import stenograd
from stenograd.simulate import ranks

OPTIMIZERS = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.5),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
    "plain": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "still": lambda ps: torch.optim.SGD(ps, lr=0.0),
}


class Net(nn.Module):
    """Two layers and batch norm between them, which start from the same weights everywhere."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(20, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 5)

    def forward(self, x):
        return self.last(self.norm(torch.tanh(self.first(x))))


PARAMETERS = [name for name, _ in Net().named_parameters()]
NBYTES = 4 * sum(p.numel() for p in Net().parameters())
STATISTICS = 2 * 16 * 4  # bytes of batch norm's floating buffers


def loss_of(model, rank, step):
    """Return the loss on a batch of this rank's."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 20, generator=generator), torch.randint(3, (8,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)


def scatter(model, rank):
    """Move a rank's parameters, so that there is something to mix where steps do nothing."""
    generator = torch.Generator().manual_seed(50 + rank)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) / 5)


def train(driver, text, kind, steps, *, first=0, states=None, weights=None, scattered=False, spoilt=()):
    """Train one rank, from saved states of all if there are some; `spoilt`: where weights become NaN."""
    model = Net()
    if weights is not None:
        model.load_state_dict(weights)
    optimizer = OPTIMIZERS[kind](model.parameters())
    sync = stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30)
    if states is not None:
        sync.load_state_dict(states[driver.rank])
        sync.after_load()
    if scattered:
        scatter(model, driver.rank)
    start, before = (copy.deepcopy(model.state_dict()), sync.round), sync.traffic.moved_bytes
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, driver.rank, step).backward()
        if (driver.rank, step) in spoilt:
            with torch.no_grad():
                model.first.weight[0, 0] = math.nan
        optimizer.step()
    moved = sync.traffic.moved_bytes - before
    found = {"start": start, "state": copy.deepcopy(model.state_dict()), "sync": sync.state_dict()}
    with sync.consensus():
        found["common"] = copy.deepcopy(model.state_dict())
    sync.close()
    return found | {"round": sync.round, "share": sync.share, "moved": moved, "left_out": sync.left_out}


def simulated(world, *args, **kwargs):
    """Return what `train` returns for each rank."""
    return ranks(world, lambda driver: train(driver, *args, **kwargs))


def flat(state):
    """Return all parameters of a state in a row."""
    return torch.cat([state[name].reshape(-1) for name in PARAMETERS]).double()


def equal(states):
    """Tell whether the parameters of all states are the same bits."""
    return all(torch.equal(flat(states[0]), flat(state)) for state in states)
