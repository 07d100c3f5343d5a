"""Ray Train on two CPU workers; the lines marked with + are Stenograd's.

python examples/ray_train.py runs/ray 4 trains for 4 epochs. Called again with 8 it goes on to epoch 8 from
its last checkpoint, and with a third argument on as many workers.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import torch
from ray import train
from ray.train import Checkpoint, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model
from sklearn.datasets import load_digits
from torch import nn

import stenograd  # +


def loop(config: dict[str, int]) -> None:
    context = train.get_context()
    digits, count = load_digits(), context.get_world_size()
    size = len(digits.target) // count  # as many on each rank, which makes as many steps
    share = slice(context.get_world_rank(), size * count, count)
    x = torch.tensor(digits.data, dtype=torch.float32)[share] / 16
    y = torch.tensor(digits.target)[share]

    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = prepare_model(net, parallel_strategy=None)  # on its device, without DistributedDataParallel
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = stenograd.distribute(model, optimizer, "topk:ratio=0.05")  # +
    whole = {"model": model, "optimizer": optimizer, "sync": sync}

    first = 0
    if last := train.get_checkpoint():
        with last.as_directory() as folder:
            first = stenograd.load_checkpoint(folder, **whole).step  # +

    for epoch in range(first, config["epochs"]):
        for xs, ys in zip(x.split(32), y.split(32), strict=True):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(xs), ys)
            loss.backward()  # gradients are averaged over all workers here
            optimizer.step()
        accuracy = (model(x).argmax(1) == y).float().mean().item()
        with tempfile.TemporaryDirectory() as folder:
            # Each worker saves its own part, and Ray puts the parts into one folder.
            stenograd.save_checkpoint(folder, step=epoch + 1, **whole)  # +
            metrics = {"epoch": epoch + 1, "accuracy": accuracy, "megabytes": sync.traffic.moved_bytes / 1e6}
            train.report(metrics, checkpoint=Checkpoint.from_directory(folder))
    sync.close()  # +


if __name__ == "__main__":
    place, epochs, workers = Path(sys.argv[1]).absolute(), int(sys.argv[2]), int((*sys.argv, 2)[3])
    trainer = TorchTrainer(
        loop,
        train_loop_config={"epochs": epochs},
        scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.5}),
        torch_config=TorchConfig(backend="gloo"),
        run_config=RunConfig(name=place.name, storage_path=str(place.parent)),
    )
    print(trainer.fit().metrics)
