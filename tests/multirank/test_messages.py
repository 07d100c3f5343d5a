"""Collectives that travel as messages between pairs: what arrives, whatever else is under way."""

import pytest
import torch

from stenograd.comm.driver import Driver
from stenograd.comm.routes import swaps
from stenograd.data.requests import Op, Request

ROWS = [1, 7, 4096, 50_000]  # float32: below and above the bytes from which rows travel one by one


def _row(source, target, size):
    return torch.arange(size, dtype=torch.float32) + 1000 * source + 10 * target


def _all_at_once(rank, world_size, size):
    """Two all-to-alls, an exchange with the next rank and a gather; the last is waited for first."""
    driver = Driver.own(timeout_s=30)
    rows = torch.stack([_row(rank, target, size) for target in range(world_size)])
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    requests = [
        Request(Op.SCATTER, (rows.clone(),)),
        Request(Op.EXCHANGE, (_row(rank, 50, size),), (after,), (before,)),
        Request(Op.GATHER, (_row(rank, 60, size),)),
        Request(Op.SCATTER, (rows + 0.5,)),
    ]
    pending = [driver.start(request) for request in requests]
    replies = [each.wait() for each in reversed(pending)]
    driver.close()
    return replies[::-1]


@pytest.mark.parametrize("size", ROWS)
@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_messages_of_several_collectives_do_not_mix(pool, world_size, size):
    assert swaps(4 * 50_000, world_size)
    for rank, told in enumerate(pool.run(world_size, _all_at_once, world_size, size)):
        first, near, gathered, last = told
        for source in range(world_size):
            assert torch.equal(first[source][0], _row(source, rank, size))
            assert torch.equal(last[source][0], _row(source, rank, size) + 0.5)
            assert torch.equal(gathered[source][0], _row(source, 60, size))
        before = (rank - 1) % world_size
        assert torch.equal(near[before][0], _row(before, 50, size))
