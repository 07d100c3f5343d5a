"""Counted bytes against the network interface's own counter, per method.

Every rank must have an interface of its own (one rank a host, or one a network namespace):

    torchrun --nnodes 2 --nproc-per-node 1 ... benchmarks/count_bytes.py --interface eth0

The counter includes packet headers and acknowledgements, which weigh more the less a method sends.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torch import nn

import laconic

METHODS = "dense,fp16,topk,sign,qsgd,powersgd,threshold,randomk"
STEPS = 10


def main() -> None:
    """Train a 1.9 M parameter network for some steps under each method and print both counts on rank 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--interface", default="eth0")
    parser.add_argument("--methods", default=METHODS)
    args = parser.parse_args()
    counter = Path(f"/sys/class/net/{args.interface}/statistics/tx_bytes")
    world = laconic.init(timeout_s=60)
    for name in args.methods.split(","):
        counted, seen = measure(name, counter)
        if world.rank == 0:
            kb = f"counted {counted / STEPS / 1e3:9.1f} kB a step, interface {seen / STEPS / 1e3:9.1f} kB"
            print(f"{name:12s} {kb}, ratio {seen / counted:.3f}", flush=True)


def measure(method: str, counter: Path) -> tuple[int, int]:
    """Return the bytes counted and the bytes that the interface sent."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(784, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(32, 784)
    with laconic.distribute(model, optimizer, method, timeout_s=60) as sync:
        for step in range(STEPS + 1):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if step == 0:  # attaching and warming up are not counted
                counted, seen = sync.traffic.moved_bytes, int(counter.read_text())
        time.sleep(0.3)  # the last packets
        return sync.traffic.moved_bytes - counted, int(counter.read_text()) - seen


if __name__ == "__main__":
    main()
