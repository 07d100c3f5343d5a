"""Rounds when a rank dies: an error, or a round that the others hold without it."""

import json
import os
import time
import warnings

import pytest
import torch
from support.losses import loss_of, survivors, tell
from torch import nn

import stenograd
from stenograd.errors import ConfigError, MethodError, PeerLost

EVERY, STEPS, DIES_IN = 3, 9, 1


def _attached(text, between, timeout_s=10):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), between, nn.Linear(3, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sync = stenograd.distribute(model, optimizer, text, timeout_s=timeout_s, bucket_bytes=64)
    return model, optimizer, sync


def _backward(model, optimizer, rank, step):
    optimizer.zero_grad()
    generator = torch.Generator().manual_seed(10 * step + rank)
    model(torch.randn(5, 4, dtype=torch.float64, generator=generator)).square().mean().backward()


def _rank(rank, folder, text, phase):
    """Train; rank 2 dies in its second round, before, between or after the messages of it."""
    model, optimizer, sync = _attached(text, nn.BatchNorm1d(3), timeout_s=6)
    brought, ends = [], []
    _note(sync, brought)
    if rank == 2:
        _die(sync, phase)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            _backward(model, optimizer, rank, step)
            try:
                optimizer.step()
            except PeerLost as error:
                tell(folder, rank, error.ranks)
                return
            if (step + 1) % EVERY == 0:
                ends.append(_flat(sync))
    told = [str(w.message) for w in caught if "were lost" in str(w.message)]
    found = (brought, ends, sync.round, sync.events, told, sync.rank, sync.world_size)
    tell(folder, rank, found)
    sync.close()


def _note(sync, brought):
    """Note what this rank brings to each round: outer parameters, momentum, and its own parameters."""
    meet = sync._meet

    def noting(t):
        part, own = sync._parts[0], _flat(sync)
        if part._outer:
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
    told = survivors(pool, 4, _rank, tmp_path, text, phase)
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


def _by_time(rank, folder, text, dies_in):
    """Train at the speed of one's rank; rank 2 dies after some steps, wherever the others are."""
    model, optimizer, sync = _attached(text, nn.Tanh(), timeout_s=6)
    step = 0
    while sync.round < 8:
        time.sleep(0.002 * (1 + 3 * rank))
        _backward(model, optimizer, rank, step)
        step += 1
        if rank == 2 and step == dies_in:
            os._exit(9)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
    with sync.consensus():
        tell(folder, rank, (_flat(sync), sync.round, [event["lost"] for event in sync.events], step))
    sync.close()


@pytest.mark.parametrize("dies_in", [1, 7, 13])
@pytest.mark.parametrize("text", ["diloco:every=0.05s,lost=drop", "local:every=0.05s,lost=drop"])
def test_rounds_by_time_go_on_without_a_lost_rank(pool, tmp_path, text, dies_in):
    told = list(survivors(pool, 4, _by_time, tmp_path, text, dies_in).values())
    assert all(torch.equal(found, told[0][0]) for found, *_ in told)
    assert all(rounds == 8 and lost == [[2]] for _, rounds, lost, _ in told)
    assert told[0][3] > told[-1][3]


def _half_confirmed(rank, folder, text, dies_in, evaluates):
    """Rank 2 dies while something is confirmed: rank 0 has heard that message, the others have not."""
    model, optimizer, sync = _attached(text, nn.Tanh())
    survivors, heard = sync._survivors, []
    confirm = survivors._confirm

    def confirming():
        heard.append(len(heard))
        confirm()
        if len(heard) == dies_in + 1 and rank == 2:
            os._exit(9)
        if len(heard) == dies_in + 1 and rank != 0:
            raise loss_of(2)

    survivors._confirm = confirming
    ends = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(4 * 4):
            _backward(model, optimizer, rank, step)
            optimizer.step()
            if evaluates and step % 4 == 1:
                own = _flat(sync)
                with sync.consensus():
                    ends.append(_flat(sync))
                assert torch.equal(_flat(sync), own)
            if (step + 1) % 4 == 0:
                ends += [p._outer[0].clone() if p._outer else _flat(sync) for p in sync._parts]
    tell(folder, rank, (ends, sync.round, sync.events))
    sync.close()


@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("text", ["local:every=4", "diloco:every=4", "diloco:every=4,fragments=2"])
def test_a_loss_while_a_round_is_confirmed_leaves_survivors_equal(pool, tmp_path, text, world):
    """Rank 0 has taken round 1 and meets the loss in round 2; the others hear there that they may take it."""
    _equal(survivors(pool, world, _half_confirmed, tmp_path, f"{text},lost=drop", DIES_IN, False))


@pytest.mark.parametrize("text", ["local:every=4", "local:every=4,qsr=0.1"])
@pytest.mark.parametrize("dies_in", [1, 2, 3])
def test_a_loss_in_evaluation_or_between_rounds_leaves_survivors_equal(pool, tmp_path, text, dies_in):
    """What is confirmed in turn: a mean to evaluate, a round, and with QSR the pass of the next one."""
    _equal(survivors(pool, 3, _half_confirmed, tmp_path, f"{text},lost=drop", dies_in, True))


def _equal(told, held=4, lost=2):
    """Survivors have held so many rounds, and their tensors, all finite, are the same bits."""
    (first, *_), *_ = told.values()
    for ends, rounds, events in told.values():
        assert rounds == held
        assert [event["lost"] for event in events] == [[lost]]
        assert all(map(torch.equal, ends, first))
        assert all(t.isfinite().all() for t in ends)


def _half_averaged(rank, folder):
    """Rank 2 dies after the means of buffers and momenta came; ranks other than 0 have not got them."""
    text = "local:every=2,states=average,states_every=1,lost=drop"
    model, optimizer, sync = _attached(text, nn.BatchNorm1d(3))
    real, found = sync._other_means, []

    def means():
        momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
        found.append([t.clone() for t in (model[1].running_mean, model[1].running_var, *momenta)])
        puts = real()
        if rank == 2:
            os._exit(9)
        if rank != 0 and len(found) == 1:
            raise loss_of(2)
        return puts

    sync._other_means = means
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(2):
            _backward(model, optimizer, rank, step)
            optimizer.step()
    momenta = [optimizer.state[p]["momentum_buffer"] for p in model.parameters()]
    after = [model[1].running_mean, model[1].running_var, *momenta]
    tell(folder, rank, (found, after, len(sync.events)))
    sync.close()


def test_buffers_and_momenta_of_a_round_held_again_are_means_of_those_left(pool, tmp_path):
    """Means that some had got are of no use to the others, so all average again what they had before."""
    told = survivors(pool, 3, _half_averaged, tmp_path)
    (brought, after, events), (theirs, others, _) = told.values()
    assert (len(brought), events) == (2, 1)
    for mine, other, one, two in zip(brought[0], theirs[0], after, others, strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, (mine + other) / 2, rtol=1e-12, atol=1e-14)


def _void_and_lost(rank, folder, text, victim, dies_in):
    """Rank 1 brings NaN to round 1; the victim dies in it, before it says whether it is finite, or later."""
    model, optimizer, sync = _attached(text, nn.Tanh())
    part = sync._parts[0]
    if rank == victim:
        owner = sync._survivors if dies_in == "_confirm" else part
        work = getattr(owner, dies_in)
        setattr(owner, dies_in, lambda *given: os._exit(9) if sync.round == 1 else work(*given))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(12):
            _backward(model, optimizer, rank, step)
            if step == 5 and rank == 1:
                next(model.parameters()).data[0, 0] = float("nan")
            optimizer.step()
    tell(folder, rank, ([_flat(sync)], sync.round, sync.events))
    sync.close()


@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize(
    ("text", "dies_in"),
    [
        ("local:every=3", "is_finite"),
        ("local:every=3", "restart"),
        ("local:every=3", "_confirm"),
        ("diloco:every=3", "is_finite"),
        ("diloco:every=3/topk:ratio=0.5", "_confirm"),
    ],
)
def test_a_loss_in_a_void_round_leaves_survivors_equal(pool, tmp_path, text, victim, dies_in):
    """Three of four rounds count, and the rank that made one void goes on from what the others have."""
    text = text.replace(":every=3", ":every=3,lost=drop")
    _equal(survivors(pool, 3, _void_and_lost, tmp_path, text, victim, dies_in, victim=victim), 3, victim)


def _traced(rank, folder, steps):
    """Rank 2 dies before the second of three rounds, while so many steps are traced."""
    model, optimizer, sync = _attached("diloco:every=2,lost=drop", nn.Tanh(), timeout_s=6)

    def train(steps):
        for step in steps:
            if (rank, step) == (2, 3):
                os._exit(9)
            _backward(model, optimizer, rank, step)
            optimizer.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with sync.trace(str(folder / "trace.json")):
            train(range(4 if rank == 2 else steps))
        train(range(steps, 6))
    file = folder / f"trace.json.rank{rank}"
    noted = [e["name"] for e in json.loads(file.read_text())["traceEvents"]].count("step")
    ends = [str(w.message) for w in caught if "the trace ends without" in str(w.message)]
    tell(folder, rank, (sync.round, noted, sync._driver.tracer, len(ends)))
    sync.close()


# After three steps no survivor has noticed the loss.
@pytest.mark.parametrize(("steps", "warned"), [(6, 0), (3, 1)])
def test_a_trace_of_a_lost_rank_ends_with_a_file_of_each_survivor(pool, tmp_path, steps, warned):
    found = survivors(pool, 3, _traced, tmp_path, steps)
    assert list(found.values()) == [(3, steps, None, warned)] * 2


def test_without_drop_a_lost_rank_is_an_error_that_names_it(pool, tmp_path):
    told = survivors(pool, 4, _rank, tmp_path, f"diloco:every={EVERY}", "sent")
    assert list(told.values()) == [(2,)] * 3


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
