"""Requests to stop: heard on all ranks at one step, whatever the method, without a byte or bit."""

import itertools
import os
import signal
import threading

import pytest
import torch
from models import SMALL_BUCKETS, flat, mlp
from support.faces import attached
from support.training import descend, shards
from torch import nn
from torch.distributed.algorithms.join import Join

import stenograd
from stenograd.errors import ConfigError, StenogradError
from stenograd.testing.pool import RanksFailed

WORLD, STEPS = 3, 12
EVERY_STEP = ["dense", "fp16", "topk:ratio=0.1", "powersgd:rank=2", "sign"]
ROUNDS = [
    "local:every=3",
    "local:every=3,after=4/topk:ratio=0.1",
    "diloco:every=4",
    "diloco:every=4,delay=1",
    "diloco:every=4,fragments=2,delay=1",
    "diloco:every=4,eager=true",
]
POLLED = ["gossip", "diloco:every=3,topology=pairs"]
CASES = [
    *(("distribute", method) for method in [*EVERY_STEP, *ROUNDS, *POLLED]),
    *(("ddp", method) for method in EVERY_STEP),
]
MOMENTS = ("forward", "backward", "step", "evaluation", "save", "round")


class Asked:
    """Calls something once, when a moment of a training comes for the nth time."""

    def __init__(self, moment, nth, ask):
        self.moment, self.left, self.ask = moment, nth, ask

    def __call__(self, moment):
        if moment == self.moment:
            self.left -= 1
            if not self.left:
                self.ask()


def _signalled():
    os.kill(os.getpid(), signal.SIGUSR1)


def _train(face, method, rank, path, at=None):
    """Train on from what is saved; return the parameters, or the step after which this rank left."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    # DDP makes other buckets after its first step, and so after the first one of a training that goes on.
    size = SMALL_BUCKETS if face == "distribute" else 4 << 20
    net, sync = attached(face, model, optimizer, method, size, timeout_s=60)
    at = at or Asked("", 0, bool)
    model[2].register_forward_hook(lambda *_: at("forward"))
    parts = {"model": model, "optimizer": optimizer, "sync": sync}
    loaded = stenograd.load_checkpoint(path, **parts)
    optimizer.register_step_pre_hook(lambda *_: at("step"))
    if hasattr(sync, "_meet"):
        meet = sync._meet
        sync._meet = lambda t: (at("round"), meet(t))
    try:
        for step in range(0 if loaded is None else loaded.step, STEPS):
            x, y = (part[rank] for part in shards(step, WORLD))
            optimizer.zero_grad()
            out = net(x)
            out.register_hook(lambda _: at("backward"))
            nn.functional.mse_loss(out, y).backward()
            optimizer.step()
            if step == 5:
                at("save")
                stenograd.save_checkpoint(path, step=step + 1, **parts)
                at("evaluation")
                with sync.consensus(), torch.no_grad():
                    model(x)
            if sync.poll() if sync.needs_poll else sync.stopping:
                stenograd.save_checkpoint(path, step=step + 1, **parts)
                return step + 1
        return flat(model)
    finally:
        sync.close()


def _drill(rank, face, method, asker, moment, nth, path):
    with stenograd.stop_on(signal.SIGUSR1):
        ask = _signalled if rank == asker else bool
        left = _train(face, method, rank, path, Asked(moment, nth, ask))
    again = left
    while isinstance(again, int):
        with stenograd.stop_on(signal.SIGUSR1):
            again = _train(face, method, rank, path)
    return left, again, _train(face, method, rank, f"{path}-straight")


@pytest.mark.parametrize(("face", "method"), CASES)
def test_all_ranks_stop_at_one_step_and_go_on_bit_for_bit(pool, tmp_path, face, method):
    """Each case has its own moment and rank, so that all are walked; the soak drills walk all with all."""
    number = CASES.index((face, method))
    moment = MOMENTS[number % (6 if "every" in method or method == "gossip" else 5)]
    if moment == "round" and "after" in method:
        moment = "step"
    nth = 1 if moment in ("evaluation", "save", "round") else 2 + number % 3
    # For the same reason DDP would add up three in another order.
    world = WORLD if face == "distribute" else 2
    found = pool.run(world, _drill, face, method, number % world, moment, nth, str(tmp_path / "run"))
    assert isinstance(found[0][0], int), f"{moment}: nobody stopped"
    assert len({left for left, _, _ in found}) == 1
    for _, again, straight in found:
        assert torch.equal(again, straight)


def _traffic(rank, face, method, listens):
    stop = stenograd.stop_on() if listens else None
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    net, sync = attached(face, model, optimizer, method, SMALL_BUCKETS, timeout_s=60)
    before = sync.traffic.payload_bytes, sync.traffic.collectives
    for step in range(14):
        x, y = (part[rank] for part in shards(step, WORLD))
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        if step == 4 and listens and rank == 1:
            stop.request()
        optimizer.step()
    sync.close()  # waits for what is under way
    found = sync.traffic.payload_bytes - before[0], sync.traffic.collectives - before[1], sync.stopping
    if stop is not None:
        stop.close()
    return found, flat(model)


@pytest.mark.parametrize(("face", "method"), [case for case in CASES if case[1] not in POLLED])
def test_requests_cost_neither_a_byte_nor_a_bit(pool, face, method):
    with_it = pool.run(WORLD, _traffic, face, method, True)
    without = pool.run(WORLD, _traffic, face, method, False)
    for (asked, one), (plain, other) in zip(with_it, without, strict=True):
        assert asked[2]
        assert not plain[2]
        if (face, method) == ("ddp", "dense"):  # which sends flags only for this
            assert asked[0] > plain[0]
            assert asked[1] == plain[1]
            continue
        assert asked[:2] == plain[:2]
        assert torch.equal(one, other)


def _uneven_calls(rank, method):
    stop = stenograd.stop_on() if rank == 1 else None
    try:
        attached("ddp", mlp(0), None, method)[1].close()
    finally:
        if stop is not None:
            stop.close()


def test_ddp_compares_calls_of_stop_on_where_flags_depend_on_them(pool):
    with pytest.raises(
        RanksFailed,
        match=r"MismatchError: ranks differ in a call of stop_on\(\) before register\(\): rank 0 has nothing",
    ):
        pool.run(2, _uneven_calls, "dense")
    pool.run(2, _uneven_calls, "topk:ratio=0.1")


def _polled(rank):
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    net, sync = attached("ddp", model, optimizer, "dense")
    assert sync.needs_poll
    heard = [sync.poll()]
    if rank == 2:
        sync.stop()
    net(torch.ones(2, 10)).sum().backward()
    heard += [sync.stopping, sync.poll(), sync.stopping]
    sync.close()
    return heard


def test_a_poll_tells_what_no_exchange_does(pool):
    assert pool.run(WORLD, _polled) == [[False, False, True, True]] * WORLD


def _skipping(rank):
    """Rank 1 skips the step after which a round is due."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    heard = []
    with stenograd.distribute(model, optimizer, "local:every=2", timeout_s=60) as sync:
        for step in range(4):
            x, y = (part[rank] for part in shards(step, WORLD))
            nn.functional.mse_loss(model(x), y).backward()
            if step == 1 and rank == 0:
                sync.stop()
            if (step, rank) != (1, 1):
                optimizer.step()
            heard.append(sync.stopping)
    return heard


def test_a_rank_that_skipped_its_step_hears_at_the_same_step(pool):
    assert pool.run(WORLD, _skipping) == [[False, True, True, True]] * WORLD


def _in_nodes(rank, method, asker):
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    heard = []
    with stenograd.distribute(model, optimizer, method, timeout_s=60) as sync:
        optimizer.register_step_pre_hook(lambda *_: sync.stop() if (len(heard), rank) == (2, asker) else None)
        for step in range(8):
            x, y = (part[rank] for part in shards(step, 4))
            descend(optimizer, nn.functional.mse_loss(model(x), y))
            heard.append(sync.stopping)
    return heard


@pytest.mark.parametrize("asker", [0, 3])
def test_nodes_hear_together(pool, asker):
    """Asked between the gradients of a node and the round of the same step: it counts in the next round."""
    found = pool.run(4, _in_nodes, "local:every=3,inside=dense,node_size=2", asker)
    assert found == [[False] * 5 + [True] * 3] * 4


def _run_out(rank):
    """The last rank has three batches only, and asks before it runs out."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    steps = 0
    with stenograd.distribute(model, optimizer, "topk:ratio=0.1", timeout_s=60) as sync:
        with Join([sync]):
            for step in range(3 if rank == WORLD - 1 else 9):
                x, y = (part[rank] for part in shards(step, WORLD))
                descend(optimizer, nn.functional.mse_loss(model(x), y))
                steps += 1
                if sync.stopping:
                    break
            if rank == WORLD - 1:
                sync.stop()
        return steps, sync.stopping


def test_a_rank_without_batches_can_ask(pool):
    found = pool.run(WORLD, _run_out)
    assert found == [(4, True), (4, True), (3, True)]


def _from_a_thread():
    caught = []

    def call():
        try:
            stenograd.stop_on()
        except StenogradError as error:
            caught.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    return caught


def test_what_stop_on_refuses():
    assert "main thread" in str(_from_a_thread()[0])
    for bad in (0, signal.SIGKILL):
        with pytest.raises(ConfigError, match="signals"):
            stenograd.stop_on(bad)


def test_earlier_handlers_are_called_and_come_back():
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append("earlier"))
    try:
        earlier = signal.getsignal(signal.SIGUSR1)
        with stenograd.stop_on(signal.SIGUSR1) as outer, stenograd.stop_on(signal.SIGUSR1) as inner:
            assert not inner.requested
            os.kill(os.getpid(), signal.SIGUSR1)
            assert inner.requested
            assert outer.requested
            assert heard == ["earlier"]
            os.kill(os.getpid(), signal.SIGUSR1)  # at once: the same request
            assert signal.getsignal(signal.SIGUSR1) == inner._note
            for one in (inner, outer):
                one._seen = dict.fromkeys(one._seen, -1e9)
            heard.clear()
            os.kill(os.getpid(), signal.SIGUSR1)
            assert heard
            assert signal.getsignal(signal.SIGUSR1) == earlier
        assert signal.getsignal(signal.SIGUSR1) == earlier
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("wrapped", [False, True], ids=["", "wrapped"])
@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_signals_are_given_back_whichever_ends_first(order, wrapped):
    """Also where the program calls what it has found from a handler of its own."""
    heard = []
    before = signal.signal(signal.SIGUSR1, lambda *_: heard.append("earlier"))
    try:
        earlier = signal.getsignal(signal.SIGUSR1)
        made = [stenograd.stop_on(signal.SIGUSR1) for _ in range(3)]
        if wrapped:
            newest = signal.getsignal(signal.SIGUSR1)
            signal.signal(signal.SIGUSR1, lambda *about: newest(*about))
        for at in order:
            made[at].close()
        assert wrapped or signal.getsignal(signal.SIGUSR1) == earlier
        signal.raise_signal(signal.SIGUSR1)
        assert heard == ["earlier"]
        assert not any(one.requested for one in made)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_that_comes_at_once_is_a_request(monkeypatch):
    install = signal.signal

    def raising(number, handler):
        found = install(number, handler)
        if handler not in (signal.SIG_DFL, signal.SIG_IGN):
            signal.raise_signal(number)
        return found

    monkeypatch.setattr(signal, "signal", raising)
    with stenograd.stop_on(signal.SIGUSR1) as stop:
        assert stop.requested
