"""The structure of Heat's ImageNet script on digits: warm-up, a rate that falls on plateaus, and a scaler.

torchrun --nproc-per-node 4 examples/heat/plateau_digits.py, or without torchrun on one process
"""

from __future__ import annotations

import torch
from torch import nn

import stenograd
from stenograd import heat, tasks
from stenograd.heat import optim
from stenograd.tasks import batches, steps_per_epoch

EPOCHS, WARMUP, BATCH = 20, 3, 16

world = stenograd.init(timeout_s=60)
rank, size = world.rank, world.world_size
task = tasks.load("digits")
model = task.model(seed=0)
rate = 0.0125 * size
optimizer = optim.SGD(model.parameters(), lr=rate, momentum=0.9, weight_decay=1e-4)
daso = optim.DASO(
    local_optimizer=optimizer,
    total_epochs=EPOCHS,
    max_global_skips=4,
    stability_level=0.05,
    node_size=2 if size % 2 == 0 else 1,
    average_buffers=True,
)
network = heat.nn.DataParallelMultiGPU(model, daso)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
daso.add_scaler(scaler)
plateau = optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=5, threshold=0.05, min_lr=1e-4)
samples = tasks.shard(task.train_size, rank, size, shuffle=True, seed=0)
steps = steps_per_epoch(task.train_size, size, BATCH, None)
daso.last_batch = steps - 1
for epoch in range(EPOCHS):
    for number, chosen in enumerate(batches(samples, BATCH, epoch=epoch, seed=0, shuffle=True, steps=steps)):
        if epoch < WARMUP:
            optimizer.param_groups[0]["lr"] = rate * (1 + number + epoch * steps) / (WARMUP * steps)
        x, y = task.train_batch(chosen)
        daso.zero_grad()
        scaler.scale(nn.functional.cross_entropy(network(x), y)).backward()
        daso.step()
    x, y = task.eval_batch(torch.arange(task.eval_size))
    with torch.no_grad():
        scores = network(x)
    loss = nn.functional.cross_entropy(scores, y).item()
    daso.epoch_loss_logic(loss, loss_globally_averaged=True)  # all ranks judge the same samples
    plateau.step(loss)
if rank == 0:
    accuracy = (scores.argmax(1) == y).float().mean().item()
    sent = daso.traffic_between_nodes.moved_bytes / 1e6
    print(f"DASO on {size} ranks: accuracy {100 * accuracy:.2f} %, {sent:.2f} MB to other nodes")
daso.close()
