"""Train on digits with CustomCentralizedOptimizer: AdamW, clipping, closures.

torchrun --nproc-per-node 2 examples/mlbench/custom.py, or without torchrun on one process
"""

from __future__ import annotations

import torch
from digits_loop import train
from torch import nn

from stenograd.mlbench import CustomCentralizedOptimizer


def make(world_size: int, model: nn.Module) -> CustomCentralizedOptimizer:
    """Return the optimizer."""
    adamw = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.01)
    return CustomCentralizedOptimizer(model, world_size, adamw, average_world=True, grad_clip=5.0)


train(make, with_closure=True)
