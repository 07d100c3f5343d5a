"""Train on digits with CentralizedAdam, with one collective a layer.

torchrun --nproc-per-node 2 examples/mlbench/centralized_adam.py, or without torchrun on one process
"""

from __future__ import annotations

from digits_loop import train
from torch import nn

from stenograd.mlbench import CentralizedAdam


def make(world_size: int, model: nn.Module) -> CentralizedAdam:
    """Return the optimizer."""
    return CentralizedAdam(world_size, model, lr=0.003, by_layer=True)


train(make)
