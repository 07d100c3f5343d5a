"""skorch: a net whose optimizer is distributed when it is made. Lines marked with + are Stenograd's.

torchrun --nproc-per-node 2 examples/skorch_net.py
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from skorch import NeuralNetClassifier
from torch import nn

import stenograd  # +


class Net(NeuralNetClassifier):
    def initialize_optimizer(self, *args: Any, **options: Any) -> Any:
        made = super().initialize_optimizer(*args, **options)
        self.sync = stenograd.distribute(self.module_, self.optimizer_, "topk:ratio=0.05")  # +
        return made


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


world = stenograd.init()  # +
digits = load_digits()
size = len(digits.target) // world.world_size  # + as many on each rank, which makes as many steps
share = slice(world.rank, size * world.world_size, world.world_size)  # + each rank its share of the data
x, y = (digits.data / 16).astype(np.float32)[share], digits.target[share]

torch.manual_seed(0)
net = Net(
    Digits,
    criterion=nn.CrossEntropyLoss,
    lr=0.1,
    optimizer__momentum=0.9,
    batch_size=32,
    max_epochs=3,
    train_split=None,  # else each rank would hold back a fifth of its share
    verbose=0,
)
try:  # +
    net.fit(x, y)
finally:  # +
    net.sync.close()  # + leaves the ranks' process group
found = {"accuracy": float(net.score(x, y)), "steps": net.sync.step, "sent": net.sync.traffic.moved_bytes}
print(json.dumps(found | {"norm": [p.norm().item() for p in net.module_.parameters()]}))
