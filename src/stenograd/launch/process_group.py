"""Join the ranks of a launch into one process group, and leave it; the same under every launcher."""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import time
from collections.abc import Sequence
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
)

from stenograd import devices
from stenograd.errors import LaunchError, bad_value, first_line
from stenograd.launch.barrier import gather_ranks, introduce, store_errors, unmarked_ranks
from stenograd.launch.detect import World, bad_variable, detect
from stenograd.launch.failure_detector import Absent, Presence, attend
from stenograd.launch.local_workers import TIMEOUT_VARIABLE, run_local
from stenograd.launch.network import (
    GLOO_INTERFACE,
    address_towards,
    bounded,
    own_address,
    unshared,
    use_loopback,
)
from stenograd.launch.rendezvous import Meeting, meeting_point
from stenograd.launch.restarts import agree_on_start
from stenograd.launch.stores import agent_has_store, store_through_mpi, tcp_store

__all__ = [
    "Absent",
    "World",
    "attends",
    "backends",
    "came",
    "detect",
    "go_on_without",
    "init",
    "join",
    "meet",
    "roll_call",
    "run_local",
    "shutdown",
]

_DEFAULT_TIMEOUT_S = 300.0
_MARKS_S = 2.0  # for marks in the store of a group that others made


@dataclass
class _Place:
    """This process's rendezvous and its store, which outlive a group: a second `init` uses them again."""

    rendezvous: Meeting
    world: World
    store: Store
    pid: int = field(default_factory=os.getpid)
    inits: int = 0
    start: str | None = None  # name of this start among those that share the store
    rank_0_lost: bool = False


@dataclass
class _Session:
    """The group that `init` made, until `shutdown`."""

    place: _Place
    store: Store
    chose_interface: bool
    detector: Presence | None


_place: _Place | None = None
_session: _Session | None = None


def init(
    *,
    backend: str | None = None,
    timeout_s: float | None = None,
    device_id: torch.device | None = None,
) -> World:
    """Join the ranks of the launch into the default process group, and return this process's rank.

    Works unchanged under torchrun, `mpiexec` of Open MPI and MPICH, `srun`, `run_local` and alone. Where
    `torch.distributed` is already initialised, nothing happens. All ranks of a launch must call it.
    Ranks on one host talk gloo over the loopback interface unless `GLOO_SOCKET_IFNAME` says otherwise.

    Args:
        backend: as in `torch.distributed.init_process_group`; None is gloo, and NCCL for CUDA tensors
            where each rank of this host has a CUDA device of its own.
        timeout_s: seconds to wait until all ranks have come, then until all are connected, and later in every
            collective, > 0; None is `STENOGRAD_TIMEOUT_S` from the environment, or 300.
        device_id: CUDA device of this rank; None is device local_rank modulo the number of devices.

    Returns:
        Rank and world size, and the same among the ranks on this host.

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
    with unshared():
        place, store = _open(limit_s, deadline)
        world = place.world
        detector = _start_detector(store, world, place.rendezvous)
    try:
        gather_ranks(store, world, "came", limit_s, deadline)  # first: a get() of a missing key names nobody
        introduce(detector, store, world)
        chose_interface = world.one_host and use_loopback()
        deadline = time.monotonic() + limit_s  # all are here; connecting has a limit of its own, and only one
        _make_group(backend, store, world, limit_s, device_id)
        # The host of the store may leave only when all are connected: connecting reads addresses from it.
        gather_ranks(store, world, "connected", limit_s, deadline)
    except BaseException:
        if detector is not None:
            detector.close()
        if dist.is_initialized():  # else the next call would take the half-made group for a whole one
            dist.destroy_process_group()
        raise
    _session = _Session(place, store, chose_interface, detector)
    return world


def meet(*, timeout_s: float | None = None) -> tuple[World, Store]:
    """Meet the other ranks in a store, without connecting to them: for looking into why `init` fails.

    All ranks must call it.

    Raises:
        LaunchError: as `init`; ranks that did not come are named.
    """
    limit_s = _timeout_s(timeout_s)
    deadline = time.monotonic() + limit_s
    place, store = _open(limit_s, deadline)
    gather_ranks(store, place.world, "came", limit_s, deadline)
    return place.world, store


def join(*, timeout_s: float | None = None) -> World:
    """Join the other ranks as `init` does, but make no process group in a world of one.

    A program of one rank can then still call `torch.distributed.init_process_group` itself.
    """
    if not dist.is_initialized() and (world := detect(os.environ)).world_size == 1:
        return world
    return init(timeout_s=timeout_s)


def shutdown() -> None:
    """Leave the group that `init` made; a group made by other means stays, and a second call does nothing.

    Scripts need not call it: it runs when Python exits.
    """
    global _session
    session, _session = _own_session(), None
    if session is None:
        return
    if (
        session.detector is not None
    ):  # first: this rank joins no further collectives, so it must not look alive
        session.detector.close()
    if dist.is_initialized():
        dist.destroy_process_group()
    if session.chose_interface:
        os.environ.pop(GLOO_INTERFACE, None)


def roll_call(grace_s: float, group: str = "") -> Absent:
    """After a failed collective, find out which ranks are to blame.

    It never raises, and takes at most about twice `grace_s`, and two seconds. In a group that `init` made,
    each rank whose collective failed asks all others (see `stenograd.launch.failure_detector`). In a group of
    the user's own, each leaves a mark in that group's store and waits for the others' marks, for two seconds
    at most: a lost rank leaves none, so that time passes after every loss.

    Args:
        grace_s: seconds that the ranks have to answer, >= 0.
        group: name of the group whose collective failed, as given to `came`.

    Returns:
        The ranks that are lost, and those that are alive but had not come to the collective. Both are empty
        where all ranks came and answered, or where this cannot be known.
    """
    session = _own_session()
    if session is not None:
        found = session.detector.absent(group, grace_s) if session.detector is not None else Absent()
        session.place.rank_0_lost |= 0 in found.lost
        return found
    try:
        store = PrefixStore("stenograd/roll-call", dist.distributed_c10d._get_default_store())
        rank, size, limit_s = dist.get_rank(), dist.get_world_size(), min(grace_s, _MARKS_S)
        return Absent(bounded(lambda: unmarked_ranks(store, rank, size, limit_s), limit_s + 1.0))
    except Exception:  # no group, a PyTorch that keeps its store elsewhere, or a store that is gone
        return Absent()


def attends() -> bool:
    """Return whether `init` made the group, so that every rank answers roll calls."""
    return _own_session() is not None


def came(group: str) -> None:
    """Count a collective that this rank came to; `roll_call` compares the counts to find late ranks."""
    session = _own_session()
    if session is not None and session.detector is not None:
        session.detector.came[group] += 1


def go_on_without(lost: Sequence[int]) -> None:
    """Forget lost ranks that training goes on without, so that `roll_call` reports only new losses."""
    session = _own_session()
    if session is not None and session.detector is not None:
        session.detector.go_on_without(lost)


def backends() -> dict[str, bool]:
    """Return which of torch.distributed's backends this PyTorch was built with.

    Example:
        >>> sorted(backends())
        ['gloo', 'nccl']
    """
    built = dist.is_available()
    return {"gloo": built and dist.is_gloo_available(), "nccl": built and dist.is_nccl_available()}


def _start_detector(store: Store, world: World, where: Meeting) -> Presence | None:
    """Start to answer roll calls, and leave this rank's address in the store; None in a world of one."""
    if world.world_size == 1:
        return None

    def host() -> str:
        if world.one_host:
            return "127.0.0.1"
        return address_towards(where.host, where.port) if where.kind == "tcp" else own_address()

    detector = attend(world.rank, host)
    with store_errors():
        store.set(f"detector/{world.rank}", detector.card if detector is not None else "")
    return detector


def _own_session() -> _Session | None:
    """Return the session if this process made it, and not its parent before a fork."""
    return _session if _session is not None and _session.place.pid == os.getpid() else None


def _joined_world() -> World:
    """Describe a group that the user made; it counts as one host unless a launcher's variables match it."""
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


def _open(limit_s: float, deadline: float) -> tuple[_Place, Store]:
    """Return the rendezvous of this launch, and a part of its store that nobody has used before."""
    world = detect(os.environ)
    place = _open_store(meeting_point(world, os.environ), world, deadline)
    if place.start is None:  # torchrun's agents keep one store over restarts, so keys must differ
        place.start = agree_on_start(place.store, world, limit_s, deadline) if agent_has_store() else "0"
    store = PrefixStore(f"stenograd/{place.start}/{place.inits}", place.store)
    place.inits += 1
    return place, store


def _open_store(where: Meeting, world: World, deadline: float) -> _Place:
    """Open the store at the rendezvous, or return the one that an earlier `init` opened there."""
    global _place
    if _place is not None and (_place.rendezvous, _place.world, _place.pid) == (where, world, os.getpid()):
        return _place
    store: Store
    if where.kind == "alone":
        store = HashStore()
    elif where.kind == "file":
        store = FileStore(where.path, -1)  # -1: the store does not remove its file; rank 0 does, at exit
    elif where.kind == "mpi":
        store = store_through_mpi(world, deadline)
    else:
        store = tcp_store(where.host, where.port, world, deadline)
    if _place is None:
        atexit.register(_at_exit)
    _place = _Place(where, world, store)
    return _place


def _make_group(
    backend: str | None, store: Store, world: World, limit_s: float, device_id: torch.device | None
) -> None:
    """Make torch's default process group, with gloo for CPU tensors and NCCL for CUDA tensors by default."""
    if backend is None:
        # NCCL refuses two ranks on one device; gloo takes their tensors by way of the CPU's memory.
        cuda = devices.count() >= world.local_world_size and dist.is_nccl_available()
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if device_id is not None or "nccl" in backend:
        devices.use(device_id or devices.local_device(world.local_rank))
    timeout = timedelta(seconds=limit_s)
    # torch imports this with the first optimizer. Its default arguments would then hold the group made here,
    # whose threads would outlive shutdown() and sometimes abort the process at exit.
    importlib.import_module("torch.distributed.nn.functional")
    try:
        with unshared():
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
            f"rank {world.rank} of {world.world_size} found the others but could not connect to them: "
            f"{first_line(error)}; check the network, or name an interface in {GLOO_INTERFACE}"
        ) from error


def _at_exit() -> None:
    """Leave the group at exit; rank 0, or a survivor if rank 0 is lost, removes the rendezvous file."""
    with contextlib.suppress(Exception):
        shutdown()
    if _place is None or _place.pid != os.getpid():
        return
    if _place.rendezvous.owned and (_place.world.rank == 0 or _place.rank_0_lost):
        with contextlib.suppress(OSError):
            Path(_place.rendezvous.path).unlink()
