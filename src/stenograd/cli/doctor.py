"""`stenograd doctor`: what is installed, what the machine has, and whether processes can talk.

Under a launcher its ranks look at the network between them as well.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

import torch

import stenograd
from stenograd.cli.table import Display, show, show_json, working
from stenograd.devices import name_all
from stenograd.errors import StenogradError, first_line
from stenograd.launch.interfaces import Reach, best, time_interfaces
from stenograd.launch.local_workers import python, usable_cores
from stenograd.launch.network import GLOO_INTERFACE
from stenograd.launch.process_group import backends, detect, init, meet, shutdown
from stenograd.launch.rendezvous import gather_ranks, tell_all
from stenograd.wire.driver import Driver
from stenograd.wire.requests import mean

__all__ = ["run", "try_all_reduce"]

_LIMIT_S = 60.0
_ELEMENTS = 1000
_INTERFACE = ("interface", "address of rank 0", "pairs of hosts", "round trip, ms", "Mbit/s", "problem")
_START_TWO = """
from stenograd.launch.local_workers import python, run_local
child = "from stenograd.cli.doctor import try_all_reduce; try_all_reduce()"
sys.exit(run_local(python(child), 2, timeout_s=30))
"""


def run(as_json: bool = False) -> int:
    """Print the findings, and return 0 if an all-reduce works, else 1.

    The all-reduce is between the ranks of the launch, or between two processes where there is no launcher.
    """
    try:
        launched = detect(os.environ).world_size > 1
    except StenogradError:
        launched = False  # told in the row about the launcher
    if launched:
        return _run_launched(as_json)
    with working("trying an all-reduce between two processes"):
        problem = _all_reduce_problem()
    found = {**_versions(), **_machine(), "all-reduce of 2 processes": problem or "works"}
    if as_json:
        show_json(found)
    else:
        show(("what", "found"), [*found.items()])
    return 1 if problem else 0


def try_all_reduce() -> None:
    """Average a vector with the other ranks and check the result; run by the child processes.

    Raises:
        StenogradError: the average is not what it should be.
    """
    world = init(timeout_s=30)
    own = torch.full((_ELEMENTS,), float(world.rank), dtype=torch.float32, device="cpu")
    average = Driver(timeout_s=30).run(mean(own))
    expected = (world.world_size - 1) / 2  # the mean of 0 .. N-1
    shutdown()
    if not bool((average == expected).all()):
        raise StenogradError(f"the average must be {expected}, got {average[0].item()}: check the network")


def _run_launched(as_json: bool) -> int:
    """Time the interfaces between the ranks, choose one, and average over it; rank 0 prints."""
    world, store = meet(timeout_s=_LIMIT_S)
    with Display(world.rank).bar("timing the interfaces that all hosts have"):
        found = time_interfaces(store, world, _LIMIT_S)
    chosen = best(found)
    if chosen is not None:
        os.environ.setdefault(GLOO_INTERFACE, chosen.name)  # what the user has set is what must be tried
    try:
        try_all_reduce()
        problem = None
    except StenogradError as error:
        problem = first_line(error)
    versions = _versions()
    texts = tell_all(store, world, "findings", json.dumps([problem, versions]), _LIMIT_S)
    received = [json.loads(text) for text in texts]
    failed = [f"rank {rank}: {other}" for rank, (other, _) in enumerate(received) if other]
    if world.rank == 0:
        own = {name: sorted({str(other.get(name)) for _, other in received}) for name in versions}
        differ = [f"{name} differs: {', '.join(texts)}" for name, texts in own.items() if len(texts) > 1]
        tried = f"all-reduce of {world.world_size} ranks over {os.environ.get(GLOO_INTERFACE, 'the default')}"
        about, works = {**versions, **_machine()}, "; ".join(failed[:3]) or "works"
        if as_json:
            rows, advice = [asdict(one) for one in found], _advice(found, chosen)
            show_json({**about, "interfaces": rows, "differ": differ, "advice": advice, tried: works})
        else:
            show(("what", "found"), [*about.items()])
            show(_INTERFACE, [_interface_row(one) for one in found])
            for line in (*differ, _advice(found, chosen), f"{tried}: {works}"):
                print(line, flush=True)
    gather_ranks(store, world, "read", _LIMIT_S, time.monotonic() + _LIMIT_S)  # rank 0 may host the store
    return 1 if failed else 0


def _interface_row(one: Reach) -> tuple[str, ...]:
    whole = f"{one.pairs - one.failed} of {one.pairs}"
    if one.failed == one.pairs:
        return one.name, one.address, whole, "", "", one.reason
    return one.name, one.address, whole, f"{one.rtt_ms:.2f}", f"{one.mbit_s:,.0f}", one.reason


def _advice(found: Sequence[Reach], chosen: Reach | None) -> str:
    """Return what to export, or what to look for."""
    if sys.platform != "linux":
        return "Interfaces are timed on Linux only."
    if chosen is None:
        tried = f"none of {', '.join(one.name for one in found)}" if found else "no common interface"
        return f"{tried} connects all hosts: open the ports between them, or give interfaces equal names"
    if chosen.address.startswith("127."):
        return "All ranks are on one host: they use the loopback interface, and nothing need be exported."
    names = [GLOO_INTERFACE, *(["NCCL_SOCKET_IFNAME"] if backends()["nccl"] else [])]
    line = " ".join(f"{name}={chosen.name}" for name in names)
    return f"The fastest interface that connects all hosts is {chosen.name}. On every host: export {line}"


def _all_reduce_problem() -> str | None:
    try:
        done = subprocess.run(
            python(_START_TWO), capture_output=True, text=True, timeout=_LIMIT_S, check=False
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
    return {
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "cores": f"{usable_cores()} of {os.cpu_count()} usable, {torch.get_num_threads()} torch threads",
        "CUDA devices": ", ".join(name_all()) or "none",
        **{name: "available" if found else "not available" for name, found in backends().items()},
        "launcher": _launcher(),
    }


def _launcher() -> str:
    try:
        world = detect(os.environ)
    except StenogradError as error:
        return str(error)
    if world.launcher == "alone":
        return "none"
    return f"{world.launcher}: rank {world.rank} of {world.world_size}"
