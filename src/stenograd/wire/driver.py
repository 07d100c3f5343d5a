"""Runs compressors' requests on torch.distributed (gloo, NCCL), counted, with every wait bounded."""

from __future__ import annotations

import re
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from stenograd.devices import Carriers
from stenograd.errors import ConfigError, PeerLost, StenogradError, WireError, bad_value, first_line
from stenograd.launch.failure_detector import FailureDetector
from stenograd.launch.process_group import (
    announce,
    announced,
    came,
    go_on_without,
    leave,
    make_group,
    roll_call,
    unannounced,
)
from stenograd.wire.drivers import AnyDriver, Observer
from stenograd.wire.gloo import Route, route, spreads, swaps
from stenograd.wire.groups import as_group, ranks_of
from stenograd.wire.messages import Arrival, Pending, Queued, Several, messages, swap, trade
from stenograd.wire.packing import as_bytes, flattened, pack, pack_rows
from stenograd.wire.pipeline import Pipeline
from stenograd.wire.requests import REDUCTIONS, Op, Reply, Request, Rounds, gather_ragged
from stenograd.wire.traffic import ATTACH, PLAIN, Label, Tally, Traffic

__all__ = ["Driver", "Pending", "Pipeline"]

T = TypeVar("T")
# What torch.distributed says where a connection broke or somebody stayed silent. It raises RuntimeError for
# everything, out of memory and unknown types included.
_LOSS = re.compile(r"gloo/transport|connect|peer|timed? ?out|socket|broken pipe|closed|reset", re.IGNORECASE)
# What NCCL, whose errors are all of one class, says of what this rank did by itself.
_OWN = re.compile(r"invalid usage|invalid argument|unhandled cuda error|duplicate gpu", re.IGNORECASE)
_DeviceError: type[Exception] = getattr(torch, "AcceleratorError", torch.OutOfMemoryError)  # torch 2.8


class Driver:
    """One rank's access to a process group.

    A driver made like this issues its collectives on the group that is given, among those of the program: use
    it only where the program itself would wait for each of them. For an exchange that is under way while
    other code runs, make one by `Driver.own`.

    Args:
        group: a process group, a `DeviceMesh` of one dimension, or None for the default one; where there is
            none, this process is alone.
        timeout_s: seconds after which a collective counts as lost, above 0.

    Attributes:
        detector: what tells after a failure who is lost, where that is not the detector that `init` made.
        names: what to call the ranks of the group, where that is not their numbers in the world.
    """

    def __init__(self, group: Any = None, *, timeout_s: float = 300.0) -> None:
        if not timeout_s > 0:
            raise bad_value("timeout_s", "must be above 0", timeout_s, "give the seconds to wait for a peer")
        group = self.group = as_group(group)
        self.timeout_s = timeout_s
        # Kept for `check_groupless`: this driver would never use a group that is made later.
        self._groupless = group is None and not dist.is_initialized()
        self.rank: int = 0 if self._groupless else dist.get_rank(group)
        self.world_size: int = 1 if self._groupless else dist.get_world_size(group)
        # Kept, because a group that was left knows its ranks no more, and a state may be saved after that.
        self._ranks = None if group is None else dist.get_process_group_ranks(group)
        self.traffic = Traffic(self.rank)
        self.tracer: Observer | None = None
        self.detector: FailureDetector | None = None
        self.names: Sequence[int] | None = None
        self._leave: weakref.finalize[[Any], Driver] | None = None
        self._name = "world" if group is None else str(group.group_name)
        self._carriers = self._find_carriers()
        self._introduced = False  # all ranks have met in a collective on their devices

    def _find_carriers(self) -> Carriers:
        if self._groupless:
            return Carriers(None)
        bound = getattr(dist.group.WORLD, "bound_device_id", None)
        return Carriers(dist.get_backend_config(self.group), bound)

    @classmethod
    def own(cls, group: Any = None, *, timeout_s: float = 300.0) -> Driver:
        """Make a driver with a process group of its own over the ranks of a group; all of them call it.

        Messages of two users of one group are paired in the order of issue, which on different ranks may
        differ: gloo then aborts the process, or waits for ever. One rank alone makes no group.

        Raises:
            PeerLost: a rank did not come within timeout_s.
        """
        if isinstance(group, AnyDriver):  # a simulated rank
            return cast(Driver, group.private())
        return cls(group, timeout_s=timeout_s).private()

    def private(self) -> Driver:
        """Return a driver like `own` over this one's ranks, with the same `traffic`; itself if it is one."""
        if self._leave is not None or self.world_size == 1:
            return self
        (own,) = self.split([range(self.world_size)], "own")
        assert own is not None  # every rank is in the one part
        own.traffic, own.tracer = self.traffic, self.tracer
        return own

    def __deepcopy__(self, memo: Any) -> Driver:
        return self  # a copy of what talks through a group talks through the same group

    def __reduce__(self) -> Any:
        if self.world_size != 1 and self.world_size != dist.get_world_size():
            raise TypeError(
                "a driver of a part of the world cannot be pickled: make a new one from its group"
            )
        return Driver, ()  # elsewhere there may be no such group; the whole world's is found again

    def start(self, request: Request, label: Label = PLAIN) -> Pending:
        """Issue a request without waiting for it; it is counted under the label."""
        if request.op is Op.SEVERAL:
            return Several([self._start(part, label) for part in request.parts])
        return self._start(request, label)

    def _start(self, request: Request, label: Label) -> Pending:
        if request.op is Op.EXCHANGE:
            return self._start_exchange(request, label)
        if request.op is Op.SCATTER:
            return self._start_scatter(request, label)
        if request.op in REDUCTIONS:
            return self._start_reduction(request.op, request.tensors, label)
        return self._start_gather(request.tensors, label)

    def run(self, rounds: Rounds[T], label: Label = PLAIN) -> T:
        """Drive one coroutine to its end."""
        pipeline: Pipeline[T] = Pipeline(self)
        pipeline.add(rounds, label)
        return pipeline.finish()[0]

    def broadcast(self, tensor: Tensor, source: int = 0, *, counted: bool = False) -> None:
        """Overwrite a tensor with that of rank `source`; `counted` tells that it is a part of training."""
        if self.world_size == 1 or not tensor.numel():
            return
        raw = as_bytes(tensor.detach())  # backends know few types, and copying needs none
        handed = self._carriers.aboard(raw)
        what = f"broadcast of {tensor.numel()} elements"
        label = PLAIN if counted else Label(ATTACH)
        place = (self.rank - source) % self.world_size
        self.traffic.count_broadcast(raw.numel(), place, self.world_size, label=label)
        start = time.perf_counter()
        work = self._issue(lambda: self._transmit_from(source, handed), what, handed)
        self.await_work(work, what, start)
        self.traffic.tally(label, "broadcast").wait_s += time.perf_counter() - start
        if handed is not raw:
            raw.copy_(handed)
        # `as_bytes` has copied a tensor that is not contiguous or is lazily conjugated.
        if raw.data_ptr() != tensor.data_ptr():
            tensor.copy_(raw.view(tensor.dtype).view(tensor.shape))

    def split(self, parts: Sequence[Sequence[int]], what: str = "part") -> list[Driver | None]:
        """Make a driver for each of several parts of this group; all ranks call it with the same parts.

        Args:
            parts: this group's ranks; parts may overlap. Each numbers its ranks anew, in ascending order.
            what: what the parts are for; a word for their names.

        Returns:
            One driver per part, None where this rank is not in it. Their groups are left when they are closed
            or forgotten.

        Raises:
            PeerLost: a rank did not come within timeout_s.
        """
        # Each rank goes through all parts, its own or not: `make_group` names groups by a count.
        # A rank that left one out would wait for the others under another name.
        return [self._part(sorted(part), what) for part in parts]

    def _part(self, part: Sequence[int], what: str) -> Driver | None:
        if self.world_size == 1:
            return Driver(self.group, timeout_s=self.timeout_s) if self.rank in part else None
        ranks = [self._global_rank(rank) for rank in part]
        start = time.perf_counter()
        try:
            group = make_group(self.group, ranks, what, self.timeout_s)
        except RuntimeError as cause:
            self._lost(f"connection of the rank(s) {', '.join(map(str, ranks))}", cause, start)
        if group is None:
            return None
        driver = self._in_own(group)
        # The part numbers its ranks anew, and its ledger finds hosts by these numbers.
        hosts = self.traffic.hosts
        driver.traffic.hosts = [hosts[rank] for rank in part] if hosts else ()
        return driver

    def _in_own(self, group: Any) -> Driver:
        """Make the driver of a new group, which is left when the driver is closed or forgotten."""
        driver = Driver(group, timeout_s=self.timeout_s)
        driver._leave = weakref.finalize(driver, leave, group)
        driver._leave.atexit = False  # shutting down is up to whoever made the world
        return driver

    def stay_in_memory(self) -> None:
        """Let all messages travel from the CPU's memory from now on, where a lost rank is an error in time.

        Raises:
            ConfigError: the group has no backend for that.
        """
        if not self._carriers.reach_memory:
            raise ConfigError(
                "lost must be raise in a group without a backend for CPU tensors, got drop: NCCL ends the "
                'process where a rank is lost; use "cpu:gloo,cuda:nccl", as stenograd.init does'
            )
        self._carriers = self._carriers.in_memory()

    def name_of(self, rank: int) -> int:
        """Return the number in the whole world, as in `PeerLost.ranks`, of a rank of this group."""
        return self._global_rank(rank) if self.names is None else self.names[rank]

    @classmethod
    def of_members(cls, group: Any, names: Sequence[int], like: Driver) -> Driver:
        """Make the driver of a group of an open run, which counts into the ledger of the one before.

        Args:
            group: of `launch.process_group.connect_members`; left when the driver is closed or forgotten.
            names: the members' ranks in the run.
            like: the driver before.
        """
        driver = like._in_own(group)
        driver.names, driver.traffic, driver.tracer = list(names), like.traffic, like.tracer
        return driver

    def without(self, lost: Sequence[int]) -> Driver:
        """Make a driver for what is left of this group; every other rank calls it with the same lost ones.

        One failed exchange closes all of gloo's connections, so the survivors connect anew. They may notice
        up to `timeout_s` after one another.

        Args:
            lost: as in `PeerLost.ranks`.

        Raises:
            PeerLost: the survivors did not come, or the store that they would meet at was lost, too.
        """
        kept = [rank for rank in ranks_of(self.group) if rank not in lost]
        start = time.perf_counter()
        try:
            # Others may find the loss out timeout_s and a roll call later than this rank.
            group = make_group(self.group, kept, "without", 2 * (self.timeout_s + 2 * self._roll_call_s))
        except RuntimeError as cause:
            self._lost(f"meeting of the remaining rank(s) {', '.join(map(str, kept))}", cause, start)
        go_on_without(lost)  # all survivors have met, so none tells of this loss any more
        if self.detector is not None:
            self.detector.go_on_without(lost)
        driver = self._in_own(group)
        driver.traffic, driver.tracer, driver.detector = self.traffic, self.tracer, self.detector
        # A new driver would not know that `stay_in_memory` was called, and use NCCL again.
        driver._carriers = self._carriers
        # Ranks are numbered anew: by the old numbers bytes would be counted for wrong hosts.
        driver.traffic.keep([rank for rank in range(self.world_size) if self.name_of(rank) in kept])
        return driver

    def close(self) -> None:
        """Leave the process group, if it is the driver's own."""
        if self._leave is not None:
            self._leave()

    def announce(self, what: str) -> None:
        """Tell the other ranks, by the store, that this one does something from now on; waits for nobody."""
        if self.world_size > 1:
            announce(self._name, what, self.rank)

    def announced(self, what: str) -> bool:
        """Return whether a rank has announced it, as far as the store knows."""
        return self.world_size > 1 and announced(self._name, what)

    def unannounced(self, what: str, grace_s: float) -> list[int]:
        """Return the ranks, as numbered in this group, that have not announced it within the time."""
        return unannounced(self._name, what, self.world_size, grace_s) if self.world_size > 1 else []

    def check_groupless(self) -> None:
        """Refuse to go on alone once the program has joined other ranks.

        Raises:
            StenogradError: a process group of several ranks was made after this driver.
        """
        if self._groupless and dist.is_initialized() and dist.get_world_size() > 1:
            raise StenogradError(
                f"a process group of {dist.get_world_size()} ranks was made after this rank started alone, "
                "so nothing would be exchanged: call init_process_group, or stenograd.init, first"
            )

    def gather_bytes(self, message: bytes) -> list[bytes]:
        """Bring every rank's message of any length to every rank; not counted as training."""
        # frombuffer refuses an empty buffer, and only this rank might have one
        own = torch.frombuffer(bytearray(message + b"."), dtype=torch.uint8)[:-1]
        received = self.run(gather_ragged(own), Label(ATTACH))
        return [bytes(other.numpy()) for (other,) in received]

    def spent(self, on: str, tally: Tally, start: float, label: Label, end: float | None = None) -> None:
        """Count seconds of computing, "encode" or "decode", since `start` by `time.perf_counter`."""
        end = time.perf_counter() if end is None else end
        if on == "encode":
            tally.encode_s += end - start
        else:
            tally.decode_s += end - start
        if self.tracer is not None:
            self.tracer.add(on, start, end, **label._asdict())

    def await_work(self, work: Any, what: str, start: float) -> None:
        """Wait within the timeout for a torch.distributed work object, asked for at `start`."""
        try:
            work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as cause:
            self._lost(what, cause, start)

    def _issue(self, call: Callable[[], Any], what: str, handed: Tensor) -> Any:
        # Before the call: where that raises, `_lost` holds a roll call, which compares these counts.
        # A detector of our own needs a count beside: `came` counts for the one that `init` made.
        came(self._name)
        if self.detector is not None:
            self.detector.came[self._name] += 1
        start = time.perf_counter()
        try:
            work = call()
        except RuntimeError as cause:
            self._lost(what, cause, start)
        if handed.device.type != "cpu":
            return Queued(work)
        return work if self.tracer is None else Arrival(work)

    def _start_reduction(self, op: Op, tensors: tuple[Tensor, ...], label: Label) -> Pending:
        flat, split = flattened(tensors)
        if self.world_size > 1 and op is Op.MEAN:
            flat.mul_(1.0 / self.world_size)  # before summing, as DDP does: the sum cannot overflow
        what = f"all-reduce of {flat.numel()} {flat.dtype} elements"
        handed = self._aboard(flat)
        added = spreads(op, flat.nbytes, self.world_size, on_gloo=handed.device.type == "cpu")
        received = torch.empty_like(handed) if added else handed
        # A sum, too, is counted under MEAN, whose name in the ledger is all-reduce: that is what travels.
        work = self._collective(Op.MEAN, handed, received, what, label)

        def finish() -> Reply:
            if added:  # in the order of the two ranks, so that both get the same bits
                torch.add(*((handed, received) if self.rank == 0 else (received, handed)), out=handed)
            return split(flat if handed is flat else flat.copy_(handed))

        return Pending(self, work, finish, what, label, Op.MEAN)

    def _start_gather(self, tensors: tuple[Tensor, ...], label: Label) -> Pending:
        packed, unpack = pack(tensors)
        own, size = self._aboard(packed), self.world_size
        everyone = own.new_empty(size * own.numel())
        what = f"all-gather of {own.numel()} bytes a rank"
        if size == 1:
            everyone.copy_(own)
        work = self._collective(Op.GATHER, own, everyone, what, label)

        def finish() -> Reply:
            return [unpack(row) for row in everyone.to(packed.device).view(size, own.numel())]

        return Pending(self, work, finish, what, label, Op.GATHER)

    def _start_scatter(self, request: Request, label: Label) -> Pending:
        request.check_rows(self.world_size)
        packed, unpack = pack_rows(request.tensors)  # (world size, bytes a row)
        own = self._aboard(packed)
        other = own.clone() if self.world_size == 1 else torch.empty_like(own)
        what = f"all-to-all of {own.numel()} bytes a rank"
        work = self._collective(Op.SCATTER, own, other, what, label)

        def finish() -> Reply:
            return [unpack(row) for row in other.to(packed.device)]

        return Pending(self, work, finish, what, label, Op.SCATTER)

    def _start_exchange(self, request: Request, label: Label) -> Pending:
        peers, sources = request.peers, request.senders
        everyone = sorted({*peers, *sources})
        for peer in everyone:
            if not 0 <= peer < self.world_size or peer == self.rank:
                raise WireError(f"rank {self.rank} of {self.world_size} cannot exchange with rank {peer}")
        packed, unpack = pack(request.tensors)
        own = self._aboard(packed)
        other = own.new_empty((len(sources), own.numel()))

        def finish() -> Reply:
            rows = other.to(packed.device)
            return {source: unpack(row) for source, row in zip(sources, rows, strict=True)}

        # Before a rank without neighbours returns: a rank that is missing here makes the others time out.
        self._introduce(own)
        if not (everyone and own.numel()):
            return Pending(self, None, finish, "", label, Op.EXCHANGE)
        of = self._global_rank
        nbytes, framed = own.numel(), own.device.type == "cpu"
        what = f"exchange of {nbytes} bytes with rank(s) {', '.join(str(of(peer)) for peer in everyone)}"
        self.traffic.count(Op.EXCHANGE, nbytes, self.world_size, peers, sources, label=label, framed=framed)
        work = self._issue(lambda: self._transmit_to(peers, sources, own, other), what, own)
        return Pending(self, work, finish, what, label, Op.EXCHANGE)

    def _aboard(self, t: Tensor) -> Tensor:
        """Return a tensor as it travels: itself, or a copy where the group has no backend for its device."""
        return t if self.world_size == 1 else self._carriers.aboard(t)

    def _introduce(self, handed: Tensor) -> None:
        """Hold a collective of all ranks before the first messages between some, which NCCL asks for.

        All ranks come here at the same place: one without neighbours exchanges with nobody, too.
        """
        if self._introduced or self.world_size == 1 or handed.device.type == "cpu":
            return
        self._introduced = True
        start, what = time.perf_counter(), "first all-reduce on the ranks' devices"
        one = torch.zeros(1, dtype=torch.float32, device=handed.device)
        work = self._issue(lambda: self._transmit(Op.SUM, one, one), what, one)
        self.await_work(work, what, start)

    def _global_rank(self, rank: int) -> int:
        return rank if self._ranks is None else self._ranks[rank]

    def _collective(self, op: Op, handed: Tensor, received: Tensor, what: str, label: Label) -> Any:
        itemsize = handed.element_size()
        nbytes = handed.numel() * itemsize
        # Shapes are equal on all ranks, so no other rank sends anything either.
        if nbytes == 0:
            return None
        framed = handed.device.type == "cpu"  # others go through NCCL, whose messages are not known
        self.traffic.count(op, nbytes, self.world_size, label=label, itemsize=itemsize, framed=framed)
        if self.world_size == 1:
            return None
        return self._issue(lambda: self._transmit(op, handed, received), what, handed)

    # These three alone hand tensors to torch.distributed; a rehearsal replaces them.

    def _transmit(self, op: Op, handed: Tensor, received: Tensor) -> Any:
        """Begin a collective that fills `received` (`handed` in a ring all-reduce); return its work."""
        options: dict[str, Any] = {"group": self.group, "async_op": True}
        if op in REDUCTIONS and received is handed:
            return dist.all_reduce(handed, **options)
        if op in REDUCTIONS:
            return trade(self.group, self.rank, handed, received)
        nbytes, on_gloo = handed.numel() * handed.element_size(), handed.device.type == "cpu"
        if op is Op.SCATTER:
            if on_gloo and swaps(nbytes // self.world_size, self.world_size):
                return swap(self.group, self.rank, handed, received)
            return dist.all_to_all_single(received, handed, **options)
        if route(op, nbytes, self.world_size, on_gloo=on_gloo) is Route.DIRECT:
            if swaps(nbytes, self.world_size):
                rows = handed.view(1, -1).expand(self.world_size, -1)  # all rows are one memory
                return swap(self.group, self.rank, rows, received.view(self.world_size, -1))
            # gloo's all-to-all takes one block of memory, which it cuts into a row for each rank.
            return dist.all_to_all_single(received, handed.repeat(self.world_size), **options)
        # one function under its newer and its older name
        gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        return gather(received, handed, **options)

    def _transmit_to(self, peers: Sequence[int], sources: Sequence[int], own: Tensor, other: Tensor) -> Any:
        """Begin an exchange with neighbours that fills a row of `other` per source; return its work."""
        of = self._global_rank
        sends = [(of(peer), own) for peer in peers]
        receives = [(of(source), row) for source, row in zip(sources, other, strict=True)]
        return messages(self.group, sends, receives)

    def _transmit_from(self, source: int, tensor: Tensor) -> Any:
        """Begin a broadcast; return its work."""
        return dist.broadcast(tensor, self._global_rank(source), self.group, True)

    def _lost(self, what: str, cause: RuntimeError, start: float) -> NoReturn:
        """Say who is lost; where nobody is, this rank failed by itself, and its error keeps its name."""
        own = isinstance(cause, (torch.OutOfMemoryError, _DeviceError)) or _OWN.search(str(cause))
        if own or not (isinstance(cause, dist.DistError) or _LOSS.search(str(cause))):
            raise cause
        waited_s = time.perf_counter() - start
        ranks = ranks_of(self.group)
        if self.detector is not None:
            absent = self.detector.absent(self._name, self._roll_call_s)
        else:
            absent = roll_call(self._roll_call_s, self._name)
        # A roll call asks all ranks of the world, and this group may be a part of it.
        lost, late = set(ranks).intersection(absent.lost), set(ranks).intersection(absent.late)
        who = "a peer did not answer"
        if lost or late:  # of a lost rank others may wait in vain, which makes them late
            verb = "did not answer" if lost else "did not come, but run"
            who = f"rank(s) {', '.join(map(str, sorted(lost or late)))} {verb}"
        elif lost := set(absent.lost):  # a peer here gave up because of a loss in another group of its own
            who = f"rank(s) {', '.join(map(str, sorted(lost)))} of another group did not answer"
        # A connection that broke before is not to be blamed on the timeout.
        limit = f" (timeout_s is {self.timeout_s:g})" if waited_s >= self.timeout_s else ""
        error = PeerLost(
            f"{self._in_the_world(ranks)}: {what} failed after {waited_s:.1f} s{limit}, {who} "
            f"({first_line(cause)}): look at that rank's log, and restart from the last checkpoint"
        )
        # Without the late ones: those live, and `lost=drop` goes on without all that stand here.
        error.ranks = tuple(sorted(lost))
        raise error from cause

    @property
    def _roll_call_s(self) -> float:
        """Seconds that ranks have to answer in a roll call: only where one is silent does it take as long.

        A living rank's answer took 14 to 20 s behind a router of 1 Mbit/s that was full of data, in 6 tries.
        """
        return min(max(2.0, self.timeout_s / 2), 30.0)

    def _in_the_world(self, ranks: Sequence[int]) -> str:
        """Name this rank by its number in the whole world, like all others in a message."""
        if self.names is not None:
            return f"rank {self.name_of(self.rank)} (with ranks {', '.join(map(str, self.names))})"
        me, size = f"rank {self._global_rank(self.rank)}", dist.get_world_size()
        if len(ranks) == size:
            return f"{me} of {size}"
        return f"{me} (of the group of ranks {', '.join(map(str, ranks))})"
