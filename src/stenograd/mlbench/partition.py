"""Cut a data set in pieces that lose no sample, the same on every rank and without communication."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import Dataset

from stenograd.arguments import choice, number
from stenograd.errors import DataError, bad_value

__all__ = ["DataPartitioner", "Partition", "partition_dataset_by_rank"]

_ROUNDING = 1e-6  # how far from 1 the sizes may sum


class Partition(Dataset[Any]):
    """Some samples of a data set, as a data set; other attributes are those of the whole.

    Args:
        data: anything with `len` and numbered entries.
        indices: numbers of the samples.

    Example:
        >>> part = Partition("abcd", [2, 0])
        >>> len(part), part[0], part[1]
        (2, 'c', 'a')
    """

    def __init__(self, data: Any, indices: Sequence[int]) -> None:
        self.data = data
        self.indices = list(indices)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Any:
        return self.data[self.indices[index]]

    def __getattr__(self, name: str) -> Any:
        if name in ("data", "indices") or name.startswith("__"):  # asked for by copies before they are set
            raise AttributeError(name)
        return getattr(self.data, name)


class DataPartitioner:
    """Cuts a data set in parts of relative sizes; every sample is in exactly one part.

    Part i ends at sample `round((sizes_0 + ... + sizes_i) n)` of the (shuffled) samples.

    Args:
        data: anything with `len` and numbered entries.
        rank: this rank; the parts do not depend on it.
        shuffle: whether to shuffle the samples first.
        sizes: relative sizes, each above 0, summing to 1.
        seed: of the order, equal on all ranks, at least 0.

    Departures from MLBench: the order comes from the seed and not from rank 0's global random state, so
    nothing is sent; rounding loses no sample.

    Example:
        >>> parts = DataPartitioner(range(100), 0, shuffle=False, sizes=[1 / 7] * 7)
        >>> [len(parts.use(i)) for i in range(7)]
        [14, 15, 14, 14, 14, 15, 14]
    """

    def __init__(
        self, data: Any, rank: int, shuffle: bool, sizes: Sequence[float] = (0.7, 0.2, 0.1), *, seed: int = 0
    ) -> None:
        if not sizes or min(sizes) <= 0 or abs(math.fsum(sizes) - 1) > _ROUNDING:
            raise bad_value("sizes", "must be above 0 and sum to 1", list(sizes), "divide by their sum")
        number("seed", seed, "use 0, 1, 2, ...", least=0, finite=False)
        self.data = data
        count = len(data)
        generator = torch.Generator(device="cpu").manual_seed(seed)
        samples = list(range(count))
        if shuffle:
            samples = torch.randperm(count, generator=generator, device="cpu").tolist()
        # the last whatever the sum rounds to
        ends = [round(math.fsum(sizes[:i]) * count) for i in range(len(sizes))] + [count]
        self.partitions = [samples[start:end] for start, end in pairwise(ends)]

    def use(self, partition_ind: int) -> Partition:
        """Return a part, numbered from 0."""
        return Partition(self.data, self.partitions[partition_ind])


def partition_dataset_by_rank(
    dataset: Any,
    rank: int,
    world_size: int,
    distribution: str = "uniform",
    shuffle: bool = True,
    *,
    seed: int = 0,
) -> Partition:
    """Return this rank's samples: each is on one rank, and the numbers differ by at most one.

    Args:
        dataset: as `DataPartitioner`'s data, the same on all ranks.
        rank: this rank, in 0..world_size-1.
        world_size: number of ranks.
        distribution: "uniform".
        shuffle: whether to deal out samples in a random order.
        seed: of that order, equal on all ranks, at least 0.

    Raises:
        ConfigError: an argument is outside its range.
        DataError: there are fewer samples than ranks.

    Example:
        >>> [len(partition_dataset_by_rank(range(60000), rank, 6)) for rank in range(6)]
        [10000, 10000, 10000, 10000, 10000, 10000]
    """
    choice("distribution", distribution, ("uniform",), "cut other shares with DataPartitioner")
    if not 0 <= rank < world_size:
        raise bad_value("rank", f"must be in 0..{world_size - 1}", rank, "number the ranks from 0")
    if len(dataset) < world_size:
        raise DataError(f"expected at least one sample per rank, found {len(dataset)} for {world_size} ranks")
    return DataPartitioner(dataset, rank, shuffle, [1 / world_size] * world_size, seed=seed).use(rank)
