"""The network, the data and the training step of SINGA's MNIST example."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stenograd.singa import DistOpt
from stenograd.tasks import Task, load

OPTIONS = ("plain", "half", "partialUpdate", "sparseTopK", "sparseThreshold")


def load_dataset(data: str | None) -> Task:
    """Return MNIST from a folder with its four files, or scikit-learn's small digits if there is none."""
    return load("mnist" if data else "digits", data)


def create_model(task: Task, seed: int) -> nn.Module:
    """Return the task's network, its weights drawn as SINGA's layers draw them.

    Weights are normal with variance 2 / (inputs of a unit + number of units), and biases are zero.
    """
    model, generator = task.model(seed), torch.Generator().manual_seed(seed)
    for layer in model:
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            std = (2 / (layer.weight[0].numel() + len(layer.weight))) ** 0.5
            nn.init.normal_(layer.weight, std=std, generator=generator)
            nn.init.zeros_(layer.bias)
    return model


def synchronize(tensor: Tensor, dist_opt: DistOpt) -> None:
    """Make a tensor the mean of all ranks', as the guide does; `dist_opt.synchronize(model)` takes rank 0's.

    The mean of N independent draws has 1/N of their variance, which the guide's first epochs show.
    """
    dist_opt.all_reduce(tensor.data)
    tensor.data /= dist_opt.world_size


def data_partition(
    dataset_x: Tensor, dataset_y: Tensor, global_rank: int, world_size: int
) -> tuple[Tensor, Tensor]:
    """Return this rank's part: equally many samples on each rank, the remainder is dropped."""
    data_per_rank = dataset_x.shape[0] // world_size
    idx_start, idx_end = global_rank * data_per_rank, (global_rank + 1) * data_per_rank
    return dataset_x[idx_start:idx_end], dataset_y[idx_start:idx_end]


def train_one_batch(
    sgd: DistOpt, model: nn.Module, x: Tensor, y: Tensor, dist_option: str, spars: float, threshold: int
) -> tuple[Tensor, Tensor]:
    """Do backpropagation, communication and the update; return the scores and the loss."""
    out = model(x)
    loss = nn.functional.cross_entropy(out, y)
    if dist_option == "plain":
        sgd.backward_and_update(loss, threshold)
    elif dist_option == "half":
        sgd.backward_and_update_half(loss, threshold)
    elif dist_option == "partialUpdate":
        sgd.backward_and_partial_update(loss, threshold)
    else:
        sgd.backward_and_sparse_update(loss, threshold, spars, topK=dist_option == "sparseTopK")
    return out.detach(), loss.detach()


def device_of(sgd: DistOpt) -> torch.device:
    """Return this rank's GPU if there are any, else the CPU."""
    gpus = torch.cuda.device_count()
    return torch.device("cuda", sgd.local_rank % gpus) if gpus else torch.device("cpu")
