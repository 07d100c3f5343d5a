"""Sparse vectors: what is chosen of a tensor, how it is written, and an all-reduce of it.

In the sparse all-reduce indices are divided among the ranks, so volume and work do not grow with their
number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from stenograd.compression.contract import Exchange, Payload, Site, State
from stenograd.errors import MethodError, WireError, bad_value, check_count
from stenograd.kernels.bits import block_views, pack_bits, unpack_bits
from stenograd.kernels.indices import index_type, pack_indices, unpack_indices
from stenograd.kernels.scatter import inside
from stenograd.kernels.select import select
from stenograd.kernels.values import pack_values, unpack_values
from stenograd.wire.requests import Rounds, gather, scatter

__all__ = [
    "VALUES",
    "Message",
    "Regions",
    "check_ramp",
    "chunk_count",
    "kept_of",
    "mean_over_senders",
    "pack_binned",
    "ramped",
    "regions_for",
    "select_chunks",
    "sparse_all_reduce",
    "unpack_binned",
]

# How float32 values may travel.
VALUES = ("float32", "bfloat16", "int8", "int2")
_LEVELS = 4  # bins, whose numbers take two bits
_WIDTH = 1.5  # standard deviations per bin, so that four bins cover six
IntOrTensor = TypeVar("IntOrTensor", int, Tensor)


def ramped(ratio: float, ratio_from: float, ramp_steps: int, step: int) -> float:
    """Return the ratio of a step: `ratio_from (ratio / ratio_from)^(step / ramp_steps)`, then `ratio`.

    It falls by the same factor at every step, and depends on the step alone, so a restart continues it.

    Args:
        ratio: where it ends, in (0, 1].
        ratio_from: where it begins, in (0, 1].
        ramp_steps: number of steps in between; 0 for no ramp.
        step: number of exchanges before this one.

    Example:
        >>> [round(ramped(0.001, 0.25, 4, step), 4) for step in range(6)]
        [0.25, 0.0629, 0.0158, 0.004, 0.001, 0.001]

    Reference: Lin et al., "Deep Gradient Compression", ICLR 2018, where it falls by a factor per epoch.
    """
    if step >= ramp_steps:
        return ratio
    return float(ratio_from * (ratio / ratio_from) ** (step / ramp_steps))


def check_ramp(ratio: float, ratio_from: float, ramp_steps: int) -> None:
    """Refuse a ratio or a ramp outside its range.

    Raises:
        MethodError: names the key.

    Example:
        >>> check_ramp(0.01, 0.001, 100)
        Traceback (most recent call last):
        stenograd.errors.MethodError: ratio_from must be in [0.01, 1], from the ratio up, got 0.001: use 0.25
    """
    if not 0 < ratio <= 1:
        raise bad_value("ratio", "must be in (0, 1]", ratio, "use 0.01 to send 1 %", MethodError)
    # without a ramp it does not matter where it would start
    if not ratio <= (ratio_from if ramp_steps else max(ratio, ratio_from)) <= 1:
        rule = f"must be in [{ratio}, 1], from the ratio up"
        raise bad_value("ratio_from", rule, ratio_from, "use 0.25", MethodError)
    if ramp_steps != 0:
        check_count("ramp_steps", ramp_steps, "leave it out for no ramp", MethodError)


def kept_of(length: int, ratio: float) -> int:
    """Return how many elements of a chunk are kept: `round(ratio * length)`, at least 1.

    Args:
        length: elements in the chunk, at least 1.
        ratio: share to keep, in (0, 1].

    Example:
        >>> kept_of(4096, 1 / 64), kept_of(10, 0.01)
        (64, 1)
    """
    return max(1, round(ratio * length))


def chunk_count(numels: Sequence[int], chunk: int, ratio: float) -> int:
    """Return how many elements `select_chunks` keeps of tensors of these lengths.

    Example:
        >>> chunk_count([8, 0, 5], chunk=4, ratio=0.5)  # 2 + 2, nothing, 2 + 1
        7
    """
    kept = kept_of(chunk, ratio)
    rests = [kept_of(n % chunk, ratio) for n in numels if n % chunk]
    return kept * sum(n // chunk for n in numels) + sum(rests)


def select_chunks(x: Tensor, numels: Sequence[int], chunk: int, ratio: float) -> tuple[Tensor, Tensor]:
    """Return the largest elements of each chunk, with their indices in x, ascending.

    A chunk is `chunk` consecutive elements of one tensor; a tensor's last one may be shorter, and keeps its
    share. So what is kept of a tensor depends neither on the other tensors nor on the bucket it is in.

    Args:
        x: flat tensor (n,), any floating type; left alone. NaN counts as largest.
        numels: lengths of the tensors that lie one after another in x.
        chunk: elements per chunk, at least 1.
        ratio: share to keep of each, in (0, 1].

    Example:
        >>> select_chunks(torch.tensor([5.0, 4.0, 0.1, -0.2]), [4], chunk=2, ratio=0.5)
        (tensor([0, 3], dtype=torch.int32), tensor([ 5.0000, -0.2000]))
    """
    indices = [torch.empty(0, dtype=torch.int64, device=x.device)]
    start = 0
    for rows in block_views(x, chunk, numels):  # (chunks, length)
        count, length = rows.shape
        inside = rows.abs().topk(kept_of(length, ratio), dim=1, sorted=False).indices.sort(1).values
        begins = torch.arange(start, start + count * length, length, device=x.device)
        indices.append((inside + begins[:, None]).view(-1))
        start += count * length
    found = torch.cat(indices)
    return found.to(index_type(x.numel())), x.index_select(0, found)


def mean_over_senders(vectors: Sequence[tuple[Tensor, Tensor]], out: Tensor) -> Tensor:
    """Return for each place the mean of the values that were sent for it, 0 where none was.

    Args:
        vectors: per rank `(indices, values)`, indices unique within a rank.
        out: flat tensor to write it to, which is returned.

    Example:
        >>> a = (torch.tensor([0, 1]), torch.tensor([2.0, 6.0]))
        >>> b = (torch.tensor([1]), torch.tensor([4.0]))
        >>> mean_over_senders([a, b], torch.empty(3))
        tensor([2., 5., 0.])
    """
    # float16 counts ranks exactly up to 2,048 only, and bfloat16 up to 256
    wide = torch.promote_types(out.dtype, torch.float32)
    total = out.zero_() if out.dtype == wide else torch.zeros_like(out, dtype=wide)
    senders = torch.zeros_like(total)
    for indices, values in vectors:
        indices = inside(indices, out.numel())
        total.index_add_(0, indices, values.to(wide))
        senders.index_add_(0, indices, torch.ones_like(values, dtype=wide))
    total.div_(senders.clamp_(min=1))
    return total if total is out else out.copy_(total)


@dataclass(frozen=True, slots=True)
class Message:
    """How k of n elements are written: indices, then values.

    Args:
        numel: n.
        count: k.
        compact: whether indices travel as an Elias-Fano code, in ascending order, not as int32 (int64 above
            2**31 elements).
        values: one of `VALUES` for float32 values; None to send them as they are.
        numels: lengths of the tensors among which the n indices are divided; only "int2" needs them.

    Example:
        >>> message = Message(1000, 2, compact=True, values="bfloat16")
        >>> payload = message.write(torch.tensor([3, 999]), torch.tensor([1.0, -2.0]))
        >>> [t.numel() * t.element_size() for t in payload]
        [3, 4]
        >>> message.read(payload)[1]
        tensor([ 1., -2.])
    """

    numel: int
    count: int
    compact: bool
    values: str | None
    numels: tuple[int, ...] = ()

    @property
    def is_lossy(self) -> bool:
        """Whether values read back may differ."""
        return self.values not in (None, "float32")

    def write(self, indices: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """Write indices, which ascend, and their values."""
        n = self.numel
        where = pack_indices(indices, n) if self.compact else indices.to(index_type(n))
        if self.values is None:
            return where, values
        if self.values == "int2":
            return where, *pack_binned(values, indices, self.numels)
        return where, *pack_values(values, self.values)

    def read(self, payload: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
        """Read back indices and values.

        Raises:
            WireError: the payload has another form.
        """
        where = payload[0]
        indices = unpack_indices(where, self.numel, self.count) if self.compact else where
        return indices, self.read_values(payload, indices)

    def read_values(self, payload: tuple[Tensor, ...], indices: Tensor) -> Tensor:
        """Read back the values of indices that are known.

        Raises:
            WireError: the payload has another form.
        """
        rest = payload[1:]
        if self.values is None:
            return rest[0]
        if self.values == "int2":
            return unpack_binned((rest[0], rest[1]), inside(indices, self.numel), self.numels)
        return unpack_values(rest, self.values, self.count)


def pack_binned(values: Tensor, indices: Tensor, numels: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Write each number as the number of its bin, and for every tensor the means of its four bins.

    With the mean and standard deviation `mu, sigma` of a tensor's numbers, the bins meet at `mu - 1.5 sigma`,
    `mu` and `mu + 1.5 sigma`; the outer two are open. The means are taken in float64, in order.

    Args:
        values: float32 (k,). NaN and infinity make the mean of their bin so.
        indices: where they lie in a flat tensor, ascending, (k,).
        numels: lengths of the tensors that lie one after another there.

    Returns:
        Codes, uint8 (ceil(2 k / 8),), lowest bit first, and means, float32 (4 t,), 0 for an empty bin, where
        t counts the tensors that are not empty.

    Example:
        >>> values = torch.tensor([1.0, 1.2, -1.0, -1.2])
        >>> payload = pack_binned(values, torch.arange(4), [4])
        >>> payload[0].numel(), unpack_binned(payload, torch.arange(4), [4])
        (1, tensor([ 1.1000,  1.1000, -1.1000, -1.1000]))

    Reference: Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025. There the range
    is cut so that two of the four levels are negative and one is for large positive numbers; here both sides
    are alike.
    """
    tensor, tensors = _owners(indices, numels)
    exact = values.to(torch.float64)
    off = exact - _means(exact, tensor, tensors)[tensor]  # x - mu, (k,)
    bound = _WIDTH * _means(off.square(), tensor, tensors).sqrt()[tensor]  # 1.5 sigma, (k,)
    # 0 to 3, by the three indices where bins meet
    codes = (off > -bound).to(torch.int64).add_(off >= 0).add_(off >= bound)
    means = _means(exact, tensor * _LEVELS + codes, tensors * _LEVELS)  # (4 t,)
    return pack_bits(codes.to(torch.uint8), 2), means.to(torch.float32)


def unpack_binned(packed: tuple[Tensor, Tensor], indices: Tensor, numels: Sequence[int]) -> Tensor:
    """Read back what `pack_binned` wrote, as float32.

    Args:
        packed: what it returned.
        indices: as in packing.
        numels: as in packing.

    Raises:
        WireError: the codes or means are not as many as belong to these indices.
    """
    codes, means = packed
    tensor, tensors = _owners(indices, numels)
    if means.numel() != _LEVELS * tensors or means.dtype is not torch.float32:
        wanted = f"{tensors} tensors have {_LEVELS * tensors} float32 means"
        raise WireError(f"{wanted}, got {means.numel()} {means.dtype}: the message is damaged")
    return means[tensor * _LEVELS + unpack_bits(codes, 2, indices.numel())]


def _owners(indices: Tensor, numels: Sequence[int]) -> tuple[Tensor, int]:
    """Return for each place the tensor that it is in, counting only tensors that are not empty."""
    ends = _ends(tuple(numels), indices.device)
    return torch.searchsorted(ends, indices.to(torch.int64), right=True), ends.numel()


# Kept, because making it on a device copies it there, in each step and for each message.
@lru_cache(maxsize=256)
def _ends(numels: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor([n for n in numels if n], dtype=torch.int64, device=device).cumsum(0)


def _means(values: Tensor, group: Tensor, groups: int) -> Tensor:
    """Return the mean of the values of each group, 0 where there are none."""
    total = torch.zeros(groups, dtype=values.dtype, device=values.device).index_add_(0, group, values)
    count = torch.zeros_like(total).index_add_(0, group, torch.ones_like(values))
    return total / count.clamp_(min=1)


@dataclass(frozen=True, slots=True)
class Regions:
    """Who adds up which indices, and how many entries travel.

    Rank j owns region j. Of every N neighbouring blocks of indices each region has one, in an order that a
    hash turns: so regions are alike whatever the layers look like.

    Args:
        numel: number of indices.
        k: entries that a rank selects, at least 1.
        world_size: number of ranks and of regions, at least 2.
        step: number of exchanges before this one.

    Example:
        >>> regions = Regions(numel=10, k=4, world_size=4)
        >>> owner, local = regions.divide(torch.arange(10))
        >>> regions.join(owner, local).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    """

    numel: int
    k: int
    world_size: int
    step: int = 0

    @property
    def block(self) -> int:
        """Indices a block: at most a cache line, and 64 blocks a region or more, for gradients cluster."""
        return min(16, 1 << max(0, (self.numel // (64 * self.world_size)).bit_length() - 1))

    @property
    def length(self) -> int:
        """Indices in a region, of which the last block may have some that do not exist."""
        return -(-self.numel // (self.block * self.world_size)) * self.block

    @property
    def kept(self) -> int:
        """Entries of the sum that a rank sends to all: about k / N."""
        return max(1, min(-(-self.k // self.world_size), self.k // (self.world_size - 1)))

    @property
    def slots(self) -> int:
        """Entries that a rank sends to each owner: about 2 k / N, so that few do not fit.

        A rank moves `2 (N - 1) (slots + kept)` words: at most 6 k of them for k of at least N.
        """
        share = -(-2 * self.k // self.world_size)
        return max(1, min(share, 3 * self.k // (self.world_size - 1) - self.kept))

    def quota(self, rank: int) -> int:
        """Entries of the sum that a rank keeps at most: all ranks together k, where it is few in turns."""
        extra = (rank + self.step) % self.world_size < self.k % self.world_size
        return min(self.kept, self.k // self.world_size + extra)

    def divide(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return the owner of each place, and its place within the owner's region."""
        blocks = indices.long().div(self.block, rounding_mode="floor")
        group = blocks.div(self.world_size, rounding_mode="floor")
        return (blocks + self._turn(group)) % self.world_size, group * self.block + indices % self.block

    def join(self, owner: Tensor | int, local: Tensor) -> Tensor:
        """Undo `divide`."""
        group = local.div(self.block, rounding_mode="floor")
        blocks = group * self.world_size + (owner - self._turn(group)) % self.world_size
        return blocks * self.block + local % self.block

    def take(self, x: Tensor, rank: int) -> Tensor:
        """Return a rank's region of flat x, with zeros at indices that do not exist, and leave zeros in x."""
        blocks, whole, tail = self._parts(x, rank)
        region = x.new_zeros(self.length)
        region[: blocks.numel() * self.block] = whole.index_select(0, blocks).view(-1)
        region[blocks.numel() * self.block :][: tail.numel()] = tail
        whole.index_fill_(0, blocks, 0)
        tail.zero_()
        return region

    def put(self, region: Tensor, x: Tensor, rank: int) -> None:
        """Write a rank's region back into flat x."""
        blocks, whole, tail = self._parts(x, rank)
        at = blocks.numel() * self.block
        whole.index_copy_(0, blocks, region[:at].view(-1, self.block))
        tail.copy_(region[at:][: tail.numel()])

    def _parts(self, x: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a rank's blocks in complete groups, all blocks of those, and its piece of the last group."""
        groups = self.numel // (self.block * self.world_size)
        numbers = torch.arange(groups + 1, device=x.device)
        blocks = numbers * self.world_size + (rank - self._turn(numbers)) % self.world_size
        # Reckoned on the host once more, which would wait for another device to read it.
        start = (groups * self.world_size + (rank - self._turn(groups)) % self.world_size) * self.block
        whole = x[: groups * self.world_size * self.block].view(-1, self.block)
        return blocks[:-1], whole, x[start : start + self.block]

    def _turn(self, group: IntOrTensor) -> IntOrTensor:
        return (group * 0x9E3779B1) >> 15  # Knuth's multiplicative hash


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows of `count` entries for the wire; an entry that is not needed lies behind the region.

    Args:
        count: entries a row.
        length: indices in a region.
        compact: whether to write indices in few bits; then they ascend within a row.
        halves: whether to write values as bfloat16.
    """

    count: int
    length: int
    compact: bool
    halves: bool

    def empty(self, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return indices and values, `(rows, count)` each, of rows without entries."""
        # Each at an index of its own: the compact code takes strictly ascending ones.
        behind = torch.arange(self.length, self.length + self.count, device=like.device)
        return behind.repeat(rows, 1), torch.zeros(rows, self.count, dtype=like.dtype, device=like.device)

    def write(self, indices: Tensor, values: Tensor) -> Payload:
        """Write rows as tensors whose first dimension is the number of rows."""
        values = self.rounded(values)
        universe = self.length + self.count
        if not self.compact:
            return indices.to(index_type(universe)), values
        return torch.stack([pack_indices(row, universe) for row in indices]), values

    def rounded(self, values: Tensor) -> Tensor:
        """Return values as they travel."""
        return values.bfloat16() if self.halves else values

    def read(self, row: Payload) -> tuple[Tensor, Tensor]:
        """Return indices and values of one row."""
        universe = self.length + self.count
        if self.compact:
            return unpack_indices(row[0], universe, self.count).long(), row[1]
        return inside(row[0], universe).long(), row[1]


def regions_for(numel: int, k: int, site: Site, *, forced: bool = False) -> Regions | None:
    """Return how to share the work, or None where an all-gather of k entries a rank is as good.

    It is where it moves less than half as much again: up to four ranks. One round takes less time than two.

    Args:
        numel: number of indices.
        k: entries that a rank selects.
        site: for the world size.
        forced: whether to share it wherever there is something to share.

    Example:
        >>> [n for n in range(2, 9) if regions_for(1000, 10, Site(shapes=(), world_size=n))]
        [5, 6, 7, 8]
    """
    if site.world_size == 1 or not k:
        return None
    regions = Regions(numel, k, site.world_size)
    return regions if forced or 3 * (regions.slots + regions.kept) <= 2 * k else None


def sparse_all_reduce(
    regions: Regions,
    x: Tensor,
    residual: Tensor | None,
    state: State,
    site: Site,
    *,
    compact: bool,
    halves: bool = False,
) -> Rounds[Exchange]:
    """Average the largest entries of each rank, and send about the k largest of the average to all.

    Every rank sends the k largest entries outside its own region to their owners, at most `slots` to each,
    the largest first. An owner adds them to its own x, whole since it need not travel, and sends the `k / N`
    largest of its region's sums to all. So the average has at most k non-zeros. What a rank has not sent
    stays in its error, and the sums that were not sent stay in their owner's: next time they enter whole
    again, so nothing has to be sent twice, and `average = mean_r(x_r - error_r)`. Two rounds.

    Args:
        regions: from `regions_for`.
        x: as in `Compressor.exchange`, and so are residual, state and site.
        residual: see there.
        state: see there.
        site: see there.
        compact: write indices as an Elias-Fano code.
        halves: send values as bfloat16; what the rounding loses stays in the error as well.

    Reference: Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (Ok-Topk), PPoPP
    2022. There regions are contiguous and re-balanced from time to time, thresholds are estimated, and what
    is not among the largest sums goes back to those who sent it; on small models that learned more slowly.
    """
    if residual is not None:
        x.add_(residual)
    # `regions_for` does not know the step, by which the owners' quotas take turns.
    regions = replace(regions, step=site.step)
    world, own = regions.world_size, site.rank
    first = _Rows(regions.slots, regions.length, compact, halves)
    second = _Rows(regions.kept, regions.length, compact, halves)
    region = regions.take(x, own)  # leaves zeros in x, so none of its own region is selected
    # In at least float32, with room for the entries that lie behind it.
    sums = pad(region.to(torch.promote_types(region.dtype, torch.float32)), (0, first.count))
    indices = select(x, regions.k)[0].long()
    owner, local = regions.divide(indices)
    chosen = x.index_select(0, indices)
    fits = _fitting(chosen, owner, regions)
    payload = first.write(*_arranged(chosen, owner, local, fits, first, world))
    rows = yield from scatter(*payload)
    for received, values in (first.read(row) for rank, row in enumerate(rows) if rank != own):
        sums.index_add_(0, received, values.to(sums.dtype))
    # Not the padding behind the region, into which the unneeded entries of the rows were added.
    message = second.write(*_largest(sums[: regions.length], regions.quota(own), second, x, world))
    everyone = yield from gather(*message)
    # The own row too, as the others read it: what bfloat16 rounds away then stays in the sums.
    kept = [second.read(tuple(t[0] for t in row)) for row in everyone]
    average = _assembled(kept, regions, x)
    if not site.error:
        return Exchange(average, state)
    lost = chosen - first.rounded(chosen).to(x.dtype)  # by rounding
    # What was sent leaves its rounding, and what did not fit stays whole.
    x.index_copy_(0, indices, lost if fits is None else torch.where(fits, lost, chosen))
    sent, values = _real(*kept[own], kept[own][0] < regions.length)
    sums.index_add_(0, sent, values.to(sums.dtype), alpha=-world)  # what is in the average, times N
    regions.put(sums[: regions.length].to(x.dtype), x, own)
    return Exchange(average, state, x)


def _fitting(values: Tensor, owner: Tensor, regions: Regions) -> Tensor | None:
    """Return which of the selected entries fit into their owners' rows, the largest; None if all do.

    Whether all do is looked at on the CPU only: the host would wait for another device.
    """
    world = regions.world_size
    if owner.is_cpu and int(owner.bincount(minlength=world).amax()) <= regions.slots:
        return None
    order = values.abs().argsort(descending=True)
    order = order[owner[order].argsort(stable=True)]  # by owner, the largest first in each
    fits = torch.empty_like(owner, dtype=torch.bool)
    return fits.index_copy_(0, order, _numbered(owner[order], world) < regions.slots)


def _arranged(
    values: Tensor, owner: Tensor, local: Tensor, fits: Tensor | None, rows: _Rows, world_size: int
) -> tuple[Tensor, Tensor]:
    """Put the entries that fit into their owners' rows, in their order."""
    if fits is not None:
        owner = torch.where(fits, owner, world_size)
    order = owner.argsort(stable=True)  # stable: indices ascend within a row, as their code needs
    owner = owner[order]
    slot = owner * rows.count + _numbered(owner, world_size + 1)
    row_indices, row_values = rows.empty(world_size + 1, values)
    if fits is not None:
        slot.clamp_(max=world_size * rows.count)  # a row for nobody
    row_indices.view(-1)[slot] = local[order]
    row_values.view(-1)[slot] = values[order]
    return row_indices[:world_size], row_values[:world_size]


def _numbered(owner: Tensor, owners: int) -> Tensor:
    """Number the entries of each owner from 0; owners ascend."""
    starts = torch.searchsorted(owner, torch.arange(owners, device=owner.device))
    return torch.arange(owner.numel(), device=owner.device) - starts[owner]


def _real(indices: Tensor, values: Tensor, are: Tensor) -> tuple[Tensor, Tensor]:
    """Let those that are not real add nothing, at a place that there is."""
    return torch.where(are, indices, 0), torch.where(are, values, 0)


def _largest(sums: Tensor, quota: int, rows: _Rows, like: Tensor, world_size: int) -> tuple[Tensor, Tensor]:
    """Return one row with the largest sums, divided by the world size."""
    chosen, largest = select(sums, quota)
    row_indices, row_values = rows.empty(1, like)
    row_indices[0, :quota] = chosen
    row_values[0, :quota] = (largest / world_size).to(like.dtype)
    return row_indices, row_values


def _assembled(received: list[tuple[Tensor, Tensor]], regions: Regions, like: Tensor) -> Tensor:
    """Put every owner's entries into one dense tensor; zeros may be at indices that do not exist."""
    average = torch.zeros_like(like)
    for rank, (local, values) in enumerate(received):
        indices = regions.join(rank, local)
        # Regions differ by a few indices at the end. No owner names one that it has not, but a rehearsal
        # does, which takes its own message for every owner's.
        real = (local < regions.length) & (values != 0) & (indices < regions.numel)
        indices, values = _real(indices, values, real)
        average.index_add_(0, indices, values.to(like.dtype))
    return average
