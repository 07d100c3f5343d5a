"""Train on digits by averaging weights, not gradients, with an optimizer class of one's own.

torchrun --nproc-per-node 2 examples/mlbench/generic.py, or without torchrun on one process
"""

from __future__ import annotations

import torch
from digits_loop import train
from torch import nn

from stenograd.mlbench import GenericCentralizedOptimizer


class LocalSGD(GenericCentralizedOptimizer):
    """SGD with this rank's gradient; after each step all ranks take the mean weights."""

    def __init__(self, world_size: int, model: nn.Module) -> None:
        super().__init__(world_size, model, agg_grad=False)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)


def make(world_size: int, model: nn.Module) -> LocalSGD:
    """Return the optimizer."""
    return LocalSGD(world_size, model)


train(make)
