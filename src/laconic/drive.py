"""Runs compressors' requests on torch.distributed (gloo, NCCL), counted, with every wait bounded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Generic, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from laconic.errors import PeerLost, WireError, bad_value
from laconic.groups import roll_call
from laconic.traffic import Traffic
from laconic.wire import Op, Reply, Request, Rounds, gather_ragged

__all__ = ["Driver", "Pending", "Pipeline", "is_group", "joined"]

T = TypeVar("T")
_ROLL_CALL_S = 2.0  # how long survivors wait for each other to name the lost


class Pending:
    """A collective under way."""

    def __init__(self, driver: Driver, work: Any, finish: Callable[[], Reply], what: str) -> None:
        self._driver, self._work, self._finish, self._what = driver, work, finish, what

    def wait(self) -> Reply:
        """Wait for the result.

        Raises:
            PeerLost: it did not come within the driver's timeout, or the connection broke.
        """
        if self._work is not None:
            start = time.perf_counter()
            self._driver.await_work(self._work, self._what)
            self._driver.traffic.wait_s += time.perf_counter() - start
        return self._finish()


def joined() -> bool:
    """Return whether this process is in a process group already.

    Example:
        >>> joined()
        False
    """
    return dist.is_initialized()


def is_group(value: object) -> bool:
    """Return whether a value is a process group of torch.distributed."""
    return isinstance(value, dist.ProcessGroup)


class _All:
    """Several torch.distributed work objects as one, under one deadline."""

    def __init__(self, works: Sequence[Any]) -> None:
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        for work in self._works:
            if deadline is None:
                work.wait()
            else:  # below a millisecond gloo would wait for ever
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))


class Driver:
    """One rank's access to a process group.

    Args:
        group: a process group, or None for the default one.
        timeout_s: seconds after which a collective counts as lost, above 0.
    """

    def __init__(self, group: Any = None, *, timeout_s: float = 300.0) -> None:
        if not timeout_s > 0:
            raise bad_value("timeout_s", "must be above 0", timeout_s, "give the seconds to wait for a peer")
        self.group = group
        self.timeout_s = timeout_s
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        self.traffic = Traffic()
        self._owned = False

    def start(self, request: Request) -> Pending:
        """Issue one collective without waiting for it."""
        if request.op is Op.EXCHANGE:
            return self._start_exchange(request)
        if request.op is Op.SCATTER:
            return self._start_scatter(request)
        if request.op is Op.MEAN:
            return self._start_mean(request.tensors, request.scaled)
        return self._start_gather(request.tensors)

    def run(self, rounds: Rounds[T]) -> T:
        """Drive one coroutine to its end."""
        pipeline: Pipeline[T] = Pipeline(self)
        pipeline.add(rounds)
        return pipeline.finish()[0]

    def broadcast(self, tensor: Tensor, source: int = 0, *, counted: bool = False) -> None:
        """Overwrite a tensor with that of rank `source`; only training's own broadcasts are counted."""
        if self.world_size == 1 or not tensor.numel():
            return
        dense = tensor.contiguous()
        sender = self._global_rank(source)
        what = f"broadcast of {tensor.numel()} elements"
        if counted:
            place = (self.rank - source) % self.world_size
            self.traffic.count_broadcast(dense.numel() * dense.element_size(), place, self.world_size)
        start = time.perf_counter()
        self.await_work(self._issue(lambda: dist.broadcast(dense, sender, self.group, True), what), what)
        self.traffic.wait_s += (time.perf_counter() - start) if counted else 0.0
        if dense is not tensor:
            tensor.copy_(dense)

    def split(self, parts: Sequence[Sequence[int]]) -> list[Driver | None]:
        """Make a driver for each of several parts of this group; all ranks call it with the same parts.

        Args:
            parts: this group's ranks; parts may overlap.

        Returns:
            One driver a part, None where this rank is not in it. Close them when they are no longer needed.
        """
        drivers: list[Driver | None] = []
        local = self.group is not None  # else every rank of the world is here, and names are numbered
        for part in parts:
            # The name of a local group holds the number of groups that a rank is in, so all must join one.
            members = part if self.rank in part or not local else [self.rank]
            group = dist.new_group(
                [self._global_rank(rank) for rank in members],
                timeout=timedelta(seconds=self.timeout_s),
                use_local_synchronization=local,
            )
            driver = Driver(group, timeout_s=self.timeout_s) if self.rank in part else None
            if driver is not None:
                driver._owned = not local
            drivers.append(driver)
        return drivers

    def close(self) -> None:
        """Leave the group of a driver that `split` made from the whole world; others are kept until the end.

        A group made from a part of the world would get its old name, and stale addresses, if made again.
        """
        if self._owned and dist.is_initialized():
            dist.destroy_process_group(self.group)
        self._owned = False

    def gather_bytes(self, message: bytes, device: torch.device) -> list[bytes]:
        """Bring every rank's message of any length to every rank."""
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8).to(device)
        return [bytes(theirs.cpu().numpy()) for (theirs,) in self.run(gather_ragged(mine))]

    def await_work(self, work: Any, what: str) -> None:
        """Wait for a torch.distributed work object within the timeout."""
        try:
            if dist.get_backend(self.group) == "nccl":
                work.wait()  # makes the current stream wait; the group's own timeout watches
            else:
                work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as cause:
            self._lost(what, cause)

    def _issue(self, call: Callable[[], Any], what: str) -> Any:
        try:
            return call()
        except RuntimeError as cause:
            self._lost(what, cause)

    def _start_mean(self, tensors: tuple[Tensor, ...], scaled: bool) -> Pending:
        flat = tensors[0] if len(tensors) == 1 else torch.cat([t.reshape(-1) for t in tensors])
        flat = flat.contiguous()
        if self.world_size > 1 and not scaled:
            flat.mul_(1.0 / self.world_size)  # before summing, as DDP does: the sum cannot overflow
        what = f"all-reduce of {flat.numel()} {flat.dtype} elements"
        work = self._collective(
            Op.MEAN, flat, lambda: dist.all_reduce(flat, group=self.group, async_op=True), what
        )

        def finish() -> Reply:
            if len(tensors) == 1:
                return (flat,)
            pieces = flat.split([t.numel() for t in tensors])
            return tuple(piece.view(t.shape) for piece, t in zip(pieces, tensors, strict=True))

        return Pending(self, work, finish, what)

    def _start_gather(self, tensors: tuple[Tensor, ...]) -> Pending:
        mine, unpack = _pack(tensors)
        everyone = mine.new_empty(self.world_size * mine.numel())
        what = f"all-gather of {mine.numel()} bytes a rank"
        if self.world_size == 1:
            everyone.copy_(mine)
        call = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        work = self._collective(
            Op.GATHER, mine, lambda: call(everyone, mine, group=self.group, async_op=True), what
        )
        return Pending(
            self, work, lambda: [unpack(row) for row in everyone.view(self.world_size, mine.numel())], what
        )

    def _start_scatter(self, request: Request) -> Pending:
        request.check_rows(self.world_size)
        rows = [_pack(tuple(t[rank] for t in request.tensors)) for rank in range(self.world_size)]
        mine = torch.stack([packed for packed, _ in rows])  # (world size, bytes a row)
        theirs = mine.clone() if self.world_size == 1 else torch.empty_like(mine)
        what = f"all-to-all of {mine.numel()} bytes a rank"
        call = dist.all_to_all_single
        work = self._collective(
            Op.SCATTER, mine, lambda: call(theirs, mine, group=self.group, async_op=True), what
        )
        unpack = rows[0][1]
        return Pending(self, work, lambda: [unpack(row) for row in theirs], what)

    def _start_exchange(self, request: Request) -> Pending:
        peers = request.peers
        for peer in peers:
            if not 0 <= peer < self.world_size or peer == self.rank:
                raise WireError(f"rank {self.rank} of {self.world_size} cannot exchange with rank {peer}")
        mine, unpack = _pack(request.tensors)
        theirs = mine.new_empty((len(peers), mine.numel()))

        def finish() -> Reply:
            return {peer: unpack(row) for peer, row in zip(peers, theirs, strict=True)}

        if not theirs.numel():
            return Pending(self, None, finish, "")
        what = f"exchange of {mine.numel()} bytes with rank(s) {', '.join(map(str, peers))}"
        self.traffic.count(Op.EXCHANGE, mine.numel(), self.world_size, len(peers))
        of = self._global_rank
        receives = [
            dist.P2POp(dist.irecv, row, of(peer), self.group) for peer, row in zip(peers, theirs, strict=True)
        ]
        sends = [dist.P2POp(dist.isend, mine, of(peer), self.group) for peer in peers]
        works = self._issue(lambda: dist.batch_isend_irecv(receives + sends), what)
        return Pending(self, _All(works), finish, what)

    def _global_rank(self, rank: int) -> int:
        return rank if self.group is None else dist.get_global_rank(self.group, rank)

    def _collective(self, op: Op, handed: Tensor, call: Callable[[], Any], what: str) -> Any:
        nbytes = handed.numel() * handed.element_size()
        if nbytes == 0:
            return None
        self.traffic.count(op, nbytes, self.world_size)
        return self._issue(call, what) if self.world_size > 1 else None

    def _lost(self, what: str, cause: RuntimeError) -> NoReturn:
        members = dist.get_process_group_ranks(self.group)
        missing = [rank for rank in roll_call(_ROLL_CALL_S) if rank in members]  # others may not know yet
        who = f"rank(s) {', '.join(map(str, missing))} did not answer" if missing else "a peer did not answer"
        raise PeerLost(
            f"rank {self.rank} of {self.world_size}: {what} failed within {self.timeout_s:g} s, {who} "
            f"({_first_line(cause)}): look at that rank's log, and restart from the last checkpoint"
        ) from cause


class Pipeline(Generic[T]):
    """Drives several coroutines at once, in an order that never depends on timing.

    When one is added, its first request is issued; then every earlier one takes its reply and issues its
    next request, oldest first. So rounds of neighbouring buckets overlap, and since the order depends on
    counts alone, it is equal on all ranks.

    Args:
        driver: the way to the other ranks.
        patient: whether adding one never waits for earlier ones; all then go on in `finish`.
    """

    def __init__(self, driver: Driver, *, patient: bool = False) -> None:
        self._driver, self._patient = driver, patient
        self._running: dict[int, tuple[Rounds[T], Pending]] = {}
        self._results: dict[int, T] = {}
        self._count = 0

    def add(self, rounds: Rounds[T]) -> None:
        """Start one more coroutine."""
        earlier = [] if self._patient else sorted(self._running)
        self._step(self._count, rounds, None)
        self._count += 1
        for index in earlier:
            self._advance(index)

    def finish(self) -> list[T]:
        """Drive all to their ends and return what they returned, in the order in which they were added."""
        while self._running:
            for index in sorted(self._running):
                self._advance(index)
        return [self._results[i] for i in range(self._count)]

    def _advance(self, index: int) -> None:
        rounds, pending = self._running.pop(index)
        self._step(index, rounds, pending.wait())

    def _step(self, index: int, rounds: Rounds[T], reply: Reply) -> None:
        try:
            self._running[index] = (rounds, self._driver.start(rounds.send(reply)))
        except StopIteration as stop:
            self._results[index] = stop.value


def _pack(tensors: tuple[Tensor, ...]) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, ...]]]:
    """Put tensors into one byte buffer, widest type first for alignment; also return the way back."""
    order = sorted(range(len(tensors)), key=lambda i: -tensors[i].element_size())
    sizes = [tensors[i].numel() * tensors[i].element_size() for i in order]
    widest = max((t.element_size() for t in tensors), default=1)
    padding = -sum(sizes) % widest
    raw = [_bytes(tensors[i]) for i in order]
    if padding:
        raw.append(raw[0].new_zeros(padding))
    packed = raw[0] if len(raw) == 1 else torch.cat(raw)
    if not packed.numel():  # nothing travels, and slices of nothing may be misaligned
        return packed, lambda row: tensors

    def unpack(row: Tensor) -> tuple[Tensor, ...]:
        if row.numel() != packed.numel():
            raise WireError(
                f"expected {packed.numel()} bytes, got {row.numel()}: the ranks disagree on the payload"
            )
        pieces = row[: sum(sizes)].split(sizes)
        back = {
            i: piece.view(tensors[i].dtype).view(tensors[i].shape)
            for i, piece in zip(order, pieces, strict=True)
        }
        return tuple(back[i] for i in range(len(tensors)))

    return packed, unpack


def _bytes(t: Tensor) -> Tensor:
    flat = t.contiguous().reshape(-1)
    if flat.stride(0) != 1:  # one element can have any stride
        flat = flat.new_empty(flat.shape).copy_(flat)
    return flat.view(torch.uint8)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]
