"""What the replica guard costs: a check against the steps between two checks, on two local ranks.

python benchmarks/guard.py [--every 100] [--methods dense,topk] [--models mlp,cnn]
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time

import torch
from models import WORKS, loss

import stenograd
from stenograd.launch.process_group import run_local
from stenograd.sync.replica_guard import ReplicaGuard

_TURNS, _STEPS = 7, 10


def measure(model_name: str, method: str, rank: int) -> tuple[float, float, int]:
    """Return milliseconds of a step and of a check, medians of turns about, and the number of parameters."""
    model, x, y = WORKS[model_name].make(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    steps, checks = [], []
    with stenograd.distribute(model, optimizer, method) as sync:
        guard = ReplicaGuard(model)
        for turn in range(_TURNS):
            for _ in range(_STEPS):
                start = time.perf_counter()
                optimizer.zero_grad()
                loss(model(x), y).backward()
                optimizer.step()
                steps.append(time.perf_counter() - start)
            start = time.perf_counter()
            guard.check(sync.step)
            checks.append(time.perf_counter() - start)
            if turn == 0:  # kernels are loaded now
                steps, checks = [], []
    count = sum(p.numel() for p in model.parameters())
    return statistics.median(steps) * 1e3, statistics.median(checks) * 1e3, count


def main() -> None:
    """Measure and print one line a model and method."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--every", type=int, default=100)
    parser.add_argument("--methods", default="dense,topk")
    parser.add_argument("--models", default="mlp,cnn")
    args = parser.parse_args()
    if "RANK" not in os.environ:
        raise SystemExit(run_local([sys.executable, *sys.argv], 2))
    rank = stenograd.init().rank
    for name in args.models.split(","):
        for method in args.methods.split(","):
            step_ms, check_ms, count = measure(name, method, rank)
            share = 100 * check_ms / (args.every * step_ms)
            if rank == 0:
                print(
                    f"{name:4s} {count / 1e6:6.2f} M parameters  {method:6s} step {step_ms:8.2f} ms  "
                    f"check {check_ms:6.2f} ms  {share:6.3f} % at check_every={args.every}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
