"""Train on digits with CentralizedSGD: torch's SGD on the mean of all ranks' gradients.

torchrun --nproc-per-node 2 examples/mlbench/centralized_sgd.py, or without torchrun on one process
"""

from __future__ import annotations

from digits_loop import train
from torch import nn

from stenograd.mlbench import CentralizedSGD


def make(world_size: int, model: nn.Module) -> CentralizedSGD:
    """Return the optimizer."""
    return CentralizedSGD(world_size, model, lr=0.05, momentum=0.9, weight_decay=1e-4)


train(make)
