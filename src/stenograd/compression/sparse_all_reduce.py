"""Sparse all-reduce: places are divided among the ranks, so volume and work do not grow with their number."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from stenograd.compression.contract import Exchange, Payload, Site, State, Transport
from stenograd.data.requests import Rounds, gather, scatter
from stenograd.kernels.dispatch import pack_places, select, unpack_places
from stenograd.kernels.reference.scatter import inside

__all__ = ["Regions", "SparseAllReduce", "regions_for"]


IntOrTensor = TypeVar("IntOrTensor", int, Tensor)


@dataclass(frozen=True, slots=True)
class Regions:
    """Who adds up which places, and how many entries travel.

    Rank j owns region j. Of every N neighbouring blocks of places each region has one, in an order that a
    hash turns: so regions are alike whatever the layers look like.

    Args:
        numel: number of places.
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
        """Places a block: at most a cache line, and 64 blocks a region or more, for gradients cluster."""
        return min(16, 1 << max(0, (self.numel // (64 * self.world_size)).bit_length() - 1))

    @property
    def length(self) -> int:
        """Places in a region, of which the last block may have some that do not exist."""
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

    def divide(self, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return the owner of each place, and its place within the owner's region."""
        blocks = places.long().div(self.block, rounding_mode="floor")
        group = blocks.div(self.world_size, rounding_mode="floor")
        return (blocks + self._turn(group)) % self.world_size, group * self.block + places % self.block

    def join(self, owner: Tensor | int, local: Tensor) -> Tensor:
        """Undo `divide`."""
        group = local.div(self.block, rounding_mode="floor")
        blocks = group * self.world_size + (owner - self._turn(group)) % self.world_size
        return blocks * self.block + local % self.block

    def take(self, x: Tensor, rank: int) -> Tensor:
        """Return a rank's region of flat x, with zeros at places that do not exist, and leave zeros in x."""
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
        length: places in a region.
        compact: whether to write places in few bits; then they ascend within a row.
        halves: whether to write values as bfloat16.
    """

    count: int
    length: int
    compact: bool
    halves: bool

    def empty(self, rows: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return places and values, `(rows, count)` each, of rows without entries."""
        behind = torch.arange(self.length, self.length + self.count, device=like.device)
        return behind.repeat(rows, 1), torch.zeros(rows, self.count, dtype=like.dtype, device=like.device)

    def write(self, places: Tensor, values: Tensor) -> Payload:
        """Write rows as tensors whose first dimension is the number of rows."""
        values = self.rounded(values)
        if not self.compact:
            return places.to(torch.int32), values
        universe = self.length + self.count
        return torch.stack([pack_places(row, universe) for row in places]), values

    def rounded(self, values: Tensor) -> Tensor:
        """Return values as they travel."""
        return values.bfloat16() if self.halves else values

    def read(self, row: Payload) -> tuple[Tensor, Tensor]:
        """Return places and values of one row."""
        universe = self.length + self.count
        if self.compact:
            return unpack_places(row[0], universe, self.count).long(), row[1]
        return inside(row[0], universe).long(), row[1]


def regions_for(numel: int, k: int, site: Site, *, forced: bool = False) -> Regions | None:
    """Return how to share the work, or None where an all-gather of k entries a rank is as good.

    It is where it moves less than half as much again: up to four ranks. One round takes less time than two.

    Args:
        numel: number of places.
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


@dataclass(frozen=True, kw_only=True)
class SparseAllReduce(Transport):
    """Average the largest entries of each rank, and send about the k largest of the average to all.

    Every rank sends the k largest entries outside its own region to their owners, at most `slots` to each,
    the largest first. An owner adds them to its own x, whole since it need not travel, and sends the `k / N`
    largest of its region's sums to all. So the average has at most k non-zeros. What a rank has not sent
    stays in its error, and the sums that were not sent stay in their owner's: next time they enter whole
    again, so nothing has to be sent twice, and `average = mean_r(x_r - error_r)`.

    Args:
        regions: from `regions_for`.
        compact: write indices as an Elias-Fano code.
        halves: send values as bfloat16; what the rounding loses stays in the error as well.

    Reference: Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (Ok-Topk), PPoPP
    2022. There regions are contiguous and re-balanced from time to time, thresholds are estimated, and what
    is not among the largest sums goes back to those who sent it; on small models that learned more slowly.
    """

    regions: Regions
    compact: bool
    halves: bool = False
    rounds: int = 2

    def run(
        self, codec: Any, x: Tensor, residual: Tensor | None, state: State, site: Site, want_error: bool
    ) -> Rounds[Exchange]:
        """Send to owners, add up, gather the largest sums; see `Transport.run`."""
        if residual is not None:
            x.add_(residual)
        regions = replace(self.regions, step=site.step)
        world, mine = regions.world_size, site.rank
        first = _Rows(regions.slots, regions.length, self.compact, self.halves)
        second = _Rows(regions.kept, regions.length, self.compact, self.halves)
        sums = _padded(regions.take(x, mine), first)
        places = select(x, regions.k)[0].long()
        owner, local = regions.divide(places)
        chosen = x.index_select(0, places)
        fits = _fitting(chosen, owner, regions)
        payload = first.write(*_arranged(chosen, owner, local, fits, first, world))
        rows = yield from scatter(*payload)
        for theirs, values in (first.read(row) for rank, row in enumerate(rows) if rank != mine):
            sums.index_add_(0, theirs, values.to(sums.dtype))
        message = second.write(*_largest(sums[: regions.length], regions.quota(mine), second, x, world))
        everyone = yield from gather(*message)
        kept = [second.read(tuple(t[0] for t in row)) for row in everyone]
        average = _assembled(kept, regions, x)
        if not want_error:
            return Exchange(average, state)
        lost = chosen - first.rounded(chosen).to(x.dtype)  # by rounding
        # What was sent leaves its rounding, and what did not fit stays whole.
        x.index_copy_(0, places, lost if fits is None else torch.where(fits, lost, chosen))
        sent, values = _real(*kept[mine], kept[mine][0] < regions.length)
        sums.index_add_(0, sent, values.to(sums.dtype), alpha=-world)  # what is in the average, times N
        regions.put(sums[: regions.length].to(x.dtype), x, mine)
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
    order = owner.argsort(stable=True)  # stable: places ascend within a row, as their code needs
    owner = owner[order]
    slot = owner * rows.count + _numbered(owner, world_size + 1)
    row_places, row_values = rows.empty(world_size + 1, values)
    if fits is not None:
        slot.clamp_(max=world_size * rows.count)  # a row for nobody
    row_places.view(-1)[slot] = local[order]
    row_values.view(-1)[slot] = values[order]
    return row_places[:world_size], row_values[:world_size]


def _numbered(owner: Tensor, owners: int) -> Tensor:
    """Number the entries of each owner from 0; owners ascend."""
    starts = torch.searchsorted(owner, torch.arange(owners, device=owner.device))
    return torch.arange(owner.numel(), device=owner.device) - starts[owner]


def _real(places: Tensor, values: Tensor, are: Tensor) -> tuple[Tensor, Tensor]:
    """Let those that are not real add nothing, at a place that there is."""
    return torch.where(are, places, 0), torch.where(are, values, 0)


def _padded(region: Tensor, rows: _Rows) -> Tensor:
    """Return a region in at least float32, with room for the entries that lie behind it."""
    dtype = torch.promote_types(region.dtype, torch.float32)
    return torch.nn.functional.pad(region.to(dtype), (0, rows.count))


def _largest(sums: Tensor, quota: int, rows: _Rows, like: Tensor, world_size: int) -> tuple[Tensor, Tensor]:
    """Return one row with the largest sums, divided by the world size."""
    chosen, largest = select(sums, quota)
    row_places, row_values = rows.empty(1, like)
    row_places[0, :quota] = chosen
    row_values[0, :quota] = (largest / world_size).to(like.dtype)
    return row_places, row_values


def _assembled(received: list[tuple[Tensor, Tensor]], regions: Regions, like: Tensor) -> Tensor:
    """Put every owner's entries into one dense tensor; zeros may be at places that do not exist."""
    average = torch.zeros_like(like)
    for rank, (local, values) in enumerate(received):
        places = regions.join(rank, local)
        # Regions differ by a few places at the end. No owner names one that it has not, but a rehearsal does,
        # which takes its own message for every owner's.
        real = (local < regions.length) & (values != 0) & (places < regions.numel)
        places, values = _real(places, values, real)
        average.index_add_(0, places, values.to(like.dtype))
    return average
