"""Rounds when a rank dies: an error, or a round that the others hold without it."""

import os
import pickle
import warnings

import pytest
import torch
from torch import nn

import stenograd
from stenograd.errors import ConfigError, MethodError, PeerLost
from stenograd.sync.outer_averaging import OuterPart
from stenograd.testing.pool import RanksFailed

EVERY, STEPS, DIES_IN = 3, 9, 1


def _rank(rank, folder, text, phase):
    """Train; rank 2 dies in its second round, before, between or after the messages of it."""
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = stenograd.distribute(model, optimizer, text, timeout_s=6, bucket_bytes=64)
    brought, ends = [], []
    _note(sync, brought)
    if rank == 2:
        _die(sync, phase)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(5, 4, dtype=torch.float64, generator=generator)
            model(x).square().mean().backward()
            try:
                optimizer.step()
            except PeerLost as error:
                (folder / f"{rank}").write_bytes(pickle.dumps(error.ranks))
                return
            if (step + 1) % EVERY == 0:
                ends.append(_flat(sync))
    told = [str(w.message) for w in caught if "were lost" in str(w.message)]
    found = (brought, ends, sync.round, sync.events, told, sync.rank, sync.world_size)
    (folder / f"{rank}").write_bytes(pickle.dumps(found))
    sync.close()


def _note(sync, brought):
    """Note what this rank brings to each round: outer parameters, momentum, and its own parameters."""
    meet = sync._meet

    def noting(t):
        part, own = sync._parts[0], _flat(sync)
        if isinstance(part, OuterPart):
            brought.append((part._outer[0].clone(), part._momentum[0].clone(), own))
        else:
            brought.append((torch.zeros_like(own), torch.zeros_like(own), own))
        meet(t)

    sync._meet = noting


def _flat(sync):
    """Return this rank's parameters in a row."""
    return torch.cat([p.detach().reshape(-1) for p in sync._parts[0].parameters.values()])


def _die(sync, phase):
    rounds, meet = [], sync._meet

    def dying(t):
        rounds.append(t)
        part = sync._parts[0]
        if len(rounds) > DIES_IN:
            if phase == "before":
                os._exit(9)
            name = {"sent": "send", "arrived": "arrive"}[phase]
            work = getattr(part, name)
            setattr(part, name, lambda: (work(), os._exit(9)))
        meet(t)

    sync._meet = dying


def _expected(text, brought):
    """Return what a round of these ranks must give."""
    outer, momentum, _ = brought[0]
    mean = sum(own for *_, own in brought) / len(brought)
    if text.startswith("local"):
        return mean
    delta = outer - mean
    return outer - 0.7 * (delta + 0.9 * (0.9 * momentum + delta))


@pytest.mark.parametrize("phase", ["before", "sent", "arrived"])
@pytest.mark.parametrize("text", [f"diloco:every={EVERY},lost=drop", f"local:every={EVERY},lost=drop"])
def test_survivors_hold_the_round_without_the_lost_rank(pool, tmp_path, text, phase):
    """Whatever the others had of the lost rank: they take the mean of those left, or all of them of all."""
    with pytest.raises(RanksFailed) as failed:
        pool.run(4, _rank, tmp_path, text, phase)
    assert list(failed.value.errors) == [2], failed.value
    told = {rank: pickle.loads((tmp_path / f"{rank}").read_bytes()) for rank in (0, 1, 3)}
    for place, (_, _, rounds, events, words, rank, size) in enumerate(told.values()):
        assert (rounds, rank, size) == (STEPS // EVERY, place, 3)
        assert [(event["round"], event["lost"]) for event in events] == [(DIES_IN, [2])]
        assert len(words) == 1
        assert "3 of 4 ranks go on" in words[0]
    ends = [found[1] for found in told.values()]
    for other in ends[1:]:
        assert all(map(torch.equal, ends[0], other))
    for number in range(DIES_IN if phase != "arrived" else DIES_IN + 1, STEPS // EVERY):
        wanted = _expected(text, [found[0][number] for found in told.values()])
        torch.testing.assert_close(ends[0][number], wanted, rtol=1e-10, atol=1e-12)


def test_without_drop_a_lost_rank_is_an_error_that_names_it(pool, tmp_path):
    with pytest.raises(RanksFailed) as failed:
        pool.run(4, _rank, tmp_path, f"diloco:every={EVERY}", "sent")
    assert list(failed.value.errors) == [2], failed.value
    for rank in (0, 1, 3):
        assert pickle.loads((tmp_path / f"{rank}").read_bytes()) == (2,)


def test_what_cannot_be_dropped_is_refused():
    for text, message in {
        "diloco:lost=drop,delay=1": "lost must be raise with inside, delay or after",
        "diloco:lost=drop,eager=true": "lost must be raise with eager",
        "local:lost=drop/topk": "cannot be taken back",
        "local:lost=maybe": "lost must be one of raise, drop",
    }.items():
        with pytest.raises(MethodError, match=message):
            stenograd.method(text)
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="check_every must be 0 with diloco:lost=drop"):
        stenograd.distribute(
            model, torch.optim.SGD(model.parameters(), lr=0.1), "diloco:lost=drop", check_every=2
        )
