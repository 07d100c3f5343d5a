"""Models and data that the multi-rank tests share; imported by the rank processes."""

import torch
from torch import nn

import stenograd
from stenograd.data.requests import Op
from stenograd.testing.methods import suite

ALL_METHODS = suite()
SMALL_BUCKETS = 1200  # bytes: several buckets, and the middle layer is larger than one


def wire_rounding(requests):
    """What the order of a sum on the wire may change: 4 roundings of 16 bits, or 0 where sums are finer."""
    types = {t.dtype for request in requests if request.op is Op.MEAN for t in request.tensors}
    eps = max((torch.finfo(dtype).eps for dtype in types), default=0.0)
    return 4 * eps if eps > torch.finfo(torch.float32).eps else 0.0


def buckets_of(sync):
    """How many buckets the ledger tells of."""
    return len({e.bucket for e in sync.traffic.entries() if e.bucket is not None})


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
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.detach()


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def train(rank, world_size, method, steps, *, bucket_bytes=SMALL_BUCKETS, first=0, sync=None, **sgd):
    """Train from rank-dependent weights and return (parameters, sync, model, optimizer)."""
    model = mlp(rank)
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9, **sgd})
    sync = stenograd.distribute(model, optimizer, method, bucket_bytes=bucket_bytes, timeout_s=30)
    for s in range(first, first + steps):
        xs, ys = shards(s, world_size)
        step(model, optimizer, xs[rank], ys[rank])
    return flat(model), sync, model, optimizer
