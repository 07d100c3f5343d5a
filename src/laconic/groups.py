"""Join the ranks of a launch into one process group, whichever launcher started them, and leave it again."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import importlib.util
import os
import time
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    HashStore,
    PrefixStore,
    Store,
    TCPStore,
    rendezvous,
)

from .errors import LaunchError, bad_value
from .launchers import World, bad_variable, detect
from .meeting import Meeting, meeting_point
from .network import GLOO_INTERFACE, await_port, bounded, own_address, use_loopback
from .workers import TIMEOUT_VARIABLE, run_local

__all__ = ["World", "backends", "detect", "init", "roll_call", "run_local", "shutdown"]

_DEFAULT_TIMEOUT_S = 300.0
_POLL_S = 0.01
_ROLL_CALL_POLL_S = 0.1


@dataclass
class _Place:
    """Where this process met the others. It outlives a group: a second `init` meets there again."""

    meeting: Meeting
    world: World
    store: Store
    pid: int = field(default_factory=os.getpid)
    inits: int = 0
    rank_0_lost: bool = False


@dataclass
class _Session:
    """The group that `init` made, from there to `shutdown`."""

    place: _Place
    store: Store
    chose_interface: bool
    roll_calls: int = 0


_place: _Place | None = None
_session: _Session | None = None


def init(
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
    device_id: torch.device | None = None,
) -> World:
    """Join the default process group, and say which rank this process is.

    Works unchanged under torchrun, `mpiexec` of Open MPI and MPICH, `srun`, `run_local` and alone. Where
    `torch.distributed` is initialised already, nothing happens. All ranks of a launch must call it.
    Ranks on one host talk gloo over the loopback interface unless `GLOO_SOCKET_IFNAME` says otherwise.

    Args:
        backend: as in `torch.distributed.init_process_group`; None is gloo, and NCCL for CUDA tensors
            where there is a CUDA device.
        timeout_s: seconds to wait for the other ranks, here and later in every collective, > 0; None is
            `LACONIC_TIMEOUT_S` from the environment, or 300.
        device_id: CUDA device of this rank; None is device local_rank modulo the number of devices.

    Returns:
        Rank, world size and the same on this host.

    Raises:
        ConfigError: `timeout_s` is out of range.
        LaunchError: the environment contradicts itself, the port is in use, or ranks did not come.

    Example:
        >>> world = init()
        >>> world.rank, world.world_size, torch.distributed.is_initialized()
        (0, 1, True)
        >>> shutdown()
    """
    global _session
    if dist.is_initialized():
        session = _own_session()
        return session.place.world if session is not None else _joined_world()
    limit_s = _timeout_s(timeout_s)
    deadline = time.monotonic() + limit_s
    world = detect(os.environ)
    place = _meet(meeting_point(world, os.environ), world, deadline)
    # Torch's agent keeps one store over restarts of the workers, so their keys must differ.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = PrefixStore(f"laconic/{restart}/{place.inits}", place.store)
    place.inits += 1
    _gather(store, world, "came", limit_s, deadline)
    chose_interface = world.one_host and use_loopback()
    _join(backend, store, world, limit_s, device_id)
    # Only when all are connected may the host of the store leave: connecting reads addresses from it.
    _gather(store, world, "connected", limit_s, time.monotonic() + limit_s)
    _session = _Session(place, store, chose_interface)
    return world


def shutdown() -> None:
    """Leave the group that `init` made; a group made by other means stays, and a second call does nothing.

    Scripts need not call it: it runs when Python exits.
    """
    global _session
    session, _session = _own_session(), None
    if session is None:
        return
    if dist.is_initialized():
        dist.destroy_process_group()
    if session.chose_interface:
        os.environ.pop(GLOO_INTERFACE, None)


def roll_call(grace_s: float) -> list[int]:
    """After a failed collective, find out which ranks are gone.

    Every survivor calls it; each leaves a mark in the meeting store and waits for the others' marks. It
    never raises, and returns within about a second of `grace_s`.

    Args:
        grace_s: seconds to wait for ranks that have not noticed the failure yet, >= 0.

    Returns:
        The ranks that did not answer, ascending; [0] where rank 0 hosts the store and that is gone; []
        where all answered, or where it cannot be known.
    """
    session = _own_session()
    try:
        if session is not None:
            session.roll_calls += 1
            store = PrefixStore(f"roll-call/{session.roll_calls}", _roll_call_store(session))
        else:
            store = PrefixStore("laconic/roll-call", dist.distributed_c10d._get_default_store())
        rank, size = dist.get_rank(), dist.get_world_size()
    except Exception:  # no group, or a version of PyTorch that keeps its store elsewhere
        return []
    server = _server_of_rank_0(session) if rank != 0 else None
    try:
        if server is not None:  # asking a store that is gone prints pages of C++ frames
            await_port(server.host, server.port, time.monotonic())
        lost = bounded(lambda: _absent(store, rank, size, grace_s), grace_s + 1.0)
    except Exception:  # the store does not answer, or its connection broke
        lost = [0] if server is not None else []
    if session is not None:
        session.place.rank_0_lost |= 0 in lost
    return lost


def backends() -> dict[str, bool]:
    """Return which of torch.distributed's backends this PyTorch was built with.

    Example:
        >>> sorted(backends())
        ['gloo', 'nccl']
    """
    built = dist.is_available()
    return {"gloo": built and dist.is_gloo_available(), "nccl": built and dist.is_nccl_available()}


def _absent(store: Store, rank: int, size: int, grace_s: float) -> list[int]:
    deadline = time.monotonic() + grace_s
    store.set(str(rank), "here")
    missing = [other for other in range(size) if other != rank]
    while True:
        missing = [other for other in missing if not store.check([str(other)])]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(_ROLL_CALL_POLL_S)


def _roll_call_store(session: _Session) -> Store:
    """Open a file anew: rank 0 may have removed it at its end, and an open store keeps its old offset."""
    if session.place.meeting.kind == "file":
        return FileStore(session.place.meeting.path, -1)
    return session.store


def _server_of_rank_0(session: _Session | None) -> TCPStore | None:
    store = session.place.store if session is not None else None
    return store if isinstance(store, TCPStore) and not _agent_has_store() else None


def _agent_has_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _own_session() -> _Session | None:
    """Return the session, if it is this process's own and not its parent's before a fork."""
    return _session if _session is not None and _session.place.pid == os.getpid() else None


def _joined_world() -> World:
    """Describe a group that the user made; without matching variables it counts as one host."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with contextlib.suppress(LaunchError):
        world = detect(os.environ)
        if (world.rank, world.world_size) == (rank, size):
            return world
    return World(rank, size, rank, size, "torch.distributed")


def _timeout_s(timeout_s: float | None) -> float:
    if timeout_s is not None:
        if not 0 < timeout_s < float("inf"):
            raise bad_value("timeout_s", "must be finite and above 0 seconds", timeout_s, "leave it at 300")
        return timeout_s
    text = os.environ.get(TIMEOUT_VARIABLE, str(_DEFAULT_TIMEOUT_S))
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < float("inf"):
        raise bad_variable(TIMEOUT_VARIABLE, "must be seconds, finite and above 0", text, "unset it")
    return value


def _meet(meeting: Meeting, world: World, deadline: float) -> _Place:
    """Open the store of the meeting, or return the one that an earlier `init` opened there."""
    global _place
    if _place is not None and (_place.meeting, _place.world, _place.pid) == (meeting, world, os.getpid()):
        return _place
    store: Store
    if meeting.kind == "alone":
        store = HashStore()
    elif meeting.kind == "file":
        store = FileStore(meeting.path, -1)  # -1: it does not remove itself; rank 0 does, at its end
    elif meeting.kind == "mpi":
        store = _agree_through_mpi(world, deadline)
    else:
        store = _tcp_store(meeting.host, meeting.port, world, deadline)
    if _place is None:
        atexit.register(_at_exit)
    _place = _Place(meeting, world, store)
    return _place


def _tcp_store(host: str, port: int, world: World, deadline: float) -> Store:
    """Host the store on rank 0 and connect to it from the others; under torchrun the agent hosts it."""
    hosting = world.rank == 0 and not _agent_has_store()
    remaining_s = max(1.0, deadline - time.monotonic())
    timeout = timedelta(seconds=remaining_s)

    def connect() -> Store:
        if _agent_has_store():
            store: Store = next(rendezvous("env://", world.rank, world.world_size, timeout=timeout))[0]
            return store
        return TCPStore(host, port, world.world_size, hosting, timeout, False, True)

    try:
        if not hosting:  # torch's own wait for the port ends in pages of C++ frames on the terminal
            await_port(host, port, deadline)
        return bounded(connect, remaining_s)
    except TimeoutError:  # a foreign server accepts connections and never answers
        reason = f"does not answer as rank 0's store within {remaining_s:.0f} s"
    except Exception as error:
        reason = str(error).splitlines()[0]
        if "EADDRINUSE" in reason or "address already in use" in reason.lower():
            reason = "is in use by another program"
    raise LaunchError(
        f"rank {world.rank} of {world.world_size} cannot meet the others at {host}:{port}, which {reason}: "
        f"MASTER_ADDR must be rank 0's host and MASTER_PORT a port that is free there and open to all ranks"
    )


def _agree_through_mpi(world: World, deadline: float) -> Store:
    """Open a port on rank 0 and tell the others through MPI: `mpiexec` alone names no address."""
    if importlib.util.find_spec("mpi4py") is None:
        raise LaunchError(
            "mpiexec started ranks on several hosts and gave them no address to meet at: export MASTER_ADDR "
            "(rank 0's host) and MASTER_PORT (a free port there), or install laconic[mpi]"
        )
    comm = importlib.import_module("mpi4py.MPI").COMM_WORLD
    if comm.Get_size() != world.world_size:
        raise LaunchError(
            f"mpi4py sees {comm.Get_size()} ranks, the launcher started {world.world_size}: "
            "use the mpiexec of the MPI library that mpi4py uses, or export MASTER_ADDR and MASTER_PORT"
        )
    if world.rank != 0:
        host, port = comm.bcast(None, root=0)
        return _tcp_store(host, port, world, deadline)
    timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    store = TCPStore("localhost", 0, world.world_size, True, timeout, False)
    comm.bcast((own_address(), store.port), root=0)
    return store


def _gather(store: Store, world: World, verb: str, limit_s: float, deadline: float) -> None:
    """Wait until every rank did what the verb says; rank 0, which may host the store, returns last."""

    def mark(prefix: str) -> None:
        store.set(f"{prefix}/{world.rank}", "1")

    def wait(keys: list[str], prefix: str) -> None:
        while not store.check(keys):
            if time.monotonic() > deadline:
                absent = [rank for rank in range(world.world_size) if not store.check([f"{prefix}/{rank}"])]
                raise _absentees(absent or [0], world.world_size, verb, limit_s)
            time.sleep(_POLL_S)

    try:
        mark(verb)
        if world.rank == 0:
            wait([f"{verb}/{rank}" for rank in range(world.world_size)], verb)
            mark(f"{verb}/seen")
            wait([f"{verb}/seen/{rank}" for rank in range(world.world_size)], f"{verb}/seen")
        else:
            wait([f"{verb}/seen/0"], verb)
            mark(f"{verb}/seen")
    except RuntimeError as error:
        raise LaunchError(f"rank 0 left while the ranks met: {str(error).splitlines()[0]}") from None


def _absentees(absent: list[int], size: int, verb: str, limit_s: float) -> LaunchError:
    names = ", ".join(map(str, absent[:16])) + (", ..." if len(absent) > 16 else "")
    return LaunchError(
        f"{size - len(absent)} of {size} ranks {verb} within {limit_s:g} s, missing: {names}; "
        f"look for errors of those ranks, or wait longer with timeout_s"
    )


def _join(
    backend: str | None, store: Store, world: World, limit_s: float, device_id: torch.device | None
) -> None:
    if backend is None:
        cuda = torch.cuda.is_available() and dist.is_nccl_available()
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if device_id is not None:
        torch.cuda.set_device(device_id)
    elif "nccl" in backend:
        torch.cuda.set_device(world.local_rank % torch.cuda.device_count())
    timeout = timedelta(seconds=limit_s)
    # torch imports this with the first optimizer. Its default arguments would then hold the group made here,
    # whose threads would outlive shutdown() and sometimes abort the process at exit.
    importlib.import_module("torch.distributed.nn.functional")
    try:
        dist.init_process_group(
            backend,
            timeout=timeout,
            world_size=world.world_size,
            rank=world.rank,
            store=store,
            device_id=device_id,
        )
    except RuntimeError as error:
        raise LaunchError(
            f"rank {world.rank} of {world.world_size} met the others but could not connect to them: "
            f"{str(error).splitlines()[0]}; check the network, or name an interface in {GLOO_INTERFACE}"
        ) from error


def _at_exit() -> None:
    """Leave quietly when Python exits; rank 0, or the survivors if it is lost, removes the meeting file."""
    with contextlib.suppress(Exception):
        shutdown()
    if _place is None or _place.pid != os.getpid():
        return
    if _place.meeting.owned and (_place.world.rank == 0 or _place.rank_0_lost):
        with contextlib.suppress(OSError):
            Path(_place.meeting.path).unlink()
