"""A device that is not there, to count without one what makes the host wait for a GPU.

    benchmarks/host_waits.py [--buckets 25] [METHOD ...]

Tensors on it live in the CPU's memory, and know it only as the device "meta": so code takes the paths of a
device that works by itself, and what would drain it is seen. Each wait lets a GPU run out of work.

As a program it writes a table: how often a step makes the host wait, for every example of every compressor
and for the steps between two rounds. Methods that wait as often share a line.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map

import stenograd
from stenograd.catalog.method import Method, method
from stenograd.catalog.registry import compressors
from stenograd.schedules.rounds import Rounds
from stenograd.simulate import ranks
from stenograd.testing.methods import configurations, wrapped

__all__ = ["AWAY", "BETWEEN", "between_rounds", "examples", "host_waits", "waits_of"]

AWAY = torch.device("meta")
# Schedules whose rounds are at least three steps apart, so that some steps are in none.
BETWEEN = (
    "local:every=4",
    "local:every=4/qsgd",
    "diloco:every=4",
    "diloco:every=8,fragments=2/lowbit:format=e3m0",
    "diloco:every=6,delay=1,mix=0.5",
    "diloco:every=4,eager=true",
    "sparseloco:every=4",
    "noloco:every=4",
)
_WORLD = 4
# Operators whose result has a size, or is a number, that only the device knows.
_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique", "unique_", "equal", "bincount")
_BESIDE = ", in the thread of the exchange"
# Where simulated ranks wait for each other's streams with every message, as ranks in a network do not.
_SIMULATION = "devices.py"


class _Away(Tensor):
    """A tensor of the device that is not there, and the memory in which it is."""

    _here: Tensor

    @staticmethod
    def __new__(cls: type[_Away], here: Tensor) -> _Away:
        made: _Away = torch.Tensor._make_wrapper_subclass(
            cls,
            here.size(),
            strides=here.stride(),
            storage_offset=here.storage_offset(),
            dtype=here.dtype,
            device=AWAY,
            requires_grad=here.requires_grad,
        )
        made._here = here.detach()
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func} met a tensor of the emulated device outside of its `with` block")

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.data_ptr, Tensor.untyped_storage):
            return func(args[0]._here)
        if func == Tensor.is_meta.__get__:  # type: ignore[attr-defined]
            return False
        if func is Tensor.backward:  # whose hooks shall come here, too
            loss = args[0]
            seed = (torch.ones_like(loss),)
            return _engine_run_backward(
                (loss,), seed, False, False, (), allow_unreachable=True, accumulate_grad=True
            )
        if func is Tensor.tolist:  # for subclasses PyTorch has none
            return args[0].cpu().tolist()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class _Device(TorchDispatchMode):
    """Computes what is asked of the device, and notes what would make the host wait for it."""

    def __init__(self, found: list[str], where: str = "") -> None:
        super().__init__()
        self._found, self._where = found, where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        flat: list[Tensor] = []
        tree_map(lambda a: flat.append(a) if isinstance(a, Tensor) else None, (args, kwargs))
        theirs = [t for t in flat if isinstance(t, _Away)]
        name = func._schema.name.removeprefix("aten::")
        goes_to = kwargs.get("device")
        to_away = goes_to is not None and torch.device(goes_to).type == AWAY.type
        if not theirs and not to_away:
            return func(*args, **kwargs)
        self._note(name, flat, theirs, args, kwargs, goes_to, to_away)
        here = tree_map(lambda a: a._here if isinstance(a, _Away) else a, (args, kwargs))
        if goes_to is not None:
            here[1]["device"] = torch.device("cpu")
            here[1].pop("pin_memory", None)
        with torch.no_grad() if not torch.is_grad_enabled() else ExitStack():
            out = func(*here[0], **here[1])
        if goes_to is not None and not to_away:
            return out.clone() if name == "_to_copy" else out
        if name == "_to_copy":
            out = out.clone() if any(out is t._here for t in theirs) else out
        out = tree_map(lambda a: _Away(a) if isinstance(a, Tensor) else a, out)
        return return_and_correct_aliasing(func, args, kwargs, out) if theirs else out

    def _note(
        self,
        name: str,
        flat: list[Tensor],
        theirs: list[_Away],
        args: Any,
        kwargs: Any,
        goes_to: Any,
        to_away: bool,
    ) -> None:
        strangers = [t for t in flat if not isinstance(t, _Away) and t.ndim]
        copies = name in ("_to_copy", "copy_")
        if theirs and strangers and not copies:
            raise RuntimeError(
                f"{name} got tensors of the CPU, {[tuple(t.shape) for t in strangers]}, among the device's"
            )
        masked = name in ("index", "index_put_", "index_put") and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        )
        if name.startswith(_WAITS) or masked:
            self._found.append(f"{name}, {_caller()}{self._where}")
        crosses = name == "copy_" and isinstance(args[0], _Away) != isinstance(args[1], _Away)
        crosses |= name == "_to_copy" and goes_to is not None and to_away != bool(theirs)
        free = kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2])
        if crosses and not (free and (to_away or isinstance(args[0], _Away))):
            self._found.append(f"{name}, {_caller()}{self._where}")


def _caller() -> str:
    """Return the innermost line of the package, or of the program, that asked for this."""
    frame = sys._getframe(1)
    skipped = (__file__, warnings.__file__)
    while frame.f_back and ("/torch/" in frame.f_code.co_filename or frame.f_code.co_filename in skipped):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _made_here(function: Any) -> Any:
    """Let numbers of a list reach the device, which `torch.tensor` leaves out for "meta"."""

    def made(*args: Any, **kwargs: Any) -> Tensor:
        device = kwargs.get("device")
        if device is None or torch.device(device).type != AWAY.type:
            return function(*args, **kwargs)
        return function(*args, **{**kwargs, "device": "cpu"}).to(AWAY)

    return made


@contextmanager
def host_waits(device: torch.device) -> Iterator[list[str]]:
    """Collect what makes the host wait for a device within a `with` block, in all threads started in it.

    Args:
        device: a CUDA device, for which PyTorch tells; or `AWAY`, whose tensors must be made in the block.

    Example:
        >>> with host_waits(AWAY) as found:
        ...     x = torch.arange(3.0, device=AWAY)
        ...     assert float((x + 1).sum()) == 6
        >>> len(found)
        1
    """
    found: list[str] = []
    if device.type == "cuda":
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = lambda message, *rest, **more: (
                found.append(f"{message}, {_caller()}")
                if "synchroniz" in str(message) and not _caller().startswith(_SIMULATION)
                else None
            )
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode("default")
        return
    run, tensor, as_tensor = threading.Thread.run, torch.tensor, torch.as_tensor

    def emulated(thread: threading.Thread) -> None:
        with _Device(found, _BESIDE if thread.name.startswith("stenograd_") else ""):
            run(thread)

    threading.Thread.run = emulated  # type: ignore[method-assign, assignment]
    torch.tensor, torch.as_tensor = _made_here(tensor), _made_here(as_tensor)
    try:
        with _Device(found):
            yield found
    finally:
        threading.Thread.run = run  # type: ignore[method-assign]
        torch.tensor, torch.as_tensor = tensor, as_tensor


def waits_of(
    text: str,
    device: torch.device = AWAY,
    *,
    buckets: int,
    steps: int = 2,
    bad: Sequence[int] = (),
    beside: bool = True,
) -> list[list[str]]:
    """Train on four simulated ranks, and return what made all their hosts wait, step by step.

    Args:
        text: the method.
        device: `AWAY`, or a CUDA device.
        buckets: layers of the network, each of which is a bucket.
        steps: how many; the first also makes what is kept.
        bad: steps, from 0, in which every gradient is NaN.
        beside: whether what an exchange's own thread waits for counts. An exchange that is under way during
            later steps ends in one of them, whenever the thread comes to it, and the training goes on.
    """
    gate, told = threading.Barrier(_WORLD, timeout=60), list[list[str]]()

    def train(driver: Any) -> None:
        layers = [m for _ in range(buckets) for m in (nn.Linear(32, 32, bias=False), nn.Tanh())]
        model = nn.Sequential(*layers).to(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        sync = stenograd.distribute(model, optimizer, text, group=driver, bucket_bytes=4096)
        for step in range(steps):
            x = torch.full((8, 32), float("nan") if step in bad else 1.0).to(device, non_blocking=True)
            if gate.wait() == 0:
                found.clear()
            gate.wait()
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
            if gate.wait() == 0:
                told.append([wait for wait in found if beside or not wait.endswith(_BESIDE)])
        gate.wait()
        sync.close()

    with host_waits(device) as found:
        ranks(_WORLD, train)
    return told


def between_rounds(text: str, steps: int) -> list[int]:
    """Return the steps, from 0, of a schedule in which nothing is sent nor taken; the first is left out.

    Example:
        >>> between_rounds("diloco:every=6,delay=1,mix=0.5", 9)
        [1, 2, 3, 4, 7, 8]
    """
    schedule = method(text).schedule
    assert isinstance(schedule, Rounds)
    met = {t + late for t in range(1, steps + 1) if schedule.starts(t) for late in (0, schedule.delay)}
    return [t - 1 for t in range(2, steps + 1) if t not in met]


def examples() -> list[str]:
    """Return every example of every compressor, those with a momentum of their own and wrappers included."""
    found = [example for cls in compressors() for example in cls.examples() if Method(example).own_momentum]
    moving = [Method(compressor=example).text for example in found]
    return list(dict.fromkeys([*configurations(), *wrapped(), *moving]))


def main() -> int:
    """Write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("methods", nargs="*", help="left out: every example of every compressor")
    parser.add_argument("--buckets", type=int, default=25)
    args = parser.parse_args()
    os.environ["STENOGRAD_KERNELS"] = "reference"
    warnings.simplefilter("ignore")
    found: dict[float, list[str]] = {}
    for text in args.methods or examples():
        waits = waits_of(text, buckets=args.buckets)[1]
        found.setdefault(len(waits) / _WORLD, []).append(text)
        if args.methods:
            print(text, *sorted(set(waits)), sep="\n  ")
    print(f"| waits per step and rank, {args.buckets} buckets | methods |\n|---|---|")
    for count, texts in sorted(found.items()):
        print(f"| {count:g} | {', '.join(texts)} |")
    if not args.methods:
        for text in BETWEEN:
            told = waits_of(text, buckets=args.buckets, steps=9, beside=False)
            between = [len(told[t]) / _WORLD for t in between_rounds(text, 9)]
            print(f"| {max(between):g}, between two rounds | {text} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
