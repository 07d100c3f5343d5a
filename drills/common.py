"""What the drills share: a small model in several buckets, and its data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stenograd.testing.methods import suite

__all__ = ["BUCKET_BYTES", "METHODS", "data", "flat", "mlp"]

BUCKET_BYTES = 600  # six buckets; the two larger matrices are one each
METHODS = suite()


def mlp(seed: int) -> nn.Sequential:
    """Return a model of 1,084 parameters."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(10, 32),
            nn.Tanh(),
            nn.Linear(32, 17),
            nn.Tanh(),
            nn.Linear(17, 8),
            nn.Tanh(),
            nn.Linear(8, 3),
        )


def data(rank: int, step: int) -> tuple[Tensor, Tensor]:
    """Return one rank's inputs and targets of a step."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(6, 10, generator=g), torch.randn(6, 3, generator=g)


def flat(model: nn.Module) -> Tensor:
    """Return all parameters as one tensor."""
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])
