"""All-to-all requests: rows for each rank, counted, merged, and refused where they do not fit."""

import pytest
import torch

from stenograd.errors import WireError
from stenograd.simulate import run
from stenograd.wire.requests import Op, Request, mean, scatter, together
from stenograd.wire.traffic import Traffic, moved_bytes


def test_row_j_goes_to_rank_j():
    """Rank r holds 10 r + j for rank j, so rank j gets j, 10 + j, 20 + j."""
    ranks = [scatter(torch.arange(3) + 10 * r, torch.full((3, 2), r / 2)) for r in range(3)]
    for j, received in enumerate(run(ranks)):
        assert [int(a) for a, _ in received] == [j, 10 + j, 20 + j]
        assert [b.tolist() for _, b in received] == [[0, 0], [0.5, 0.5], [1, 1]]


def test_one_rank_gets_its_own_row():
    assert run([scatter(torch.tensor([[7, 8]]))])[0][0][0].tolist() == [7, 8]


@pytest.mark.parametrize("tensor", [torch.zeros(3), torch.zeros(()), torch.zeros(0, 2)])
def test_a_row_for_each_rank_is_needed(tensor):
    with pytest.raises(WireError, match="one row to each of 2 ranks, got a tensor of"):
        run([scatter(tensor), scatter(tensor)])


def test_together_merges_scatters_and_keeps_their_places():
    def both(rank):
        return together([scatter(torch.tensor([rank, rank + 5])), scatter(torch.full((2, 1), rank))])

    requests = []
    first, second = run([both(0), both(1)], spy=requests.append)
    assert [(r.op, len(r.tensors)) for r in requests] == [(Op.SCATTER, 2)]
    assert [[int(t) for (t,) in part] for part in first] == [[0, 1], [0, 1]]
    assert [[int(t) for (t,) in part] for part in second] == [[5, 6], [0, 1]]


def test_together_keeps_different_collectives_apart():
    requests = []
    run([together([scatter(torch.zeros(2, 1)), mean(torch.ones(3))]) for _ in range(2)], spy=requests.append)
    assert [r.op for r in requests] == [Op.SCATTER, Op.MEAN]


def test_what_stays_here_does_not_move():
    """4 rows of 100 bytes: 400 handed over, 300 sent."""
    assert moved_bytes(Op.SCATTER, 400, 4) == 300
    assert moved_bytes(Op.SCATTER, 400, 1) == 0
    traffic = Traffic()
    traffic.count(Op.SCATTER, Request(Op.SCATTER, (torch.zeros(4, 25),)).nbytes, 4)
    assert (traffic.payload_bytes, traffic.moved_bytes, traffic.collectives) == (400, 300, 1)
