"""Keras on PyTorch: `fit` with a step of one's own. Lines marked with + are Stenograd's.

torchrun --nproc-per-node 2 examples/keras_fit.py
"""

from __future__ import annotations

import json
import os
from typing import Any

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from sklearn.datasets import load_digits

import stenograd  # +


class Classifier(keras.Sequential):
    """Steps by an optimizer of torch, because Keras's own are none."""

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        self.torch_optimizer.zero_grad()
        predicted = self(x, training=True)
        loss = self.compute_loss(y=y, y_pred=predicted)
        loss.backward()  # gradients are averaged over all ranks here
        self.torch_optimizer.step()
        return self.compute_metrics(x, y, predicted)


world = stenograd.init()  # +
digits = load_digits()
size = len(digits.target) // world.world_size  # + as many on each rank, which makes as many steps
share = slice(world.rank, size * world.world_size, world.world_size)  # + each rank its share of the data
x, y = (digits.data / 16).astype("float32")[share], digits.target[share]

keras.utils.set_random_seed(0)
model = Classifier([keras.Input((64,)), keras.layers.Dense(128, "relu"), keras.layers.Dense(10)])
model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
model.torch_optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sync = stenograd.distribute(model, model.torch_optimizer, "topk:ratio=0.05")  # +

with sync:  # + leaves the ranks' process group at its end
    model.fit(x, y, batch_size=32, epochs=3, verbose=0)
accuracy = model.evaluate(x, y, verbose=0)[1]
found = {"accuracy": accuracy, "steps": sync.step, "sent": sync.traffic.moved_bytes}
print(json.dumps(found | {"norm": [p.norm().item() for p in model.parameters()]}))
