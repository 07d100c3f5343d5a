"""Rounds that go by time: ranks make as many steps as they can, and count for as many."""

import time

import pytest
import torch
from models import SMALL_BUCKETS, flat, mlp
from support.training import descend
from torch.nn import functional

import stenograd
from stenograd.errors import MethodError, StenogradError

LR, ROUNDS = 0.01, 4


def _pulled(rank, method, weighted, pause_s):
    """Losses with one gradient each; return the steps that each round took, and the weights."""
    model = mlp(0).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    sync = stenograd.distribute(model, optimizer, method, bucket_bytes=SMALL_BUCKETS, timeout_s=60)
    steps, pulls = [0], _pulls(rank, model)
    while sync.round < ROUNDS:
        time.sleep(pause_s * (1 + 4 * rank))
        before = sync.round
        optimizer.zero_grad()
        if weighted:
            sync.weight(3 + 2 * rank)
        sum((p * pull).sum() for p, pull in zip(model.parameters(), pulls, strict=True)).backward()
        optimizer.step()
        steps[-1] += 1
        if sync.round > before:
            steps.append(0)
    with sync.consensus():
        found = flat(model)
    events = sync.traffic.collectives
    sync.close()
    return steps[:-1], found, events


def _pulls(rank, model):
    g = torch.Generator().manual_seed(rank)
    return [torch.randn(p.shape, generator=g, dtype=p.dtype) for p in model.parameters()]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "method", ["local:every=0.2s", "diloco:every=0.2s,outer_lr=1,momentum=0,nesterov=false"]
)
def test_rounds_are_means_by_the_steps_that_ranks_made(pool, method, weighted):
    """A rank that is 5 and 9 times as slow makes fewer steps, and nobody waits for more than one of them."""
    world = 3
    ranks = pool.run(world, _pulled, method, weighted, 0.01)
    model = mlp(0).double()
    wanted, steps = flat(model), [taken for taken, *_ in ranks]
    assert all(len(taken) == ROUNDS and min(taken) >= 1 for taken in steps)
    assert sum(steps[0]) > 2 * sum(steps[2])
    pulls = [torch.cat([pull.flatten() for pull in _pulls(rank, model)]) for rank in range(world)]
    for made in zip(*steps, strict=True):
        counts = [n * (3 + 2 * rank if weighted else 1) for rank, n in enumerate(made)]
        moved = zip(counts, made, pulls, strict=True)
        wanted = wanted - LR * sum(count * n * pull for count, n, pull in moved) / sum(counts)
    for _, found, _ in ranks:
        assert torch.equal(found, ranks[0][1])
        assert torch.allclose(found, wanted, rtol=0, atol=1e-12)


def _ended(rank, steps):
    """Ranks with as many batches each, of which the first is done long before the last."""
    model = mlp(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    sync = stenograd.distribute(
        model, optimizer, "diloco:every=0.1s", bucket_bytes=SMALL_BUCKETS, timeout_s=60
    )
    seen = []
    for step in range(steps):
        time.sleep(0.005 * (1 + 5 * rank))
        optimizer.zero_grad()
        g = torch.Generator().manual_seed(100 * step + rank)
        functional.mse_loss(model(torch.randn(4, 10, generator=g)), torch.zeros(4, 3)).backward()
        optimizer.step()
        seen.append(sync.round)
    with sync.consensus():
        found = flat(model)
    rounds = sync.round
    sync.close()
    return found, seen[-1], rounds


def test_a_rank_that_is_done_takes_part_until_all_are(pool):
    ranks = pool.run(2, _ended, 40)
    assert ranks[0][1] < ranks[1][1] <= ranks[0][2] == ranks[1][2]
    assert torch.equal(ranks[0][0], ranks[1][0])


def _saved(rank, folder, resumed):
    model = mlp(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    method = "diloco:every=0.1s"
    sync = stenograd.distribute(model, optimizer, method, bucket_bytes=SMALL_BUCKETS, timeout_s=60)
    kept = {"model": model, "optimizer": optimizer, "sync": sync}
    if resumed:
        step = stenograd.load_checkpoint(folder, **kept).step
        with sync.consensus():
            found = flat(model)
        return step, sync.round, found, flat(model)
    while sync.round < 3:
        time.sleep(0.005 * (1 + 3 * rank))
        descend(optimizer, model(torch.ones(2, 10)).square().mean())
    if rank == 0:  # some more steps on one rank
        model(torch.ones(2, 10)).square().mean().backward()
        optimizer.step()
    stenograd.save_checkpoint(folder, step=sync.round, **kept)
    with sync.consensus():
        found = flat(model)
    own, rounds = flat(model), sync.round
    sync.close()
    return rounds, rounds, found, own


def test_a_checkpoint_goes_on_where_it_was_saved(pool, tmp_path):
    saved = pool.run(2, _saved, str(tmp_path), False)
    loaded = pool.run(2, _saved, str(tmp_path), True)
    for before, after in zip(saved, loaded, strict=True):
        assert before[:2] == after[:2]
        assert all(torch.equal(a, b) for a, b in zip(before[2:], after[2:], strict=True))


def test_until_the_first_local_step_there_is_no_round_to_end():
    """While gradients are averaged all have the same model: it is what is evaluated, kept, and saved."""
    model = mlp(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    method = "diloco:every=60s,after=3"
    with stenograd.distribute(model, optimizer, method) as sync:
        for last in (False, False, True):
            optimizer.zero_grad()
            model(torch.ones(2, 10)).square().mean().backward()
            if not last:  # the last pass of these, whose step is skipped
                optimizer.step()
            trained = flat(model)
            with sync.consensus():
                assert torch.equal(flat(model), trained)
            if not last:
                sync.refresh()
                assert torch.equal(flat(model), trained)
        state = sync.state_dict()
    other = mlp(4)
    other.load_state_dict(model.state_dict())
    with stenograd.distribute(other, torch.optim.SGD(other.parameters(), lr=LR), method) as sync:
        sync.load_state_dict(state)
        with sync.consensus():
            assert torch.equal(flat(other), trained)


def _loaded(rank):
    """Take other weights after attaching, before any step and after a round; return what is left of them."""
    model, found = mlp(5), []
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with stenograd.distribute(model, optimizer, "diloco:every=0.05s", timeout_s=60) as sync:
        for seed in (6, 7):
            model.load_state_dict(mlp(seed).state_dict())
            sync.refresh()
            found.append(torch.equal(flat(model), flat(mlp(seed))))
            while not sync.round:
                optimizer.zero_grad()
                model(torch.ones(2, 10)).square().mean().backward()
                optimizer.step()
    return found


def test_weights_that_were_loaded_after_attaching_stay_when_all_refresh(pool):
    assert pool.run(2, _loaded) == [[True, True]] * 2


def _kept(rank, folder):
    """Ranks of unequal speed, a refresh, and a state beside a framework's checkpoint."""
    model = mlp(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    with stenograd.distribute(model, optimizer, "diloco:every=0.1s", timeout_s=60) as sync:
        while sync.round < 2:
            time.sleep(0.005 * (1 + 3 * rank))
            descend(optimizer, model(torch.ones(2, 10)).square().mean())
        sync.refresh()
        stenograd.save_state(folder, sync, model=model, optimizer=optimizer)
        saved, made, state = flat(model), sync.step, sync.state_dict()
        with torch.no_grad():
            model[0].weight.zero_()
        stenograd.load_state(folder, sync, model=model, optimizer=optimizer)
        assert torch.equal(flat(model), saved)
        return made, state


def test_what_ranks_keep_fits_together_whatever_each_has_made(pool, tmp_path):
    found = pool.run(2, _kept, tmp_path)
    assert found[0][0] != found[1][0]
    assert len(stenograd.reshard([state for _, state in found], 3)) == 3


def _crossed(rank):
    model = mlp(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    sync = stenograd.distribute(model, optimizer, "local:every=60s", timeout_s=30)
    try:
        if rank == 0:
            sync.flush()
        else:
            with sync.consensus():
                pass
    except StenogradError as error:
        return str(error)
    finally:
        sync.close()


def test_ranks_that_come_for_different_things_are_told(pool):
    for told in pool.run(2, _crossed):
        assert (
            "ranks came for different things: rank 0 for flush() or refresh(), rank 1 for consensus()" in told
        )


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("local:seconds=-1", "seconds must be 0 or positive, got -1"),
        ("local:every=2s,qsr=0.1", "qsr must be 0 with seconds"),
        ("local:every=2s,inside=dense", "seconds must be 0 with inside, delay or fragments"),
        ("diloco:every=2s,fragments=2", "seconds must be 0 with inside, delay or fragments"),
        ("diloco:every=2s,eager=true", "seconds must be 0 with eager rounds or pairs"),
        ("noloco:every=2s", "seconds must be 0 with eager rounds or pairs"),
        ("local:every=twos", "local: seconds must be a number, got 'two'"),
        ("gossip:every=2s", "every must be a whole number, got '2s'"),
    ],
)
def test_what_does_not_go_by_time_is_refused(text, says):
    with pytest.raises(MethodError, match=says.replace("(", r"\(")):
        stenograd.method(text)


def test_both_spellings_and_the_object_are_one_method():
    texts = {str(stenograd.method(text)) for text in ("diloco:every=30s", "diloco:seconds=30")}
    assert texts == {str(stenograd.method(stenograd.schedules.DiLoCo(seconds=30.0)))}


def _stopped(rank, how):
    model = mlp(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR)
    sync = stenograd.distribute(model, optimizer, "local:every=0.1s", timeout_s=60)
    steps = 0
    while not sync.stopping:
        time.sleep(0.004 * (1 + 4 * rank))
        descend(optimizer, model(torch.ones(2, 10)).square().mean())
        steps += 1
        if steps == 10 and rank == 0:
            sync.stop()
            if how == "poll":
                sync.poll()
        if how == "poll" and steps == 10 and rank == 1:
            sync.poll()
    found = sync.round, flat(model)
    sync.close()
    return found


@pytest.mark.parametrize("how", ["round", "poll"])
def test_all_ranks_hear_of_a_request_in_the_same_round(pool, how):
    ranks = pool.run(2, _stopped, how)
    assert ranks[0][0] == ranks[1][0]
    assert how == "poll" or torch.equal(ranks[0][1], ranks[1][1])
