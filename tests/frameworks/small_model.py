"""The model that adapters are tested with, and what methods send of it."""

import hashlib
import json

import torch
import torch.distributed as dist
from torch import nn

ELEMENTS = 64 * 96 + 96 + 96 * 64 + 64

# What 22 steps send, in multiples of the model: 5 % of its elements take 2 to 6 bytes each; signs take a bit,
# and biases and scales little more; rank 1 takes a row and a column of each matrix; rounds are 5 and 2, and 8
# bytes of flags each.
SENT_IN_22_STEPS = [
    ("topk:ratio=0.05", 0.025 * 22, 0.075 * 22),
    ("sign", 22 / 32, 22 / 16),
    ("powersgd:rank=1", 0.01 * 22, 0.03 * 22),
    ("local:every=4", 5, 5.01),
    ("diloco:every=10", 2, 2.01),
]


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64))


def flat(model):
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def uneven(step, rank, size=64):
    """A batch whose number of rows differs from rank to rank and from step to step."""
    g = torch.Generator().manual_seed(1000 * step + rank)
    n = 1 + (3 * step + 5 * rank) % 7
    return torch.randn(n, size, generator=g), torch.randn(n, size, generator=g)


def by_one_process(model, steps, ranks, accumulate, lr):
    """Train on all ranks' uneven batches together; return how far the weights moved, and the model."""
    before, optimizer = flat(model), torch.optim.SGD(model.parameters(), lr=lr)
    size = next(model.parameters()).shape[1]
    for first in range(0, steps, accumulate):
        batches = [uneven(s, r, size) for s in range(first, first + accumulate) for r in range(ranks)]
        x, y = (torch.cat(kind) for kind in zip(*batches, strict=True))
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
    return (flat(model) - before).abs().max().item(), model


def digest(model):
    return hashlib.sha256(flat(model).numpy().tobytes()).hexdigest()


def end(answer):
    """Print what a rank found, and leave the group, as PyTorch asks of a program that has one when it ends.

    Where the group was left to the interpreter's own end, a run once ended with SIGABRT after all its work.
    """
    print(json.dumps(answer), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
