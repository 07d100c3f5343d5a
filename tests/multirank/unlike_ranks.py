"""What test_unlike_processors.py runs on every rank: prints a digest of the averages for each method."""

import hashlib
import json
import sys

import numpy as np
import torch
from torch import nn

import stenograd


def digest(method, dtype, rank):
    """Average 6 gradients of a model that stays as it is: optimizers' own steps may round in another way."""
    rng = np.random.default_rng(rank)
    model = nn.Sequential(nn.Linear(33, 48), nn.ReLU(), nn.Linear(48, 7)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    found = hashlib.sha256()
    with stenograd.distribute(model, optimizer, method, timeout_s=60) as sync:
        for _ in range(6):
            x, y = (torch.from_numpy(rng.standard_normal((8, n))).to(dtype) for n in (33, 7))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            for p in model.parameters():
                found.update(p.grad.numpy().tobytes())
        assert sync.skipped == 0
    return found.hexdigest()


if __name__ == "__main__":
    torch.set_num_threads(1)
    rank = stenograd.init(timeout_s=60).rank
    cases = [(method, kind) for method in sys.argv[1:] for kind in ("float64", "float32")]
    print(json.dumps([[*case, digest(case[0], getattr(torch, case[1]), rank)] for case in cases]))
