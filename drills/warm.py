"""Imported once by the process that ranks are forked from, so that they need not import and load it again."""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: there must be no threads when the ranks are forked

import torch
import torch.distributed.nn.functional

from stenograd import tasks
from stenograd.catalog.method import method, methods
from stenograd.simulate import exchange

torch.set_num_threads(1)
for name in methods():
    for size in (2_000, 40_000):
        for _ in exchange(method(name).compressor, [torch.randn(size) for _ in range(2)]):
            pass
task = tasks.load("digits")
model = task.model(0)
optimizer = task.recipe.make_optimizer(model)  # the first one imports torch's compiler
task.loss(model, *task.train_batch(torch.arange(4)))  # forward only: autograd does not survive a fork
optimizer.step()
