"""Truth about bytes: what a rank handed to collectives, what those moved, and the time that took."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple, TextIO

from stenograd.wire.gloo import Frames, broadcast_frames, frames, spreads
from stenograd.wire.requests import REDUCTIONS, Op

__all__ = ["ATTACH", "CONTROL", "PLAIN", "TRAINING", "Entry", "Label", "Tally", "Traffic", "moved_bytes"]

TRAINING, CONTROL, ATTACH = "training", "control", "attach"
_TOTALLED = (TRAINING, CONTROL)


class Label(NamedTuple):
    """What a collective is for.

    Args:
        kind: `TRAINING`; `CONTROL` for a step's flags, where its last bucket does not carry them; `ATTACH`
            for what ranks tell each other outside of steps: comparing, broadcasting the model, agreements.
        bucket: its number; None where there are no buckets.
        method: how it is written.
        round: number of the exchange's earlier collectives.
    """

    kind: str = TRAINING
    bucket: int | None = None
    method: str = ""
    round: int = 0

    def next(self) -> Label:
        """Return the label of the next round."""
        return Label(self.kind, self.bucket, self.method, self.round + 1)


PLAIN = Label()


@dataclass(frozen=True, slots=True)
class Entry:
    """Everything counted under one label and one operation, on one rank.

    Args:
        kind: see `Label`. bucket, method, round: likewise.
        op: "all-reduce", "all-gather", "all-to-all", "exchange" or "broadcast".
        count: number of collectives.
        payload_bytes: handed to them; indices, scales and padding included.
        moved_bytes: that they make this rank send.
        inside_bytes: of these, to ranks on the same host.
        across_bytes: of these, to other hosts. Both are 0 where the ranks have not told each other theirs.
        messages: that gloo makes of them.
        header_bytes: headers and acknowledgements on top of `moved_bytes`, estimated for Ethernet; see
            `stenograd.wire.gloo`. 0 for CUDA tensors.
        wait_s: seconds in which the rank waited for them.
        encode_s: seconds of computing and packing before them; between two rounds, decoding one and
            encoding the next.
        decode_s: seconds of computing after the last round.
    """

    kind: str
    bucket: int | None
    method: str
    round: int
    op: str
    count: int
    payload_bytes: int
    moved_bytes: int
    inside_bytes: int
    across_bytes: int
    messages: int
    header_bytes: int
    wait_s: float
    encode_s: float
    decode_s: float


@dataclass(slots=True)
class Tally:
    """The sums behind an `Entry`, which grow."""

    count: int = 0
    payload_bytes: int = 0
    moved_bytes: int = 0
    inside_bytes: int = 0
    across_bytes: int = 0
    messages: int = 0
    header_bytes: int = 0
    wait_s: float = 0.0
    encode_s: float = 0.0
    decode_s: float = 0.0

    def add(self, other: Tally) -> None:
        """Add another one's sums."""
        for name in _SUMS:
            setattr(self, name, getattr(self, name) + getattr(other, name))


_SUMS = tuple(f.name for f in fields(Tally))


class Traffic:
    """The ledger of one rank since it was attached, and its totals.

    The totals are the sums over the entries of training, its control flags included, and leave out `ATTACH`:

    - `payload_bytes`: bytes handed to collectives; indices, scales, padding and control flags included.
    - `moved_bytes`: bytes that those collectives make a rank send: `2 (N-1)/N` times the payload for a ring
      all-reduce, `N-1` times for an all-gather, `(N-1)/N` times for an all-to-all, once per rank that
      it sends to for an exchange with neighbours, once per child for a broadcast. A ring of gloo deals small
      all-reduces out unevenly; then this is the mean over the ranks.
    - `inside_bytes`, `across_bytes`: of these, to the same host and to others. An all-reduce sends everything
      to the rank before, a large all-gather to the rank after, in the group's order; the others, and on CPU
      an all-gather of at most 128 KiB or by two ranks, to their peers.
    - `header_bytes`: what gloo and TCP add on Ethernet, estimated.
    - `collectives`: number of collectives.
    - `wait_s`, `encode_s`, `decode_s`: seconds in which communication was waited for, and spent on coding.

    Args:
        rank: this rank in its group, as written into records, also when ranks are lost later.

    Example:
        >>> traffic = Traffic()
        >>> traffic.count(Op.MEAN, 300, 3, label=Label(bucket=0, method="dense"))
        >>> traffic.payload_bytes, traffic.moved_bytes, traffic.collectives
        (300, 400, 1)
        >>> [(e.bucket, e.op, e.moved_bytes) for e in traffic.entries()]
        [(0, 'all-reduce', 400)]
    """

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self._place = rank  # its number among those that are left, like the numbers of targets
        self.hosts: Sequence[str] = ()  # each rank's, once known
        self._tallies: dict[tuple[Label, str], Tally] = {}

    @property
    def payload_bytes(self) -> int:
        """Bytes handed to collectives."""
        return int(self._total("payload_bytes"))

    @property
    def moved_bytes(self) -> int:
        """Bytes that the collectives made this rank send."""
        return int(self._total("moved_bytes"))

    @property
    def inside_bytes(self) -> int:
        """Bytes moved to ranks on the same host."""
        return int(self._total("inside_bytes"))

    @property
    def across_bytes(self) -> int:
        """Bytes moved to other hosts."""
        return int(self._total("across_bytes"))

    @property
    def header_bytes(self) -> int:
        """Bytes that headers and acknowledgements add, estimated."""
        return int(self._total("header_bytes"))

    @property
    def collectives(self) -> int:
        """Number of collectives."""
        return int(self._total("count"))

    @property
    def wait_s(self) -> float:
        """Seconds in which communication was waited for."""
        return float(self._total("wait_s"))

    @property
    def encode_s(self) -> float:
        """Seconds of computing and packing before collectives."""
        return float(self._total("encode_s"))

    @property
    def decode_s(self) -> float:
        """Seconds of computing after an exchange's last collective."""
        return float(self._total("decode_s"))

    def entries(self) -> list[Entry]:
        """Return what was counted so far, one record for each label and operation, in order of appearance.

        There are as many as buckets times rounds, however long the training.
        """
        return [
            Entry(*label, op, **{name: getattr(tally, name) for name in _SUMS})
            for (label, op), tally in list(self._tallies.items())
        ]

    def keep(self, ranks: Sequence[int]) -> None:
        """Go on counting in what is left of the group, whose ranks are numbered anew.

        Args:
            ranks: those that are left, this one among them, ascending, as they were numbered so far.
        """
        self._place = ranks.index(self._place)
        self.hosts = [self.hosts[rank] for rank in ranks] if self.hosts else ()

    def move(self, place: int, hosts: Sequence[str]) -> None:
        """Go on counting in another group.

        Args:
            place: this rank's number there.
            hosts: that of each of its ranks.
        """
        self._place, self.hosts = place, hosts

    def tally(self, label: Label, op: str) -> Tally:
        """Return the sums to add to."""
        tally = self._tallies.get((label, op))
        if tally is None:
            tally = self._tallies[label, op] = Tally()
        return tally

    def count(
        self,
        op: Op,
        nbytes: int,
        world_size: int,
        peers: Sequence[int] = (),
        sources: Sequence[int] | None = None,
        *,
        label: Label = PLAIN,
        itemsize: int = 1,
        framed: bool = True,
    ) -> None:
        """Add one collective.

        Args:
            op: which.
            nbytes: handed to it by this rank.
            world_size: number of ranks in the group.
            peers: the ranks that an exchange with neighbours sends to.
            sources: the ranks that it receives from; None for the peers.
            label: what it is for.
            itemsize: bytes of an element.
            framed: whether it goes through gloo.
        """
        direct = spreads(op, nbytes, world_size, on_gloo=framed)
        moved = moved_bytes(op, nbytes, world_size, len(peers))
        framing = Frames()
        # Each rank hands one row to every other one, as in an all-to-all of N equal rows.
        if framed and direct:
            framing = frames(Op.SCATTER, world_size * nbytes, world_size)
        elif framed:
            received = None if sources is None else len(sources)
            ends = {"peers": len(peers), "sources": received}
            framing = frames(op, nbytes, world_size, rank=self._place, itemsize=itemsize, **ends)
        targets = self._targets(Op.SCATTER if direct else op, world_size, peers)
        self._add(self.tally(label, op.value), nbytes, moved, targets, framing)

    def count_broadcast(self, nbytes: int, place: int, world_size: int, *, label: Label = PLAIN) -> None:
        """Add one broadcast along a binomial tree, of which this rank is number `place` from the root.

        Example:
            >>> root, leaf = Traffic(), Traffic()
            >>> root.count_broadcast(100, 0, 4), leaf.count_broadcast(100, 3, 4)
            (None, None)
            >>> root.moved_bytes, root.payload_bytes, leaf.moved_bytes, leaf.payload_bytes
            (200, 100, 0, 0)
        """
        reach = [1 << i for i in range((world_size - 1).bit_length())]
        children = [step for step in reach if place < step and place + step < world_size]
        targets = [(self._place + step) % world_size for step in children]
        framing = broadcast_frames(nbytes, len(children), place == 0)
        # Only the root hands bytes over; the others pass on what they got.
        payload = nbytes if place == 0 else 0
        self._add(self.tally(label, "broadcast"), payload, len(children) * nbytes, targets, framing)

    def __add__(self, other: Traffic) -> Traffic:
        out = Traffic(self.rank)
        for tallies in (self._tallies, other._tallies):
            for (label, op), tally in list(tallies.items()):
                out.tally(label, op).add(tally)
        return out

    def write_jsonl(self, file: str | os.PathLike[str] | TextIO, *, step: int | None = None) -> None:
        """Append the entries to a file as JSON lines, one a record, in one write.

        So several ranks may append to one file of a local disk. The numbers are sums since attaching.

        Args:
            file: path, or an open text file.
            step: written into every record, with this rank's number.

        Example:
            >>> import io
            >>> traffic, file = Traffic(rank=1), io.StringIO()
            >>> traffic.count(Op.GATHER, 8, 2)
            >>> traffic.write_jsonl(file, step=10)
            >>> record = json.loads(file.getvalue())
            >>> record["rank"], record["step"], record["op"], record["moved_bytes"]
            (1, 10, 'all-gather', 8)
        """
        place: dict[str, Any] = {"rank": self.rank, "step": step}
        lines = "".join(json.dumps({**place, **asdict(entry)}) + "\n" for entry in self.entries())
        if not isinstance(file, (str, os.PathLike)):
            file.write(lines)
            return
        handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        with os.fdopen(handle, "wb", buffering=0) as raw:  # O_APPEND: one write is not torn by another's
            raw.write(lines.encode())

    def as_metrics(self, prefix: str = "traffic") -> dict[str, float]:
        """Return the totals as plain numbers, for any logger that takes a dictionary.

        `wandb.run.log(m)`, `mlflow.log_metrics(m, step)`, `accelerator.log(m, step)`, Lightning's
        `self.log_dict(m)` and `logs.update(m)` in a Hugging Face callback all take it as it is.

        Args:
            prefix: begins every key, before a slash.

        Example:
            >>> traffic = Traffic()
            >>> traffic.count(Op.MEAN, 300, 3)
            >>> traffic.as_metrics()["traffic/moved_bytes"]
            400.0
        """
        return {f"{prefix}/{name}": float(self._total(name)) for name in _SUMS}

    def to_tensorboard(self, writer: Any, step: int, *, prefix: str = "traffic") -> None:
        """Write the totals, and each bucket's bytes and seconds, as scalars.

        Args:
            writer: anything with `add_scalar(tag, value, step)`, such as
                `torch.utils.tensorboard.SummaryWriter` (`pip install stenograd[tensorboard]`).
            step: number of the training step.
            prefix: begins every tag.
        """
        for tag, value in self.as_metrics(prefix).items():
            writer.add_scalar(tag, value, step)
        buckets: dict[int, Tally] = {}
        for (label, _), tally in list(self._tallies.items()):
            if label.bucket is not None and label.kind in _TOTALLED:
                buckets.setdefault(label.bucket, Tally()).add(tally)
        for bucket, tally in sorted(buckets.items()):
            for name in ("moved_bytes", "wait_s", "encode_s", "decode_s"):
                writer.add_scalar(f"{prefix}/bucket{bucket}/{name}", getattr(tally, name), step)

    def _total(self, name: str) -> Any:
        tallies = list(self._tallies.items())  # the thread that exchanges may add some meanwhile
        return sum(getattr(tally, name) for (label, _), tally in tallies if label.kind in _TOTALLED)

    def _targets(self, op: Op, world_size: int, peers: Sequence[int]) -> Sequence[int]:
        """Return the ranks that this one sends to, equally much to each."""
        if op is Op.EXCHANGE:
            return peers
        if op is Op.SCATTER:
            return [rank for rank in range(world_size) if rank != self._place]
        return [(self._place + (1 if op is Op.GATHER else -1)) % world_size]

    def _add(self, tally: Tally, payload: int, moved: int, targets: Sequence[int], framing: Frames) -> None:
        tally.count += 1
        tally.payload_bytes += payload
        tally.moved_bytes += moved
        tally.messages += framing.messages
        tally.header_bytes += framing.header_bytes
        # Where nothing moved there may be no targets, and the bytes are divided by their number.
        if self.hosts and moved:
            others = sum(self.hosts[target] != self.hosts[self._place] for target in targets)
            across = moved * others // len(targets)
            tally.across_bytes += across
            tally.inside_bytes += moved - across


def moved_bytes(op: Op, nbytes: int, world_size: int, peers: int = 0) -> int:
    """Return the bytes that one rank sends for a collective over `nbytes` of payload a rank."""
    if op in REDUCTIONS:
        return round(2 * (world_size - 1) / world_size * nbytes)
    if op is Op.SCATTER:
        return round((world_size - 1) / world_size * nbytes)
    return (peers if op is Op.EXCHANGE else world_size - 1) * nbytes
