"""`stenograd doctor`: what is installed, what the machine has, and whether two processes can talk."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys

import torch

import stenograd
from stenograd.cli.table import show
from stenograd.comm.driver import Driver
from stenograd.data.requests import mean
from stenograd.errors import StenogradError
from stenograd.launch.process_group import backends, detect, init, shutdown

__all__ = ["run", "try_all_reduce"]

_LIMIT_S = 60.0
_ELEMENTS = 1000
_START_TWO = """
import sys
from stenograd.launch.local_workers import run_local
child = "from stenograd.cli.doctor import try_all_reduce; try_all_reduce()"
sys.exit(run_local([sys.executable, "-c", child], 2, timeout_s=30))
"""


def run() -> int:
    """Print the findings, and return 0 if an all-reduce between two processes works, else 1."""
    problem = _all_reduce_problem()
    found = {**_versions(), **_machine(), "launcher": _launcher()}
    show(("what", "found"), [*found.items(), ("all-reduce of 2 processes", problem or "works")])
    return 1 if problem else 0


def try_all_reduce() -> None:
    """Average a vector with the other ranks and check the result; run by the child processes.

    Raises:
        StenogradError: the average is not what it should be.
    """
    world = init(timeout_s=30)
    average = Driver(timeout_s=30).run(mean(torch.full((_ELEMENTS,), float(world.rank))))
    expected = (world.world_size - 1) / 2  # the mean of 0 .. N-1
    shutdown()
    if not bool((average == expected).all()):
        raise StenogradError(f"the average must be {expected}, got {average[0].item()}: check the network")


def _all_reduce_problem() -> str | None:
    try:
        done = subprocess.run(
            [sys.executable, "-c", _START_TWO], capture_output=True, text=True, timeout=_LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {_LIMIT_S:g} s"
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    reasons = [line for line in lines if "Error" in line or "stenograd" in line] or lines
    return f"failed (status {done.returncode}): {'; '.join(reasons[-2:])[:400]}"


def _versions() -> dict[str, str]:
    found = {"stenograd": stenograd.__version__, "python": f"{platform.python_version()} ({sys.executable})"}
    for name in ("torch", "numpy", "mpi4py", "matplotlib", "scikit-learn"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def _machine() -> dict[str, str]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": f"{usable} of {os.cpu_count()} usable, {torch.get_num_threads()} torch threads",
        "CUDA devices": ", ".join(devices) or "none",
        **{name: _yes(available) for name, available in backends().items()},
    }


def _launcher() -> str:
    try:
        world = detect(os.environ)
    except StenogradError as error:
        return str(error)
    if world.launcher == "alone":
        return "none"
    return f"{world.launcher}: rank {world.rank} of {world.world_size}"


def _yes(available: bool) -> str:
    return "available" if available else "not available"
