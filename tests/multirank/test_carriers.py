"""Real ranks whose tensors travel as copies, since no backend reaches them; and groups on bound devices."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

import stenograd
from stenograd.devices import Carriers
from stenograd.sync.handshake import broadcast_tensors
from stenograd.wire.driver import Driver
from stenograd.wire.requests import Op, Request, gather_ragged

HOWS = ["dense", "topk:ratio=0.5", "sign", "powersgd:rank=1", "diloco:every=2/qsgd", "gossip"]


def _copies(seen):
    """Let every tensor travel as a copy, as one on another device does, and note the copies."""

    def aboard(self, t):
        copy = t.clone()
        seen.append(copy)
        return copy

    return patch.object(Carriers, "aboard", aboard)


def _only_copies(seen):
    """Refuse what is handed to the backend if it is no copy, or was not made for that."""
    transmit = Driver._transmit, Driver._transmit_to, Driver._transmit_from

    def check(t):
        assert any(t.data_ptr() == copy.data_ptr() for copy in seen)

    def all_ranks(self, op, handed, received):
        check(handed)
        return transmit[0](self, op, handed, received)

    def some(self, peers, sources, mine, theirs):
        check(mine)
        return transmit[1](self, peers, sources, mine, theirs)

    def from_one(self, source, tensor):
        check(tensor)
        return transmit[2](self, source, tensor)

    return patch.multiple(Driver, _transmit=all_ranks, _transmit_to=some, _transmit_from=from_one)


def _collectives(rank, world_size):
    driver = Driver.own(timeout_s=30)
    x = torch.arange(10.0) / 3 + rank
    after, before = (rank + 1) % world_size, (rank - 1) % world_size
    requests = [
        Request(Op.MEAN, (x.clone(), x[:3].clone())),
        Request(Op.SUM, (x.clone(),)),
        Request(Op.GATHER, (x, x.to(torch.int16))),
        Request(Op.SCATTER, (x[:world_size].clone(),)),
        Request(Op.EXCHANGE, (x,), (after,), (before,)),
    ]
    found = [driver.start(request).wait() for request in requests]
    found.append(driver.run(gather_ragged(x[:rank])))
    turned = torch.full((3, 2), complex(rank, 1)).T  # no backend takes it as it is
    broadcast_tensors(driver, [turned], 1)
    moved = driver.traffic.moved_bytes
    driver.close()
    return found, turned, moved


def _training(rank, how):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 2))
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with stenograd.distribute(model, optimizer, how, timeout_s=30) as sync:
        for _ in range(4):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        moved = sync.traffic.moved_bytes
    return [p.detach().clone() for p in model.parameters()], moved


def _both(rank, function, argument):
    seen = []
    plain = function(rank, argument)
    with _copies(seen), _only_copies(seen):
        return plain, function(rank, argument), len(seen)


def _equal(a, b):
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    return a == b


@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_of_copies_give_the_same(pool, world_size):
    """As a model on a GPU through gloo, or a CPU tensor through a group of NCCL alone."""
    for plain, copied, count in pool.run(world_size, _both, _collectives, world_size):
        assert _equal(plain, copied)
        assert count >= 7  # one for each collective, and two for the ragged one


@pytest.mark.parametrize("how", HOWS)
def test_training_through_copies_gives_the_same_bits_and_bytes(pool, how):
    for plain, copied, count in pool.run(2, _both, _training, how):
        assert _equal(plain, copied)
        assert count


def _bound(rank):
    """Make groups of some ranks, as `inside=` and `lost=drop` do, where the world is bound to a device."""
    world = dist.group.WORLD
    world.bound_device_id = torch.device("cuda", 0)
    try:
        with patch.object(dist.distributed_c10d, "_get_split_source", side_effect=AssertionError("split")):
            driver = Driver.own(timeout_s=30)
            pair, single = driver.split([[0, 2], [1]], "level")
            told = (pair or single).gather_bytes(b"%d" % rank)
        return told, str(world.bound_device_id)
    finally:
        world.bound_device_id = None


def test_a_group_of_some_ranks_never_waits_for_the_others(pool):
    """To split a communicator, NCCL wants all ranks of the world; torch would where that is bound."""
    found = pool.run(3, _bound)
    assert found == [([b"0", b"2"], "cuda:0"), ([b"1"], "cuda:0"), ([b"0", b"2"], "cuda:0")]


def _groups(rank, how):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    before = len(dist.distributed_c10d._world.pg_map)
    with stenograd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), how, timeout_s=30) as sync:
        made = len(dist.distributed_c10d._world.pg_map) - before
        sync.refresh()
        again = len(dist.distributed_c10d._world.pg_map) - before
    return made, again, len(dist.distributed_c10d._world.pg_map) - before


def test_fragments_share_one_group_for_what_is_under_way(pool):
    """On a GPU each group is a communicator with hundreds of megabytes of its own."""
    for fragments in (1, 4):
        how = f"diloco:every=8,delay=1,mix=0.5,fragments={fragments}"
        assert pool.run(2, _groups, how) == [(2, 2, 0)] * 2
