"""Small gathers without a ring, and different collectives at once, on gloo ranks."""

import pytest
import torch

from stenograd.exchange.tensor_exchange import Flags
from stenograd.simulate import run
from stenograd.wire.driver import Driver
from stenograd.wire.requests import gather, gather_ragged, mean, scatter, together

SIZES = [1, 7, 5000, 30_000, 200_000]  # of bytes; the last two on both sides of what goes around the ring


def _tensors(rank, numel):
    return torch.arange(numel, dtype=torch.uint8) + rank, torch.full((3,), float(rank))


def _several(rank, size):
    parts = [
        mean(torch.full((5,), float(rank))),
        scatter(torch.arange(2 * size).view(size, 2) + rank),
        gather(torch.tensor([rank])),
        mean(torch.full((2,), float(rank), dtype=torch.float64)),
        gather_ragged(torch.arange(rank)),
    ]
    return together(parts)


def _job(rank, size):
    driver = Driver(timeout_s=30)
    gathered = []
    for numel in SIZES:
        before = driver.traffic.moved_bytes
        gathered.append((driver.run(gather(*_tensors(rank, numel))), driver.traffic.moved_bytes - before))
    flags = Flags(torch.tensor([float(rank == 1), 0.0, 1.0]))
    merged = driver.run(flags.carried_by(_several(rank, size)))
    return gathered, merged, (flags.any > 0).tolist()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_as_in_simulation(pool, size):
    wanted = run([_several(r, size) for r in range(size)])
    for rank, (gathered, merged, told) in enumerate(pool.run(size, _job, size)):
        for numel, (rows, moved) in zip(SIZES, gathered, strict=True):
            for r, row in enumerate(rows):
                assert all(torch.equal(a, b) for a, b in zip(row, _tensors(r, numel), strict=True))
            assert moved == (size - 1) * 4 * -(-(numel + 12) // 4)
        assert str(merged) == str(wanted[rank])
        assert told == [size > 1, False, True]
