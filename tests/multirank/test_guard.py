"""The replica guard on real ranks: what differs is found, named and, if asked, repaired."""

import warnings

import pytest
import torch
from models import ALL_METHODS
from support.faces import Face, Hook
from support.training import descend, flat, mlp
from torch import nn

import stenograd
from stenograd.simulate import ranks
from stenograd.sync.replica_guard import ReplicaGuard

NARROW = (torch.float16, torch.bfloat16, torch.float64)


def _flip(model, name):
    dict(model.named_parameters())[name].data.view(torch.int32).view(-1)[3] ^= 1 << 20


def _trained(rank, world_size, face, method, repair):
    """A bit of rank 1 flips after step 5, and one of rank 2 after step 11; checks are due every 4 steps."""
    sgd = torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}  # weight decay would bring the flip into momenta
    run = face(rank, world_size, mlp(rank), how=method, optimizer=sgd, check_every=4, repair=repair)
    error = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for s in range(16):
            try:
                run.train([s])
            except stenograd.errors.ReplicaDivergence as raised:
                error = (str(raised), raised.step, raised.tensors)
                break
            if (s, rank) in ((5, 1), (11, 2)):
                _flip(run.model, "2.weight" if s == 5 else "4.bias")
    run.close()
    return run.weights(), error, run.sync.repaired, [str(w.message) for w in caught]


@pytest.mark.parametrize("face", [Face, Hook])
@pytest.mark.parametrize("method", ["dense", "powersgd:rank=2"])
def test_a_flipped_bit_is_found_at_the_next_check_and_named(pool, method, face):
    for _, error, *_ in pool.run(3, _trained, 3, face, method, False):
        message, at, tensors = error
        assert (at, tensors) == (8, {"2.weight": (1,)})
        assert "replicas differ at step 8 (equal at step 4): 2.weight on rank(s) 1" in message


@pytest.mark.parametrize("face", [Face, Hook])
def test_repair_takes_the_majority_s_tensors_and_says_so_once_an_event(pool, face):
    ranks = pool.run(3, _trained, 3, face, "topk:ratio=0.1", True)
    for parameters, error, repaired, told in ranks:
        assert error is None
        assert repaired == 2
        assert torch.equal(parameters, ranks[0][0])
        assert len(told) == len(set(told))
    assert [len(told) for *_, told in ranks] == [2, 1, 1]  # rank 0, and who was repaired
    assert "2.weight on rank(s) 1: repaired with the tensors of rank(s) 0" in ranks[0][3][0]


def test_passes_before_the_first_round_are_compared_too(pool):
    """What a bit that flipped after pass 6 cost is counted on in rounds, which begin after pass 10."""
    for _, error, repaired, _ in pool.run(3, _trained, 3, Face, "local:every=2,after=10", True):
        assert (error, repaired) == (None, 1)


class _Masters(torch.optim.Optimizer):
    """SGD on copies in double precision, which it writes back into the parameters."""

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            wide = self.state[p].setdefault("wide", p.double())
            p.copy_(wide.sub_(p.grad, alpha=0.25))


@pytest.mark.filterwarnings("ignore:replicas differ")
def test_copies_that_an_optimizer_keeps_follow_what_is_repaired():
    """Else the next step undoes each repair. Rank 2 and its copies go astray once; all numbers are exact."""

    def train(rank):
        model = nn.Linear(4, 3)
        for p in model.parameters():
            nn.init.constant_(p, 0.5)
        optimizer = _Masters(model.parameters(), {})
        with stenograd.distribute(model, optimizer, group=rank, check_every=1, repair=True) as sync:
            for step in range(6):
                if step == 2 and rank.rank == 2:
                    for p, state in optimizer.state.items():
                        p.data.copy_(state["wide"].add_(1.0))
                descend(optimizer, model(torch.ones(2, 4)).sum())
            return flat(model), sync.repaired

    first, *others = ranks(3, train)
    for row, repaired in others:
        assert torch.equal(row, first[0])
        assert repaired == 1


def test_outer_parameters_that_differ_are_repaired_once():
    """Else they would make the parameters differ again in each round, and pull all ranks along."""

    def train(rank):
        model = mlp(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with stenograd.distribute(
            model, optimizer, "diloco:every=1", group=rank, check_every=1, repair=True
        ) as sync:
            for step in range(6):
                if (rank.rank, step) == (1, 2):
                    sync._parts[0]._outer[0][0] += 1.0
                descend(optimizer, model(torch.ones(1, 10)).square().mean())
            return sync.repaired

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert ranks(3, train) == [1, 1, 1]


def test_two_ranks_have_no_majority(pool):
    for _, error, *_ in pool.run(2, _trained, 2, Face, "dense", True):
        assert "2.weight, rank(s) 0 against rank(s) 1 without a majority" in error[0]
        assert error[2] == {"2.weight": ()}


def _long(rank, method):
    """1,000 steps, checked every 100; then a bit of rank 1 flips, which no later update rounds away."""
    sgd = torch.optim.SGD, {"lr": 0.05, "momentum": 0.9}
    run = Face(rank, 3, mlp(rank), how=method, optimizer=sgd, check_every=100, timeout_s=60)
    weights, applied = run.train(range(1000)), run.sync.step
    if rank == 1:
        _flip(run.model, "4.weight")
    with pytest.raises(stenograd.errors.ReplicaDivergence) as raised:
        run.train(range(100))
    run.close()
    return weights, applied, raised.value.step, raised.value.tensors


@pytest.mark.soak
@pytest.mark.parametrize("method", ALL_METHODS)
def test_replicas_stay_equal_for_long_and_a_flipped_bit_is_found(pool, method):
    ranks = pool.run(3, _long, method, timeout_s=280)
    for weights, *found in ranks:
        assert found == [1000, 1100, {"4.weight": (1,)}]
        assert weights.isfinite().all()
        assert torch.equal(weights, ranks[0][0])


def _by_itself(rank):
    """Buffers are each rank's own, unless asked for; so is the optimizer's state. All dtypes are repaired."""
    model = nn.BatchNorm1d(3)
    model.odd = nn.ParameterDict(
        {f"p{i}": nn.Parameter(torch.ones(5, dtype=d)) for i, d in enumerate(NARROW)}
    )
    model.scalar, model.none = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(0))
    model.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    sum(p.double().sum() for p in model.parameters()).backward()
    optimizer.step()
    model.running_mean += rank
    optimizer.state[model.weight]["momentum_buffer"] += rank == 2
    assert ReplicaGuard(model).check() == []
    with pytest.raises(stenograd.errors.ReplicaDivergence, match=r"buffer running_mean, rank\(s\) 0 against"):
        ReplicaGuard(model, check_buffers=True).check(7)
    with pytest.raises(
        stenograd.errors.ReplicaDivergence, match=r"momentum_buffer of weight in optimizer 0 on rank\(s\) 2"
    ):
        ReplicaGuard(model, optimizers=[optimizer]).check()
    if rank == 2:
        for p in model.parameters():
            p.data.add_(1)
    guard = ReplicaGuard(model, repair=True)
    names = [n for n, p in model.named_parameters() if p.numel()]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert guard.check() == names
    assert guard.check() == []
    assert not model.turned.is_contiguous()
    with pytest.raises(stenograd.errors.ReplicaDivergence, match="at different steps"):
        guard.check(rank)
    again = ReplicaGuard(model)
    again.check(100)
    model.weight.data += rank == 2  # after a checkpoint of step 50 was loaded
    with pytest.raises(stenograd.errors.ReplicaDivergence) as raised:
        again.check(60)
    assert "replicas differ at step 60: weight on rank(s) 2" in str(raised.value)
    return guard.checks, guard.repaired


def test_by_itself(pool):
    assert pool.run(3, _by_itself) == [(3, 1)] * 3
