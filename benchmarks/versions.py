"""Step times of two checkouts of Stenograd, interleaved in one run: what did a change cost, or gain?

Two ranks of each checkout stay attached to every method, and wait while the others have their turn. A
checkout may be one from before the project got its name: the package is called as its folder under `src`.

    git worktree add ../before COMMIT
    python benchmarks/versions.py ../before [--models mlp cnn] [--methods dense topk:ratio=0.01] [--rounds 15]

Prints for every model and method the median milliseconds of a step before and now, the median of the rounds'
ratios with their quartiles, and the same of the processor time, which other programs disturb less.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from models import WORKS, loss

HERE = Path(__file__).resolve().parent
METHODS = ("dense", "topk:ratio=0.01", "sign", "qsgd", "powersgd:rank=4")


class Checkout:
    """Two ranks that train with the Stenograd of one checkout, when told to."""

    def __init__(self, root: Path, model: str, methods: list[str], folder: Path) -> None:
        package = next(path.parent.name for path in (root / "src").glob("*/__init__.py"))
        store = str(folder / f"{root.name}-{model}")
        place = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", f"{package.upper()}_STORE": store}
        env = {**os.environ, **place, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "src")}
        command = [sys.executable, __file__, "--child", package, model, *methods]
        self._ranks = [
            subprocess.Popen(
                command,
                env={**env, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]

    def turn(self, method: int, steps: int) -> tuple[float, float]:
        """Return the slower rank's median milliseconds of a step, and the processor time of all ranks."""
        for rank in self._ranks:
            assert rank.stdin is not None
            rank.stdin.write(f"{method} {steps}\n")
            rank.stdin.flush()
        told = [json.loads(rank.stdout.readline()) for rank in self._ranks if rank.stdout is not None]
        return max(wall for wall, _ in told), sum(cpu for _, cpu in told)

    def close(self) -> None:
        """Let the ranks end."""
        for rank in self._ranks:
            rank.communicate("", timeout=60)


def child(package: str, model_name: str, methods: list[str]) -> None:
    """Attach a model to every method; then train for as many steps of one as each line of the input says."""
    library = importlib.import_module(package)
    torch.set_num_threads(1)
    rank = library.init(timeout_s=300).rank
    attached = []
    for method in methods:
        model, inputs, targets = WORKS[model_name].make(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        attached.append((model, inputs, targets, optimizer, library.distribute(model, optimizer, method)))
    for line in sys.stdin:
        number, steps = map(int, line.split())
        model, inputs, targets, optimizer, _ = attached[number]
        taken_ms = []
        for step in range(steps + 1):  # the first, with cold caches, does not count
            if step == 1:
                cpu = time.process_time()
            start = time.perf_counter()
            optimizer.zero_grad()
            loss(model(inputs), targets).backward()
            optimizer.step()
            taken_ms.append((time.perf_counter() - start) * 1e3)
        cpu_ms = (time.process_time() - cpu) * 1e3 / steps
        print(json.dumps([statistics.median(taken_ms[1:]), cpu_ms]), flush=True)


def compare(before: Path, model: str, methods: list[str], rounds: int, steps: int) -> None:
    """Print a line for each method."""
    with tempfile.TemporaryDirectory() as folder:
        pair = [Checkout(root, model, methods, Path(folder)) for root in (before, HERE.parent)]
        for number, method in enumerate(methods):
            for checkout in pair:
                checkout.turn(number, steps)
            told: list[list[tuple[float, float]]] = [[], []]
            for turn in range(rounds):
                for which in (0, 1) if turn % 2 else (1, 0):
                    told[which].append(pair[which].turn(number, steps))
            line = f"{model:5}{method:18}"
            for times in range(2):
                was, now = ([turn[times] for turn in turns] for turns in told)
                low, middle, high = statistics.quantiles([b / a for a, b in zip(was, now, strict=True)], n=4)
                line += f"{statistics.median(was):9.2f}{statistics.median(now):9.2f}{middle:8.3f}"
                line += f"  ({low:.3f} to {high:.3f})"
            print(line, flush=True)
        for checkout in pair:
            checkout.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, help="root of the other checkout")
    parser.add_argument("--models", nargs="+", default=["mlp", "cnn"])
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    columns = f"{'before':>9}{'now':>9}{'ratio':>8}  {'(quartiles)':16}"
    print(f"{'model':5}{'method':18}{columns}{columns}  ms per step, then of processor time")
    for model in args.models:
        compare(args.before.resolve(), model, args.methods, args.rounds, args.steps)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], sys.argv[4:])
    else:
        main()
