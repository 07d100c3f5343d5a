"""What a method costs where the link is free: steps of GPT-2 small in bfloat16 on one GPU, for `gpu.py`."""

from __future__ import annotations

import cProfile
import io
import os
import pstats
import statistics
from contextlib import suppress
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import stenograd
from stenograd.tasks.models import CharGPT

__all__ = ["drain", "time_steps"]

# What stands after "; " is an option of a rival: see `_Rival`.
_NAMES = (
    "nothing",
    "DDP",
    "DDP bf16",
    "DDP PowerSGD",
    "dense",
    "dense; 4 MiB",
    "dense; 100 MiB",
    "dense; bad steps too",
    "dense; hook",
    "bf16",
    "topk:ratio=0.01",
    "topk:ratio=0.01,compact=false",
    "sign",
    "sign; triton",
    "qsgd",
    "qsgd; triton",
    "lowbit",
    "powersgd",
    "local:every=8",
)
_SMALL_NAMES = ("nothing", "DDP", "dense", "topk:ratio=0.01", "sign", "qsgd", "lowbit", "powersgd")


def drain(device: torch.device) -> None:
    """Wait until a device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _Rival:
    """One way to train a GPT: with nothing, with DDP and a hook of its own, or with a method.

    Options of a method: a size of buckets, "bad steps too" for `skip_bad_steps=False`, "hook" for
    DistributedDataParallel's hook, or "triton" for kernels.
    """

    def __init__(self, name: str, part: Any) -> None:
        text, _, option = name.partition("; ")
        small, self.kernels = part.small, "triton" if option == "triton" else ""
        torch.manual_seed(0)
        sizes = (65, 32, 2, 2, 64) if small else (50304, 1024, 12, 12, 768)
        self.model: nn.Module = CharGPT(*sizes).to(part.device, torch.bfloat16)
        self.tokens = torch.randint(sizes[0], (2 if small else 8, sizes[1] + 1), device=part.device)
        self.device = part.device
        if name.startswith("DDP") or option == "hook":
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=not small)
        if option == "hook":
            stenograd.ddp.register(self.model, text)
        elif name.startswith("DDP"):
            self._add_hook(name)
        elif name != "nothing":
            size = int(option.split()[0]) << 20 if option.endswith("MiB") else None
            skips = option != "bad steps too"
            stenograd.distribute(self.model, self.optimizer, text, bucket_bytes=size, skip_bad_steps=skips)

    def _add_hook(self, name: str) -> None:
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

        ddp: Any = self.model
        if name.endswith("bf16"):
            ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
        elif name.endswith("PowerSGD"):
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
            ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)

    def turn(self, steps: int) -> float:
        """Return the milliseconds per step of a turn."""
        os.environ["STENOGRAD_KERNELS"] = self.kernels
        drain(self.device)
        start = perf_counter()
        for _ in range(steps):
            self.optimizer.zero_grad()
            scores = self.model(self.tokens[:, :-1])
            functional.cross_entropy(scores.flatten(0, 1).float(), self.tokens[:, 1:].flatten()).backward()
            self.optimizer.step()
        drain(self.device)
        return (perf_counter() - start) / steps * 1e3


def time_steps(part: Any) -> None:
    """Take turns of all rivals until the part's time is over, then look where the host's time goes."""
    names = _SMALL_NAMES if part.small else _NAMES
    rivals: dict[str, _Rival] = {}
    for name in names:
        try:
            rivals[name] = _Rival(name, part)
            rivals[name].turn(2)
        except Exception as error:
            rivals.pop(name, None)
            part.add(name, False, note=f"{type(error).__name__}: {error}".splitlines()[0])
    turns: dict[str, list[float]] = {name: [] for name in rivals}
    for at in range(12):
        round_s = sum(map(max, turns.values())) * 4e-3 if at else 0.0
        if at > 2 and part.left < 15 + 2 * round_s:
            break
        for name, rival in rivals.items():
            turns[name].append(rival.turn(2 if part.small else 4))
    base = turns.get("DDP", [float("nan")])
    for name, found in turns.items():
        ratio = statistics.median(a / b for a, b in zip(found, base, strict=False))
        part.add(
            name, None, statistics.median(found), "ms per step", f"{ratio:.3f} x DDP, {len(found)} turns"
        )
    for name in ("dense", "topk:ratio=0.01", "powersgd"):
        if name in rivals and part.left > 5:
            _profile(part, name, rivals[name])


def _profile(part: Any, name: str, rival: _Rival) -> None:
    """Write down where the host's time goes, backward passes and hooks included, and the device's."""
    found, report = cProfile.Profile(), io.StringIO()
    with torch.autograd.set_multithreading_enabled(False):  # so that all is in this thread
        rival.turn(1)
        found.enable()
        rival.turn(2)
        found.disable()
    pstats.Stats(found, stream=report).sort_stats("tottime").print_stats(40)
    kernels = ""
    with suppress(AssertionError, RuntimeError):
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as on_device:
            rival.turn(2)
        kernels = on_device.key_averages().table(sort_by="cuda_time_total", row_limit=40)
    path = part.rows.with_name(f"profile-{name.partition(':')[0]}.txt")
    path.write_text(report.getvalue() + kernels)
    part.add(f"profile of {name}", None, note=path.name)
