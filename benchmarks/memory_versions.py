"""Peak of allocated memory of two checkouts of Stenograd, interleaved: what did a change cost, or save?

Two ranks train the 10 M parameter network for some steps, as in `memory.py`. What counts is the bytes in
use, by `live_bytes.c`, which needs a C compiler. Resident memory, which `memory.py` measures, includes what
malloc keeps after free(), which hides small differences. A process per checkout imports everything once and
forks the ranks of each measurement. A checkout may be one from before the project got its name: the package
is called as its folder under `src`. Without another checkout only this one is measured, which compares
methods.

    git worktree add ../before COMMIT
    python benchmarks/memory_versions.py ../before [--methods dense topk:ratio=0.01] [--rounds 3]

Prints for every method the growth of the peak in bytes per parameter, above that of the same training
without an exchange: medians before and now, and every round's numbers. Linux with glibc only.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from models import WORKS, loss
from torch import nn

from stenograd.catalog.method import for_any_optimizer

HERE = Path(__file__).resolve().parent
FLOOR = "none"  # every rank trains for itself
PARAMETERS = 10_020_874  # of the network, WORKS["mlp"]


class Checkout:
    """A process with the Stenograd of one checkout, which measures when told to."""

    def __init__(self, root: Path, counter: Path) -> None:
        package = next(path.parent.name for path in (root / "src").glob("*/__init__.py"))
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(root / "src"),
            "LD_PRELOAD": str(counter),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", package],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, method: str, steps: int) -> int:
        """Return by how many bytes the peak of rank 0 grew."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{method} {steps}\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """Let the process end."""
        self._process.communicate("", timeout=60)


def child(package: str) -> None:
    """Answer each line of the input, a method and a number of steps, with a line: the peak's growth."""
    library = importlib.import_module(package)
    importlib.import_module("torch._dynamo")  # optimizers do, and it is large
    torch.set_num_threads(1)
    for line in sys.stdin:
        method, steps = line.split()
        with tempfile.TemporaryDirectory() as folder:
            ranks = [_forked(library, rank, method, int(steps), Path(folder)) for rank in range(2)]
            for rank in ranks:
                if os.waitpid(rank, 0)[1]:
                    raise SystemExit(f"a rank failed under {method}")
            print((Path(folder) / "bytes").read_text(), flush=True)


def _forked(library: Any, rank: int, method: str, steps: int, folder: Path) -> int:
    """Start a rank, and return its process id."""
    if process := os.fork():
        return process
    try:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
        os.environ |= {name: str(value) for name, value in names.items()}
        os.environ[f"{library.__name__.upper()}_STORE"] = str(folder / "store")
        grown = _grown(library, method, steps)
        if rank == 0:
            (folder / "bytes").write_text(str(grown))
        os._exit(0)
    finally:
        os._exit(1)  # after a traceback, and never back into the loop that forked


def _grown(library: Any, method: str, steps: int) -> int:
    rank = library.init(timeout_s=120).rank
    small = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))
    _, inputs, targets = WORKS["mlp"].make(rank)
    _train(library, method, small, inputs, targets, steps)
    gc.collect()
    counter = ctypes.CDLL(os.environ["LD_PRELOAD"])
    counter.live_bytes_grown.restype = ctypes.c_long
    counter.live_bytes_restart()
    _train(library, method, *WORKS["mlp"].make(rank), steps)
    grown: int = counter.live_bytes_grown()
    return grown


def _train(library: Any, method: str, model: nn.Module, inputs: Any, targets: Any, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sync = None if method == FLOOR else library.distribute(model, optimizer, method)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model(inputs), targets).backward()
        optimizer.step()
    if sync is not None:
        sync.close()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before", type=Path, nargs="?", help="root of the other checkout")
    parser.add_argument("--methods", nargs="+", default=for_any_optimizer())
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()
    roots = [args.before.resolve(), HERE.parent] if args.before else [HERE.parent]
    compiler = shutil.which("cc")
    if compiler is None:
        raise SystemExit("a C compiler must be there to build live_bytes.c, found no cc: install one")
    with tempfile.TemporaryDirectory() as folder:
        counter = Path(folder) / "live_bytes.so"
        subprocess.run(
            [compiler, "-O2", "-shared", "-fPIC", "-o", counter, HERE / "live_bytes.c"], check=True
        )
        compare([Checkout(root, counter) for root in roots], args.methods, args.rounds, args.steps)


def compare(checkouts: list[Checkout], methods: list[str], rounds: int, steps: int) -> None:
    """Measure in turn, and print a line for each method."""
    told: dict[str, list[list[float]]] = {m: [[] for _ in checkouts] for m in [FLOOR, *methods]}
    for turn in range(rounds):
        for method, grown in told.items():
            for checkout, numbers in list(zip(checkouts, grown, strict=True))[:: 1 if turn % 2 else -1]:
                numbers.append(checkout.measure(method, steps) / PARAMETERS)
            print(turn, method, *(f"{numbers[-1]:.2f}" for numbers in grown), file=sys.stderr, flush=True)
    floor = [statistics.median(numbers) for numbers in told.pop(FLOOR)]
    medians = "".join(f"{value:8.2f}" for value in floor)
    print(f"{FLOOR:44}{medians}   bytes per parameter; the others above that")
    for method, grown in told.items():
        above = [sorted(n - low for n in numbers) for numbers, low in zip(grown, floor, strict=True)]
        medians = "".join(f"{statistics.median(numbers):8.2f}" for numbers in above)
        rows = " / ".join(" ".join(f"{n:.2f}" for n in numbers) for numbers in above)
        print(f"{method:44}{medians}   {rows}", flush=True)
    for checkout in checkouts:
        checkout.close()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2])
    else:
        main()
