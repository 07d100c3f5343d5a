"""Train on digits with SparsifiedSGD, which stays on its rank: 4000 coordinates of each tensor a step.

torchrun --nproc-per-node 2 examples/mlbench/sparsified_sgd.py, or without torchrun on one process
"""

from __future__ import annotations

from digits_loop import train
from torch import nn

from stenograd.mlbench import SparsifiedSGD


def make(world_size: int, model: nn.Module) -> SparsifiedSGD:
    """Return the optimizer."""
    return SparsifiedSGD(model.parameters(), lr=0.4, weight_decay=1e-4, sparse_grad_size=4000)


train(make)
