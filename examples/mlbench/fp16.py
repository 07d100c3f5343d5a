"""Train on digits with FP16Optimizer: a bfloat16 model, float32 master weights, a dynamic loss scale.

torchrun --nproc-per-node 2 examples/mlbench/fp16.py, or without torchrun on one process
"""

from __future__ import annotations

import torch
from digits_loop import train
from torch import nn

from stenograd.mlbench import FP16Optimizer


def make(world_size: int, model: nn.Module) -> FP16Optimizer:
    """Return the optimizer."""
    fp = FP16Optimizer(model, world_size, average_world=True, divide_before=True)
    fp.set_optimizer(torch.optim.SGD([fp.fp32_params], lr=0.05, momentum=0.9, weight_decay=1e-4))
    return fp


train(make, dtype=torch.bfloat16)
