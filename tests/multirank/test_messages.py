"""Collectives that travel as messages between pairs: what arrives, whatever else is under way."""

import pytest
import torch

from stenograd.simulate import ranks
from stenograd.wire.driver import Driver
from stenograd.wire.gloo import swaps
from stenograd.wire.requests import Op, Request

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


def _sums(rank, dtype, sizes):
    """Offer a receive, add up, and only then send what was offered for."""
    driver = Driver.own(timeout_s=30)
    other = 1 - rank
    offer = driver.start(Request(Op.EXCHANGE, (torch.zeros(3),), (), (other,)))
    found = []
    for size in sizes:
        x = _numbers(rank, size, dtype)
        for op in (Op.MEAN, Op.SUM):
            halves = x.clone().split([size // 3, size - size // 3])
            (one,), two = (driver.start(Request(op, t)).wait() for t in ((x.clone(),), halves))
            found.append((one, torch.cat(two)))
    sent = driver.start(Request(Op.EXCHANGE, (torch.full((3,), float(rank)),), (other,), ()))
    told = offer.wait()[other][0]
    sent.wait()
    messages = [e.messages for e in driver.traffic.entries() if e.op == "all-reduce"]
    driver.close()
    return found, told, messages


def _numbers(rank, size, dtype):
    generator = torch.Generator().manual_seed(17 * size + rank)
    x = torch.randn(size, generator=generator, dtype=torch.float64).mul_(3.0).to(dtype)
    x[::5] *= 1e-7  # float16 has no full precision there
    if size > 9:
        x[7], x[9] = torch.inf, -0.0
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_two_ranks_add_up_the_same_bits_directly_and_in_a_ring(pool, dtype):
    """Below, at and above the bytes that they send each other whole; an earlier offer gets its own."""
    at = (1 << 17) // dtype.itemsize
    sizes = [1, 10, at, at + 1, 3 * at]
    ranks = pool.run(2, _sums, dtype, sizes)
    expected = []
    for size in sizes:
        x, y = (_numbers(rank, size, dtype) for rank in (0, 1))
        expected += [x * 0.5 + y * 0.5, x + y]
    for rank, (found, told, messages) in enumerate(ranks):
        for (one, two), sums in zip(found, expected, strict=True):
            assert torch.equal(one, sums)
            assert torch.equal(two, sums)
        assert told.tolist() == [1.0 - rank] * 3
        assert messages == [3 * 4 * 1 + 2 * 4 * 4]  # one each, and a ring's four


def _bytes(rank):
    driver = Driver.own(timeout_s=30)
    told = [driver.gather_bytes(message) for message in (b"", b"\0ab" * rank)]
    driver.close()
    return told


def test_a_message_may_be_empty_on_any_rank(pool):
    """Rank 0 of the second has nothing; the first is empty everywhere."""
    wanted = [[b""] * 3, [b"", b"\0ab", b"\0ab\0ab"]]
    assert pool.run(3, _bytes) == [wanted] * 3
    simulated = ranks(3, lambda driver: driver.gather_bytes(b"ab" * driver.rank))
    assert simulated == [[b"", b"ab", b"abab"]] * 3


def _fails_alone(rank, kind):
    driver = Driver.own(timeout_s=2)
    tensor = torch.ones(3)
    if kind == "type" and rank:
        tensor = tensor.to(torch.float8_e5m2)
    elif kind == "memory" and rank:
        driver._transmit = _full
    try:
        driver.start(Request(Op.SUM, (tensor,))).wait()
    except Exception as error:
        return type(error).__name__, str(error)
    finally:
        driver.close()


def _full(*_):
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize(
    ("kind", "name", "said"),
    [("type", "RuntimeError", "Invalid scalar type"), ("memory", "OutOfMemoryError", "out of memory")],
)
def test_only_what_is_a_lost_peer_is_called_so(pool, kind, name, said):
    """Three ranks, so that all take the all-reduce; the last two fail by themselves, and the first waits."""
    (waits, _), *others = pool.run(3, _fails_alone, kind)
    assert waits == "PeerLost"
    for kind_of, told in others:
        assert (kind_of, said in told) == (name, True), told
