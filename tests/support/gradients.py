"""Gradients of ranks that one process simulates."""

import torch


def ranks_of(world, numel, seed=0, dtype=torch.float32):
    """Return normal numbers for each rank, flat, drawn in float32."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(numel, generator=generator).to(dtype) for _ in range(world)]
