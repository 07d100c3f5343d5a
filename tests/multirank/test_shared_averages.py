"""Averages that ranks share the work of: real ranks against simulated ones, and through the engine."""

import pytest
import torch
from models import flat, mlp, shards, step, wire_rounding

import stenograd
from stenograd.catalog.method import method
from stenograd.compression.contract import Site
from stenograd.errors import WireError
from stenograd.simulate import exchange, run
from stenograd.testing.methods import configurations
from stenograd.testing.pool import RankPool
from stenograd.wire.driver import Driver
from stenograd.wire.requests import scatter, together
from stenograd.wire.traffic import moved_bytes

METHODS = configurations()
SHAPES = [torch.Size(s) for s in [(30, 40), (5,), (0, 3), (17, 11), ()]]


def _mixed(rank, world_size):
    """Rows of several types, one of them strided, and one without elements."""
    return (
        torch.arange(world_size) * 100 + rank,
        torch.full((world_size, 3), rank, dtype=torch.uint8),
        torch.zeros(world_size, 0),
        (torch.arange(2.0 * world_size).view(2, world_size) + rank).t(),
        torch.tensor([True, False] * world_size)[:world_size],
    )


def _scattered(rank, world_size):
    driver = Driver(timeout_s=30)
    received = driver.run(scatter(*_mixed(rank, world_size)))
    pair = [scatter(torch.full((world_size, 2), rank, dtype=torch.int32)), scatter(torch.ones(world_size))]
    traffic = driver.traffic.payload_bytes, driver.traffic.moved_bytes, driver.traffic.collectives
    merged = driver.run(together(pair))
    nothing = driver.run(scatter(torch.zeros(world_size, 0)))
    with pytest.raises(WireError, match=f"one row to each of {world_size} ranks"):
        driver.run(scatter(torch.zeros(world_size + 1)))
    return received, merged, [t.shape for (t,) in nothing], traffic


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gloo_scatters_as_simulate_does(pool, world_size):
    """A row is 8 + 8 + 3 + 1 bytes, padded to 24."""
    simulated = run([scatter(*_mixed(r, world_size)) for r in range(world_size)])
    for rank, (received, merged, nothing, traffic) in enumerate(pool.run(world_size, _scattered, world_size)):
        for got, wanted in zip(received, simulated[rank], strict=True):
            for a, b in zip(got, wanted, strict=True):
                assert a.dtype == b.dtype
                assert torch.equal(a, b)
        assert [t.tolist() for (t,) in merged[0]] == [[r, r] for r in range(world_size)]
        assert [float(t) for (t,) in merged[1]] == [1.0] * world_size
        assert nothing == [torch.Size((0,))] * world_size
        assert traffic == (24 * world_size, 24 * (world_size - 1), 1)


def _vector(rank, step):
    numel = sum(shape.numel() for shape in SHAPES)
    return torch.randn(numel, generator=torch.Generator().manual_seed(100 * step + rank))


def _steps(rank, world_size, steps):
    driver, out = Driver(timeout_s=60), []
    for text in METHODS:
        compressor, averages = method(text).compressor, []
        state = compressor.init(
            _vector(rank, 0), Site(shapes=tuple(SHAPES), rank=rank, world_size=world_size)
        )
        before = driver.traffic.moved_bytes
        for number in range(steps):
            site = Site(shapes=tuple(SHAPES), rank=rank, world_size=world_size, step=number, error=True)
            done = driver.run(compressor.exchange(_vector(rank, number), None, state, site))
            state = done.state
            averages.append(done.average)
        out.append((averages, done.error, driver.traffic.moved_bytes - before))
    return out


def _check_against_simulation(pool, world_size, steps):
    """Compare averages of each step, the last errors and the bytes; what is owed shows from the second on."""
    ranks = pool.run(world_size, _steps, world_size, steps)
    for i, text in enumerate(METHODS):
        compressor, states, moved, requests = method(text).compressor, None, 0, []
        for number in range(steps):
            xs = [_vector(r, number) for r in range(world_size)]
            simulated = exchange(
                compressor, xs, states, shapes=SHAPES, step=number, want_error=True, spy=requests.append
            )
            states, rounding = [e.state for e in simulated], wire_rounding(requests)
            for rank in range(world_size):
                got = ranks[rank][i][0][number]
                assert torch.equal(got, ranks[0][i][0][number]), text
                near = {"rtol": rounding or 1e-4, "atol": rounding or 1e-5}
                torch.testing.assert_close(
                    got, simulated[rank].average, **near, msg=lambda m, t=text: f"{t}: {m}"
                )
        for rank in range(world_size):
            torch.testing.assert_close(ranks[rank][i][1], simulated[rank].error, rtol=1e-4, atol=1e-4)
            moved = sum(moved_bytes(r.op, r.nbytes, world_size) for r in requests)
            padding = 8 * len(requests) * world_size
            assert moved <= ranks[rank][i][2] <= moved + padding, text


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_real_ranks_give_what_simulate_gives(pool, world_size):
    _check_against_simulation(pool, world_size, 3)


def test_eight_ranks_give_what_simulate_gives():
    with RankPool(8) as pool:
        _check_against_simulation(pool, 8, 2)


def _trained(rank, world_size, text):
    model = mlp(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    with stenograd.distribute(model, optimizer, text, bucket_bytes=1200, timeout_s=60) as sync:
        for s in range(24):
            xs, ys = shards(s % 4, world_size)
            losses.append(float(step(model, optimizer, xs[rank], ys[rank])))
    return flat(model), losses, sync.traffic.moved_bytes


@pytest.mark.parametrize(
    "text",
    [
        "topk:ratio=0.1",
        "topk:ratio=0.1,reduce=regions",
        "sign:block=64,dense_below=20",
        "qsgd:bits=4,block=64",
        "qsgd:feedback=true",
    ],
)
def test_the_engine_trains_with_four_ranks(pool, text):
    """Several buckets in flight: equal parameters on all ranks, and a lower loss."""
    ranks = pool.run(4, _trained, 4, text)
    assert all(torch.equal(parameters, ranks[0][0]) for parameters, *_ in ranks)
    first, last = (sum(sum(losses[part]) for _, losses, _ in ranks) for part in (slice(4), slice(-4, None)))
    assert last < 0.95 * first
