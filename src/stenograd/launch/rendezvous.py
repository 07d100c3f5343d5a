"""The rendezvous of a launch: where its ranks find each other, and how they wait for each other there.

That is a file on this host, or an address and a port, where a key-value store is opened.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal, Protocol

from torch.distributed import FileStore, HashStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed import Store as TorchStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous as torch_rendezvous

from stenograd.errors import LaunchError, first_line
from stenograd.launch.detect import STORE_VARIABLE, World, bad_variable
from stenograd.launch.network import await_port, bounded, own_address
from stenograd.reading import private_folder

__all__ = [
    "Meeting",
    "Store",
    "agree_on_start",
    "expand_hosts",
    "gather_ranks",
    "meeting_point",
    "open_store",
    "store_errors",
    "tell_all",
    "unmarked_ranks",
]

_EXPORT = "export MASTER_ADDR (rank 0's host) and MASTER_PORT (a free port there) to all ranks"

# Ports for Slurm jobs: below 32768, where Linux begins to hand out ephemeral ports to anybody.
_FIRST_PORT, _PORTS = 10_000, 20_000

# Processes that start ranks, as /proc names them (15 characters at most).
_LAUNCHERS = frozenset(
    ["hydra_pmi_proxy", "pmi_proxy", "prterun", "prted", "orterun", "orted", "mpiexec", "mpirun"]
)

_POLL_S = 0.01  # a launch is late by this at most; stores have no wait that says which key is missing
_ROLL_CALL_POLL_S = 0.1  # coarser: the store's host may be struggling, and survivors have 2 s
_NAMED_RANKS = 16  # an error about a thousand missing ranks still fits a terminal


class Store(Protocol):
    """The methods that we use of torch.distributed's stores."""

    def set(self, key: str, value: str) -> None:
        """Set a key."""

    def get(self, key: str) -> bytes:
        """Wait for a key and return its value."""

    def add(self, key: str, amount: int) -> int:
        """Add to a number that begins at 0, and return the sum."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys are set."""


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


def open_store(where: Meeting, world: World, deadline: float) -> TorchStore:
    """Open the store at a rendezvous.

    Raises:
        LaunchError: that is not possible; it says why, and what to set.
    """
    if where.kind == "alone":
        return HashStore()
    if where.kind == "file":
        return FileStore(where.path, -1)  # -1: the store does not remove its file; rank 0 does, at exit
    if where.kind == "mpi":
        return _store_through_mpi(world, deadline)
    return _tcp_store(where.host, where.port, world, deadline)


def gather_ranks(store: Store, world: World, verb: str, limit_s: float, deadline: float) -> None:
    """Wait until every rank has done what the verb says ("came", "connected").

    Rank 0 may host the store, so it must not leave while others still read from it: it returns only when all
    have seen that everyone is there.

    Raises:
        LaunchError: ranks are missing at the deadline, or this rank's number is taken.
    """
    done, seen = ([f"{name}/{rank}" for rank in range(world.world_size)] for name in (verb, f"{verb}/seen"))

    def mark(keys: Sequence[str]) -> None:
        if store.add(keys[world.rank], 1) > 1:
            raise LaunchError(
                f"another process is already rank {world.rank} of {world.world_size} at this rendezvous: "
                f"give each job a MASTER_PORT of its own, and start each rank once"
            )

    with store_errors():
        mark(done)
        # Only rank 0 asks for all keys: if each rank did, a poll would cost the store N times as much.
        _await(store, world, done if world.rank == 0 else seen[:1], done, verb, limit_s, deadline)
        mark(seen)
        if world.rank == 0:
            _await(store, world, seen, seen, verb, limit_s, deadline)


def tell_all(store: Store, world: World, what: str, text: str, limit_s: float) -> list[str]:
    """Give every rank a text of each rank, in rank order; all ranks call it with the same `what`, once.

    Rank 0 may host the store: let `gather_ranks` follow before it leaves.

    Raises:
        LaunchError: ranks did not tell theirs in time; it names them.
    """
    keys = [f"{what}/{rank}" for rank in range(world.world_size)]
    with store_errors():
        store.set(keys[world.rank], text)
        _await(store, world, keys, keys, f"told {what!r}", limit_s, time.monotonic() + limit_s)
        return [store.get(key).decode() for key in keys]


def agree_on_start(store: Store, world: World, limit_s: float, deadline: float) -> str:
    """Return a name of this start that is equal on all ranks and was never used before in this store.

    Under torchrun one store outlives all restarts. `TORCHELASTIC_RESTART_COUNT` cannot tell them apart: each
    agent counts its own, and when workers are started again because nodes came or went, it counts none. So
    rank 0 draws a name and answers every request in the store, also those that dead ranks of earlier starts
    left, until all ranks of this start have confirmed that they know it. The agents have stopped earlier
    ranks by then.

    Args:
        store: that of the rendezvous.
        world: rank and number of ranks.
        limit_s: how long ranks may take, for the message.
        deadline: on `time.monotonic`'s clock, when to give up.

    Raises:
        LaunchError: ranks did not come in time.
    """
    if not _agent_has_store():
        return "0"
    prefix, drawn, counted, unanswered = "stenograd/start", secrets.token_hex(8), 0, list[int]()

    def answer() -> None:
        nonlocal counted
        requests = store.add(f"{prefix}/requests", 0)
        unanswered.extend(range(counted + 1, requests + 1))
        counted = requests
        # A rank counts its request before it sets it, so one may not be there yet, or never, if it is killed.
        for number in [n for n in unanswered if store.check([f"{prefix}/request/{n}"])]:
            unanswered.remove(number)
            token = store.get(f"{prefix}/request/{number}").decode()
            store.set(f"{prefix}/answer/{token}", drawn)

    with store_errors():
        if world.rank == 0:
            store.set(f"{prefix}/{drawn}/0", "1")
            confirmed = [f"{prefix}/{drawn}/{rank}" for rank in range(world.world_size)]
            _await(store, world, confirmed, confirmed, "came", limit_s, deadline, meanwhile=answer)
            return drawn
        number, own = store.add(f"{prefix}/requests", 1), [f"{prefix}/answer/{drawn}"]
        store.set(f"{prefix}/request/{number}", drawn)
        _await(store, world, own, own, "came", limit_s, deadline)
        name = store.get(own[0]).decode()
        store.set(f"{prefix}/{name}/{world.rank}", "1")
        return name


def unmarked_ranks(store: Store, ranks: Iterable[int], grace_s: float) -> list[int]:
    """Return those of some ranks that leave no mark in the store within the grace period."""
    deadline = time.monotonic() + grace_s
    missing = list(ranks)
    while True:
        missing = [other for other in missing if not store.check([str(other)])]
        if not missing or time.monotonic() > deadline:
            return missing
        time.sleep(_ROLL_CALL_POLL_S)


@contextlib.contextmanager
def store_errors() -> Iterator[None]:
    """Turn the store's own error into a `LaunchError`."""
    try:
        yield
    except RuntimeError as error:
        raise LaunchError(f"rank 0 left during the rendezvous: {first_line(error)}") from None


def _await(
    store: Store,
    world: World,
    keys: Sequence[str],
    of_ranks: Sequence[str],
    verb: str,
    limit_s: float,
    deadline: float,
    meanwhile: Callable[[], object] = bool,
) -> None:
    """Wait for keys in the store; at the deadline name the ranks whose keys (`of_ranks`) are missing."""
    while not store.check([*keys]):
        meanwhile()
        if time.monotonic() > deadline:
            # Where all ranks have their marks, what is missing is rank 0's word that it has seen them.
            absent = [rank for rank, key in enumerate(of_ranks) if not store.check([key])] or [0]
            raise _missing_ranks(absent, world.world_size, verb, limit_s)
        time.sleep(_POLL_S)


def _missing_ranks(absent: list[int], size: int, verb: str, limit_s: float) -> LaunchError:
    """Build the error that names the ranks that did not come in time."""
    names = ", ".join(map(str, absent[:_NAMED_RANKS])) + (", ..." if len(absent) > _NAMED_RANKS else "")
    return LaunchError(
        f"{size - len(absent)} of {size} ranks {verb} within {limit_s:g} s, missing: {names}; "
        f"look for errors of those ranks, or wait longer with timeout_s"
    )


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
    # The first 31 steps of jobs with neighbouring numbers get different ports.
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
            # A command's name may itself hold spaces and parentheses.
            command, _, numbers = text.partition("(")[2].rpartition(") ")
            fields = numbers.split()
            inherited = f"\0{marker}=".encode() in b"\0" + Path(f"/proc/{pid}/environ").read_bytes()
        # environ of another user's process cannot be read; such an ancestor counts as the launcher.
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


def _agent_has_store() -> bool:
    """Return whether torchrun's agent hosts the store, so that it outlives restarts of the ranks."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _tcp_store(host: str, port: int, world: World, deadline: float) -> TorchStore:
    """Host the store on rank 0 and connect to it from the others; under torchrun the agent hosts it."""
    hosting = world.rank == 0 and not _agent_has_store()
    started = time.monotonic()

    def connect() -> TorchStore:
        timeout = timedelta(seconds=_left_s(deadline))
        if _agent_has_store():
            store: TorchStore = next(
                torch_rendezvous("env://", world.rank, world.world_size, timeout=timeout)
            )[0]
            return store
        # wait_for_workers is False, since `gather_ranks` waits and names who is missing. multi_tenant is
        # True as in torch's own rendezvous, so that stores of one process may share the port.
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


def _store_through_mpi(world: World, deadline: float) -> TorchStore:
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
        return _tcp_store(host, port, world, deadline)
    timeout = timedelta(seconds=_left_s(deadline))
    # wait_for_workers is False, because the others learn the port only from the broadcast below.
    store = TCPStore("localhost", 0, world.world_size, True, timeout, False)
    comm.bcast((own_address(), store.port), root=0)
    return store


def _left_s(deadline: float) -> float:
    """Return the seconds that are left, at least one: whoever listens already needs no longer to answer."""
    return max(1.0, deadline - time.monotonic())
