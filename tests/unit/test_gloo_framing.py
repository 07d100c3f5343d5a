"""Frames of gloo's collectives: by hand for small ones, and as sums over the ranks."""

import pytest

from stenograd.wire.gloo import Frames, frames
from stenograd.wire.requests import Op
from stenograd.wire.traffic import moved_bytes


def test_a_lone_rank_and_nothing_send_nothing():
    assert frames(Op.MEAN, 100, 1) == frames(Op.GATHER, 0, 3) == Frames()


def test_an_element_travels_round_the_ring_twice():
    """Piece 0 holds the element: it goes from rank 2 to 1 to 0, and back from 0 to 2 to 1."""
    ranks = [frames(Op.MEAN, 4, 3, rank=rank, itemsize=4) for rank in range(3)]
    assert [(r.messages, r.received) for r in ranks] == [(1, 1), (1, 2), (2, 1)]
    assert [r.packets for r in ranks] == [3, 4, 5]


@pytest.mark.parametrize("world_size", [2, 3, 4, 7])
@pytest.mark.parametrize("numel", [1, 5, 7, 1000, 2_000_003])
def test_what_all_ranks_send_all_ranks_receive(world_size, numel):
    """Each filled piece is sent by all ranks but one, twice."""
    ranks = [frames(Op.MEAN, 4 * numel, world_size, rank=r, itemsize=4) for r in range(world_size)]
    sent = sum(r.messages for r in ranks)
    assert sent == sum(r.received for r in ranks)
    assert sent % (2 * (world_size - 1)) == 0
    pieces = sent // (2 * (world_size - 1))
    assert min(numel, 2 * world_size) // 2 <= pieces <= max(2 * world_size, 4 * numel // 2**20 + world_size)
    assert 1448 * sum(r.packets for r in ranks) > world_size * moved_bytes(Op.MEAN, 4 * numel, world_size)


@pytest.mark.parametrize(
    ("op", "peers", "expected"),
    [
        # two pieces of 500 bytes to the next rank in each of two rounds; four notices out, four in
        (Op.GATHER, 0, Frames(messages=4, received=4, packets=4 + 4 + 4, acks=4)),
        # 333 bytes to each of two ranks
        (Op.SCATTER, 0, Frames(messages=2, received=2, packets=2 + 2 + 2, acks=2)),
        (Op.EXCHANGE, 1, Frames(messages=1, received=1, packets=3, acks=1)),
    ],
)
def test_messages_by_hand(op, peers, expected):
    assert frames(op, 1000, 3, peers=peers) == expected


def test_large_messages_take_full_packets():
    """(48 + 100,000) / 1,448 is 69.1: 70 packets, two notices, one ACK a message and one for 16 packets."""
    assert frames(Op.EXCHANGE, 100_000, 2, peers=1) == Frames(1, 1, 72, 1 + 70 // 16)
