"""Gossip through `distribute` when a rank dies: an error, or training that goes on without it."""

import os
import warnings

import pytest
import torch
from support.losses import survivors, tell
from torch import nn

import stenograd
from stenograd.errors import PeerLost
from stenograd.sync import gossip

STEPS = 8
DIES_AT = 1


def _attached(text, value):
    """Steps move nothing; ranks' values of 0, 1, 4 and 9 are not soon equal."""
    model = nn.Linear(3, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    sync = stenograd.distribute(model, optimizer, text, timeout_s=6)
    nn.init.constant_(model.weight, float(value))
    return model, optimizer, sync


def _backward(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()


def _rank(rank, folder, text):
    model, optimizer, sync = _attached(text, rank**2)
    seen = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            if rank == 2 and step == DIES_AT:
                os._exit(9)
            _backward(model, optimizer)
            try:
                optimizer.step()
            except PeerLost as error:
                tell(folder, rank, error.ranks)
                return
            seen.append((float(model.weight[0, 0]), sync.share))
        with sync.consensus():
            common = float(model.weight[0, 0])
    told = [str(w.message) for w in caught if "were lost" in str(w.message)]
    found = (seen, common, sync.round, sync.events, told, sync.rank, sync.world_size)
    tell(folder, rank, found)
    sync.close()


@pytest.mark.parametrize("graph", ["onepeer", "ring"])
def test_survivors_go_on_and_keep_their_mean(pool, tmp_path, graph):
    """From one mixing after the loss on, `sum w x` and `sum w` stay; steps move nothing here.

    On the directed graph rank 2 still is somebody's target and somebody's source in every step, so without
    weights the mean would go on moving; on the ring there are none.
    """
    told = survivors(pool, 4, _rank, tmp_path, f"gossip:graph={graph},lost=drop")
    for place, (_, _, rounds, events, words, rank, size) in enumerate(told.values()):
        assert (rounds, rank, size) == (STEPS, place, 3)
        assert [event["lost"] for event in events] == [[2]]
        assert len(words) == 1
        assert "3 of 4 ranks go on" in words[0]
    seen = [found[0] for found in told.values()]
    totals = [
        (sum(x * w for x, w in (mine[step] for mine in seen)), sum(mine[step][1] for mine in seen))
        for step in range(DIES_AT + 1, STEPS)
    ]
    for mass, share in totals:
        assert (mass, share) == pytest.approx(totals[0], rel=1e-12)
    commons = [found[1] for found in told.values()]
    assert commons == pytest.approx([totals[0][0] / totals[0][1]] * 3, rel=1e-12)
    # Distance 1 leaves weights 1, 1.5 and 0.5 (rank 1 keeps, rank 3 gets nothing), distance 2 evens them out.
    shares = {mine[step][1] for mine in seen for step in range(DIES_AT + 1, STEPS)}
    assert shares == ({0.5, 1.0, 1.5} if graph == "onepeer" else {1.0})
    assert totals[0][0] > 1
    spread = [max(x for x, _ in at) - min(x for x, _ in at) for at in zip(*seen, strict=True)]
    assert spread[-1] < 0.5 * spread[DIES_AT] > 0.1


def test_without_drop_a_lost_rank_is_an_error_that_names_it(pool, tmp_path):
    assert list(survivors(pool, 4, _rank, tmp_path, "gossip").values()) == [(2,)] * 3


def _rank_evaluating(rank, folder, hasty):
    """Rank 2 dies before the others evaluate; rank 0, if hasty, has its mean before it hears of that."""
    model, optimizer, sync = _attached("gossip:graph=ring,lost=drop", rank)
    if rank == 2:
        os._exit(9)
    if hasty and rank == 0:
        real, gossip.average = gossip.average, lambda *_, **__: None
    common = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with sync.consensus():
            common.append(float(model.weight[0, 0]))
        assert float(model.weight[0, 0]) == rank
        if hasty and rank == 0:
            gossip.average = real
        _backward(model, optimizer)
        optimizer.step()
        with sync.consensus():
            common.append(float(model.weight[0, 0]))
    tell(folder, rank, (common, sync.round, sync.world_size, len(sync.events)))
    sync.close()


@pytest.mark.parametrize("hasty", [False, True])
def test_the_mean_of_survivors_is_there_before_all_have_noticed(pool, tmp_path, hasty):
    mean = (0 + 1 + 3) / 3
    told = survivors(pool, 4, _rank_evaluating, tmp_path, hasty)
    for rank, (common, rounds, size, events) in told.items():
        first = 0.0 if hasty and rank == 0 else mean
        assert common == pytest.approx([first, mean], rel=1e-12)
        assert (rounds, size, events) == (1, 3, 1)


def _rank_evaluating_in_pairs(rank, folder):
    """After a round in pairs rank 2 dies, and nobody meets it before the others evaluate."""
    model, optimizer, sync = _attached("noloco:every=1,lost=drop", rank**2)
    told = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            _backward(model, optimizer)
            optimizer.step()
            if rank == 2:
                os._exit(9)
            own = float(model.weight[0, 0])
            with sync.consensus():
                told.append((own, float(model.weight[0, 0])))
    tell(folder, rank, (told, sync.round, sync.world_size, len(sync.events)))
    sync.close()


def test_survivors_in_pairs_evaluate_their_mean(pool, tmp_path):
    """The mean of what rounds have left on the three, bit for bit the same on each."""
    told = list(survivors(pool, 4, _rank_evaluating_in_pairs, tmp_path).values())
    assert [rest for _, *rest in told] == [[2, 3, 1]] * 3
    for evaluations in zip(*(found for found, *_ in told), strict=True):
        assert [common for _, common in evaluations] == [evaluations[0][1]] * 3
        mean = sum(own for own, _ in evaluations) / 3
        assert evaluations[0][1] == pytest.approx(mean, rel=1e-12)
        assert mean > 0.1
