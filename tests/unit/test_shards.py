"""Who trains on what: shards, batches and their orders."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograd.errors import ConfigError, DataError
from stenograd.tasks import batches, eval_batches, shard, steps_per_epoch

worlds = st.integers(1, 7)
sizes = st.integers(1, 200)
seeds = st.integers(0, 2**40)
common = settings(max_examples=150)


@common
@given(worlds, sizes, seeds, st.booleans())
def test_shards_hold_every_sample_once(world_size, extra, seed, shuffle):
    size = world_size - 1 + extra
    shards = [shard(size, rank, world_size, shuffle=shuffle, seed=seed) for rank in range(world_size)]
    assert sorted(torch.cat(shards).tolist()) == list(range(size))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    if not shuffle:
        assert torch.cat(shards).tolist() == list(range(size))


@common
@given(worlds, sizes, st.integers(1, 40), seeds, st.booleans())
def test_epoch_shows_every_sample_once_in_equally_many_batches(world_size, extra, batch_size, seed, shuffle):
    size = world_size - 1 + extra
    steps = steps_per_epoch(size, world_size, batch_size, None)
    seen = []
    for rank in range(world_size):
        mine = shard(size, rank, world_size, shuffle=shuffle, seed=seed)
        epoch = list(batches(mine, batch_size, epoch=1, seed=seed, shuffle=shuffle, steps=steps))
        assert len(epoch) == steps
        assert 1 <= min(map(len, epoch)) <= max(map(len, epoch)) <= max(batch_size, 2)
        seen += torch.cat(epoch).tolist()
    assert sorted(seen) == list(range(size))


@common
@given(sizes, st.integers(1, 20), st.integers(1, 60))
def test_given_steps_are_kept(size, batch_size, steps):
    """Any number of steps: that many batches, and no sample seen two times more often than another."""
    assert steps_per_epoch(size, 1, batch_size, steps) == steps
    epoch = list(batches(torch.arange(size), batch_size, epoch=0, seed=0, shuffle=True, steps=steps))
    counts = torch.cat(epoch).bincount(minlength=size)
    assert len(epoch) == steps
    assert 1 <= min(map(len, epoch)) <= max(map(len, epoch)) <= batch_size + 1
    assert int(counts.max() - counts.min()) <= 1


@common
@given(worlds, st.integers(0, 50), st.integers(1, 9))
def test_evaluation_covers_every_sample_once(world_size, size, batch_size):
    found = [
        batch.tolist()
        for rank in range(world_size)
        for batch in eval_batches(size, rank, world_size, batch_size)
    ]
    assert [sample for batch in found for sample in batch] == list(range(size))
    assert all(1 <= len(batch) <= batch_size for batch in found)


def order(*, epoch=0, seed=0):
    return torch.cat(
        list(batches(torch.arange(50), 8, epoch=epoch, seed=seed, shuffle=True, steps=7))
    ).tolist()


def test_orders_differ_by_epoch_and_seed_and_repeat():
    assert order() == order()
    assert len({tuple(order(epoch=epoch, seed=seed)) for epoch in range(3) for seed in range(3)}) == 9


def test_shards_differ_by_seed_and_repeat():
    cuts = [tuple(shard(50, 0, 2, shuffle=True, seed=seed).tolist()) for seed in (0, 1, 0)]
    assert cuts[0] == cuts[2] != cuts[1]


def test_orders_leave_the_global_random_state_alone():
    before = torch.get_rng_state()
    order()
    shard(9, 0, 2, shuffle=True, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_uneven_shards_take_equally_many_steps():
    """65 samples on 2 ranks: 33 fill two batches of 32 at most, so 32 are cut in two batches as well."""
    steps = steps_per_epoch(65, 2, 32, None)
    lengths = [
        [len(b) for b in batches(torch.arange(n), 32, epoch=0, seed=0, shuffle=True, steps=steps)]
        for n in (33, 32)
    ]
    assert lengths == [[17, 16], [16, 16]]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: shard(3, 0, 4, shuffle=False, seed=0), DataError, "found 3 samples for 4 ranks"),
        (lambda: shard(3, 2, 2, shuffle=False, seed=0), ConfigError, r"rank must be in 0\.\.1, got 2"),
        (lambda: shard(3, 0, 0, shuffle=False, seed=0), ConfigError, "world_size must be >= 1, got 0"),
        (lambda: shard(3, 0, 1, shuffle=True, seed=-1), ConfigError, "seed and epoch must be >= 0"),
        (lambda: steps_per_epoch(3, 4, 1, None), DataError, "found 3 samples for 4 ranks"),
        (lambda: steps_per_epoch(3, 1, 0, None), ConfigError, "batch_size must be >= 1, got 0"),
        (lambda: steps_per_epoch(3, 1, 1, 0), ConfigError, "steps must be >= 1, got 0"),
        (lambda: eval_batches(3, 0, 1, 0), ConfigError, "batch_size must be >= 1, got 0"),
        (lambda: eval_batches(3, -1, 1, 1), ConfigError, "rank must be in"),
    ],
)
def test_shards_reject(call, error, message):
    with pytest.raises(error, match=message):
        call()
