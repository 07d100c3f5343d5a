"""How long attaching and the first steps take, on 8 ranks of this machine, for every method of the registry.

    python benchmarks/first_step.py [--ranks 8] [METHOD ...]

Bar: with kernels on disk, the first compressed step takes at most twice the median step and 0.5 s.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Sequence

import torch
from torch import nn

import stenograd
from stenograd.catalog.method import for_any_optimizer
from stenograd.testing.pool import RankPool

METHODS = for_any_optimizer()
_STEPS = 12
_SLACK_S = 0.5


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("methods", nargs="*")
    args = parser.parse_args(argv)
    print(f"{args.ranks} ranks, {os.cpu_count()} cores; seconds of the slowest rank")
    print(f"{'method':<12} {'attach':>8} {'first step':>11} {'median step':>12}  within the bar")
    late = 0
    for method in args.methods or METHODS:
        attach, first, median = (max(column) for column in zip(*_run(method, args.ranks), strict=True))
        good = first <= 2 * median + _SLACK_S
        late += not good
        print(
            f"{method:<12} {attach:8.2f} {first:11.3f} {median:12.3f}  {'yes' if good else 'NO'}", flush=True
        )
    return 1 if late else 0


def _run(method: str, count: int) -> list[list[float]]:
    """Return what every rank measured, in processes of its own: kernels are on disk, and none is loaded."""
    with RankPool(count) as pool:
        pool.run(count, _measure, method)  # puts them on disk
    with RankPool(count) as pool:
        return pool.run(count, _measure, method, timeout_s=300)


def _measure(rank: int, method: str) -> list[float]:
    """Attach to a network of a million parameters, and take a few steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, 512))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    start = time.perf_counter()
    sync = stenograd.distribute(model, optimizer, method)
    attach_s, steps_s = time.perf_counter() - start, []
    for _ in range(_STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        model(torch.randn(16, 512)).square().mean().backward()
        optimizer.step()
        steps_s.append(time.perf_counter() - start)
    sync.close()
    return [attach_s, steps_s[0], statistics.median(steps_s)]


if __name__ == "__main__":
    sys.exit(main())
