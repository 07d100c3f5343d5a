"""Read from environment variables which launcher started this process, and as which rank.

Precedence: variables set closest to the process win.

1. torchrun (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `LOCAL_WORLD_SIZE`), also set by hand or by `run_local`;
2. Open MPI (`OMPI_COMM_WORLD_RANK`, ...);
3. MPICH, Intel MPI and other launchers that speak PMI (`PMI_RANK`, `PMI_SIZE`, `MPI_LOCALRANKID`, ...);
4. Slurm (`SLURM_PROCID`, ...), only inside a step that `srun` started;
5. none: a world of one.

MPI comes before Slurm because an `mpiexec` inside an allocation starts its daemons with `srun`, and the
daemons' `SLURM_PROCID` is then inherited by every rank. `PMI_RANK` without local ranks inside a Slurm
step was set by `srun --mpi=pmi2` itself, and is read as Slurm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from stenograd.errors import LaunchError

__all__ = ["OPEN_VARIABLE", "STORE_VARIABLE", "World", "bad_variable", "detect", "is_loopback"]

STORE_VARIABLE = "STENOGRAD_STORE"  # path of the file store that `run_local` gives to its workers
OPEN_VARIABLE = "STENOGRAD_OPEN"  # HOST:PORT of the store of an open run, or the path of its file

# Slurm numbers the batch script, the interactive shell and other pseudo steps downwards from 2**32 - 2.
_FIRST_PSEUDO_STEP = 0xFFFFFFF0


@dataclass(frozen=True)
class World:
    """This process's rank, and the number of ranks, in all and on this host.

    Attributes:
        rank: this process among all, 0 <= rank < world_size.
        world_size: processes in the whole launch, >= 1.
        local_rank: this process among those on its host, 0 <= local_rank < local_world_size.
        local_world_size: processes of the launch on this host, as far as known, >= 1.
        launcher: "torchrun", "openmpi", "mpich", "slurm", "stenograd", "alone" or "torch.distributed".

    Example:
        >>> World(rank=0, world_size=1, local_rank=0, local_world_size=1, launcher="alone").one_host
        True
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    launcher: str

    @property
    def one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.local_world_size == self.world_size


def detect(env: Mapping[str, str]) -> World:
    """Find the launcher, and this process's rank in its launch.

    An `sbatch` or `salloc` shell has `SLURM_NTASKS` (a batch script even `SLURM_PROCID`), but is not a
    step: without an ordinary `SLURM_STEP_ID` a process there is alone. Start ranks with `srun`.

    Args:
        env: environment variables, usually `os.environ`.

    Returns:
        The world, checked for consistency.

    Raises:
        LaunchError: a variable is missing, not an integer, or contradicts another.

    Example:
        >>> detect({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"})
        World(rank=1, world_size=4, local_rank=1, local_world_size=2, launcher='mpich')
    """
    if "RANK" in env:
        return _torchrun(env)
    if "OMPI_COMM_WORLD_RANK" in env:
        names = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
        return _read(env, "openmpi", *(f"OMPI_COMM_WORLD_{name}" for name in names))
    in_step = _in_slurm_step(env)
    if "PMI_RANK" in env and ("MPI_LOCALRANKID" in env or "PMI_LOCAL_RANK" in env or not in_step):
        return _pmi(env)
    if in_step:
        return _slurm(env)
    if env.get("WORLD_SIZE", "1") != "1":
        advice = "set RANK as well, unset WORLD_SIZE, or start with torchrun, mpiexec or srun"
        if "LOCAL_RANK" in env:
            advice += (
                " (Lightning starts processes so, and joins them in trainer.fit() or fabric.launch(): leave "
                "stenograd.init() out, or call it after that)"
            )
        raise bad_variable("WORLD_SIZE", "needs RANK beside it", env["WORLD_SIZE"], advice)
    return World(0, 1, 0, 1, "alone")


def bad_variable(name: str, rule: str, got: object, advice: str) -> LaunchError:
    """Build the error for an environment variable: name, rule, value got, what to do.

    Example:
        >>> print(bad_variable("RANK", "must be an integer", "x", "unset it"))
        environment variable RANK must be an integer, got 'x': unset it
    """
    return LaunchError(f"environment variable {name} {rule}, got {got!r}: {advice}")


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this host.

    Example:
        >>> is_loopback("127.0.0.1"), is_loopback("node1")
        (True, False)
    """
    return host in ("localhost", "::1") or re.fullmatch(r"127(\.\d+){3}", host) is not None


def _torchrun(env: Mapping[str, str]) -> World:
    """Read torchrun's variables; `LOCAL_*` may be missing when they were set by hand.

    Without them, ranks share a host only if `MASTER_ADDR` or `run_local` says so. Otherwise each counts as
    alone on its host, because binding gloo to the loopback interface would cut off ranks on other hosts.
    """
    launcher = "stenograd" if STORE_VARIABLE in env else "torchrun"
    rank, size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    one_host = launcher == "stenograd" or is_loopback(env.get("MASTER_ADDR", ""))
    local_rank = _integer(env, "LOCAL_RANK", rank if one_host else 0)
    local_size = _integer(env, "LOCAL_WORLD_SIZE", size if one_host else local_rank + 1)
    return _checked(World(rank, size, local_rank, local_size, launcher), "RANK", "LOCAL_RANK")


def _pmi(env: Mapping[str, str]) -> World:
    """Read PMI's variables; `mpiexec.gforker` forks on one host only, and sets no local ones."""
    if "PMI_LOCAL_RANK" in env and "MPI_LOCALRANKID" not in env:
        return _read(env, "mpich", "PMI_RANK", "PMI_SIZE", "PMI_LOCAL_RANK", "PMI_LOCAL_SIZE")
    if "MPI_LOCALRANKID" in env:
        return _read(env, "mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
    return _read(env, "mpich", "PMI_RANK", "PMI_SIZE", "PMI_RANK", "PMI_SIZE")


def _slurm(env: Mapping[str, str]) -> World:
    """Read Slurm's variables; those of the step win over those of the job."""
    size_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    rank, size = _integer(env, "SLURM_PROCID"), _integer(env, size_name)
    world = World(rank, size, _integer(env, "SLURM_LOCALID"), _slurm_local_size(env, size), "slurm")
    return _checked(world, "SLURM_PROCID", "SLURM_LOCALID")


def _slurm_local_size(env: Mapping[str, str], size: int) -> int:
    """Count the step's tasks on this host, from a list such as `2(x3),1` and the host's index in it."""
    name = "SLURM_STEP_TASKS_PER_NODE" if "SLURM_STEP_TASKS_PER_NODE" in env else "SLURM_TASKS_PER_NODE"
    hosts_name = "SLURM_STEP_NUM_NODES" if "SLURM_STEP_NUM_NODES" in env else "SLURM_NNODES"
    if _integer(env, hosts_name, 1) == 1:
        return size
    text, counts = env.get(name, ""), list[int]()
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise bad_variable(name, "must look like 2(x3),1", text, "start the step with srun")
        counts += [int(match[1])] * int(match[2] or 1)
    host = _integer(env, "SLURM_NODEID")
    if not 0 <= host < len(counts):
        raise bad_variable("SLURM_NODEID", f"must be below the {len(counts)} hosts of {name}", host, _RESTART)
    return counts[host]


def _in_slurm_step(env: Mapping[str, str]) -> bool:
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID"))
    if step is None or "SLURM_PROCID" not in env:
        return False
    return not step.isdigit() or int(step) < _FIRST_PSEUDO_STEP


def _read(env: Mapping[str, str], launcher: str, *names: str) -> World:
    rank, size, local_rank, local_size = (_integer(env, name) for name in names)
    return _checked(World(rank, size, local_rank, local_size, launcher), names[0], names[2])


_RESTART = "start all ranks with one launcher, and unset variables that an earlier one left"


def _checked(world: World, rank_name: str, local_rank_name: str) -> World:
    if not 0 <= world.rank < world.world_size:
        rule = f"must be at least 0 and below the world size {world.world_size}"
        raise bad_variable(rank_name, rule, world.rank, _RESTART)
    if not 0 <= world.local_rank < world.local_world_size <= world.world_size:
        rule = (
            f"must be at least 0 and below the local world size {world.local_world_size}, "
            f"which may not exceed the world size {world.world_size}"
        )
        raise bad_variable(local_rank_name, rule, world.local_rank, _RESTART)
    return world


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise bad_variable(name, "must be set beside the launcher's other variables", None, _RESTART)
        return default
    try:
        return int(text)
    except ValueError:
        raise bad_variable(name, "must be an integer", text, _RESTART) from None
