"""Time and bytes of one step in each mode: python benchmark.py -w 2, or mpiexec -n 2 python benchmark.py."""

from __future__ import annotations

import argparse
import multiprocessing
import time

import torch
from model import OPTIONS, device_of, train_one_batch

from stenograd.singa import SGD, DistOpt, NcclIdHolder
from stenograd.tasks.models import mnist_cnn


def benchmark(
    args: argparse.Namespace,
    nccl_id: NcclIdHolder | None = None,
    local_rank: int | None = None,
    world_size: int | None = None,
) -> None:
    """Print a line for each mode on random images."""
    for dist_option in OPTIONS:
        sgd = DistOpt(SGD(lr=0.005, momentum=0.9), nccl_id, local_rank, world_size)
        torch.set_num_threads(1)
        dev = device_of(sgd)
        model = mnist_cnn().to(dev)
        sgd.synchronize(model)
        x, y = (
            torch.rand(args.batch_size, 1, 28, 28, device=dev),
            torch.arange(args.batch_size, device=dev) % 10,
        )
        spars = 0.01 if dist_option == "sparseTopK" else 0.001
        for step in range(args.warmup + args.steps):
            if step == args.warmup:
                synchronize(dev)
                start, sent = time.perf_counter(), sgd.traffic.moved_bytes
            train_one_batch(sgd, model, x, y, dist_option, spars, args.threshold)
        synchronize(dev)
        step_ms = 1e3 * (time.perf_counter() - start) / args.steps
        sent_mb = (sgd.traffic.moved_bytes - sent) / args.steps / 1e6
        if sgd.global_rank == 0:
            images = args.batch_size * sgd.world_size / step_ms * 1e3
            print(
                f"{dist_option:16} {step_ms:9.2f} ms/step {images:9.0f} images/s {sent_mb:9.4f} MB/step",
                flush=True,
            )
        sgd.close()


def synchronize(dev: torch.device) -> None:
    """Wait for the device, so that its work is timed."""
    if dev.type == "cuda":
        torch.cuda.synchronize(dev)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "-w", "--world-size", type=int, default=0, help="processes to start; 0: by the launcher"
    )
    parser.add_argument("-b", "--batch-size", type=int, default=64)
    parser.add_argument("-t", "--threshold", type=int, default=50000)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--warmup", type=int, default=5)
    args = parser.parse_args()
    if not args.world_size:
        benchmark(args)
    else:
        nccl_id, context = NcclIdHolder(), multiprocessing.get_context("spawn")
        ranks = range(args.world_size)
        process = [context.Process(target=benchmark, args=(args, nccl_id, r, args.world_size)) for r in ranks]
        for p in process:
            p.start()
        for p in process:
            p.join()
