"""Peak memory of a rank in training, above that of the same training alone, in bytes per parameter.

For each method two local ranks train the 10 M parameter network for some steps in processes of their own:

    python benchmarks/memory.py --rivals ddp dense topk:ratio=0.01 powersgd:rank=4 --out memory.json

A small network is trained first under the same method, so that code and compiled kernels do not count. What
is compared is the peak of the resident memory that the kernel counts (VmHWM), reset in between; Linux only.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from models import WORKS, loss
from rivals import FLOOR, Attached
from torch import nn

import stenograd
from stenograd.catalog.method import for_any_optimizer
from stenograd.launch.process_group import run_local

RIVALS = ["ddp", "ddp-powersgd", *for_any_optimizer()]
_CHILD = "STENOGRAD_BENCHMARK_CHILD"


def status_bytes(key: str) -> int:
    """Return a size from the kernel's description of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def train(name: str, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, steps: int) -> None:
    """Train for some steps and detach."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    attached = Attached(name, model, optimizer)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(attached.module(inputs), targets).backward()
        optimizer.step()
    attached.close()


def child(name: str, steps: int, out: Path) -> None:
    """Measure on every rank; rank 0 writes the growth of its peak, in bytes."""
    torch.set_num_threads(1)
    rank = stenograd.init(timeout_s=120).rank
    small = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))
    _, inputs, targets = WORKS["mlp"].make(rank)
    train(name, small, inputs, targets, steps)
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what there is now
    before = status_bytes("VmRSS")
    train(name, *WORKS["mlp"].make(rank), steps)
    if rank == 0:
        out.write_text(json.dumps(status_bytes("VmHWM") - before))


def measure(name: str, steps: int, rounds: int) -> float:
    """Return the growth of the peak in bytes, the median of some runs: the allocator's luck varies."""
    return statistics.median(measure_once(name, steps) for _ in range(rounds))


def measure_once(name: str, steps: int) -> int:
    """Return it for one run."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "bytes"
        argv = [sys.executable, __file__, "--rivals", name, "--steps", str(steps), "--out", str(out)]
        subprocess.run(argv, env={**os.environ, _CHILD: "1"}, check=True, timeout=300)
        grown: int = json.loads(out.read_text())
        return grown


def main() -> None:
    """Measure all and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rivals", nargs="+", default=RIVALS)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if _CHILD in os.environ:
        if "RANK" not in os.environ:
            raise SystemExit(run_local([sys.executable, *sys.argv], 2))
        return child(args.rivals[0], args.steps, args.out)
    parameters = sum(p.numel() for p in WORKS["mlp"].build().parameters())
    alone = measure(FLOOR, args.steps, args.rounds)
    print(f"{FLOOR:24s} {alone / parameters:6.1f} bytes a parameter: weights, gradients, activations")
    rows = {FLOOR: alone}
    for name in args.rivals:
        rows[name] = measure(name, args.steps, args.rounds)
        print(f"{name:24s} {(rows[name] - alone) / parameters:6.1f} bytes a parameter above that", flush=True)
    if args.out:
        args.out.write_text(json.dumps({"parameters": parameters, "peak_bytes": rows}, indent=2) + "\n")
    return None


if __name__ == "__main__":
    main()
