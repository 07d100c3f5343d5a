"""Two checkouts of Stenograd, interleaved in one run: what did a change cost, or gain, in time or in memory?

A checkout may be one from before the project got its name: the package is called as its folder under `src`.

    git worktree add ../before COMMIT
    python benchmarks/versions.py ../before [--models mlp cnn] [--methods dense topk:ratio=0.01] [--rounds 15]
    python benchmarks/versions.py --memory [../before] [--methods ddp dense] [--rounds 3]

Two ranks of each checkout stay attached to every method, and wait while the others have their turn. Prints
for every model and method the median milliseconds of a step before and now, the median of the rounds' ratios
with their quartiles, and the same of the processor time, which other programs disturb less.

With `--memory` a process per checkout imports everything once and forks two ranks for each measurement, which
train the 10 M parameter network. Prints for every method the growth of the peak in bytes per parameter above
that of training without an exchange, before and now: of the bytes in use, by `live_bytes.c` (which needs a C
compiler), and of resident memory, which includes what malloc keeps after free() and so hides small
differences. Without another checkout only this one is measured, and NAME.json and NAME.md are written into
--out. Linux with glibc only.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch
from scenarios import KEY_METHODS, WORKS, loss
from torch import nn

HERE = Path(__file__).resolve().parent
METHODS = list(KEY_METHODS)
FLOOR = "none"  # every rank trains for itself
_MEMORY_MODEL = "mlp"
Peaks = dict[str, list[list[float]]]  # of a method in every round, in bytes: in use, resident


class Checkout:
    """Processes with the Stenograd of one checkout, which answer each line that they get with one of JSON."""

    def __init__(self, root: Path, job: list[str], places: list[dict[str, str]]) -> None:
        package = next(path.parent.name for path in (root / "src").glob("*/__init__.py"))
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(root / "src")}
        command, pipe = [sys.executable, __file__, "--child", package, *job], subprocess.PIPE
        self._processes = [
            subprocess.Popen(command, env=env | place, stdin=pipe, stdout=pipe, text=True) for place in places
        ]

    def ask(self, *words: object) -> list[Any]:
        """Return every process's answer."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(f"{' '.join(map(str, words))}\n")
            process.stdin.flush()
        return [json.loads(process.stdout.readline()) for process in self._processes if process.stdout]

    def close(self) -> None:
        """Let the processes end."""
        for process in self._processes:
            process.communicate("", timeout=60)


def place_of(rank: int, store: Path) -> dict[str, str]:
    """Return the variables of one of two ranks."""
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    stores = dict.fromkeys(("STENOGRAD_STORE", "LACONIC_STORE"), store)  # the name now, and the one before
    return {name: str(value) for name, value in (place | stores).items()}


def attach(library: Any, name: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    """Return what to call in the model's place, and what averages its gradients, if anything does."""
    if name.startswith("ddp"):
        from rivals import DDP_HOOKS  # needs names of the present library

        return DDP_HOOKS[name](model), None
    return model, None if name == FLOOR else library.distribute(model, optimizer, name)


def time_steps(library: Any, model_name: str, methods: list[str]) -> None:
    """Be a rank: attach a model to every method, and train one for as many steps as each line says."""
    rank = library.init(timeout_s=300).rank
    attached = []
    for method in methods:
        model, inputs, targets = WORKS[model_name].make(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        attached.append((*attach(library, method, model, optimizer), optimizer, inputs, targets))
    for line in sys.stdin:
        number, steps = map(int, line.split())
        module, _, optimizer, inputs, targets = attached[number]
        taken_ms = []
        for step in range(steps + 1):  # the first, with cold caches, does not count
            if step == 1:
                cpu = time.process_time()
            start = time.perf_counter()
            train(module, optimizer, inputs, targets)
            taken_ms.append((time.perf_counter() - start) * 1e3)
        cpu_ms = (time.process_time() - cpu) * 1e3 / steps
        print(json.dumps([statistics.median(taken_ms[1:]), cpu_ms]), flush=True)


def train(module: Any, optimizer: torch.optim.Optimizer, inputs: Any, targets: Any) -> None:
    """Take one step."""
    optimizer.zero_grad()
    loss(module(inputs), targets).backward()
    optimizer.step()


def measure_memory(library: Any) -> None:
    """Answer each line, a method and a number of steps, with the peak's growth on rank 0."""
    importlib.import_module("torch._dynamo")  # optimizers do, and it is large
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
        os.environ |= place_of(rank, folder / "store")
        grown = _grown(library, method, steps)
        if rank == 0:
            (folder / "bytes").write_text(json.dumps(grown))
        os._exit(0)
    finally:
        os._exit(1)  # after a traceback, and never back into the loop that forked


def _grown(library: Any, method: str, steps: int) -> list[int]:
    """Return by how many bytes the peaks of what is in use and of what is resident grew."""
    rank = library.init(timeout_s=120).rank
    small = nn.Sequential(nn.Linear(784, 300), nn.ReLU(), nn.Linear(300, 10))
    _, inputs, targets = WORKS[_MEMORY_MODEL].make(rank)
    _train(library, method, small, inputs, targets, steps)  # so that code and kernels do not count
    gc.collect()
    counter = ctypes.CDLL(os.environ["LD_PRELOAD"])
    counter.live_bytes_grown.restype = ctypes.c_long
    Path("/proc/self/clear_refs").write_text("5")  # the resident peak is what there is now
    resident = _status_bytes("VmRSS")
    counter.live_bytes_restart()
    _train(library, method, *WORKS[_MEMORY_MODEL].make(rank), steps)
    return [counter.live_bytes_grown(), _status_bytes("VmHWM") - resident]


def _status_bytes(key: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))


def _train(library: Any, method: str, model: nn.Module, inputs: Any, targets: Any, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    module, sync = attach(library, method, model, optimizer)
    for _ in range(steps):
        train(module, optimizer, inputs, targets)
    if sync is not None:
        sync.close()


def compare_times(roots: list[Path], model: str, methods: list[str], rounds: int, steps: int) -> None:
    """Print a line for each method."""
    with tempfile.TemporaryDirectory() as folder:
        stores = [Path(folder) / str(which) for which in range(2)]
        pair = [
            Checkout(root, ["times", model, *methods], [place_of(rank, store) for rank in range(2)])
            for root, store in zip(roots, stores, strict=True)
        ]
        for number, method in enumerate(methods):
            for checkout in pair:
                checkout.ask(number, steps)
            told: list[list[tuple[float, float]]] = [[], []]
            for turn in range(rounds):
                for which in (0, 1) if turn % 2 else (1, 0):
                    ranks = pair[which].ask(number, steps)
                    told[which].append((max(wall for wall, _ in ranks), sum(cpu for _, cpu in ranks)))
            line = f"{model:5}{method:18}"
            for times in range(2):
                was, now = ([turn[times] for turn in turns] for turns in told)
                low, middle, high = statistics.quantiles([b / a for a, b in zip(was, now, strict=True)], n=4)
                line += f"{statistics.median(was):9.2f}{statistics.median(now):9.2f}{middle:8.3f}"
                line += f"  ({low:.3f} to {high:.3f})"
            print(line, flush=True)
        for checkout in pair:
            checkout.close()


def measure_peaks(roots: list[Path], methods: list[str], rounds: int, steps: int) -> list[Peaks]:
    """Return for each checkout what each method's peaks grew by in every round."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise SystemExit("a C compiler must be there to build live_bytes.c, found no cc: install one")
    with tempfile.TemporaryDirectory() as folder:
        counter = str(Path(folder) / "live_bytes.so")
        build = [compiler, "-O2", "-shared", "-fPIC", "-o", counter, str(HERE / "live_bytes.c")]
        subprocess.run(build, check=True)
        checkouts = [Checkout(root, ["memory"], [{"LD_PRELOAD": counter}]) for root in roots]
        told: list[Peaks] = [{m: [] for m in dict.fromkeys([FLOOR, *methods])} for _ in roots]
        for turn in range(rounds):
            for method in told[0]:
                for which in range(len(roots))[:: 1 if turn % 2 else -1]:
                    (peaks,) = checkouts[which].ask(method, steps)
                    told[which][method].append(peaks)
        for checkout in checkouts:
            checkout.close()
    return told


def above(told: Peaks, method: str, kind: int) -> list[float]:
    """Return the median, the least and the most bytes per parameter above training alone, of a kind."""
    of, alone = ([peaks[kind] / parameters() for peaks in told[m]] for m in (method, FLOOR))
    floor = 0.0 if method == FLOOR else statistics.median(alone)
    return [pick(of) - floor for pick in (statistics.median, min, max)]


@cache
def parameters() -> int:
    """Return how many the network has whose memory is measured."""
    return sum(p.numel() for p in WORKS[_MEMORY_MODEL].build().parameters())


def memory_table(told: Peaks) -> str:
    """Format a line a method: medians and ranges of both kinds."""
    lines = []
    for method in told:
        kinds = ["{:.2f} ({:.2f} to {:.2f})".format(*above(told, method, kind)) for kind in range(2)]
        lines.append([f"`{method}`", *kinds])
    from harness import table  # needs names of the present library

    head = ["bytes per parameter above training alone, which is the first line", "in use", "resident"]
    return table(head, lines)


def main() -> None:
    """Measure and print."""
    from harness import command_line, publish  # as above

    parser = command_line(__doc__, "memory")
    parser.add_argument("before", type=Path, nargs="?", help="root of the other checkout")
    parser.add_argument("--models", nargs="+", choices=list(WORKS), default=["mlp", "cnn"])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--memory", action="store_true", help="measure memory instead of time")
    args = parser.parse_args()
    roots = [*([args.before.resolve()] if args.before else []), HERE.parent]
    if args.memory:
        told = measure_peaks(roots, args.methods, args.rounds, args.steps)
        if args.before:
            for method in told[0]:
                kinds = ("".join(f"{above(one, method, k)[0]:8.2f}" for one in told) for k in range(2))
                print("{:40} in use{}   resident{}".format(method, *kinds))
        else:
            publish(args, "Peak memory of a rank", told[0], memory_table(told[0]))
        return
    if len(roots) < 2:
        parser.error("the root of another checkout is needed")
    columns = f"{'before':>9}{'now':>9}{'ratio':>8}  {'(quartiles)':16}"
    print(f"{'model':5}{'method':18}{columns}{columns}  ms per step, then of processor time")
    for model in args.models:
        compare_times(roots, model, args.methods, args.rounds, args.steps)


def child(package: str, job: str, *words: str) -> None:
    """Be a process of a checkout."""
    library = importlib.import_module(package)
    torch.set_num_threads(1)
    if job == "memory":
        measure_memory(library)
    else:
        time_steps(library, words[0], list(words[1:]))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        child(*sys.argv[2:])
    else:
        main()
