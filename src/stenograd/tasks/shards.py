"""Divide samples among ranks, epochs and batches: computed alike on every rank, without communication."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from stenograd.errors import DataError, bad_value

__all__ = ["batches", "eval_batches", "shard", "steps_per_epoch"]


def shard(size: int, rank: int, world_size: int, *, shuffle: bool, seed: int) -> Tensor:
    """Return this rank's training samples: each sample is on one rank, and shards differ by at most one.

    Args:
        size: number of samples.
        rank: this rank, in 0..world_size-1.
        world_size: number of ranks.
        shuffle: whether to cut a permutation of all samples instead of the samples in order.
        seed: of that permutation, equal on every rank, at least 0.

    Raises:
        ConfigError: if rank, world_size or seed is outside its range.
        DataError: if there are fewer samples than ranks.

    Example:
        >>> [shard(5, rank, 2, shuffle=False, seed=0).tolist() for rank in range(2)]
        [[0, 1, 2], [3, 4]]
    """
    _check_world(size, rank, world_size)
    samples = torch.arange(size, device="cpu")
    samples = _shuffled(samples, 0, seed) if shuffle else samples
    return samples.tensor_split(world_size)[rank].clone()


def steps_per_epoch(size: int, world_size: int, batch_size: int, steps: int | None) -> int:
    """Return the number of steps in an epoch, the same on every rank.

    If steps is None it is as many as the longest shard needs, ceil(ceil(size / world_size) / batch_size), but
    no more than the shortest shard has samples (which matters only for batches of one).

    Example:
        >>> steps_per_epoch(65, world_size=2, batch_size=32, steps=None)  # 33 and 32 samples: two steps each
        2
    """
    _check_world(size, 0, world_size)
    _check_positive("batch_size", batch_size)
    if steps is not None:
        _check_positive("steps", steps)
        return steps
    longest = -(-size // world_size)
    return min(-(-longest // batch_size), size // world_size)


def batches(
    shard: Tensor, batch_size: int, *, epoch: int, seed: int, shuffle: bool, steps: int
) -> Iterator[Tensor]:
    """Cut a shard into the batches of one epoch.

    Ranks must take equally many steps, though one shard may be a sample longer than another. So if `steps`
    batches are about a shard (as `steps_per_epoch` arranges), the shard is cut into nearly equal batches:
    each sample occurs once and no batch is empty. Fewer steps use only the first samples; more start over.

    Args:
        shard: this rank's samples, not empty.
        batch_size: samples per batch; a batch may hold one more to avoid leaving a single sample.
        epoch: number of the epoch; each has its own order.
        seed: of the orders, at least 0.
        shuffle: whether to reorder the shard in each epoch (and each round).
        steps: number of batches, from `steps_per_epoch`.

    Example:
        >>> samples = torch.arange(5)
        >>> [batch.tolist() for batch in batches(samples, 2, epoch=0, seed=0, shuffle=False, steps=3)]
        [[0, 1], [2, 3], [4]]
    """
    _check_positive("batch_size", batch_size)
    _check_positive("steps", steps)
    wanted = steps * batch_size
    # `steps_per_epoch` gives a short shard up to a batch more, and with batches of 1 a long one 1 less.
    one_pass = len(shard) - 1 <= wanted <= len(shard) + batch_size and steps <= len(shard)
    count = len(shard) if one_pass else wanted
    rounds = range(-(-count // len(shard)))
    order = torch.cat([_shuffled(shard, 1, seed, epoch, turn) if shuffle else shard for turn in rounds])
    return iter(order[:count].tensor_split(steps))


def eval_batches(size: int, rank: int, world_size: int, batch_size: int) -> Iterator[Tensor]:
    """Cut this rank's part of the evaluation samples into batches; none if the part is empty.

    Each sample occurs once over all ranks. The number of batches may differ between ranks.

    Example:
        >>> [[batch.tolist() for batch in eval_batches(5, rank, 2, batch_size=2)] for rank in range(2)]
        [[[0, 1], [2]], [[3, 4]]]
    """
    _check_rank(rank, world_size)
    _check_positive("batch_size", batch_size)
    piece = torch.arange(size, device="cpu").tensor_split(world_size)[rank]
    return (piece[start : start + batch_size] for start in range(0, len(piece), batch_size))


def _shuffled(samples: Tensor, *words: int) -> Tensor:
    """Return samples in an order that depends on the words alone, without the global random state."""
    if min(words) < 0:
        raise bad_value("seed and epoch", "must be >= 0", words[1:], "use 0, 1, 2, ...")
    mixed = int(np.random.SeedSequence(words).generate_state(1, np.uint64)[0])  # near seeds, unrelated orders
    generator = torch.Generator(device="cpu").manual_seed(mixed)
    return samples[torch.randperm(len(samples), generator=generator, device="cpu")]


def _check_world(size: int, rank: int, world_size: int) -> None:
    _check_rank(rank, world_size)
    if size < world_size:
        raise DataError(f"expected at least one sample per rank, found {size} samples for {world_size} ranks")


def _check_rank(rank: int, world_size: int) -> None:
    _check_positive("world_size", world_size)
    if not 0 <= rank < world_size:
        raise bad_value("rank", f"must be in 0..{world_size - 1}", rank, "number the ranks from 0")


def _check_positive(name: str, got: int) -> None:
    if got < 1:
        raise bad_value(name, "must be >= 1", got, "use 1 or more")
