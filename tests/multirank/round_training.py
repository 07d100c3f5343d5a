"""One small training under any schedule, for the tests of rounds."""

import copy
import math

import torch
from torch import nn

import stenograd
from stenograd.simulate import ranks

BUCKET = 600  # bytes: several chunks, and a tensor larger than one
OPTIMIZERS = {
    "momentum": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.5),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.01, weight_decay=0.1),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(20, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))
        self.norm = nn.BatchNorm1d(16)
        self.last = nn.Linear(16, 3)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) / 5)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.last(self.norm(x))


def loss_of(model, rank, step, bad=()):
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 20, generator=generator), torch.randint(3, (8,), generator=generator)
    loss = nn.functional.cross_entropy(model(x), y)
    return loss * math.nan if (rank, step) in bad else loss


def train(driver, text, kind, steps, *, cut=None, bad=(), accumulate=1):
    """Train one rank; with `cut`, save after so many steps and go on with everything new."""
    saved, seen = None, []
    for begin, end in [(0, steps)] if cut is None else [(0, cut), (cut, steps)]:
        model = Net()
        optimizer = OPTIMIZERS[kind](model.parameters())
        sync = stenograd.distribute(model, optimizer, text, group=driver, bucket_bytes=BUCKET, timeout_s=30)
        if saved is not None:
            sync.load_state_dict(saved[2])
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            sync.after_load()
        rank = sync.rank
        for step in range(begin, end):
            optimizer.zero_grad()
            for part in range(accumulate - 1):
                with sync.no_sync():
                    loss_of(model, rank, 100 * part + step).backward()
            loss_of(model, rank, step, bad).backward()
            optimizer.step()
            seen.append(sync.pending)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sync.state_dict()))
        with sync.consensus():
            common = copy.deepcopy(model.state_dict())
        done = {"round": getattr(sync, "round", 0), "skipped": sync.skipped}
        sync.close()
    return {"state": saved[0], "optimizer": saved[1], "sync": saved[2], "common": common, "seen": seen} | done


def simulated(world, *args, **kwargs):
    return ranks(world, lambda driver: train(driver, *args, **kwargs))


def on_rank(rank, *args, **kwargs):
    return train(None, *args, **kwargs)
