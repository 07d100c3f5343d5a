"""PyTorch Ignite: the hook of the model that `auto_model` wraps. Lines marked with + are Stenograd's.

torchrun --nproc-per-node 2 examples/ignite_loop.py
"""

from __future__ import annotations

import json

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events, create_supervised_trainer
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

import stenograd  # +


def training(rank: int) -> None:
    digits = load_digits()
    x, y = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
    loader = idist.auto_dataloader(TensorDataset(x, y), batch_size=64)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    model = idist.auto_model(net)  # DistributedDataParallel
    sync = stenograd.ddp.register(model, "topk:ratio=0.05")  # +
    optimizer = idist.auto_optim(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    trainer = create_supervised_trainer(model, optimizer, nn.functional.cross_entropy, device=idist.device())

    @trainer.on(Events.EPOCH_STARTED)
    def shuffle(engine: Engine) -> None:
        loader.sampler.set_epoch(engine.state.epoch)

    with sync:  # + leaves the ranks' process group at its end
        trainer.run(loader, max_epochs=3)
    accuracy = (net(x).argmax(1) == y).float().mean().item()
    found = {"accuracy": accuracy, "steps": sync.step, "sent": sync.traffic.moved_bytes}
    print(json.dumps(found | {"norm": [p.norm().item() for p in net.parameters()]}))


if __name__ == "__main__":
    with idist.Parallel(backend="gloo") as parallel:
        parallel.run(training)
