"""Gossip through `distribute`, against copies of a model in one process and the matrix product W x."""

import copy
import math

import numpy as np
import pytest
import torch
from gossip_training import NBYTES, OPTIMIZERS, Net, equal, flat, loss_of, on_rank, plain, simulated
from torch import nn

import stenograd
from stenograd.errors import NonFiniteError
from stenograd.simulate import ranks
from stenograd.topology import mixing_matrix

GRAPHS = ["onepeer", "exponential", "ring", "torus", "star", "complete"]


@pytest.mark.parametrize("order", ["combine-then-adapt", "adapt-then-combine"])
@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_equals_copies_in_one_process_bit_for_bit(world, graph, order):
    text = f"gossip:graph={graph},order={order}"
    done = simulated(world, text, "momentum", 4)
    equal(done, plain(world, text, "momentum", 4))
    assert done[0]["round"] == 4
    mean = torch.stack([flat(d["state"]) for d in done]).mean(0)
    for mine in done:
        torch.testing.assert_close(flat(mine["common"]), mean, rtol=1e-6, atol=1e-7)
        assert torch.equal(flat(mine["common"]), flat(done[0]["common"]))
    if world >= 5 and graph in ("onepeer", "ring"):  # where ranks have other neighbours, models differ
        assert not torch.equal(flat(done[0]["state"]), flat(done[1]["state"]))


@pytest.mark.parametrize("text", ["gossip:every=3", "gossip:graph=torus,buffers=average,every=2"])
def test_adamw_mixes_every_few_steps(text):
    done = simulated(4, text, "adamw", 7)
    equal(done, plain(4, text, "adamw", 7))
    assert done[0]["round"] == 7 // (3 if "3" in text else 2)


@pytest.mark.parametrize(
    "text", ["gossip", "gossip:graph=ring,order=adapt-then-combine", "gossip:pushsum=on"]
)
def test_real_ranks_do_the_same(text, pool):
    done = pool.run(3, on_rank, text, "momentum", 5)
    equal(done, plain(3, text, "momentum", 5))


def test_the_clock_counts_passes_outside_no_sync():
    assert simulated(2, "gossip:every=2", "momentum", 4, accumulate=3)[0]["round"] == 2


@pytest.mark.parametrize("world", [2, 4, 8])
def test_one_peer_reaches_the_mean_after_log2_mixings(world):
    """Parameters start apart and never step; one mixing less does not do it."""
    mixings = world.bit_length() - 1
    done = simulated(world, "gossip", "still", mixings, scattered=True)
    start = plain(world, "gossip", "still", 0, scattered=True)
    mean = torch.stack([flat(s) for s in start]).mean(0)
    for mine in done:
        torch.testing.assert_close(flat(mine["state"]), mean, rtol=1e-5, atol=1e-6)
    before = simulated(world, "gossip", "still", mixings - 1, scattered=True)
    assert max((flat(mine["state"]) - mean).abs().max() for mine in before) > 0.01


@pytest.mark.parametrize("world", [1, 2, 3, 5, 8])
def test_one_peer_moves_exactly_the_model_per_step(world):
    done = simulated(world, "gossip", "momentum", 5)
    assert {d["moved"] for d in done} == {5 * (NBYTES + 1) * (world > 1)}  # and a byte with the pass's number


@pytest.mark.parametrize("world", [2, 3, 5])
def test_push_sum_weights_stay_one_on_a_doubly_stochastic_graph(world):
    """8 bytes more per message, and the same parameters bit for bit."""
    done = simulated(world, "gossip:pushsum=on", "momentum", 6)
    assert sum(d["share"] for d in done) == world
    equal(done, plain(world, "gossip", "momentum", 6))
    assert done[0]["moved"] == 6 * (NBYTES + 8 + 1)


CODECS = {"bf16": 1.0, "qsgd:bits=8": 1.0, "sign:dense_below=0": 0.3, "topk:ratio=0.1": 0.2}


@pytest.mark.parametrize(("codec", "gamma"), CODECS.items())
def test_codecs_keep_the_mean_and_come_to_it(codec, gamma):
    """W is symmetric, so the sum over ranks of W (h_j - h_i) is 0 whatever the codec loses."""
    text = f"gossip:graph=ring,consensus={gamma}/{codec}"
    done = simulated(4, text, "still", 60, scattered=True)
    start = torch.stack([flat(s) for s in plain(4, text, "still", 0, scattered=True)])
    end = torch.stack([flat(d["state"]) for d in done])
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
    OPTIMIZERS["plain"] = lambda ps: torch.optim.SGD(ps, lr=lr)
    done = simulated(world, text, "plain", steps)
    assert h.shape == (world, n)
    for mine, model in zip(done, models, strict=True):
        torch.testing.assert_close(flat(mine["state"]), flat(model.state_dict()), rtol=1e-4, atol=2e-5)


def test_small_tensors_travel_densely_where_the_codec_says_so():
    """Below 64 elements: the biases of 16 and 3, both of batch norm, and the last weight of 48."""
    done = simulated(4, "gossip:graph=ring,consensus=0.3/sign:dense_below=64", "momentum", 4)
    dense = simulated(4, "gossip:graph=ring", "momentum", 4)
    small = [p.numel() for p in Net().parameters() if p.numel() < 64]
    codes = 320 // 8 + 4 * 320 // done[0]["sync"]["parameters"]["first.weight"]["own"].numel() + 1
    assert done[0]["moved"] == 4 * 2 * (4 * sum(small) + codes + 1)
    assert done[0]["moved"] < dense[0]["moved"]


@pytest.mark.parametrize("order", ["combine-then-adapt", "adapt-then-combine"])
def test_one_nan_gradient_costs_one_local_step_on_one_rank(order):
    text = f"gossip:order={order}"
    with pytest.warns(RuntimeWarning, match="a gradient of rank 1 was not finite"):
        done = simulated(3, text, "momentum", 5, bad=((1, 2),))
    assert [d["skipped"] for d in done] == [0, 1, 0]
    equal(done, plain(3, text, "momentum", 5, bad=((1, 2),)))


@pytest.mark.parametrize(
    "text", ["gossip:pushsum=on", "gossip:graph=ring", "gossip:graph=ring,consensus=0.3/sign:dense_below=0"]
)
def test_a_rank_with_bad_parameters_is_left_out(text):
    """Dense mixings heal it; with estimates it keeps its own until somebody gives it others."""

    def rank_of(driver):
        model = Net()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        with stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30) as sync:
            for step in range(6):
                optimizer.zero_grad()
                loss_of(model, driver.rank, step).backward()
                if (driver.rank, step) == (1, 2):
                    with torch.no_grad():
                        model.first.weight[0, 0] = math.inf
                optimizer.step()
            finite = bool(flat(model.state_dict()).isfinite().all())
            if (driver.rank == 1 and not finite) or "sign" in text:
                with pytest.raises(NonFiniteError), sync.consensus():
                    pass
            else:
                with sync.consensus():
                    assert bool(flat(model.state_dict()).isfinite().all())
            return finite, sync.left_out, sync.share

    with pytest.warns(RuntimeWarning, match="were not finite"):
        found = ranks(4, rank_of)
    assert [finite for finite, *_ in found] == [True, "sign" not in text, True, True]
    assert sum(left for _, left, _ in found) >= 2
    assert sum(share for *_, share in found) == (3 if "pushsum" in text else 4)


def test_a_skipped_step_leaves_the_mixing_to_the_next_forward_pass():
    """Rank 1 never steps in pass 2, as a GradScaler would have it; both ranks still mix in every pass."""

    def rank_of(driver):
        model = Net()
        optimizer = OPTIMIZERS["momentum"](model.parameters())
        with stenograd.distribute(model, optimizer, "gossip", group=driver, timeout_s=30) as sync:
            seen = []
            for step in range(4):
                optimizer.zero_grad()
                loss_of(model, driver.rank, step).backward()
                if (driver.rank, step) != (1, 2):
                    optimizer.step()
                seen.append((sync.pending, sync.round))
            return seen

    first, second = ranks(2, rank_of)
    assert first == [(False, 1), (False, 2), (False, 3), (False, 4)]
    assert second == [(False, 1), (False, 2), (True, 2), (False, 4)]


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
        assert all(torch.equal(one[name], two[name]) for name in one)
