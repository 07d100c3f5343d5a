"""Process groups: join the ranks of a launch, the same under every launcher, and make groups of our own.

Our collectives never share a group with anybody else's. Two users of one group pair their messages in the
order of issue, which may differ from rank to rank: with two models reached by one backward pass it does, and
gloo then aborts the process.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import os
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store  # type: ignore[attr-defined]

from stenograd import devices
from stenograd.errors import ConfigError, LaunchError, PeerLost, bad_value, first_line
from stenograd.launch.detect import OPEN_VARIABLE, World, bad_variable, detect
from stenograd.launch.failure_detector import Absent, FailureDetector, attend
from stenograd.launch.local_workers import TIMEOUT_VARIABLE, run_local
from stenograd.launch.membership import CONNECT_S, Membership
from stenograd.launch.network import (
    GLOO_INTERFACE,
    Sockets,
    address_towards,
    bounded,
    opened,
    own_address,
    unshared,
    use_loopback,
)
from stenograd.launch.rendezvous import (
    Meeting,
    agree_on_start,
    gather_ranks,
    meeting_point,
    open_store,
    store_errors,
    unmarked_ranks,
)

__all__ = [
    "Absent",
    "Ranks",
    "World",
    "announce",
    "announced",
    "attends",
    "backends",
    "came",
    "connect_members",
    "detect",
    "go_on_without",
    "init",
    "join",
    "leave",
    "make_group",
    "meet",
    "membership",
    "refuse_open",
    "roll_call",
    "run_local",
    "shutdown",
    "unannounced",
    "waiting_loops",
]

Ranks = Sequence[int]

_DEFAULT_TIMEOUT_S = 300.0
_MARKS_S = 2.0  # for marks in the store of a group that others made
_LOOP = "gloo_tcp_loop"  # what gloo calls the thread that moves a process group's messages
_TASKS = Path("/proc/self/task")
_ANYBODY = "anybody"  # beside the ranks' own keys, so that one question to the store is enough
# How many groups were made from each group. All its ranks make them in the same order, so the number is equal
# on all of them and can stand in the new group's name without any communication.
_made: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
# gloo's ports and threads for all groups of our own, by process and interface; a forked child needs others.
_ports: dict[tuple[int, str], list[Any]] = {}
_makers: list[Any] = []  # one entry for each thread that is making a group; the first has torch's class
_makers_lock = threading.Lock()


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
    detector: FailureDetector | None
    group: Any  # torch's default group, which the program may replace by another


_place: _Place | None = None
_session: _Session | None = None
_membership: Membership | None = None  # in an open run, in place of both
_open_chose_interface = False


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

    Where `STENOGRAD_OPEN` names the store of an open run (see `Rounds`), this process waits for nobody here:
    it is alone in the default group. Rank and world size say who it is, and how many there are to begin with.

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
        if (open_run := membership()) is not None:
            return _world_of(open_run)
        session = _own_session()
        return session.place.world if session is not None else _joined_world()
    shutdown()  # where the program has destroyed the group by itself
    limit_s = _timeout_s(timeout_s)
    if OPEN_VARIABLE in os.environ:
        return _init_open(limit_s)
    deadline = time.monotonic() + limit_s
    with unshared():
        place, store = _open(limit_s, deadline)
        world = place.world
        detector = _start_detector(store, world, place.rendezvous)
    try:
        gather_ranks(store, world, "came", limit_s, deadline)  # first: a get() of a missing key names nobody
        if detector is not None:
            _introduce(detector, store, world)
        chose_interface = world.one_host and use_loopback()  # before the group is made, which reads it
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
    _session = _Session(place, store, chose_interface, detector, dist.group.WORLD)
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


def join(*, timeout_s: float | None = None, open_run: bool = False) -> World:
    """Join the other ranks as `init` does, but make no process group in a world of one.

    A program of one rank can then still call `torch.distributed.init_process_group` itself.

    Raises:
        ConfigError: this is a worker of an open run, and not `open_run` says that the caller knows of these.
    """
    if not open_run:
        refuse_open()
    alone = not dist.is_initialized() and OPEN_VARIABLE not in os.environ
    if alone and (world := detect(os.environ)).world_size == 1:
        return world
    return init(timeout_s=timeout_s)


def refuse_open() -> None:
    """Refuse to exchange in an open run, where each process is alone in its group, by what needs all ranks.

    Raises:
        ConfigError: this process is a worker of an open run, or would become one.
    """
    if membership() is not None or (OPEN_VARIABLE in os.environ and not dist.is_initialized()):
        raise ConfigError(
            f"{OPEN_VARIABLE} is set, so this process is a worker of an open run, where only rounds with a "
            "quorum bring ranks together: unset it, or use stenograd.distribute with "
            "diloco:every=30,quorum=0.75"
        )


def shutdown() -> None:
    """Leave the group that `init` made; a group made by other means stays, and a second call does nothing.

    Scripts need not call it: it runs when Python exits.
    """
    global _membership, _session
    if (open_run := membership()) is not None:
        _membership = None
        open_run.close()
        if dist.is_initialized():
            dist.destroy_process_group()
        if _open_chose_interface:  # as below
            os.environ.pop(GLOO_INTERFACE, None)
        return
    session, _session = _session, None
    if session is None or session.place.pid != os.getpid():
        return
    if session.detector is not None:
        session.detector.close()  # first: this rank joins no further collectives, so it must not look alive
    if dist.is_initialized() and dist.group.WORLD is session.group:
        dist.destroy_process_group()
    # A group that is made later, perhaps over several hosts, would otherwise be bound to loopback, too.
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

        def meet_others() -> list[int]:
            store.set(str(rank), "here")
            return unmarked_ranks(store, [other for other in range(size) if other != rank], limit_s)

        return Absent(bounded(meet_others, limit_s + 1.0))
    except Exception:  # no group, a PyTorch that keeps its store elsewhere, or a store that is gone
        return Absent()


def membership() -> Membership | None:
    """Return this process's part in the open run that `init` joined; None outside of one."""
    return _membership if _membership is not None and _membership.pid == os.getpid() else None


def attends() -> bool:
    """Return whether `init` made the group, so that every rank answers roll calls."""
    return _own_session() is not None


def came(group: str) -> None:
    """Count a collective that this rank came to; `roll_call` compares the counts to find late ranks."""
    if (detector := _detector()) is not None:
        detector.came[group] += 1


def go_on_without(lost: Sequence[int]) -> None:
    """Forget lost ranks that training goes on without, so that `roll_call` reports only new losses."""
    if (detector := _detector()) is not None:
        detector.go_on_without(lost)


def backends() -> dict[str, bool]:
    """Return which of torch.distributed's backends this PyTorch was built with.

    Example:
        >>> sorted(backends())
        ['gloo', 'nccl']
    """
    built = dist.is_available()
    return {"gloo": built and dist.is_gloo_available(), "nccl": built and dist.is_nccl_available()}


def make_group(parent: Any, ranks: Ranks, what: str, timeout_s: float) -> Any:
    """Make a process group of some of a group's ranks; every rank of the parent calls it, in the same order.

    `torch.distributed.new_group` cannot do this for a part of the world. Its names count the groups that a
    rank is in, so ranks that are in different numbers of groups would wait for each other under two names,
    and a group that is made again would find the addresses of the old one. Here the name holds the parent's
    name and a count of the groups made from that parent.

    Args:
        parent: the group that holds the ranks; None for the whole world.
        ranks: the members, as numbered in the world.
        what: what the group is for; part of its name.
        timeout_s: seconds after which a collective of the group fails, and so does making it.

    Returns:
        The group; None where this rank is not a member.
    """
    whole = parent if parent is not None else dist.distributed_c10d._get_default_group()
    counts = _made.setdefault(whole, Counter())
    counts[what] += 1  # on ranks outside of the new group, too
    if dist.get_rank() not in ranks:
        return None
    return _connect(whole, sorted(ranks), f"stenograd/{whole.group_name}/{what}/{counts[what]}", timeout_s)


def connect_members(store: Store, name: str, number: int, size: int, timeout_s: float) -> tuple[Any, Sockets]:
    """Connect some workers of an open run, each of which is alone in its default group.

    Args:
        store: to find each other in.
        name: of the group, which nobody has used there.
        number: of this worker among them.
        size: how many there are.
        timeout_s: as in `make_group`.

    Returns:
        The group, and its connections.
    """
    c10d: Any = dist.distributed_c10d
    # torch knows members by their ranks in the default group, where this process is 0 and nobody else is.
    numbers = {(0 if i == number else i + 1): i for i in range(size)}
    limit = timedelta(seconds=min(CONNECT_S, timeout_s))
    try:
        with waiting_loops(), unshared(), _shared_port(), opened() as connections:
            group, _ = c10d._new_process_group_helper(
                size, number, [*numbers], "gloo", store, f"stenograd/open/{name}", timeout=limit
            )
        c10d._world.pg_group_ranks[group] = numbers
        # The shorter limit was for connecting alone; collectives have the caller's.
        group._get_backend(torch.device("cpu"))._set_default_timeout(timedelta(seconds=timeout_s))
    except RuntimeError as error:
        # A round catches PeerLost and begins another attempt; a RuntimeError would end the training.
        raise PeerLost(f"the members of {name} did not connect: {first_line(error)}") from error
    return group, connections[0]


def announce(group: str, what: str, rank: int) -> None:
    """Leave word in the store that a rank of the group of this name does something from now on."""
    board = _board(group, what)
    board.set(str(rank), "here")
    board.set(_ANYBODY, "here")


def announced(group: str, what: str) -> bool:
    """Return whether a rank of a group has announced something."""
    return bool(_board(group, what).check([_ANYBODY]))


def unannounced(group: str, what: str, size: int, grace_s: float) -> list[int]:
    """Return which ranks of a group have not announced something within the time."""
    return unmarked_ranks(_board(group, what), range(size), grace_s)


def _board(group: str, what: str) -> Store:
    return PrefixStore(f"stenograd/{group}/{what}", dist.distributed_c10d._get_default_store())


def leave(group: Any) -> None:
    """Destroy a group on this rank; nothing happens if it is gone already."""
    # The program may destroy the world at the same time, and this may run while Python collects garbage.
    with contextlib.suppress(ValueError, KeyError, AttributeError, RuntimeError):
        if dist.is_initialized() and group in dist.distributed_c10d._world.pg_map:
            dist.destroy_process_group(group)


@contextlib.contextmanager
def waiting_loops() -> Iterator[None]:
    """Let the threads that gloo starts inside wait for a core, rather than interrupt whoever computes on it.

    Such a thread wakes when a message comes, and may interrupt the very thread that is sending on the same
    connection. That one holds the connection's lock, which gloo's thread then tries in vain, and asks the
    kernel for messages again and again, until it has used up its time slice: 3 to 5 ms of nothing. Ranks
    that send at the same time, as in training, meet this in most steps. Linux lets a thread of `SCHED_BATCH`
    interrupt nobody; it gets its share of the time as before, and a free core at once.

    Only groups of our own are made in here: the program's stay as they are. Where the system has no such
    policy or does not allow it, nothing changes.

    Example:
        >>> with waiting_loops():
        ...     pass  # make a process group
    """
    before = _loops()
    yield
    for thread in _loops() - before:
        with contextlib.suppress(OSError):  # not allowed, or gone
            os.sched_setscheduler(thread, os.SCHED_BATCH, os.sched_param(0))


def _init_open(limit_s: float) -> World:
    """Join an open run: make a default group of this process alone, and open the run's store."""
    global _membership, _open_chose_interface
    address, world = os.environ[OPEN_VARIABLE], detect(os.environ)
    # Who has no number may be one of several machines that share a folder.
    here = world.one_host and (world.world_size > 1 or own_address() == socket.gethostname())
    chose_interface = here and os.sep in address and use_loopback()
    importlib.import_module("torch.distributed.nn.functional")  # as in `_make_group`
    found = Membership(address, world, limit_s)
    with unshared():
        # torch makes no group without a default one; the members of a round get a group of their own.
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    if devices.count():
        devices.use(devices.local_device(world.local_rank))
    atexit.register(_leave_open)
    _membership, _open_chose_interface = found, chose_interface
    return _world_of(found)


def _world_of(found: Membership) -> World:
    # A worker that comes later may have a rank beyond the starting size; `World` has rank < world_size.
    size, local = max(found.size, found.rank + 1), detect(os.environ)
    return World(found.rank, size, local.local_rank, local.local_world_size, "open")


def _leave_open() -> None:
    with contextlib.suppress(Exception):  # at exit nobody can do anything about it
        shutdown()


def _start_detector(store: Store, world: World, where: Meeting) -> FailureDetector | None:
    """Start to answer roll calls, and leave this rank's address in the store; None in a world of one."""
    if world.world_size == 1:
        return None

    # It is a function because `attend` handles the OSError of a host that has no address.
    def host() -> str:
        if world.one_host:
            return "127.0.0.1"
        return address_towards(where.host, where.port) if where.kind == "tcp" else own_address()

    detector = attend(world.rank, host)
    with store_errors():
        # Without a card the key is set as well: the others' get() in `_introduce` waits for it.
        store.set(f"detector/{world.rank}", detector.card if detector is not None else "")
    return detector


def _introduce(detector: FailureDetector, store: Store, world: World) -> None:
    """Give a rank's failure detector the addresses that all ranks left in the store."""
    with store_errors():
        cards = {rank: store.get(f"detector/{rank}").decode() for rank in range(world.world_size)}
    detector.meet({rank: card for rank, card in cards.items() if card})


def _own_session() -> _Session | None:
    """Return the session if this process, not its parent before a fork, made it and its group stands."""
    if _session is None or _session.place.pid != os.getpid():
        return None
    return _session if dist.is_initialized() and dist.group.WORLD is _session.group else None


def _detector() -> FailureDetector | None:
    session = _own_session()
    return None if session is None else session.detector


def _joined_world() -> World:
    """Describe a group that the user made; it counts as one host unless a launcher's variables match it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    with contextlib.suppress(LaunchError):  # the user may have used no launcher
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
        place.start = agree_on_start(place.store, world, limit_s, deadline)
    store = PrefixStore(f"stenograd/{place.start}/{place.inits}", place.store)
    place.inits += 1
    return place, store


def _open_store(where: Meeting, world: World, deadline: float) -> _Place:
    """Open the store at the rendezvous, or return the one that an earlier `init` opened there."""
    global _place
    # The pid counts, because a forked child has given up its parent's connections (`network._let_go`).
    if _place is not None and (_place.rendezvous, _place.world, _place.pid) == (where, world, os.getpid()):
        return _place
    store = open_store(where, world, deadline)
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


@contextlib.contextmanager
def _unbound(world: Any) -> Iterator[None]:
    """Let torch connect a new group afresh, where it would split the communicator of the default group.

    It splits where that is bound to a device (`init_process_group(device_id=...)`). NCCL then waits for every
    rank of the world, members or not; ours are called by members alone, and by survivors of a lost rank.
    """
    bound = getattr(world, "bound_device_id", None)
    if bound is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = bound


@contextlib.contextmanager
def _shared_port() -> Iterator[None]:
    """Let gloo groups that are made inside use one port and one thread, rather than one of each per group.

    gloo can serve many groups so, and torch has the option, but gives it no way to `new_group`.
    """
    c10d: Any = dist.distributed_c10d
    with _makers_lock:
        if not _makers and hasattr(c10d, "ProcessGroupGloo"):
            _makers.append(c10d.ProcessGroupGloo)
            c10d.ProcessGroupGloo = _sharing(c10d.ProcessGroupGloo)
        else:  # another thread is making a group, too
            _makers.append(None)
    try:
        yield
    finally:
        with _makers_lock:
            first = _makers[0]
            _makers.pop()  # the last: the first, with torch's class, goes when all are done
            if not _makers and first is not None:
                c10d.ProcessGroupGloo = first


def _sharing(gloo: Any) -> Any:
    class Sharing(gloo):  # type: ignore[misc]
        """What torch makes, at the port of those made before."""

        # torch's `_new_process_group_helper` calls ProcessGroupGloo with these arguments.
        def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
            options = gloo._Options()
            options._timeout, options._devices = timeout, _gloo_devices(gloo)
            options._threads = 2 * len(options._devices)  # as torch has it
            super().__init__(store, rank, size, options)

    return Sharing


def _gloo_devices(gloo: Any) -> list[Any]:
    """Return the port on each interface that torch would choose, the same for one process and interface."""
    named = os.environ.get(GLOO_INTERFACE, "")
    key = os.getpid(), named
    if key not in _ports:
        names = [name for name in named.split(",") if name]
        default = [] if names else [gloo.create_default_device()]
        _ports[key] = default or [gloo.create_device(interface=name) for name in names]
    return _ports[key]


def _connect(parent: Any, ranks: list[int], name: str, timeout_s: float) -> Any:
    """Do what `new_group` does for members, under a name of our choice, with the parent's backend."""
    c10d: Any = dist.distributed_c10d
    store = c10d._get_default_store()
    number, deadline = ranks.index(dist.get_rank()), time.monotonic() + timeout_s
    backend, timeout = dist.get_backend(parent), timedelta(seconds=timeout_s)
    with waiting_loops(), unshared(), _unbound(c10d._get_default_group()), _shared_port():
        group, _ = c10d._new_process_group_helper(
            len(ranks), number, ranks, backend, store, name, timeout=timeout
        )
        # torch looks a group's ranks up here; `new_group` would have noted them.
        c10d._world.pg_group_ranks[group] = {rank: i for i, rank in enumerate(ranks)}
        # A rank that left the group at once would break the connections that others are still making.
        connected, everyone = f"{name}/connected", f"{name}/everyone"
        if store.add(connected, 1) == len(ranks):
            store.set(everyone, "1")
        # One limit for both waits; stores take 0 for none at all.
        store.wait([everyone], timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
    return group


def _loops() -> set[int]:
    """Return the numbers of this process's threads that have gloo's name; none where that is not told."""
    found: set[int] = set()
    if not hasattr(os, "SCHED_BATCH"):
        return found
    with contextlib.suppress(OSError):
        for task in _TASKS.iterdir():
            with contextlib.suppress(OSError):  # it has just ended
                if (task / "comm").read_text().strip() == _LOOP:
                    found.add(int(task.name))
    return found


def _at_exit() -> None:
    """Leave the group at exit; rank 0, or a survivor if rank 0 is lost, removes the rendezvous file."""
    with contextlib.suppress(Exception):  # at exit nobody can do anything about it
        shutdown()
    if _place is None or _place.pid != os.getpid():
        return
    if _place.rendezvous.owned and (_place.world.rank == 0 or _place.rank_0_lost):
        with contextlib.suppress(OSError):
            Path(_place.rendezvous.path).unlink()
