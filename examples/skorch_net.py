"""skorch: through its AccelerateMixin. Lines marked with + are Stenograd's.

torchrun --nproc-per-node 2 examples/skorch_net.py
"""

from __future__ import annotations

import json

import numpy as np
import torch
from accelerate import Accelerator
from skorch import NeuralNetClassifier
from skorch.hf import AccelerateMixin
from sklearn.datasets import load_digits
from torch import nn

import stenograd.accelerate  # +


class Net(AccelerateMixin, NeuralNetClassifier):
    """Trains on all ranks: Accelerate gives each its share of every epoch."""


class Digits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


digits = load_digits()
x, y = (digits.data / 16).astype(np.float32), digits.target
torch.manual_seed(0)

accelerator = Accelerator(cpu=True)
attached = stenograd.accelerate.use(accelerator, "topk:ratio=0.05")  # +
net = Net(
    Digits,
    accelerator=accelerator,
    criterion=nn.CrossEntropyLoss,
    lr=0.1,
    optimizer__momentum=0.9,
    batch_size=32,
    max_epochs=3,
    train_split=None,  # skorch would otherwise split off its validation data
    iterator_train__shuffle=True,
)
net.fit(x, y)
found = {"accuracy": float(net.score(x, y)), "steps": attached.sync.step, "sent": attached.traffic.moved_bytes}
print(json.dumps(found | {"norm": [p.norm().item() for p in net.module_.parameters()]}))
