"""The torch.distributed driver: same answers as simulate, counted, in a fixed order."""

import os
import re
import time

import pytest
import torch
from support.losses import survivors, tell

from stenograd.compression.means import half_means
from stenograd.errors import PeerLost
from stenograd.exchange.tensor_exchange import TensorExchange
from stenograd.simulate import run
from stenograd.wire.driver import Driver
from stenograd.wire.requests import exchange as exchange_with
from stenograd.wire.requests import gather, gather_ragged, mean, means
from stenograd.wire.traffic import Traffic

SHAPES = [(9, 7), (5,), (0, 3), (12, 4), ()]


def _vector(rank):
    return torch.randn(
        sum(torch.Size(s).numel() for s in SHAPES), generator=torch.Generator().manual_seed(rank)
    )


def _in_16_bits(rank, world_size):
    return Driver(timeout_s=30).run(half_means(_vector(rank), rank, world_size))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_gloo_averages_in_16_bits_as_simulate_does(pool, world_size):
    """Bit for bit, because sums are the ranks' own: 117 numbers, which neither 2 nor 4 divide."""
    ranks = pool.run(world_size, _in_16_bits, world_size)
    simulated = run([half_means(_vector(rank), rank, world_size) for rank in range(world_size)])
    for (average, sent), (wanted, wanted_sent) in zip(ranks, simulated, strict=True):
        assert torch.equal(average, wanted)
        assert torch.equal(sent, wanted_sent)


def _one_stretch(rank, text):
    """A bucket of which nothing is compressed: its only request is one tensor, averaged in place."""
    exchange = TensorExchange(text, Driver(timeout_s=30))
    mine = {"w": torch.full((3, 3), float(rank + 1)), "b": torch.full((3,), float(rank + 1))}
    averages = [t.reshape(-1) for t in exchange.average(mine).values()]
    residuals = [t for state in exchange.state_dict()["parameters"].values() for t in state.values()]
    exchange.close()
    return torch.cat(averages), torch.cat([torch.zeros(1), *(r.reshape(-1) for r in residuals)])


def test_a_bucket_with_nothing_to_compress_is_averaged(pool):
    """Ranks hold 1 and 2: the average is 1.5 and nothing is left over."""
    for text in ("powersgd:rank=2", "topk:ratio=0.1,dense_below=100", "dense", "fp16:feedback=true"):
        for average, residual in pool.run(2, _one_stretch, text):
            assert average.tolist() == [1.5] * 12, text
            assert not residual.any(), text


def _odd_payloads(rank, world_size):
    driver = Driver(timeout_s=30)
    mixed = (
        torch.tensor([rank], dtype=torch.uint8),
        torch.arange(3, dtype=torch.float64) + rank,
        torch.empty(0, 2),
        torch.tensor(rank, dtype=torch.bfloat16),
        torch.arange(6).reshape(2, 3).t() * rank,
        torch.tensor([True, False]),
    )
    everyone = driver.run(gather(*mixed))
    ragged = driver.run(gather_ragged(torch.arange(rank * 2), torch.ones(rank * 2, dtype=torch.uint8)))
    a, b = driver.run(means([torch.full((2, 2), float(rank)), torch.tensor(float(rank))]))
    transposed = driver.run(mean((torch.arange(6.0).reshape(2, 3) * rank).t()))
    return everyone, ragged, a, b, transposed


def test_payloads_of_every_type_shape_and_length(pool):
    for everyone, ragged, a, b, transposed in pool.run(3, _odd_payloads, 3):
        for rank, (u8, f64, empty, bf16, strided, flags) in enumerate(everyone):
            assert u8.tolist() == [rank]
            assert f64.tolist() == [rank, rank + 1, rank + 2]
            assert empty.shape == (0, 2)
            assert bf16.shape == ()
            assert float(bf16) == rank
            assert strided.tolist() == [[0, 3 * rank], [rank, 4 * rank], [2 * rank, 5 * rank]]
            assert flags.tolist() == [True, False]
        assert [t.tolist() for t, _ in ragged] == [[], [0, 1], [0, 1, 2, 3]]
        assert a.tolist() == [[1.0, 1.0], [1.0, 1.0]]
        assert float(b) == 1.0
        assert transposed.tolist() == [[0, 3], [1, 4], [2, 5]]


def _counted(rank):
    driver = Driver(timeout_s=30)
    driver.run(mean(torch.ones(300)))
    driver.run(gather(torch.ones(10), torch.ones(3, dtype=torch.uint8)))
    return driver.traffic


def test_traffic_counts_payload_and_what_collectives_move(pool):
    """All-reduce of 1200 B on 3 ranks moves 2*2/3*1200 = 1600; a gather of 43 B padded to 44 moves 2*44."""
    for traffic in pool.run(3, _counted):
        assert isinstance(traffic, Traffic)
        assert (traffic.payload_bytes, traffic.moved_bytes, traffic.collectives) == (1244, 1688, 2)
        assert traffic.wait_s > 0


def _ordered(rank):
    """Buckets with 1, 3 and 2 rounds, and rank 1 slower: the order of issue is the same."""
    import time

    driver, issued = Driver(timeout_s=30), []
    start = driver.start
    driver.start = lambda request, *label: (issued.append(request.tensors[0].numel()), start(request))[1]

    def bucket(number, rounds):
        for i in range(rounds):
            if rank == 1:
                time.sleep(0.02 * (number + 1))
            yield from mean(torch.ones(10 * number + i + 1))

    from stenograd.wire.driver import Pipeline

    pipeline = Pipeline(driver)
    for number, rounds in enumerate([1, 3, 2, 3]):
        pipeline.add(bucket(number, rounds))
    pipeline.finish()
    return issued


def test_rounds_of_several_buckets_are_issued_in_one_order(pool):
    first, second = pool.run(2, _ordered)
    assert first == second
    assert first == [1, 11, 21, 12, 31, 13, 22, 32, 33]


def _lost_in_a_part(rank):
    """Ranks 2 and 3 are a group, and 3 does not come, but answers the roll call."""
    part = Driver(timeout_s=30).split([[0, 1], [2, 3]])[rank // 2]
    if rank != 2:
        time.sleep(2.5)
        return None
    with pytest.raises(PeerLost) as failed:
        Driver(part.group, timeout_s=0.5).run(exchange_with(torch.ones(1), [1]))
    return str(failed.value)


def test_a_message_has_one_numbering_of_ranks_and_the_time_that_was_waited(pool):
    """Number 0 of the group of ranks 2 and 3 is rank 2 everywhere, and its neighbour 1 is rank 3."""
    told = pool.run(4, _lost_in_a_part)[2]
    words = re.fullmatch(
        r"rank 2 \(of the group of ranks 2, 3\): exchange of 4 bytes with rank\(s\) 3 failed after "
        r"(\d+\.\d) s \(timeout_s is 0\.5\), rank\(s\) 3 did not come, but run \(.*\): look at .*",
        told,
    )
    assert words, told
    assert 0.5 <= float(words[1]) < 2.5


def _lost_at_once(rank, folder):
    if rank == 1:
        os._exit(9)
    with pytest.raises(PeerLost) as failed:
        Driver(timeout_s=60).run(gather(torch.ones(1)))
    assert failed.value.ranks == (1,)
    tell(folder, rank, str(failed.value))


def test_a_timeout_that_was_not_reached_is_not_blamed(pool, tmp_path):
    """The connections of a rank that ends break at once."""
    for rank, told in survivors(pool, 3, _lost_at_once, tmp_path, victim=1).items():
        words = re.match(rf"rank {rank} of 3: .* failed after (\d+\.\d) s, ", told)
        assert words, told
        assert "rank(s) 1 did not answer" in told
        assert float(words[1]) < 30
