"""A small model, its batches and a step, as most trainings of the tests have them."""

import torch
from torch import nn

SMALL_BUCKETS = 1200  # bytes: several buckets, and the middle layer is larger than one


def mlp(seed):
    """1,138 parameters: weights of 320, 544, 136 elements and small ones."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(10, 32),
            nn.Tanh(),
            nn.Linear(32, 17),
            nn.Tanh(),
            nn.Linear(17, 8),
            nn.Tanh(),
            nn.Linear(8, 3),
        )


def shards(step, world_size, per_rank=6):
    """Batch of one step for all ranks: inputs and targets, cut by rank."""
    g = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(world_size * per_rank, 10, generator=g)
    y = torch.randn(world_size * per_rank, 3, generator=g)
    return x.chunk(world_size), y.chunk(world_size)


def step(model, optimizer, x, y):
    """Take one step, and return the loss."""
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def descend(optimizer, loss):
    """Take one step down a loss."""
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def flat(model):
    """Return all parameters in a row."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def on_whole_batches(optimizer_of, world_size, steps, scheduler_of=None):
    """Train one process on all ranks' batches, and return the weights.

    The gradient of the mean of the ranks' losses is the mean of their gradients.
    """
    model = mlp(0)
    optimizer = optimizer_of(model.parameters())
    scheduler = scheduler_of(optimizer) if scheduler_of else None
    for number in range(steps):
        xs, ys = shards(number, world_size)
        step(model, optimizer, torch.cat(xs), torch.cat(ys))
        if scheduler:
            scheduler.step()
    return flat(model)
