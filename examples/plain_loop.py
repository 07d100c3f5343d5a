"""A plain PyTorch loop, made data-parallel by the lines marked with +.

python examples/plain_loop.py, or torchrun --nproc-per-node 2 examples/plain_loop.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

import stenograd  # +

torch.manual_seed(0)
world = stenograd.init()  # +
digits = load_digits()
size = len(digits.target) // world.world_size  # + as many on each rank, which makes as many steps
share = slice(world.rank, size * world.world_size, world.world_size)  # + each rank its share of the data
x = torch.tensor(digits.data, dtype=torch.float32)[share] / 16
y = torch.tensor(digits.target)[share]

model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
sync = stenograd.distribute(model, optimizer, "topk:ratio=0.05")  # +

for epoch in range(5):
    for xs, ys in zip(x.split(32), y.split(32), strict=True):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(xs), ys)
        loss.backward()  # gradients are averaged over all ranks here
        optimizer.step()
    if world.rank == 0:
        accuracy = (model(x).argmax(1) == y).float().mean().item()
        print(f"epoch {epoch} accuracy {accuracy:.3f} sent {sync.traffic.moved_bytes / 1e6:.2f} MB")
