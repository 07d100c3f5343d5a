"""Flags that travel with other messages: what comes of both, for every collective and none."""

import pytest
import torch

from stenograd.exchange.tensor_exchange import Flags
from stenograd.simulate import run
from stenograd.wire.finite import finite_of
from stenograd.wire.requests import (
    Op,
    commit,
    exchange,
    gather,
    gather_ragged,
    mean,
    means,
    scatter,
    summed,
    together,
)

WORLD = 3
MINE = [[1.0, 0.0, 0.0, 1.0], [0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]]
ANY = [True, False, True, True]


def nothing():
    return "nothing"
    yield


def committed():
    return (yield from commit(finite_of([torch.ones(2)])))


def several(rank):
    return together(
        [mean(torch.tensor([float(rank)])), scatter(torch.full((WORLD, 2), rank)), gather(torch.tensor(rank))]
    )


CASES = {
    "one mean": lambda r: mean(torch.tensor([1.0, 2.0 * r])),
    "means": lambda r: means((torch.ones(2, 2) * r, torch.zeros(0), torch.tensor(4.0))),
    "scaled": lambda r: summed(means((torch.ones(3) * r,))),
    "narrow": lambda r: mean(torch.ones(3, dtype=torch.float16)),
    "gather": lambda r: gather(torch.tensor([r]), torch.full((3,), r, dtype=torch.uint8)),
    "ragged": lambda r: gather_ragged(torch.arange(r)),
    "scatter": lambda r: scatter(torch.arange(WORLD * 2).view(WORLD, 2) + r, torch.ones(WORLD)),
    "peers": lambda r: exchange([torch.tensor([r])], [p for p in range(WORLD) if p != r]),
    "settle": lambda r: committed(),
    "no request": lambda r: nothing(),
    "several": several,
}


@pytest.mark.parametrize("name", CASES)
def test_result_and_flags_are_those_of_both_alone(name):
    flags = [Flags(torch.tensor(mine)) for mine in MINE]
    carried = run([f.carried_by(CASES[name](r)) for r, f in enumerate(flags)])
    assert str(carried) == str(run([CASES[name](r) for r in range(WORLD)]))
    assert [(f.any > 0).tolist() for f in flags] == [ANY] * WORLD


@pytest.mark.parametrize("name", CASES)
def test_flags_take_no_collective_of_their_own_where_a_message_reaches_all(name):
    requests = []
    flags = [Flags(torch.tensor(mine)) for mine in MINE]
    run([f.carried_by(CASES[name](r)) for r, f in enumerate(flags)], spy=requests.append)
    plain = []
    run([CASES[name](r) for r in range(WORLD)], spy=plain.append)
    extra = 1 if name in ("peers", "settle", "no request") else 0
    assert len(requests) == len(plain) + extra


def test_no_flags_change_nothing():
    requests = []
    flags = [Flags(torch.empty(0)) for _ in range(2)]
    assert run([f.carried_by(nothing()) for f in flags], spy=requests.append) == ["nothing"] * 2
    assert requests == []
    assert flags[0].any.tolist() == []


def test_flags_must_have_travelled():
    with pytest.raises(RuntimeError, match="not exchanged yet"):
        _ = Flags(torch.ones(1)).any


def test_different_collectives_are_under_way_at_once():
    """In simulation one turn for three requests, which the spy sees one by one."""
    requests, turns = [], 0

    def counted(rounds):
        nonlocal turns
        reply = None
        while True:
            try:
                request = rounds.send(reply)
            except StopIteration as stop:
                return stop.value
            turns += 1
            reply = yield request

    out = run([counted(several(r)) for r in range(WORLD)], spy=requests.append)
    assert turns == WORLD
    assert [r.op for r in requests] == [Op.MEAN, Op.SCATTER, Op.GATHER]
    assert float(out[0][0]) == 1.0
    assert [int(t) for (t,) in out[1][2]] == [0, 1, 2]
