"""Requests and the coroutines that make them."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograd.errors import WireError
from stenograd.simulate import run
from stenograd.wire.requests import (
    Op,
    Request,
    Rounds,
    gather,
    gather_ragged,
    mean,
    means,
    read,
    summed,
    together,
)


def test_bytes_are_those_of_all_tensors():
    """3 x 4 + 5 x 1 + 1 x 8 + 0."""
    tensors = (
        torch.zeros(3),
        torch.zeros(5, dtype=torch.uint8),
        torch.zeros((), dtype=torch.int64),
        torch.zeros(0),
    )
    assert Request(Op.GATHER, tensors).nbytes == 25
    assert Request(Op.MEAN, ()).nbytes == 0


def test_one_mean_takes_one_type():
    with pytest.raises(WireError, match=r"one dtype, got \['torch.float16', 'torch.float32'\]"):
        Request(Op.MEAN, (torch.zeros(1), torch.zeros(1, dtype=torch.float16)))


def test_means_come_back_in_order():
    ranks = [means((torch.tensor([float(r)]), torch.tensor([[10.0 * r]]))) for r in range(3)]
    assert run(ranks) == [(torch.tensor([1.0]), torch.tensor([[10.0]]))] * 3


def test_gathered_tensors_come_in_rank_order():
    for received in run([gather(torch.tensor([r]), torch.tensor([r / 2])) for r in range(3)]):
        assert [(a.item(), b.item()) for a, b in received] == [(0, 0), (1, 0.5), (2, 1)]


@settings(max_examples=40)
@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=5))
def test_ragged_tensors_keep_their_lengths(lengths):
    """4 bytes for the length, then everyone pads to the longest: 12 bytes an entry here."""
    places = [torch.arange(n, dtype=torch.int32) + 1 for n in lengths]
    values = [torch.full((n,), float(r), dtype=torch.float64) for r, n in enumerate(lengths)]
    requests = []
    ranks = [gather_ragged(p, v) for p, v in zip(places, values, strict=True)]
    for received in run(ranks, spy=requests.append):
        for (p, v), sent_p, sent_v in zip(received, places, values, strict=True):
            assert torch.equal(p, sent_p)
            assert torch.equal(v, sent_v)
    assert [r.nbytes for r in requests] == [4, 12 * max(lengths)]


def test_ragged_tensors_must_be_flat_and_equally_long():
    for tensors in ((torch.zeros(2), torch.zeros(3)), (torch.zeros(2, 2),)):
        with pytest.raises(WireError, match="1-D and equally long"):
            next(gather_ragged(*tensors))


def three_rounds(rank):
    first = yield from mean(torch.tensor([float(rank)]))
    everyone = yield from gather(torch.tensor([rank]))
    last = yield from mean(first + len(everyone))
    return last.item()


def one_round(rank):
    average = yield from mean(torch.tensor([10.0 * rank, 0.0]))
    return average[0].item()


def test_coroutines_run_together_share_their_rounds():
    """Ranks 0 and 1: means .5 and 5; the first rounds are one collective, so three in all instead of four."""
    requests = []
    ranks = [together([three_rounds(r), one_round(r)]) for r in range(2)]
    assert run(ranks, spy=requests.append) == [[2.5, 5.0]] * 2
    assert [(r.op, len(r.tensors)) for r in requests] == [(Op.MEAN, 2), (Op.GATHER, 1), (Op.MEAN, 1)]


def look(rank: int) -> Rounds[list[int]]:
    """As `read` asks for numbers of a device."""
    (found,) = yield Request(Op.READ, (torch.tensor([rank, 7]),))
    return found


def test_numbers_are_read_without_a_message():
    """Two that look at once are answered apart, and the mean beside them is a collective of its own."""
    requests = []
    ranks = [together([look(r), look(10 + r), one_round(r)]) for r in range(2)]
    assert run(ranks, spy=requests.append) == [[[r, 7], [10 + r, 7], 5.0] for r in range(2)]
    assert [(r.op, r.nbytes) for r in requests] == [(Op.READ, 0), (Op.MEAN, 8)]
    with pytest.raises(StopIteration) as stop:
        next(read(torch.tensor([3])))  # the CPU's memory is read at once
    assert stop.value.value == [3]


def test_types_are_not_mixed_in_a_merged_mean():
    def halves(rank):
        average = yield from mean(torch.tensor([float(rank)], dtype=torch.float16))
        return average.dtype

    requests = []
    assert (
        run([together([one_round(r), halves(r)]) for r in range(2)], spy=requests.append)
        == [[5.0, torch.float16]] * 2
    )
    assert [r.tensors[0].dtype for r in requests] == [torch.float32, torch.float16]


def test_what_is_together_may_be_a_part_of_more():
    """Both gathers are one collective; the reply of each is its own, whatever stands beside it."""
    requests = []
    ranks = [
        together(
            [one_round(r), together([gather(torch.tensor([r])), mean(torch.tensor([r + 1.0]))]), look(r)]
        )
        for r in range(2)
    ]
    inner = [[(torch.tensor([0]),), (torch.tensor([1]),)], torch.tensor([1.5])]
    assert run(ranks, spy=requests.append) == [[5.0, inner, [r, 7]] for r in range(2)]
    assert [r.op for r in requests] == [Op.MEAN, Op.GATHER, Op.READ]


def test_averages_of_two_types_at_once_are_summed():
    halves = [torch.ones(1) / 2, torch.ones(1, dtype=torch.float64) / 2]
    for found in run([summed(together([mean(t.clone()) for t in halves])) for _ in range(2)]):
        assert [t.item() for t in found] == [1.0, 1.0]


def test_nothing_together_is_nothing():
    assert run([together([]), together([])]) == [[], []]
