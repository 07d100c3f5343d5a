"""What the drills share: a small model in several buckets, and its data."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["BUCKET_BYTES", "METHODS", "data", "flat", "mlp", "table"]

BUCKET_BYTES = 600  # six buckets; the two larger matrices are one each

# Random sparsification holds gradients back for 1/ratio steps: with a ratio of 0.1 the training diverges.
METHODS = {
    "dense": "dense",
    "fp16": "fp16",
    "fp16+feedback": "fp16:feedback=true",
    "bf16": "bf16",
    "topk": "topk:ratio=0.1",
    "topk, sparse all-reduce": "topk:ratio=0.1,reduce=regions",
    "topk, dense below 20": "topk:ratio=0.1,dense_below=20,clip_norm=1.0",
    "threshold": "threshold:value=0.01",
    "randomk": "randomk:ratio=0.5",
    "randomblock": "randomblock:ratio=0.5",
    "sign": "sign:dense_below=0",
    "sign, majority": "sign:majority=true,block=64,dense_below=20",
    "qsgd": "qsgd:bits=4",
    "powersgd": "powersgd:rank=2",
    "powersgd, cold": "powersgd:rank=1,warm_start=false",
}


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


def table(header: list[str], rows: list[list[object]]) -> str:
    """Return rows of text under a header, in columns."""
    text = [header, *([str(cell) for cell in row] for row in rows)]
    widths = [max(len(row[i]) for row in text) for i in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in text]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])
