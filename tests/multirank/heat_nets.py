"""Wrapped models and their training, shared by the tests of Heat's DataParallel; imported by the ranks."""

import torch
from models import SMALL_BUCKETS, mlp, shards
from torch import nn

from stenograd.heat import DataParallel, DataParallelOptimizer

OPTIMIZERS = {
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=1e-2),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
}


def make(rank, blocking, *, model=None, optimizers=None, kind="momentum", **options):
    """A wrapped model with rank-dependent weights, and its DataParallelOptimizer or several."""
    model = mlp(rank) if model is None else model
    inner = optimizers(model) if optimizers else [OPTIMIZERS[kind](model.parameters())]
    outer = [DataParallelOptimizer(o) for o in inner]
    options = {"bucket_bytes": SMALL_BUCKETS, "timeout_s": 30, **options}
    given = outer[0] if len(outer) == 1 else outer
    return DataParallel(model, options.pop("comm", None), given, blocking, **options), outer


def loss_of(net, rank, world_size, number):
    xs, ys = shards(number, world_size)
    return nn.functional.mse_loss(net(xs[rank]), ys[rank])


def train(net, optimizers, rank, world_size, numbers):
    for number in numbers:
        for o in optimizers:
            o.zero_grad()
        loss_of(net, rank, world_size, number).backward()
        for o in optimizers:
            o.step()


def in_both_modes(run, tolerance=0.0):
    """Return what a function of the mode gives, after checking that both modes give the same."""
    blocking, waiting = run(True), run(False)
    assert len(blocking) == len(waiting)
    for i, (a, b) in enumerate(zip(blocking, waiting, strict=True)):
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance, msg=lambda text, i=i: f"flush {i}: {text}")
    return waiting
