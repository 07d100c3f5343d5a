"""A rehearsal asks for what real ranks ask for, operation by operation and byte for byte."""

import copy
import random
import time
import warnings

import numpy as np
import pytest
import torch
from models import SMALL_BUCKETS, mlp, step

import stenograd
from stenograd.planning.rehearsal import Recorder, RehearsalDriver, record, rehearse, together
from stenograd.planning.trial import Trial, Work, first_batches
from stenograd.testing.methods import suite
from stenograd.testing.pool import RankPool
from stenograd.wire.driver import Driver

SCHEDULES = [
    "local:every=2",
    "local:every=3,states=average/sign:dense_below=0",
    "local:every=2,buffers=keep/topk:ratio=0.1",
    "diloco:every=3",
    "diloco:every=4,fragments=2,delay=1/topk:ratio=0.1,dense_below=0",
    "diloco:every=3,eager=true/qsgd",
    "sparseloco:every=2",
    "slowmo:every=2",
    "postlocal:every=2,after=2",
    "gossip",
    "gossip:graph=ring,consensus=0.5/sign:dense_below=0",
    "gossip:graph=ring,order=adapt-then-combine",
    "gossip:every=2,pushsum=on",
    "local:every=2,inside=dense,node_size=2",
]
# dgc brings a momentum of its own, so the optimizer here has none.
METHODS = [*suite(), "dgc:ratio=0.1,dense_below=0", "demo", *SCHEDULES]
STEPS = 6


def sent(cls, method, group=None):
    """Train some steps and return what each driver of a class transmitted, and the ledger without seconds."""
    noted = {}
    own = {name: getattr(cls, name) for name in ("_transmit", "_transmit_to", "_transmit_from")}

    def spy(driver, what, tensor, *ends):
        nbytes = tensor.numel() * tensor.element_size()
        noted.setdefault(id(driver), []).append((what, nbytes, str(tensor.dtype), *map(list, ends)))

    def transmit(self, op, handed, received):
        spy(self, op.value, handed)
        return own["_transmit"](self, op, handed, received)

    def transmit_to(self, peers, sources, mine, theirs):
        spy(self, "exchange", mine, peers, sources)
        return own["_transmit_to"](self, peers, sources, mine, theirs)

    def transmit_from(self, source, tensor):
        spy(self, "broadcast", tensor)
        return own["_transmit_from"](self, source, tensor)

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = mlp(0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            g = torch.Generator().manual_seed(5)
            sync = stenograd.distribute(model, optimizer, method, group=group, bucket_bytes=SMALL_BUCKETS)
            # Now, so that descriptions of the model are left out, whose length depends on the host's name.
            cls._transmit, cls._transmit_to, cls._transmit_from = transmit, transmit_to, transmit_from
            with sync:
                for _ in range(STEPS):  # the same batches on all ranks: then data-dependent sizes agree
                    step(model, optimizer, torch.randn(6, 10, generator=g), torch.randn(6, 3, generator=g))
                sync.flush()
            # After closing: an eager schedule leaves an exchange under way.
            ledger = [
                (e.kind, e.bucket, e.method, e.round, e.op, e.count, e.moved_bytes, e.header_bytes)
                for e in sync.traffic.entries()
                if e.kind != "attach"
            ]
    finally:
        for name, function in own.items():
            setattr(cls, name, function)
    return sorted(noted.values(), key=str), sorted(ledger, key=str)


def _both(rank, methods, world_size):
    """Return the methods for which a real run and a rehearsal of this rank differ."""
    wrong = {}
    for method in methods:
        real = sent(Driver, method)
        imagined = sent(RehearsalDriver, method, RehearsalDriver(world_size, Recorder(), rank))
        if real != imagined or not real[0]:
            wrong[method] = (real, imagined)
    return wrong


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_rehearsal_equals_real_ranks(pool, world_size):
    """Every method and schedule: the same operations, sizes, peers and ledger on each rank."""
    if world_size == 4:
        chosen = ["dense", "topk:ratio=0.1,dense_below=0", "sign", "powersgd:rank=2", *SCHEDULES[-4:]]
    else:
        chosen = METHODS
    for wrong in pool.run(world_size, _both, chosen, world_size, timeout_s=400):
        assert wrong == {}


def test_a_rehearsal_equals_five_ranks_that_share_their_work():
    """From five ranks on, top-k sends to owners of regions, which differ in size."""
    chosen = ["topk:ratio=0.1,dense_below=0", "local:every=2/topk:ratio=0.1,dense_below=0"]
    with RankPool(5) as ranks:
        for wrong in ranks.run(5, _both, chosen, 5, timeout_s=400):
            assert wrong == {}


@pytest.mark.parametrize("world_size", [8, 13])
def test_no_method_is_left_out_with_many_ranks(world_size):
    """Also where ranks divide nothing evenly; gossip by levels of two hosts is left to tests of its own."""
    found = rehearse(_trial(), METHODS[:-1], world_size, seconds=0.1, bucket_bytes=200)
    assert found.left_out == {}


def _trial():
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 2))
    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.1)
    batches = [torch.randn(5, 8) for _ in range(3)]
    trial = Trial(model, optimizer, batches, lambda model, x: model(x).square().mean())
    trial.loss(model, batches[0]).backward()
    optimizer.step()
    return trial


def test_a_rehearsal_leaves_the_users_state_as_it_was():
    """Model, buffers, gradients, optimizer and the three random generators are equal bit for bit."""
    trial = _trial()
    before = copy.deepcopy((trial.model.state_dict(), trial.optimizer.state_dict()))
    grads = [p.grad.clone() for p in trial.model.parameters()]
    generators = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    found = rehearse(trial, ["dense", "topk:ratio=0.5", "local:every=2"], 3, seconds=0.5)
    assert set(found.programs) == {
        stenograd.method(m).text for m in ("dense", "topk:ratio=0.5", "local:every=2")
    }
    assert found.left_out == {}
    after = trial.model.state_dict(), trial.optimizer.state_dict()
    torch.testing.assert_close(after[0], before[0], rtol=0, atol=0)
    assert str(after[1]) == str(before[1])
    assert all(torch.equal(p.grad, g) for p, g in zip(trial.model.parameters(), grads, strict=True))
    assert torch.equal(torch.get_rng_state(), generators[0])
    assert random.getstate() == generators[1]
    assert (np.random.get_state()[1] == generators[2]).all()
    assert not any(module._forward_pre_hooks for module in trial.model.modules())


WHOLE = [
    "dense",
    "topk",
    "local:every=3",
    "diloco:every=6",
    "diloco:every=8,fragments=2,delay=1,mix=0.5/topk",
    "gossip:every=2",
]


@pytest.mark.parametrize("method", WHOLE)
def test_a_short_recording_stands_for_whole_periods(method):
    """Its bytes per step are what the ledger counts in two whole periods, none of whose steps is left out."""
    trial, how = _trial(), stenograd.method(method)
    program = record(trial, how, 4, 4, bucket_bytes=150)
    own = Work(trial, first_batches(trial))
    sync = stenograd.distribute(
        own.model, own.optimizer, how, group=RehearsalDriver(4, Recorder()), bucket_bytes=150
    )

    def moved(steps):
        for _ in range(steps):
            own.step()
        entries = [entry for entry in sync.traffic.entries() if entry.kind != "attach"]
        return sum(entry.moved_bytes for entry in entries)

    with sync:
        before = moved(program.steps)
        assert (moved(2 * program.steps) - before) / (2 * program.steps) == pytest.approx(program.moved_bytes)
    assert program.steps == {"gossip:every=2": 4}.get(method, getattr(how.schedule, "every", 1))


def test_what_another_thread_does_is_noted_as_its_own():
    """Methods of two rounds work beside the backward pass: jobs are posted, done and joined."""
    program = record(_trial(), stenograd.method("powersgd"), 4, 2, bucket_bytes=150)
    main, *others = [[event.kind for event in lane] for lane in program.lanes]
    assert main.count("post") == main.count("join") == sum(lane.count("done") for lane in others) > 0
    assert "issue" in [kind for lane in others for kind in lane]


def test_batches_may_come_from_an_iterator():
    """Its first four are taken once, however many methods are rehearsed."""
    trial = _trial()
    left = iter([torch.randn(5, 8) for _ in range(6)])
    trial = Trial(trial.model, trial.optimizer, left, trial.loss)
    assert rehearse(trial, ["dense", "topk:ratio=0.5"], 2, seconds=0.2).left_out == {}
    assert len(list(left)) == 2


def test_a_method_that_does_not_fit_is_left_out_with_its_reason():
    trial = _trial()
    trial = Trial(
        trial.model, torch.optim.SGD(trial.model.parameters(), 0.1, momentum=0.9), trial.batches, trial.loss
    )
    found = rehearse(trial, ["dgc", "dense"], 2, seconds=0.2)
    assert "momentum" in found.left_out[stenograd.method("dgc").text]
    assert list(found.programs) == ["dense"]


def test_no_method_computes_less_than_a_step_without_an_exchange():
    """What is recorded below it is chance."""
    found = rehearse(_trial(), ["dense", "topk:ratio=0.1", "local:every=3"], 2, seconds=0.3)
    for program in found.programs.values():
        computed = sum(event.compute_s for event in program.lanes[0])
        assert computed >= program.period * program.periods * found.profile.floor_cpu_s * (1 - 1e-9)


def _together(rank):
    """Rank 1 takes 20 ms more for each loss."""
    model = torch.nn.Linear(8, 4)
    before = torch.get_rng_state()

    def loss(module, batch):
        time.sleep(0.02 * rank)
        return module(batch).square().mean()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    trial = stenograd.Trial(model, optimizer, iter([torch.ones(2, 8)]), loss)
    weights = model.weight.detach().clone()
    found = together(trial, Driver.own(timeout_s=30), 0.2)
    assert torch.equal(model.weight, weights)
    assert torch.equal(torch.get_rng_state(), before)
    return found


def test_ranks_together_take_what_the_slowest_takes(pool):
    first, second = pool.run(2, _together)
    assert first == second
    assert len(first) >= 8
    assert min(first) >= 0.02
