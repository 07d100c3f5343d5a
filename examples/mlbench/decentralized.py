"""Train on digits with DecentralizedSGD: each rank averages its weights with its two neighbours on a ring.

torchrun --nproc-per-node 4 examples/mlbench/decentralized.py, or without torchrun on one process
"""

from __future__ import annotations

import torch
from torch import nn

from stenograd import tasks
from stenograd.mlbench.backends import global_average, initialize_backends
from stenograd.mlbench.decentralized import DecentralizedSGD
from stenograd.mlbench.partition import partition_dataset_by_rank
from stenograd.mlbench.schedulers import MultiStepLRLinearWarmUp
from stenograd.mlbench.tracker import Tracker, time_to_accuracy_goal

EPOCHS, BATCH = 10, 16

with initialize_backends("gloo") as (rank, size, _):
    task = tasks.load("digits")
    samples = torch.tensor(partition_dataset_by_rank(range(task.train_size), rank, size))
    steps = task.train_size // size // BATCH
    model = task.model(seed=0)  # equal weights on all ranks
    ring = {(rank - 1) % size, (rank + 1) % size} - {rank}
    optimizer = DecentralizedSGD(rank, ring, model, lr=0.05, momentum=0.9, nesterov=True)
    warm, late = steps, [steps * EPOCHS * 3 // 4]
    scheduler = MultiStepLRLinearWarmUp(optimizer, 0.1, late, 0.05, warmup_init_lr=0.01, warmup_duration=warm)
    tracker = Tracker([], run_id=0, rank=rank, goal=time_to_accuracy_goal(95))
    shuffler = torch.Generator().manual_seed(rank)
    for _epoch in range(EPOCHS):
        tracker.train()
        for batch in samples[torch.randperm(len(samples), generator=shuffler)].split(BATCH)[:steps]:
            tracker.batch_start()
            x, y = task.train_batch(batch)
            tracker.record_batch_load()
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            tracker.record_batch_fwd_pass()
            loss.backward()
            tracker.record_batch_backprop()
            optimizer.step(tracker=tracker)
            tracker.batch_end()
            scheduler.step()
        tracker.validation()
        x, y = task.eval_batch(torch.arange(task.eval_size))
        with torch.no_grad():
            right = (model(x).argmax(1) == y).sum()
        accuracy = 100 * global_average(right, len(y)).item()  # of the ranks' own models
        tracker.record_stat("global_Prec@1", accuracy)
        tracker.epoch_end()
    if rank == 0:
        print(f"accuracy {accuracy:.2f} % sent {optimizer.traffic.moved_bytes / 1e6:.1f} MB a rank")
        print(tracker.goal_result)
