"""Ranks that die, and what the others tell of it through files: a pool whose rank is lost returns nothing."""

import pickle

import pytest

from stenograd.errors import PeerLost
from stenograd.testing.pool import RanksFailed


def tell(folder, rank, found):
    """Write what this rank has found, for `survivors`."""
    (folder / f"{rank}").write_bytes(pickle.dumps(found))


def survivors(pool, world, run, folder, *args, victim=2):
    """Run `run(rank, folder, *args)`, of which only the victim may die; return what others told, by rank."""
    with pytest.raises(RanksFailed) as failed:
        pool.run(world, run, folder, *args)
    assert list(failed.value.errors) == [victim], failed.value
    return {rank: pickle.loads((folder / f"{rank}").read_bytes()) for rank in range(world) if rank != victim}


def loss_of(rank):
    """Return the error of a rank's loss."""
    lost = PeerLost(f"rank {rank} did not answer")
    lost.ranks = (rank,)
    return lost
