"""Gossip through `distribute`: codecs, bytes, ranks that are not finite, states on other numbers of ranks."""

import copy
import math

import numpy as np
import pytest
import torch
from support.rounds import (
    NBYTES,
    OPTIMIZERS,
    PARAMETERS,
    STATISTICS,
    Net,
    equal,
    flat,
    loss_of,
    simulated,
    train,
)
from torch import nn

import stenograd
from stenograd.errors import CheckpointError, NonFiniteError, StenogradError
from stenograd.simulate import ranks
from stenograd.topology import mixing_matrix


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(
    ("text", "mixings", "nbytes"),
    [
        ("gossip", 6, NBYTES),
        ("gossip:pushsum=on", 6, NBYTES + 8),
        ("noloco:every=2", 3, NBYTES + STATISTICS),
        ("noloco:every=2,buffers=keep", 3, NBYTES),
    ],
)
def test_a_rank_sends_the_model_to_one_other(text, mixings, nbytes, world):
    """And a byte with the pass's number; of an odd number of ranks one has no partner in some rounds."""
    found = {d["moved"] for d in simulated(world, text, "momentum", 6)}
    if "noloco" in text and world % 2:
        assert max(found) <= mixings * (nbytes + 1)
    else:
        assert found == {mixings * (nbytes + 1) * (world > 1)}


CODECS = {"bf16": 1.0, "qsgd:bits=8": 1.0, "sign:dense_below=0": 0.3, "topk:ratio=0.1": 0.2}


@pytest.mark.parametrize(("codec", "gamma"), CODECS.items())
def test_codecs_keep_the_mean_and_come_to_it(codec, gamma):
    """W is symmetric, so the sum over ranks of W (h_j - h_i) is 0 whatever the codec loses."""
    done = simulated(4, f"gossip:graph=ring,consensus={gamma}/{codec}", "still", 60, scattered=True)
    start, end = (
        torch.stack(found)
        for found in ([flat(d["start"][0]) for d in done], [flat(d["state"]) for d in done])
    )
    torch.testing.assert_close(end.mean(0), start.mean(0), rtol=0, atol=2e-5)
    assert (end - end.mean(0)).norm() < 0.15 * (start - start.mean(0)).norm()


@pytest.mark.parametrize("order", ["combine-then-adapt", "adapt-then-combine"])
def test_choco_equals_its_equation_in_numpy(order):
    """q = top-k of x - h; h += q at both ends; x += gamma sum_j W_ij (h_j - h_i); then SGD, or before."""
    world, steps, gamma, lr = 4, 6, 0.25, 0.1
    models = [Net() for _ in range(world)]
    n = NBYTES // 4
    h = np.stack([flat(m.state_dict()).numpy() for m in models])
    matrix = mixing_matrix(stenograd.method("gossip:graph=ring").schedule.topology(world), world).numpy()

    def write(x):
        for model, row in zip(models, x, strict=True):
            with torch.no_grad():
                nn.utils.vector_to_parameters(torch.from_numpy(row).float(), model.parameters())

    def mixed(x):
        for rank in range(world):
            difference = x[rank] - h[rank]
            kept = np.argsort(-np.abs(difference), kind="stable")[: math.ceil(0.2 * n)]
            h[rank, kept] += difference[kept]
        return x + gamma * (matrix @ h - h)

    for step in range(steps):
        grads = []
        for rank, model in enumerate(models):
            model.zero_grad()
            loss_of(model, rank, step).backward()
            grads.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]).double().numpy())
        x, g = np.stack([flat(m.state_dict()).numpy() for m in models]), np.stack(grads)
        write(mixed(x) - lr * g if order.startswith("combine") else mixed(x - lr * g))
    text = f"gossip:graph=ring,consensus={gamma},order={order}/topk:ratio=0.2,values=float32"
    for mine, model in zip(simulated(world, text, "plain", steps), models, strict=True):
        torch.testing.assert_close(flat(mine["state"]), flat(model.state_dict()), rtol=1e-4, atol=2e-5)


def test_small_tensors_travel_densely_where_the_codec_says_so():
    """Below 64 elements: the biases of 16 and 3, both of batch norm, and the last weight of 48."""
    done = simulated(4, "gossip:graph=ring,consensus=0.3/sign:dense_below=64", "momentum", 4)
    small = [p.numel() for p in Net().parameters() if p.numel() < 64]
    codes = 320 // 8 + 4 * 320 // done[0]["sync"]["parameters"]["first.weight"]["own"].numel() + 1
    assert done[0]["moved"] == 4 * 2 * (4 * sum(small) + codes + 1)


@pytest.mark.parametrize(
    "text", ["gossip:pushsum=on", "gossip:graph=ring", "gossip:graph=ring,consensus=0.3/sign:dense_below=0"]
)
def test_a_rank_with_bad_parameters_is_left_out(text):
    """Dense mixings heal it; with estimates it keeps its own until somebody gives it others."""

    def rank_of(driver):
        if "sign" not in text:
            found = train(driver, text, "momentum", 6, spoilt=((1, 2),))
            return bool(flat(found["common"]).isfinite().all()), found["left_out"], found["share"]
        model = Net()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        with stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30) as sync:
            model.first.weight.data[0, 0] = math.nan if driver.rank == 1 else 0.0
            loss_of(model, driver.rank, 0).backward()
            optimizer.step()
            with pytest.raises(NonFiniteError), sync.consensus():
                pass
            return bool(flat(model.state_dict()).isfinite().all()), sync.left_out, sync.share

    with pytest.warns(RuntimeWarning, match="not finite"):
        found = ranks(4, rank_of)
    assert [finite for finite, *_ in found] == [True, "sign" not in text, True, True]
    assert sum(left for _, left, _ in found) >= 2
    assert sum(share for *_, share in found) == (3 if "pushsum" in text else 4)


def test_several_optimizers_step_on_the_same_mixed_parameters():
    """One mixing before the first of them; the second one's step must not mix again."""

    def rank_of(driver, both):
        model = Net()
        halves = [model.first.parameters(), [*model.norm.parameters(), *model.last.parameters()]]
        optimizers = [torch.optim.SGD(ps, lr=0.1) for ps in (halves if both else [model.parameters()])]
        with stenograd.distribute(model, optimizers, "gossip", group=driver, timeout_s=30) as sync:
            for step in range(3):
                model.zero_grad()
                loss_of(model, driver.rank, step).backward()
                for optimizer in optimizers:
                    optimizer.step()
            return copy.deepcopy(model.state_dict()), sync.round

    for (one, rounds), (two, _) in zip(ranks(3, rank_of, False), ranks(3, rank_of, True), strict=True):
        assert rounds == 3
        assert equal([one, two])


@pytest.mark.parametrize(
    "text", ["gossip", "gossip:pushsum=on", "gossip:graph=ring,consensus=0.3/topk:ratio=0.2"]
)
def test_resharding_starts_all_ranks_from_the_mean(text):
    """4 -> 2 -> 3 ranks, each time from the exact mean, and training goes on from there."""
    saved = simulated(4, text, "momentum", 3)
    for world, at in ((2, 3), (3, 6)):
        mean = torch.stack([flat(s["state"]) for s in saved]).mean(0)
        states = stenograd.reshard([s["sync"] for s in saved], world)
        saved = simulated(world, text, "momentum", 3, first=at, states=states)
        for found in saved:
            torch.testing.assert_close(flat(found["start"][0]), mean, rtol=1e-6, atol=1e-7)
            assert equal([found["start"][0], saved[0]["start"][0]])
            assert found["round"] == at + 3


def test_a_resharded_state_divides_by_the_weights():
    """Ranks at 1 and 4 with weights 0.5 and 1.5 have the mean (0.5 + 6) / 2; a plain mean would be 2.5."""
    saved = simulated(2, "gossip:pushsum=on", "still", 1)
    for state, value, weight in zip(saved, (1.0, 4.0), (0.5, 1.5), strict=True):
        for name in PARAMETERS:
            state["sync"]["parameters"][name]["own"].fill_(value * weight)
        state["sync"]["parameters"]["push-sum in rounds"]["own weight"].fill_(weight)
    states = stenograd.reshard([s["sync"] for s in saved], 3)
    for found in simulated(3, "gossip:pushsum=on", "still", 0, states=states):
        assert found["share"] == 1.0
        assert bool((flat(found["start"][0]) == 3.25).all())


def test_a_state_of_another_graph_is_refused():
    """Rank and world size are the same, and so is the model."""
    states = [done["sync"] for done in simulated(2, "gossip:graph=ring", "still", 1)]
    with pytest.raises(CheckpointError, match=r"method must be 'gossip', got 'gossip:graph=ring'"):
        simulated(2, "gossip", "still", 0, states=states)


@pytest.mark.parametrize("resharded", [False, True])
def test_the_state_of_another_model_is_refused_before_anything_changes(resharded):
    """One layer more was frozen when it was saved."""

    def synced(frozen):
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
        model[0].requires_grad_(not frozen)
        return stenograd.distribute(model, torch.optim.SGD(model.parameters(), lr=0.1), "gossip")

    with synced(frozen=True) as one, synced(frozen=False) as other:
        states = [{**one.state_dict(), "round": 7}]
        (state,) = stenograd.reshard(states, 1) if resharded else states
        with pytest.raises(CheckpointError, match=r"differ in parameter '0\.weight'"):
            other.load_state_dict(state)
        assert other.round == 0
    stenograd.shutdown()


def test_refresh_forgets_no_mixing_that_left_somebody_out():
    def rank_of(driver):
        model = Net()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        with stenograd.distribute(model, optimizer, "gossip:graph=ring", group=driver, timeout_s=30) as sync:
            model.first.weight.data[0, 0] = math.nan if driver.rank == 1 else 0.0
            loss_of(model, driver.rank, 0).backward()
            optimizer.step()
            before = sync.left_out
            sync.refresh()
            return before, sync.left_out

    with pytest.warns(RuntimeWarning, match="not finite"):
        assert ranks(2, rank_of) == [(1, 1)] * 2


class _Twice(torch.optim.Optimizer):
    """Evaluates its closure twice, and changes nothing."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    @torch.enable_grad()
    def step(self, closure):
        closure()
        return closure()


def test_a_second_evaluation_is_refused_where_mixing_comes_before_the_step():
    """SGD evaluates its closure once, which happens before mixing."""
    model = Net()
    optimizer = _Twice(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0, 0)
        loss.backward()
        return loss

    with (
        stenograd.distribute(model, optimizer, "gossip"),
        pytest.raises(StenogradError, match="without a closure, or write order=adapt-then-combine"),
    ):
        optimizer.step(closure)
    optimizer = OPTIMIZERS["momentum"](model.parameters())
    for method in ("gossip", "gossip:order=adapt-then-combine"):
        with stenograd.distribute(model, optimizer, method) as sync:
            optimizer.step(closure)
            assert sync.round == 1
    stenograd.shutdown()
