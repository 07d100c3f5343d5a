"""Loops and a plain reference that the tests of DASO share; imported by the rank processes."""

import torch
from models import flat, mlp, shards, step

from stenograd.heat.daso import DASO

LAYOUTS = {
    "1x4": {"node_size": 4},
    "2x2": {"node_size": 2},
    "4x1": {"node_size": 1},
    "3+1": {"nodes": [[0, 1, 2], [3]]},
}


def make(seed=0, *, model=None, lr=0.05, momentum=0.0, **arguments):
    """A model whose weights depend on the seed, and DASO on it."""
    model = mlp(seed) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    arguments = {"total_epochs": 10, "timeout_s": 30, "record_events": True, **arguments}
    daso = DASO(optimizer, **arguments)
    daso.set_model(model)
    return model, daso


def batch(rank, model, daso, number, world_size=4):
    """One batch of rank's own shard."""
    xs, ys = shards(number, world_size)
    return step(model, daso, xs[rank], ys[rank])


def epoch(rank, model, daso, count, first=0, loss=1.0, world_size=4):
    """One epoch of `count` batches with a loss given by hand."""
    daso.last_batch = count - 1
    for number in range(first, first + count):
        batch(rank, model, daso, number, world_size)
    daso.epoch_loss_logic(loss)


def weights(model):
    return flat(model).clone()
