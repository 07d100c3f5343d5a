"""The battery for a machine with a GPU: what only a card can show, in a few minutes and one command.

    scripts/gpu [--seconds 540] [--out DIR] [--device cuda|cpu] [--parts steps kernels]

Seven parts, each in a process of its own with a share of the seconds. Each prints its rows when it ends, and
one that fails or runs out of time does not stop the others. The last lines are the table; `--out` also gets
it, with every row, as JSON. `--device cpu` runs the same parts at small sizes, so that the battery is known
to work before there is a card. Nothing is installed: the package is taken from `src`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeAlias

import gpu_gpt
import gpu_programs
import torch
import torch.distributed as dist
from gpu_gpt import drain
from host_waits import AWAY, BETWEEN, between_rounds, waits_of
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.nn import functional

import stenograd
from stenograd.catalog.method import method
from stenograd.schedules.schedule import What
from stenograd.tasks.models import CharGPT
from stenograd.testing.methods import by_name

Look: TypeAlias = Callable[[str], tuple[float | None, str]]
SHARES = {"steps": 60, "bits": 60, "kernels": 60, "gpt": 90, "programs": 60, "ranks": 120, "training": 120}
_SMALL_SHARES = {
    "steps": 150,
    "bits": 70,
    "kernels": 30,
    "gpt": 50,
    "programs": 30,
    "ranks": 150,
    "training": 60,
}
_SMALL = ("dense", "topk:ratio=0.1", "powersgd:rank=2", "diloco:every=4,fragments=2/lowbit")
_SCHEDULED = (
    "local:every=2",
    "local:every=2/qsgd",
    "diloco:every=2",
    "diloco:every=4,fragments=2/lowbit",
    "diloco:every=4,delay=1",
    "gossip",
)


@dataclass
class Row:
    """One line of the table: what was looked at, whether it is right (None: only measured), and a figure."""

    part: str
    name: str
    ok: bool | None
    value: float | None = None
    unit: str = ""
    note: str = ""

    def __str__(self) -> str:
        mark = {True: "ok", False: "FAILED", None: "-"}[self.ok]
        figure = "" if self.value is None else f"{self.value:.4g} {self.unit}"
        return f"{self.part:9s} {mark:6s} {self.name[:44]:44s} {figure:18s} {self.note}"[:200].rstrip()


class Part:
    """Where a part writes its rows, and how long it has.

    Args:
        name: of the part.
        device: "cuda" or "cpu".
        end: by `time.monotonic`, which all processes of a machine share: starting one may take long.
        rows: a file, which gets a row a line at once: what a part has found survives its end.
    """

    def __init__(self, name: str, device: str, end: float, rows: Path) -> None:
        self.name, self.device, self.rows = name, torch.device(device), rows
        self.end = end
        self.small = device == "cpu"

    @property
    def left(self) -> float:
        """Seconds that remain."""
        return self.end - time.monotonic()

    def add(
        self, name: str, ok: bool | None, value: float | None = None, unit: str = "", note: str = ""
    ) -> None:
        """Write a row."""
        row = Row(self.name, name, ok, value, unit, note)
        with self.rows.open("a") as out:
            out.write(json.dumps(asdict(row)) + "\n")

    def each(
        self, names: Sequence[str], look: Callable[[str], tuple[float | None, str]], unit: str = ""
    ) -> None:
        """Write a row for each name: what `look` returns, or the error that it raises.

        Names for which no time is left are counted in one last row.
        """
        for at, name in enumerate(names):
            if self.left < 2:
                self.add(f"{len(names) - at} more", None, note="not reached in time")
                return
            try:
                value, note = look(name)
            except Exception as error:
                print(f"{self.name}, {name}:\n{traceback.format_exc()}", file=sys.stderr)
                self.add(name, False, note=_first_line(error))
            else:
                self.add(name, True, value, unit, note)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


@contextmanager
def alone(backend: str) -> Iterator[None]:
    """Be the one rank of a group with a backend."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, store=FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def _layers(device: torch.device, count: int = 25) -> nn.Sequential:
    """Make a network of so many equal layers, each of which is a bucket if `bucket_bytes` is 4,096."""
    torch.manual_seed(0)
    pairs = [m for _ in range(count) for m in (nn.Linear(32, 32, bias=False), nn.Tanh())]
    return nn.Sequential(*pairs).to(device)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int = 1) -> float:
    """Take steps on random numbers, and return the last loss."""
    first = next(model.parameters())
    g = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    for _ in range(steps):
        x = torch.randn(8, 32, generator=g).to(first.device, first.dtype)
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def steps(part: Part) -> None:
    """Take steps with every method alone, on every kind of group, counting how often the host waits."""
    versions = f"torch {torch.__version__}, Python {platform.python_version()}"
    part.add("versions", None, note=f"{versions}, {_card(part.device)}, stenograd {stenograd.__version__}")
    for backend in ["gloo"] if part.small else ["nccl", "cpu:gloo,cuda:nccl"]:
        with alone(backend):
            part.each(
                [f"{backend}: {text}" for text in [*by_name(), *_SCHEDULED]], partial(_steps_alone, part)
            )
            part.each([f"{backend}: {what}" for what in _CONTROL], partial(_control_alone, part))
    os.environ["STENOGRAD_KERNELS"] = "reference"
    part.each(_SMALL[:3] if part.small else by_name(), partial(_waits_of_four, part), "waits per step")
    part.each(BETWEEN[:1] if part.small else BETWEEN, partial(_waits_between, part), "waits between rounds")


def _steps_alone(part: Part, name: str) -> tuple[float | None, str]:
    model = _layers(part.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sync = stenograd.distribute(model, optimizer, name.partition(": ")[2], bucket_bytes=4096)
    loss = _train(model, optimizer, 4)
    sync.close()
    assert torch.tensor(loss).isfinite(), f"the loss is {loss}"
    return None, ""


def _waits_of_four(part: Part, text: str) -> tuple[float | None, str]:
    """Count how often one rank of four waits for its device in a step: see `benchmarks/host_waits.py`."""
    device, buckets = (AWAY, 3) if part.small else (part.device, 25)
    return len(waits_of(text, device, buckets=buckets)[1]) / 4, ""


def _waits_between(part: Part, text: str) -> tuple[float | None, str]:
    """Count how often one rank of four waits for its device in a step between two rounds."""
    device, buckets = (AWAY, 3) if part.small else (part.device, 25)
    found = waits_of(text, device, buckets=buckets, steps=8, beside=False)
    return max(len(found[t]) for t in between_rounds(text, 8)) / 4, ""


_CONTROL = ("checkpoint", "agreement", "trace")


def _control_alone(part: Part, name: str) -> tuple[float | None, str]:
    """Send control messages on a group with one backend."""
    from stenograd.wire.agreement import agree
    from stenograd.wire.driver import Driver

    what = name.partition(": ")[2]
    if what == "agreement":
        agree(Driver.own(None), lambda: None)
        return None, ""
    model = _layers(part.device, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    sync = stenograd.distribute(model, optimizer, "topk:ratio=0.1")
    with tempfile.TemporaryDirectory() as folder:
        if what == "trace":
            with sync.trace(f"{folder}/trace.json"):
                _train(model, optimizer, 2)
        else:
            _train(model, optimizer, 2)
            stenograd.save_checkpoint(folder, step=2, model=model, optimizer=optimizer, sync=sync)
            wanted = _train(model, optimizer, 2)
            stenograd.load_checkpoint(folder, model=model, optimizer=optimizer, sync=sync)
            assert _train(model, optimizer, 2) == wanted, "a resumed run differs"
    sync.close()
    return None, ""


def bits(part: Part) -> None:
    """Run every compressor on three simulated ranks on the device, and compare with the CPU."""
    from stenograd.simulate import exchange
    from stenograd.testing.checks import SHAPES, data
    from stenograd.testing.conformance import cases

    found = dict(cases())
    os.environ["STENOGRAD_KERNELS"] = "reference"

    def look(name: str) -> tuple[float | None, str]:
        on_cpu = [e.average for e in exchange(found[name], data(3), shapes=SHAPES)]
        there = [x.to(part.device) for x in data(3)]
        on_device = [e.average.cpu() for e in exchange(found[name], there, shapes=SHAPES)]
        for other in on_device[1:]:
            assert torch.equal(other, on_device[0]), "ranks differ"
        if part.device.type == "cuda":
            os.environ["STENOGRAD_KERNELS"] = "triton"
            fast = exchange(found[name], there, shapes=SHAPES)[0].average.cpu()
            os.environ["STENOGRAD_KERNELS"] = "reference"
            assert torch.equal(fast, on_device[0]), "Triton's kernels give other bits than plain torch"
        far = float((on_device[0] - on_cpu[0]).abs().max() / on_cpu[0].abs().max().clamp_min(1e-30))
        # Codes may differ by a step of the grid where the device's sums are rounded in another order.
        assert far < 1.0, f"averages differ by {far:.3g}"  # NaN, too
        return far, "equal bits" if torch.equal(on_device[0], on_cpu[0]) else "relative difference"

    part.each(list(found), look)
    _run_tests(part, "tests/unit/test_triton.py")


def _run_tests(part: Part, path: str) -> None:
    """Run a file of tests; on a GPU those take it by themselves."""
    if find_spec("pytest") is None:
        part.add(path, None, note="pytest is not installed")
        return
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", path]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=max(part.left, 1))
    except subprocess.TimeoutExpired:
        part.add(path, None, note="not reached in time")
        return
    if done.returncode not in (0, 5):
        print(done.stdout[-5000:], file=sys.stderr)
    skipped = done.returncode == 5  # no test was left to run
    part.add(
        path,
        None if skipped else done.returncode == 0,
        note=(done.stdout.strip().splitlines() or [done.stderr])[-1],
    )


def kernels(part: Part) -> None:
    """Time the hot primitives against a copy of the same size."""
    from stenograd.kernels import lowrank
    from stenograd.kernels.quantize import qsgd_decode_mean, qsgd_encode_feedback
    from stenograd.kernels.scatter import scatter_mean
    from stenograd.kernels.select import select, select_feedback
    from stenograd.kernels.sign import sign_decode_mean, sign_encode_feedback

    n = 1 << (20 if part.small else 26)  # 4 MB, or 256 MB, which no cache holds
    x = torch.randn(n, device=part.device)
    r, out, k = torch.zeros_like(x), torch.empty_like(x), n // 100
    matrix, rows = x.clone(), n // 4096
    place = (0, n, 1, rows, 4096)
    right = torch.randn(1, 4, 4096, device=part.device)

    def contenders() -> Mapping[str, tuple[Callable[[], object], int]]:
        """Return what to time, and the bytes that it must read and write."""
        sparse = [select(x, k)] * 4
        signs = [sign_encode_feedback(x, None, 1024, [n])] * 4
        codes = [qsgd_encode_feedback(x, None, 4, 512, [n], 0)] * 4
        return {
            "copy": (lambda: out.copy_(x), 8 * n),
            "top-k 1 %: encode with feedback": (lambda: select_feedback(x, r, k), 12 * n),
            "top-k 1 %: decode 4": (lambda: scatter_mean(sparse, n, out), 4 * n),
            "sign: encode with feedback": (lambda: sign_encode_feedback(x, r, 1024, [n]), 12 * n),
            "sign: decode 4": (lambda: sign_decode_mean(signs, 1024, [n], out), 4 * n),
            "qsgd 4 bit: encode with feedback": (
                lambda: qsgd_encode_feedback(x, r, 4, 512, [n], 1),
                12 * n,
            ),
            "qsgd 4 bit: decode 4": (lambda: qsgd_decode_mean(codes, 4, 512, [n], out), 6 * n),
            "PowerSGD 4: add and project": (lambda: lowrank.project_rows(matrix, r, place, right), 12 * n),
        }

    peak = 0.0
    for kind in ("", "triton") if part.device.type == "cuda" else ("",):
        os.environ["STENOGRAD_KERNELS"] = kind
        for name, (call, nbytes) in contenders().items():
            if part.left < 5:
                part.add(name, None, note="not reached in time")
                continue
            try:
                seconds = _seconds(call, part.device)
            except Exception as error:
                part.add(f"{name} {kind}".strip(), False, note=_first_line(error))
                continue
            peak = nbytes / seconds if name == "copy" else peak
            share = f"{nbytes / seconds / peak:.0%} of the copy's bytes per second"
            part.add(f"{name} {kind}".strip(), None, seconds * 1e3, "ms", share)


def _seconds(call: Callable[[], object], device: torch.device, rounds: int = 10) -> float:
    """Return the median time of a call on a device."""
    found = []
    for at in range(rounds + 3):
        drain(device)
        start = time.perf_counter()
        call()
        drain(device)
        if at >= 3:
            found.append(time.perf_counter() - start)
    return statistics.median(found)


def gpt(part: Part) -> None:
    """Time steps of GPT-2 small in bfloat16, alone: what a method costs where the link is free."""
    with alone("gloo" if part.small else "nccl"):
        gpu_gpt.time_steps(part)


def programs(part: Part) -> None:
    """Run ordinary programs alone, on the group that a machine with GPUs has: see `gpu_programs.py`."""
    found = gpu_programs.named(small=part.small)

    def look(name: str) -> tuple[float | None, str]:
        found[name](part.device)
        return None, ""

    with alone("gloo" if part.small else "cpu:gloo,cuda:nccl"):
        part.each(list(found), look)


def ranks(part: Part) -> None:
    """Train on 2 and 4 real ranks over gloo, with tensors on the device: replicas, resume, NaN, programs."""
    for world in (2, 4):
        seconds = part.left * 0.6 if world == 2 else part.left - 10  # to start and to end
        end, done = time.monotonic() + seconds, 0
        while done >= 0:
            if end - time.monotonic() < 8:
                part.add(f"{world} ranks: from number {done} on", None, note="not reached in time")
                break
            done = _run_ranks(part, world, end, done)


def _run_ranks(part: Part, world: int, end: float, first: int) -> int:
    """Start ranks; return the number of the job after one that failed, or -1 if they reached the end."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--device", part.device.type, "--end", f"{end}", "--rows"]
        command += [
            str(part.rows),
            "--world",
            str(world),
            "--folder",
            folder,
            "--first",
            str(first),
            "--rank",
        ]
        running = [subprocess.Popen([*command, str(rank)]) for rank in range(world)]
        failed = False
        for process in running:
            try:
                failed |= process.wait(max(end + 8 - time.monotonic(), 1)) != 0
            except subprocess.TimeoutExpired:
                failed = True
                part.add(f"{world} ranks", False, note="did not end in time")
            finally:
                process.kill()
        reached = Path(folder, "job")
        if failed and not reached.exists():
            part.add(f"{world} ranks", False, note="ended before their first job")
        return int(reached.read_text()) + 1 if failed and reached.exists() else -1


def rank(part: Part, number: int, world: int, folder: str, first: int) -> None:
    """Be one rank of `ranks`; the first writes the rows. An error ends all: ranks are out of step then."""
    store = FileStore(f"{folder}/store", world)
    dist.init_process_group("gloo", store=store, rank=number, world_size=world)
    jobs: dict[str, Callable[[], str]] = {
        text: partial(_trained_twice, part, text, number, f"{folder}/{at}")
        for at, text in enumerate(_SMALL if part.small else [*by_name(), *_SCHEDULED])
    }
    if world == 2:
        found = gpu_programs.named(small=part.small)
        jobs.update({name: partial(_without_fault, run, part.device) for name, run in found.items()})
    for at, (text, job) in enumerate(jobs.items()):
        if at < first:
            continue
        left = torch.tensor([part.left])
        dist.broadcast(left, 0)
        if float(left) < 3:
            if number == 0:
                part.add(f"{world} ranks: {len(jobs) - at} more", None, note="not reached in time")
            break
        Path(folder, "job").write_text(str(at))
        try:
            wrong = job()
        except Exception as error:
            traceback.print_exc()
            part.add(f"{world} ranks: {text}", False, note=f"rank {number}: {_first_line(error)}")
            os._exit(1)  # the others wait for it
        if number == 0:
            part.add(f"{world} ranks: {text}", not wrong, note=wrong)
    dist.destroy_process_group()


def _without_fault(run: Callable[[torch.device], None], device: torch.device) -> str:
    run(device)
    return ""


def _trained_twice(part: Part, text: str, number: int, folder: str) -> str:
    """Train, save, train on, load, train on again; return what is wrong on some rank, or nothing."""
    model = _layers(part.device, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    everything: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with stenograd.distribute(model, optimizer, text, bucket_bytes=4096, timeout_s=30) as sync:
        _train(model, optimizer, 3, number)
        stenograd.save_checkpoint(folder, step=3, sync=sync, **everything)
        _train(model, optimizer, 4, 10 + number)
        first = _digest(model)
        stenograd.load_checkpoint(folder, sync=sync, **everything)
        _train(model, optimizer, 4, 10 + number)
        wrong = [] if _digest(model) == first else ["a resumed run differs"]
        every_step = method(text).schedule.what is What.GRADIENTS
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (first, wrong))
        if every_step and len({digest for digest, _ in told}) > 1:
            wrong.append("replicas differ")
        wrong += [w for _, theirs in told for w in theirs]
        if every_step:
            before = _digest(model)
            optimizer.zero_grad()
            (
                model(torch.ones(1, 32, device=part.device)).sum() * (float("nan") if number else 1.0)
            ).backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                optimizer.step()
            if _digest(model) != before or sync.finite:
                wrong.append("a NaN on one rank changed the weights")
    return "; ".join(dict.fromkeys(wrong))


def _digest(model: nn.Module) -> str:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return hashlib.sha256(flat.cpu().numpy().tobytes()).hexdigest()


def training(part: Part) -> None:
    """Train replicas of a GPT on the sources of Python's own library: loss against tokens, by method."""
    text = "".join(p.read_text(errors="ignore") for p in sorted(Path(os.__file__).parent.glob("*.py")))
    data = torch.frombuffer(bytearray(text.encode("ascii", "ignore")[: 1 << 22]), dtype=torch.uint8).long()
    for seed in range(1 if part.small else 3):
        part.each(
            [f"seed {seed}: {text}" for text in ("dense", "diloco:every=30/lowbit", "topk:ratio=0.01")],
            partial(_final_loss, part, data.to(part.device), seed, 4 if part.small else 300),
            "nats per byte",
        )


def _final_loss(part: Part, data: Tensor, seed: int, count: int, name: str) -> tuple[float | None, str]:
    from stenograd.simulate import ranks as simulated

    sizes = (128, 32, 2, 2, 32) if part.small else (128, 256, 6, 6, 384)  # 10.7 M parameters
    context, held_out = sizes[1], len(data) * 9 // 10

    def batch(g: torch.Generator, low: int, high: int) -> tuple[Tensor, Tensor]:
        at = torch.randint(low, high - context - 1, (16,), generator=g)
        windows = torch.stack([data[i : i + context + 1] for i in at.tolist()])
        return windows[:, :-1], windows[:, 1:]

    def loss_of(model: nn.Module, pair: tuple[Tensor, Tensor]) -> Tensor:
        return functional.cross_entropy(model(pair[0]).flatten(0, 1), pair[1].flatten())

    def train(driver: Any) -> float:
        torch.manual_seed(seed)
        model = CharGPT(*sizes).to(part.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        sync = stenograd.distribute(model, optimizer, name.partition(": ")[2], group=driver)
        g = torch.Generator().manual_seed(100 * seed + driver.rank)
        for _ in range(count):
            optimizer.zero_grad()
            loss_of(model, batch(g, 0, held_out)).backward()
            optimizer.step()
        test = torch.Generator().manual_seed(7)
        with sync.consensus(), torch.no_grad():
            losses = [float(loss_of(model, batch(test, held_out, len(data)))) for _ in range(20)]
        sync.close()
        return statistics.mean(losses)

    start = time.perf_counter()
    found = simulated(4, train, timeout_s=max(part.left, 5))
    return found[0], f"{count} steps of 4 replicas in {time.perf_counter() - start:.0f} s"


PARTS: dict[str, Callable[[Part], None]] = {
    "steps": steps,
    "bits": bits,
    "kernels": kernels,
    "gpt": gpt,
    "programs": programs,
    "ranks": ranks,
    "training": training,
}


def _card(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "no card, the CPU"


def run_part(name: str, args: argparse.Namespace, seconds: float, rows: Path) -> list[Row]:
    """Run one part in a process of its own, and return its rows."""
    start = time.monotonic()
    command = [
        sys.executable,
        __file__,
        "--part",
        name,
        "--device",
        args.device,
        "--end",
        f"{start + seconds}",
    ]
    process = subprocess.Popen([*command, "--rows", str(rows)], start_new_session=True)
    try:
        code = process.wait(seconds + 10)
        failure = f"ended with exit code {code}" if code else ""
    except subprocess.TimeoutExpired:
        failure = f"did not end within {seconds + 10:.0f} s"
        os.killpg(process.pid, signal.SIGKILL)  # its ranks, too
        process.wait()
    found = [Row(**json.loads(line)) for line in rows.read_text().splitlines()] if rows.exists() else []
    if failure:
        found.append(Row(name, "the whole part", False, note=failure))
    for row in found:
        print(row)
    print(f"{name}: {len(found)} rows in {time.monotonic() - start:.0f} s", flush=True)
    return found


def main() -> int:
    """Run the battery, or be one of its processes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=540.0, help="for all parts together")
    parser.add_argument("--out", type=Path, help="folder for the table and the rows as JSON")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--parts", nargs="*", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--end", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--world", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--first", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda needs a CUDA device, and this PyTorch sees none: use --device cpu")
    if args.rank is not None:
        rank(Part("ranks", args.device, args.end, args.rows), args.rank, args.world, args.folder, args.first)
        return 0
    if args.part:
        PARTS[args.part](Part(args.part, args.device, args.end, args.rows))
        return 0
    end, rows = time.monotonic() + args.seconds, list[Row]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.out or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        shares = SHARES if args.device == "cuda" else _SMALL_SHARES
        for at, name in enumerate(args.parts):
            rest = sum(shares[other] for other in args.parts[at:])
            seconds = max((end - time.monotonic()) * shares[name] / rest, 5.0)
            file = folder / f"rows-{name}.jsonl"
            file.unlink(missing_ok=True)
            rows += run_part(name, args, seconds, file)
    return report(rows, args)


def report(rows: Sequence[Row], args: argparse.Namespace) -> int:
    """Print the table, write it, and return 1 if something failed."""
    card = _card(torch.device(args.device))
    lines = [f"On {card}, torch {torch.__version__}:", *map(str, rows)]
    wrong = [row for row in rows if row.ok is False]
    print("\n".join(lines))
    print(f"{len(rows)} rows, {sum(row.ok is True for row in rows)} right, {len(wrong)} wrong")
    if args.out:
        (args.out / "table.txt").write_text("\n".join(lines) + "\n")
        (args.out / "rows.json").write_text(
            json.dumps({"card": card, "rows": [asdict(r) for r in rows]}, indent=1)
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
