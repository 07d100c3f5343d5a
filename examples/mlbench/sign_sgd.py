"""Train on digits with SignSGD on the mean gradient: every weight moves by the learning rate.

torchrun --nproc-per-node 2 examples/mlbench/sign_sgd.py, or without torchrun on one process
"""

from __future__ import annotations

from digits_loop import train
from torch import nn

from stenograd.mlbench import CustomCentralizedOptimizer, SignSGD


def make(world_size: int, model: nn.Module) -> CustomCentralizedOptimizer:
    """Return the optimizer."""
    sign = SignSGD(model.parameters(), lr=0.001, momentum=0.9)
    return CustomCentralizedOptimizer(model, world_size, sign, average_world=True)


train(make)
