"""Train with Heat's DASO on MNIST, or on digits: four workers as two nodes of two.

torchrun --nproc-per-node 4 examples/heat/daso_mnist.py [--data DIR with the IDX files]
"""

from __future__ import annotations

import argparse
import time

import torch
from torch import nn

import stenograd
from stenograd import heat, tasks
from stenograd.tasks import batches, steps_per_epoch

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", help="folder with MNIST's four IDX files; without it, scikit-learn's digits")
parser.add_argument("--epochs", type=int, default=10)
parser.add_argument("--node-size", type=int, help="workers a node; by default 2, if they fill the nodes")
args = parser.parse_args()

world = stenograd.init(timeout_s=60)
rank, size = world.rank, world.world_size
task = tasks.load("mnist" if args.data else "digits", args.data)
model = task.model(seed=rank)  # DASO takes rank 0's weights
rate = 0.01 if args.data else 0.1
optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-5)
daso = heat.DASO(
    optimizer,
    total_epochs=args.epochs,
    warmup_epochs=2,
    cooldown_epochs=2,
    node_size=args.node_size or (2 if size % 2 == 0 else 1),
)
network = heat.DataParallelMultiGPU(model, daso)
samples = tasks.shard(task.train_size, rank, size, shuffle=True, seed=0)
daso.last_batch = steps_per_epoch(task.train_size, size, 32, None) - 1
for epoch in range(args.epochs):
    start, total = time.perf_counter(), 0.0
    for chosen in batches(samples, 32, epoch=epoch, seed=0, shuffle=True, steps=daso.last_batch + 1):
        x, y = task.train_batch(chosen)
        daso.zero_grad()
        loss = nn.functional.cross_entropy(network(x), y)
        loss.backward()
        daso.step()
        total += loss.item()
    skips = (daso.global_skip, daso.local_skip, daso.batches_to_wait)
    daso.epoch_loss_logic(total / (daso.last_batch + 1))
    x, y = task.eval_batch(torch.arange(task.eval_size))
    with torch.no_grad():
        accuracy = (network(x).argmax(1) == y).float().mean().item()
    if rank == 0:
        sent = daso.traffic_between_nodes.moved_bytes / 1e6
        print(
            f"epoch {epoch}: skips {skips}, accuracy {100 * accuracy:.2f} %, "
            f"{time.perf_counter() - start:.1f} s, {sent:.2f} MB to other nodes so far",
            flush=True,
        )
daso.close()
