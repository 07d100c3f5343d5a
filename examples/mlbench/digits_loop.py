"""The loop that the examples share: eight epochs on this rank's share of scikit-learn's digits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from stenograd import tasks
from stenograd.mlbench import initialize_backends, partition_dataset_by_rank
from stenograd.tasks import batches, steps_per_epoch

EPOCHS, GLOBAL_BATCH = 8, 32


def train(
    make: Callable[[int, nn.Module], Any], *, dtype: torch.dtype = torch.float32, with_closure: bool = False
) -> None:
    """Train the model that `make(world_size, model)` returns an optimizer for, and print its accuracy.

    Args:
        make: returns the optimizer.
        dtype: of the model and its inputs.
        with_closure: hand a closure to step, instead of computing gradients before it.
    """
    with initialize_backends("gloo") as (rank, size, _):
        task = tasks.load("digits")
        samples = torch.tensor(partition_dataset_by_rank(range(task.train_size), rank, size))
        model = task.model(seed=0).to(dtype)
        optimizer = make(size, model)
        batch = max(1, GLOBAL_BATCH // size)
        steps = steps_per_epoch(task.train_size, size, batch, None)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * steps)
        backward = getattr(optimizer, "backward_loss", torch.Tensor.backward)
        for epoch in range(EPOCHS):
            for chosen in batches(samples, batch, epoch=epoch, seed=0, shuffle=True, steps=steps):
                x, y = task.train_batch(chosen)

                def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(model(x.to(dtype)).float(), y)
                    backward(loss)
                    return loss

                if with_closure:
                    optimizer.step(closure)
                else:
                    closure()
                    optimizer.step()
                scheduler.step()
        x, y = task.eval_batch(torch.arange(task.eval_size))
        with torch.no_grad():
            accuracy = (model(x.to(dtype)).argmax(1) == y).float().mean().item()
        if rank == 0:
            sent = getattr(optimizer, "traffic", None)
            told = f" sent {sent.moved_bytes / 1e6:.2f} MB a rank" if sent else ""
            print(f"{type(optimizer).__name__} on {size} ranks: accuracy {100 * accuracy:.2f} %{told}")
