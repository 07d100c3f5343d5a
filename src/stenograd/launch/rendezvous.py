"""The rendezvous of a launch: a file on this host, or an address and a port."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from stenograd.errors import LaunchError
from stenograd.launch.detect import STORE_VARIABLE, World, bad_variable
from stenograd.reading import private_folder

__all__ = ["Meeting", "expand_hosts", "meeting_point"]

_EXPORT = "export MASTER_ADDR (rank 0's host) and MASTER_PORT (a free port there) to all ranks"

# Ports for Slurm jobs: below 32768, where Linux begins to hand out ephemeral ports to anybody.
_FIRST_PORT, _PORTS = 10_000, 20_000

# Processes that start ranks, as /proc names them (15 characters at most).
_LAUNCHERS = frozenset(
    ["hydra_pmi_proxy", "pmi_proxy", "prterun", "prted", "orterun", "orted", "mpiexec", "mpirun"]
)


@dataclass(frozen=True)
class Meeting:
    """A rendezvous: where the ranks of a launch find each other.

    Attributes:
        kind: "alone" (a world of one), "file", "tcp", or "mpi" (rank 0 sends its address through mpi4py).
        path: the file, where kind is "file".
        owned: whether rank 0 removes that file when it exits; false for one that `run_local` made.
        host: rank 0's host, where kind is "tcp".
        port: the port there, 1 to 65535.
    """

    kind: Literal["alone", "file", "tcp", "mpi"]
    path: str = ""
    owned: bool = False
    host: str = ""
    port: int = 0


def meeting_point(world: World, env: Mapping[str, str]) -> Meeting:
    """Choose the rendezvous; every rank of the launch chooses the same one without communicating.

    In this order: the file in `STENOGRAD_STORE`; nowhere, for a world of one; `MASTER_ADDR` and
    `MASTER_PORT`; for ranks on one host, a file under the temporary directory that only this user can
    read, named after the launch; for `srun` on several hosts, the step's first host and a port derived
    from the job; for `mpiexec` on several hosts, whatever mpi4py lets the ranks agree on.

    Args:
        world: what `detect` found.
        env: environment variables, usually `os.environ`.

    Returns:
        The rendezvous.

    Raises:
        LaunchError: a variable is malformed or missing, or the directory is not private.
    """
    if STORE_VARIABLE in env:
        return Meeting("file", path=env[STORE_VARIABLE])
    if world.world_size == 1:
        return Meeting("alone")
    if "MASTER_ADDR" in env or "MASTER_PORT" in env:
        return _exported(env)
    if world.launcher == "torchrun":
        raise LaunchError(f"RANK and WORLD_SIZE are set, but not MASTER_ADDR: {_EXPORT}, or use torchrun")
    if world.one_host:
        return Meeting("file", path=str(_private_directory() / _launch_name(world, env)), owned=True)
    return _slurm_address(env) if world.launcher == "slurm" else Meeting("mpi")


def expand_hosts(text: str) -> list[str]:
    """Expand a Slurm host list.

    Args:
        text: names separated by commas; brackets hold numbers and ranges, leading zeros kept.

    Returns:
        The host names in order.

    Raises:
        LaunchError: the text is not such a list.

    Example:
        >>> expand_hosts("a[1-3,5],b07")
        ['a1', 'a2', 'a3', 'a5', 'b07']
    """
    if re.fullmatch(r"(?:[^\[\],\s]|\[[\d,-]+\])+(?:,(?:[^\[\],\s]|\[[\d,-]+\])+)*", text) is None:
        raise LaunchError(f"a host list must look like a[1-3,5],b07, got {text!r}: {_EXPORT}")
    parts = re.split(r",(?![^\[]*\])", text)
    return [host for part in parts for host in _expand_part(part, text)]


def _expand_part(part: str, text: str) -> list[str]:
    head, bracket, rest = part.partition("[")
    if not bracket:
        return [part]
    inside, _, tail = rest.partition("]")
    numbers: list[str] = []
    for item in inside.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if match is None:
            raise LaunchError(f"a host list must look like a[1-3,5],b07, got {text!r}: {_EXPORT}")
        low, high = match[1], match[2] or match[1]
        numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
    return [head + number + more for number in numbers for more in _expand_part(tail, text)]


def _exported(env: Mapping[str, str]) -> Meeting:
    host, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not host or not port:
        missing, got = ("MASTER_ADDR", host) if not host else ("MASTER_PORT", port)
        raise bad_variable(missing, "must be set together with the other", got, _EXPORT)
    if not port.isdigit() or not 1 <= int(port) <= 65535:
        raise bad_variable("MASTER_PORT", "must be an integer from 1 to 65535", port, _EXPORT)
    return Meeting("tcp", host=host, port=int(port))


def _slurm_address(env: Mapping[str, str]) -> Meeting:
    """Take the step's first host, where Slurm puts task 0, and a port that differs between steps."""
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or ""
    job, step = env.get("SLURM_JOB_ID", ""), env.get("SLURM_STEP_ID", "0")
    if not job.isdigit() or not step.isdigit():
        raise bad_variable("SLURM_JOB_ID", "and SLURM_STEP_ID must be integers", f"{job}.{step}", _EXPORT)
    port = _FIRST_PORT + (int(job) * 31 + int(step)) % _PORTS
    return Meeting("tcp", host=expand_hosts(hosts)[0], port=port)


def _launch_name(world: World, env: Mapping[str, str]) -> str:
    """Name this launch: equal on all its ranks, different from any other launch on this host."""
    if world.launcher == "slurm":
        keys = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
        name = "-".join(env.get(key, "0") for key in keys)
    else:
        marker = "OMPI_COMM_WORLD_RANK" if world.launcher == "openmpi" else "PMI_RANK"
        name = f"{env.get('PMIX_NAMESPACE', '')}-{_launcher_process(marker)}"
    return re.sub(r"[^\w.@-]", "_", f"{world.launcher}-{name}")


def _launcher_process(marker: str) -> str:
    """Return pid and start time of the process that started the ranks of this host.

    That is the nearest ancestor with a launcher's name, or without the variable that launchers give to their
    ranks: a shell or a profiler may stand between. Hydra sets no variable that names a launch, and process
    numbers are reused, quickly so in containers, hence the start time. Where there is no /proc: the parent.
    """
    pid = parent = os.getppid()
    while pid > 1:
        try:
            text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
            command, _, numbers = text.partition("(")[2].rpartition(") ")
            fields = numbers.split()
            inherited = f"\0{marker}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        except PermissionError:
            return f"{pid}-{fields[19]}"
        except OSError:
            break
        if command in _LAUNCHERS or not inherited:
            return f"{pid}-{fields[19]}"  # field 22 of proc(5): start time in clock ticks since boot
        pid = int(fields[1])
    return f"{parent}-0"


def _private_directory() -> Path:
    """Make the directory of this user's rendezvous files, and check that nobody else can write there."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    directory = Path(tempfile.gettempdir()) / f"stenograd-{user}"
    try:
        private_folder(directory)
    except OSError as cause:
        raise LaunchError(
            f"{directory} must be a directory that belongs to you and that nobody else can write to, got: "
            f"{cause.strerror}: remove it, or point TMPDIR elsewhere"
        ) from cause
    return directory
