"""Many small parameters: what attaching and a step cost, against DistributedDataParallel in the same run.

    python benchmarks/small_tensors.py [--tensors 10000] [--turns 5]

Two ranks on this machine take turns with plain training, DDP, and Stenograd's methods. Each tensor has four
elements, so there is next to nothing to send, and the time is that of handling tensors.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import stenograd
from stenograd.testing.pool import RankPool

METHODS = ("dense", "topk:ratio=0.01")
STEPS = 5


class Small(nn.Module):
    """The sum of many parameters of four elements."""

    def __init__(self, tensors: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(tensors))

    def forward(self, x: Tensor) -> Tensor:
        """Return one number."""
        return torch.stack([w.sum() for w in self.weights]).sum() * x.sum()


def measure(rank: int, how: str, tensors: int) -> tuple[float, float]:
    """Return seconds of attaching, and the median seconds of a step."""
    model = Small(tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    start = time.perf_counter()
    net: nn.Module = DistributedDataParallel(model) if how == "DDP" else model
    sync = stenograd.distribute(model, optimizer, how) if how in METHODS else None
    attach_s, steps_s = time.perf_counter() - start, []
    for _ in range(STEPS):
        start = time.perf_counter()
        optimizer.zero_grad()
        net(torch.ones(4)).backward()
        optimizer.step()
        steps_s.append(time.perf_counter() - start)
    if sync is not None:
        sync.close()
    return attach_s, statistics.median(steps_s)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tensors", type=int, default=10_000)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    rivals = ("no exchange", "DDP", *METHODS)
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in rivals}
    with RankPool(2) as pool:
        for name in METHODS:
            pool.run(2, measure, name, 10)  # imports and kernels
        for _ in range(options.turns):
            for name in rivals:
                found[name].append(pool.run(2, measure, name, options.tensors, timeout_s=300)[0])
    medians = {
        name: [statistics.median(column) for column in zip(*rows, strict=True)]
        for name, rows in found.items()
    }
    print(f"{options.tensors} tensors of 4 elements, 2 ranks, medians of {options.turns} turns")
    print(f"{'':16}{'attach, s':>10}{'of DDP':>8}{'step, ms':>10}{'of DDP':>8}")
    ddp = medians["DDP"]
    for name, (attach_s, step_s) in medians.items():
        shares = attach_s / ddp[0], step_s / ddp[1]
        print(f"{name:16}{attach_s:10.2f}{shares[0]:8.2f}{step_s * 1e3:10.1f}{shares[1]:8.2f}")


if __name__ == "__main__":
    main()
