"""Train on digits with PowerSGD: gradients of rank 2, error feedback, a warm start.

torchrun --nproc-per-node 2 examples/mlbench/power_sgd.py, or without torchrun on one process
"""

from __future__ import annotations

from digits_loop import train
from torch import nn

from stenograd.mlbench import PowerSGD


def make(world_size: int, model: nn.Module) -> PowerSGD:
    """Return the optimizer."""
    options = {"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4}
    return PowerSGD(model, **options, reuse_query=True, world_size=world_size, rank=2)


train(make)
