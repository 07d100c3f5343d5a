"""Time per training step: DistributedDataParallel against Stenograd's methods, interleaved in one run.

Alone it starts two local ranks; under torchrun, mpiexec or hand-set variables it uses those. Prints medians
on rank 0, and with --out writes them as JSON:

    python benchmarks/step_time.py --model mlp --methods dense,fp16,topk,sign,powersgd --rounds 5 --steps 10
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import stenograd
from stenograd.launch.process_group import run_local
from stenograd.sync.gradients import DEFAULT_BUCKET_BYTES
from stenograd.tasks.models import mnist_cnn


def build(name: str) -> tuple[nn.Module, Tensor]:
    """Return a model with the same weights on every rank, and its input."""
    torch.manual_seed(0)
    if name == "cnn":
        return mnist_cnn(), torch.randn(64, 1, 28, 28)
    sizes = [784, 2048, 2048, 2048, 10]
    layers = [m for a, b in pairwise(sizes) for m in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1]), torch.randn(32, 784)


class Rival:
    """One way to train, with a model of its own."""

    def __init__(self, name: str, model: str, bucket_bytes: int) -> None:
        self.name = name
        self.model, self.x = build(model)
        self.sync: Any = None
        if name.startswith("ddp"):
            self.model = DistributedDataParallel(self.model)
            if name == "ddp-fp16":
                from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

                self.model.register_comm_hook(None, fp16_compress_hook)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        if not name.startswith(("ddp", "none")):
            self.sync = stenograd.distribute(self.model, self.optimizer, name, bucket_bytes=bucket_bytes)

    def steps(self, count: int) -> list[float]:
        """Train and return the milliseconds of each step."""
        out = []
        for _ in range(count):
            start = time.perf_counter()
            self.optimizer.zero_grad()
            self.model(self.x).square().mean().backward()
            self.optimizer.step()
            out.append((time.perf_counter() - start) * 1e3)
        return out


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=["mlp", "cnn"], default="mlp")
    parser.add_argument("--methods", default="none,ddp,dense,ddp-fp16,fp16,topk,sign,powersgd")
    parser.add_argument("--rounds", type=int, default=5, help="interleaved turns of each rival")
    parser.add_argument("--steps", type=int, default=10, help="steps a turn; the first is not counted")
    parser.add_argument("--bucket-bytes", type=int, default=DEFAULT_BUCKET_BYTES)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if "RANK" not in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ and "PMI_RANK" not in os.environ:
        raise SystemExit(run_local([sys.executable, *sys.argv], 2))
    world = stenograd.init()
    rivals = [Rival(name, args.model, args.bucket_bytes) for name in args.methods.split(",")]
    times: dict[str, list[float]] = {r.name: [] for r in rivals}
    for rival in rivals:
        rival.steps(3)
    for _ in range(args.rounds):
        for rival in rivals:
            times[rival.name].append(statistics.median(rival.steps(args.steps)[1:]))
    if world.rank == 0:
        report(args, times, rivals, world.world_size)
    for rival in rivals:
        if rival.sync:
            rival.sync.close()


def report(
    args: argparse.Namespace, times: dict[str, list[float]], rivals: list[Rival], world_size: int
) -> None:
    """Print one line a rival: median of the turns, ratio to DDP, bytes per step."""
    base = statistics.median(times.get("ddp", times[rivals[0].name]))
    steps = 3 + args.rounds * args.steps
    rows = []
    for rival in rivals:
        ms = statistics.median(times[rival.name])
        moved = rival.sync.traffic.moved_bytes / steps / 1e6 if rival.sync else None
        rows.append(
            {"method": rival.name, "ms": round(ms, 2), "ratio": round(ms / base, 3), "moved_MB": moved}
        )
        print(f"{rival.name:24s} {ms:9.2f} ms   {ms / base:6.3f} x DDP   {moved or 0:9.3f} MB a step")
    if args.out:
        machine = {
            "cpu": platform.processor() or platform.machine(),
            "cores": os.cpu_count(),
            "torch": torch.__version__,
        }
        args.out.write_text(
            json.dumps({"model": args.model, "ranks": world_size, "machine": machine, "rows": rows})
        )


if __name__ == "__main__":
    main()
