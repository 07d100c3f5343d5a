"""Train on digits with CentralizedSparsifiedSGD: 4000 random coordinates of each tensor a step.

torchrun --nproc-per-node 2 examples/mlbench/centralized_sparsified_sgd.py, or without torchrun on one process
"""

from __future__ import annotations

from digits_loop import train
from torch import nn

from stenograd.mlbench import CentralizedSparsifiedSGD


def make(world_size: int, model: nn.Module) -> CentralizedSparsifiedSGD:
    """Return the optimizer."""
    options = {"lr": 0.4, "weight_decay": 1e-4, "sparse_grad_size": 4000, "random_sparse": True}
    return CentralizedSparsifiedSGD(model.parameters(), **options, world_size=world_size)


train(make)
