"""What may cross the network: requests that compressors yield and drivers answer.

A compressor is a coroutine. It yields a `Request`, and whoever drives it (torch.distributed, or `simulate`
with N ranks in one process) sends back the reply. So the same compressor runs everywhere, and a request's
`nbytes` is the only byte count in the code base.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor

from stenograd.errors import WireError

__all__ = [
    "REDUCTIONS",
    "Op",
    "Reply",
    "Request",
    "Rounds",
    "commit",
    "exchange",
    "gather",
    "gather_lengths",
    "gather_padded",
    "gather_ragged",
    "mean",
    "means",
    "read",
    "scatter",
    "summed",
    "together",
]


class Op(Enum):
    """The collectives that a compressor may ask for."""

    MEAN = "all-reduce"
    SUM = "sum by all-reduce"
    GATHER = "all-gather"
    EXCHANGE = "exchange"
    SCATTER = "all-to-all"
    COMMIT = "nothing"
    READ = "a look at numbers"
    SEVERAL = "several"


REDUCTIONS = (Op.MEAN, Op.SUM)
_SILENT = (Op.COMMIT, Op.READ)  # they send nothing


@dataclass(frozen=True, slots=True)
class Request:
    """One collective that a compressor asks for.

    Args:
        op: `MEAN` averages over the ranks and `SUM` adds up (floating tensors of one dtype); `GATHER` brings
            every rank's tensors to every rank (any dtypes, equal shapes on all ranks); `EXCHANGE` sends the
            tensors to the peers and brings those of the sources here; `SCATTER` sends row j of every tensor
            to rank j and brings every rank's row for this one here (the first dimension is the world size);
            `COMMIT` sends nothing: it waits until all else of this step has come, and tells whether all
            averages of the step are finite; `READ` sends nothing: it brings the numbers of small integer
            tensors to the host; `SEVERAL` stands for its `parts`, which are under way at once.
        tensors: what this rank hands over. The driver may overwrite them: use the reply instead. The reply
            belongs to the compressor, and may be the very tensors handed over.
        peers: for `EXCHANGE`, the other ranks to send to, ascending.
        sources: for `EXCHANGE`, the other ranks whose tensors come here, ascending; None for the peers.
            Whoever is a peer has this rank among its sources, and the other way round.
        parts: for `SEVERAL`, other requests that send something.
    """

    op: Op
    tensors: tuple[Tensor, ...] = ()
    peers: tuple[int, ...] = ()
    sources: tuple[int, ...] | None = None
    parts: tuple[Request, ...] = ()

    def __post_init__(self) -> None:
        for name, ranks in (("peers", self.peers), ("sources", self.senders)):
            if list(ranks) != sorted(set(ranks)) or (ranks and self.op is not Op.EXCHANGE):
                raise WireError(f"{name} are ascending ranks of an EXCHANGE, got {ranks} for {self.op.name}")
        if self.op in REDUCTIONS and len({t.dtype for t in self.tensors}) > 1:
            got = sorted({str(t.dtype) for t in self.tensors})
            raise WireError(f"one {self.op.name} takes one dtype, got {got}")

    @property
    def senders(self) -> tuple[int, ...]:
        """The ranks whose tensors an `EXCHANGE` brings here."""
        return self.peers if self.sources is None else self.sources

    def check_rows(self, world_size: int) -> None:
        """Raise unless every tensor of a `SCATTER` has one row for each rank.

        Raises:
            WireError: names the shape.
        """
        for t in self.tensors:
            if t.ndim == 0 or len(t) != world_size:
                raise WireError(
                    f"a SCATTER sends one row to each of {world_size} ranks, got a tensor of {tuple(t.shape)}"
                )

    @property
    def nbytes(self) -> int:
        """Bytes that this rank hands to the collective."""
        own = 0 if self.op in _SILENT else sum(t.numel() * t.element_size() for t in self.tensors)
        return own + sum(part.nbytes for part in self.parts)


# For MEAN and SUM the reduced tensors; for GATHER and SCATTER one tuple of tensors (rows) per rank, in rank
# order; for EXCHANGE a dict with one tuple of tensors per source, in rank order; for COMMIT a bool; for READ
# one list of integers per tensor; for SEVERAL a list with a reply for each part.
Reply: TypeAlias = Any
T = TypeVar("T")
_MOST_RAGGED = (1 << 31) - 1  # an int32 tells lengths
Rounds: TypeAlias = Generator[Request, Reply, T]


def means(tensors: Sequence[Tensor]) -> Rounds[tuple[Tensor, ...]]:
    """Average tensors of one dtype over the ranks in one collective."""
    reply: tuple[Tensor, ...] = yield Request(Op.MEAN, tuple(tensors))
    return reply


def summed(rounds: Rounds[T]) -> Rounds[T]:
    """Let a coroutine of averages add up instead: what it is given is divided by the world size already.

    That saves a pass over it where whoever fills x multiplies it in any case.
    """
    reply: Reply = None
    while True:
        try:
            request = rounds.send(reply)
        except StopIteration as stop:
            # StopIteration has no type parameter: its value is Any.
            return stop.value  # type: ignore[no-any-return]
        reply = yield _as_sum(request)


def _as_sum(request: Request) -> Request:
    if request.op is Op.SEVERAL:
        return replace(request, parts=tuple(map(_as_sum, request.parts)))
    return replace(request, op=Op.SUM) if request.op is Op.MEAN else request


def mean(tensor: Tensor) -> Rounds[Tensor]:
    """Average one tensor over the ranks (write `yield from` before it)."""
    (average,) = yield from means((tensor,))
    return average


def gather(*tensors: Tensor) -> Rounds[list[tuple[Tensor, ...]]]:
    """Bring every rank's tensors here, one tuple per rank in rank order; shapes are equal on all ranks."""
    reply: list[tuple[Tensor, ...]] = yield Request(Op.GATHER, tensors)
    return reply


def scatter(*tensors: Tensor) -> Rounds[list[tuple[Tensor, ...]]]:
    """Send row j of every tensor to rank j, and bring here the rows that all ranks have for this one.

    Args:
        tensors: any dtypes; the first dimension is the world size, and shapes are equal on all ranks.

    Returns:
        One tuple of rows per rank, in rank order, this rank's own included.

    Example:
        >>> from stenograd.simulate import run
        >>> run([scatter(torch.tensor([[1], [2]])), scatter(torch.tensor([[3], [4]]))])
        [[(tensor([1]),), (tensor([3]),)], [(tensor([2]),), (tensor([4]),)]]
    """
    reply: list[tuple[Tensor, ...]] = yield Request(Op.SCATTER, tensors)
    return reply


def exchange(
    tensors: Sequence[Tensor], peers: Iterable[int], sources: Iterable[int] | None = None
) -> Rounds[dict[int, tuple[Tensor, ...]]]:
    """Send tensors to some ranks and bring some ranks' here, by rank; all ranks take part, if without peers.

    Args:
        tensors: any dtypes; shapes are equal on all ranks.
        peers: other ranks to send to, each once.
        sources: other ranks to receive from, each once; None for the peers. Whoever is sent to must have the
            sender among its sources, and the other way round, or ranks wait for each other in vain.

    Example:
        >>> from stenograd.simulate import run
        >>> around = [exchange([torch.tensor(10 * r)], [(r + 1) % 3], [(r - 1) % 3]) for r in range(3)]
        >>> run(around)
        [{2: (tensor(20),)}, {0: (tensor(0),)}, {1: (tensor(10),)}]
    """
    senders = None if sources is None else tuple(sorted(sources))
    request = Request(Op.EXCHANGE, tuple(tensors), tuple(sorted(peers)), senders)
    reply: dict[int, tuple[Tensor, ...]] = yield request
    return reply


def commit(finite: Tensor) -> Rounds[bool]:
    """Wait until all communication of this step is over, and return whether all its averages are finite.

    Once this returns True the step is committed: nothing takes it back, so old state may be overwritten.

    Args:
        finite: `wire.finite.Finite` of this exchange, as a 0-d tensor equal on all ranks.

    Example:
        >>> from stenograd.wire.finite import finite_of
        >>> from stenograd.simulate import run
        >>> run([commit(finite_of([torch.ones(2)]))])
        [True]
    """
    reply: bool = yield Request(Op.COMMIT, (finite,))
    return reply


def read(numbers: Tensor) -> Rounds[list[int]]:
    """Bring a few integers to the host.

    From the CPU's memory at once. From a device all coroutines of a step are answered together, once none of
    them can go on without: so the host waits for the device once, whatever the number of buckets.

    Args:
        numbers: 1-D, of an integer type; as many, and as often, on all ranks.

    Example:
        >>> from stenograd.simulate import run
        >>> run([read(torch.tensor([3, 4]))])
        [[3, 4]]
    """
    if numbers.is_cpu:
        return numbers.tolist()
    found: list[list[int]] = yield Request(Op.READ, (numbers,))
    return found[0]


def gather_ragged(*tensors: Tensor, most: int = _MOST_RAGGED) -> Rounds[list[tuple[Tensor, ...]]]:
    """Like `gather`, for 1-D tensors whose common length differs from rank to rank.

    One int32 per rank tells the lengths; then every payload is padded to the longest, so a rank sends
    `4 + max_r(length_r) * (bytes per entry)` bytes. When no rank has anything, the second round is empty.

    Args:
        tensors: 1-D and equally long on this rank.
        most: the greatest length that a rank may have; a damaged one would ask for as much memory.

    Raises:
        WireError: tensors of other forms, or a rank's length outside 0 to `most`.
    """
    length = tensors[0].numel()
    if any(t.ndim != 1 or t.numel() != length for t in tensors):
        raise WireError(f"ragged tensors are 1-D and equally long, got {[tuple(t.shape) for t in tensors]}")
    count = torch.full((1,), length, dtype=torch.int32, device=tensors[0].device)
    _, lengths = yield from gather_lengths(count, most)
    return (yield from gather_padded(tensors, lengths))


def gather_lengths(count: Tensor, most: int = _MOST_RAGGED) -> Rounds[tuple[int, list[int]]]:
    """Tell every rank how many entries each has, by an int32; see `gather_ragged`.

    Args:
        count: this rank's, 1-D with one int32, on any device.
        most: the greatest that a rank may have.

    Returns:
        This rank's count, and all ranks' in rank order.

    Raises:
        WireError: a rank's count is outside 0 to `most`.
    """
    received = yield from gather(count.clone())  # what is handed over may be overwritten
    # This rank's count may lie on a device, too: read with the others it costs no further wait.
    own, *lengths = yield from read(torch.cat([count, *(other for (other,) in received)]))
    if min(lengths) < 0 or max(lengths) > most:  # before memory for as many is asked for
        raise WireError(f"a rank may send 0 to {most} entries, got {lengths}: the message is damaged")
    return own, lengths


def gather_padded(tensors: Sequence[Tensor], lengths: Sequence[int]) -> Rounds[list[tuple[Tensor, ...]]]:
    """Bring 1-D tensors of known lengths to every rank, padded by zeros on the way; see `gather_ragged`."""
    longest = max(lengths)
    padded = tuple(torch.nn.functional.pad(t, (0, longest - t.numel())) for t in tensors)
    everyone = yield from gather(*padded)
    return [tuple(t[:n] for t in other) for other, n in zip(everyone, lengths, strict=True)]


def together(parts: Sequence[Rounds[T]]) -> Rounds[list[T]]:
    """Run several coroutines in step and merge what they ask for in the same round.

    Requests with the same op (and, for MEAN and SUM, the same dtype; for EXCHANGE, the same peers and
    sources) become one collective, and different ones are under way at once, so k small exchanges cost one
    latency. A part may be `together` itself.
    """
    results: dict[int, T] = {}
    waiting: dict[int, Request] = {}
    replies: dict[int, Reply] = dict.fromkeys(range(len(parts)))
    while replies:
        for i, reply in replies.items():
            try:
                waiting[i] = parts[i].send(reply)
            except StopIteration as stop:
                results[i] = stop.value
        replies = yield from _merged(waiting)
        waiting.clear()
    return [results[i] for i in range(len(parts))]


def _merged(waiting: dict[int, Request]) -> Rounds[dict[int, Reply]]:
    # What is together already is merged with the rest: SEVERAL has no parts of its own kind.
    asked = [part for request in waiting.values() for part in request.parts or (request,)]
    groups: dict[tuple[Op, torch.dtype | None, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for i, request in enumerate(asked):
        dtype = request.tensors[0].dtype if request.op in REDUCTIONS and request.tensors else None
        groups.setdefault((request.op, dtype, request.peers, request.senders), []).append(i)
    requests = [
        Request(op, tuple(t for i in members for t in asked[i].tensors), peers, sources)
        for (op, _, peers, sources), members in groups.items()
    ]
    answers: list[Reply] = []
    # Drivers start only what sends something; the pipeline itself answers COMMIT and READ.
    if len(requests) > 1 and all(request.op not in _SILENT for request in requests):
        answers = yield Request(Op.SEVERAL, parts=tuple(requests))
    else:
        for request in requests:
            answers.append((yield request))
    replies: dict[int, Reply] = {}
    for ((op, *_), members), reply in zip(groups.items(), answers, strict=True):
        start = 0
        for i in members:
            stop = start + len(asked[i].tensors)
            replies[i] = _part(op, reply, slice(start, stop))
            start = stop
    # In the order of the parts, whatever was merged: it decides the order of the next collectives.
    found = iter([replies[i] for i in range(len(asked))])
    return {i: [next(found) for _ in r.parts] if r.parts else next(found) for i, r in waiting.items()}


def _part(op: Op, reply: Reply, part: slice) -> Reply:
    if op in REDUCTIONS or op is Op.READ:
        return reply[part]
    if op is Op.COMMIT:
        return reply
    if op in (Op.GATHER, Op.SCATTER):
        return [other[part] for other in reply]
    return {peer: other[part] for peer, other in reply.items()}
