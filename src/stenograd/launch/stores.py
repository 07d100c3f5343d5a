"""Opens the store in which the ranks of several hosts meet: over TCP, or told through MPI."""

from __future__ import annotations

import importlib
import importlib.util
import os
import time
from datetime import timedelta

from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from stenograd.errors import LaunchError, first_line
from stenograd.launch.detect import World
from stenograd.launch.network import await_port, bounded, own_address

__all__ = ["agent_has_store", "store_through_mpi", "tcp_store"]


def agent_has_store() -> bool:
    """Return whether torchrun's agent hosts the store, so that it outlives restarts of the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def tcp_store(host: str, port: int, world: World, deadline: float) -> Store:
    """Host the store on rank 0 and connect to it from the others; under torchrun the agent hosts it."""
    hosting = world.rank == 0 and not agent_has_store()
    started = time.monotonic()

    def connect() -> Store:
        timeout = timedelta(seconds=_left_s(deadline))
        if agent_has_store():
            store: Store = next(torch_rendezvous("env://", world.rank, world.world_size, timeout=timeout))[0]
            return store
        return TCPStore(host, port, world.world_size, hosting, timeout, False, True)

    try:
        if not hosting:  # torch's own wait for the port prints pages of C++ frames when it fails
            await_port(host, port, deadline)
        return bounded(connect, _left_s(deadline))
    except TimeoutError:  # another program's server accepts connections and never answers
        reason = f"does not answer as rank 0's store within {time.monotonic() - started:.0f} s"
    except Exception as error:
        reason = first_line(error)
        if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
            reason = "is in use by another program"
    raise LaunchError(
        f"rank {world.rank} of {world.world_size} cannot meet the others at {host}:{port}, which {reason}: "
        f"MASTER_ADDR must be rank 0's host and MASTER_PORT a port that is free there and open to all ranks"
    )


def store_through_mpi(world: World, deadline: float) -> Store:
    """Open a port on rank 0 and send it to the others through MPI, since `mpiexec` gives ranks no address."""
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError(
            "mpiexec started ranks on several hosts and gave them no address of rank 0: export MASTER_ADDR "
            "(rank 0's host) and MASTER_PORT (a free port there), or install stenograd[mpi]"
        )
    comm = importlib.import_module("mpi4py.MPI").COMM_WORLD
    if comm.Get_size() != world.world_size:
        raise LaunchError(
            f"mpi4py sees {comm.Get_size()} ranks, the launcher started {world.world_size}: "
            "use the mpiexec of the MPI library that mpi4py uses, or export MASTER_ADDR and MASTER_PORT"
        )
    if world.rank != 0:
        host, port = comm.bcast(None, root=0)
        return tcp_store(host, port, world, deadline)
    timeout = timedelta(seconds=_left_s(deadline))
    store = TCPStore("localhost", 0, world.world_size, True, timeout, False)
    comm.bcast((own_address(), store.port), root=0)
    return store


def _left_s(deadline: float) -> float:
    """Return the seconds that are left, at least one: whoever listens already needs no longer to answer."""
    return max(1.0, deadline - time.monotonic())
