"""Training on this rank's part of the data; started by mnist_multiprocess.py or mnist_dist.py."""

from __future__ import annotations

import argparse
import os
import time

import numpy as np
import torch
from model import OPTIONS, create_model, data_partition, device_of, load_dataset, synchronize, train_one_batch
from torch import Tensor, nn

from stenograd.singa import DistOpt, NcclIdHolder, opt


def options(description: str) -> argparse.ArgumentParser:
    """Return the parser of the options that all scripts share."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument(
        "--data", metavar="DIR", help="folder with MNIST's four files; small digits if left out"
    )
    parser.add_argument("-d", "--dist-option", choices=OPTIONS, default="plain")
    parser.add_argument(
        "-s", "--spars", type=float, default=0.05, help="share (TopK) or smallest magnitude sent"
    )
    parser.add_argument("-m", "--max-epoch", type=int, help="number of epochs; MNIST: 10")
    parser.add_argument("-b", "--batch-size", type=int, help="samples a rank and step; MNIST: 64")
    parser.add_argument("-l", "--learning-rate", type=float, help="MNIST: 0.005")
    parser.add_argument("-t", "--threshold", type=int, default=50000, help="of the fusion rule, in elements")
    parser.add_argument("--seed", type=int, default=0, help="of the initial parameters")
    return parser


def train_mnist_cnn(
    args: argparse.Namespace,
    nccl_id: NcclIdHolder | None = None,
    local_rank: int | None = None,
    world_size: int | None = None,
) -> None:
    """Train; the three last arguments come from mnist_multiprocess.py, and from the launcher otherwise."""
    task = load_dataset(args.data)
    recipe = task.recipe
    sgd = opt.SGD(
        lr=recipe.lr if args.learning_rate is None else args.learning_rate,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
    )
    sgd = DistOpt(sgd, nccl_id=nccl_id, local_rank=local_rank, world_size=world_size)
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // sgd.world_size))
    train = data_partition(*task.train_batch(torch.arange(task.train_size)), sgd.global_rank, sgd.world_size)
    test = data_partition(*task.eval_batch(torch.arange(task.eval_size)), sgd.global_rank, sgd.world_size)
    model = create_model(task, args.seed + sgd.global_rank).to(device_of(sgd))
    for p in model.parameters():
        synchronize(p, sgd)
    batch_size = args.batch_size or recipe.batch_size
    shuffle, steps = np.random.default_rng(0), len(train[0]) // batch_size
    for epoch in range(recipe.epochs if args.max_epoch is None else args.max_epoch):
        start, sent = time.perf_counter(), sgd.traffic.moved_bytes
        say(sgd, f"Starting Epoch {epoch}:")
        index = torch.from_numpy(shuffle.permutation(len(train[0])))[: steps * batch_size]
        loss, accuracy = train_epoch(sgd, model, train, index.split(batch_size), args)
        sent = sgd.traffic.moved_bytes - sent
        say(sgd, f"Training loss = {loss:.6f}, training accuracy = {accuracy:.6f}")
        if args.dist_option == "partialUpdate":
            sgd.finalize(model)  # so that all ranks evaluate one model
        accuracy = evaluate(sgd, model, test, batch_size)
        elapsed_s = time.perf_counter() - start
        say(sgd, f"Evaluation accuracy = {accuracy:.6f}, Elapsed Time = {elapsed_s:.6f}s")
        say(sgd, f"Sent = {sent / steps / 1e6:.6f} MB per step")


def train_epoch(
    sgd: DistOpt,
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    batches: tuple[Tensor, ...],
    args: argparse.Namespace,
) -> tuple[float, float]:
    """Return the loss, summed over batches and ranks, and the accuracy."""
    dev, totals, samples = device_of(sgd), torch.zeros(2, device=device_of(sgd)), 0
    model.train()
    for index in batches:
        x, y = data[0][index].to(dev), data[1][index].to(dev)
        out, loss = train_one_batch(sgd, model, x, y, args.dist_option, args.spars, args.threshold)
        totals += torch.stack([loss, (out.argmax(1) == y).sum()])
        samples += len(y)
    return summed(sgd, totals, samples)


def evaluate(sgd: DistOpt, model: nn.Module, data: tuple[Tensor, Tensor], batch_size: int) -> float:
    """Return the accuracy on whole batches of all ranks' test data."""
    dev, totals = device_of(sgd), torch.zeros(2, device=device_of(sgd))
    samples = len(data[0]) // batch_size * batch_size
    model.eval()
    with torch.no_grad():
        for x, y in zip(data[0][:samples].split(batch_size), data[1].split(batch_size), strict=False):
            totals[1] += (model(x.to(dev)).argmax(1) == y.to(dev)).sum()
    return summed(sgd, totals, samples)[1]


def summed(sgd: DistOpt, totals: Tensor, samples: int) -> tuple[float, float]:
    """Return the loss summed over the ranks, and the share of correct samples in all ranks' samples."""
    sgd.all_reduce(totals)
    loss, corrects = totals.tolist()
    return loss, corrects / (samples * sgd.world_size)


def say(sgd: DistOpt, line: str) -> None:
    """Print on rank 0."""
    if sgd.global_rank == 0:
        print(line, flush=True)
