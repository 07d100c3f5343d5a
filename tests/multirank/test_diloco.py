"""DiLoCo against copies of a model in one process, an explicit queue and torch.optim.SGD outside."""

import math

import pytest
import torch
from round_training import OPTIMIZERS, Net, loss_of, on_rank, simulated
from torch import nn

import stenograd
from stenograd.errors import NonFiniteError
from stenograd.simulate import ranks
from stenograd.sync.outer import fragments_of


def mean_in_order(values):
    total = values[0] * (1.0 / len(values))
    for value in values[1:]:
        total = total + value * (1.0 / len(values))
    return total


def plain(world, text, kind, steps, bad=()):
    """The same in one process: deep copies, a queue of what is under way, and torch's SGD."""
    how = stenograd.method(text).schedule
    models = [Net() for _ in range(world)]
    optimizers = [OPTIMIZERS[kind](m.parameters()) for m in models]
    names = [n for n, _ in models[0].named_parameters()]
    groups = fragments_of(dict(models[0].named_parameters()), how.fragments, how.layout)
    shared = Net()
    outer = dict(shared.named_parameters())
    sgd = [
        torch.optim.SGD(
            [outer[n] for n in group],
            lr=how.outer_lr,
            momentum=how.momentum,
            nesterov=how.nesterov and how.momentum > 0,
        )
        for group in groups
    ]
    queue = []

    def finish(f, means):
        for n, mean in means.items():
            outer[n].grad = mean
        sgd[f].step()
        for model in models:
            mine = dict(model.named_parameters())
            for n in means:
                mine[n].copy_(mine[n].lerp(outer[n], 1.0 - how.mix) if how.mix else outer[n])
        if f == 0:
            for same in zip(*(m.buffers() for m in models), strict=True):
                if same[0].is_floating_point():
                    value = mean_in_order(list(same))
                    for b in same:
                        b.copy_(value)

    for step in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step - 1, bad).backward()
            if all(p.grad.isfinite().all() for p in model.parameters()):
                optimizer.step()
        with torch.no_grad():
            while queue and queue[0][0] == step:
                finish(*queue.pop(0)[1:])
            for f, group in enumerate(groups):
                if (step - f * (how.every // how.fragments)) % how.every == 0:
                    deltas = [{n: outer[n] - dict(m.named_parameters())[n] for n in group} for m in models]
                    queue.append(
                        (step + how.delay, f, {n: mean_in_order([d[n] for d in deltas]) for n in group})
                    )
            while queue and queue[0][0] == step:
                finish(*queue.pop(0)[1:])
    assert set(names) == {n for group in groups for n in group}
    return [m.state_dict() for m in models], {n: p.detach() for n, p in outer.items()}


TEXTS = [
    "diloco:every=3",
    "diloco:every=3,nesterov=false,outer_lr=1.0,momentum=0.5",
    "diloco:every=4,outer_lr=1.0,momentum=0",
    "diloco:every=6,fragments=3",
    "diloco:every=6,fragments=2,delay=2,mix=0.5,layout=sequential",
    "diloco:every=4,delay=1,mix=0.25",
]


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_equals_copies_in_one_process_bit_for_bit(text, world):
    """14 steps: several rounds and some steps after the last one."""
    wanted, outer = plain(world, text, "momentum", 14)
    done = simulated(world, text, "momentum", 14)
    for mine, theirs in zip(done, wanted, strict=True):
        for name, value in theirs.items():
            assert torch.equal(mine["state"][name], value), name
        for name, value in outer.items():
            assert torch.equal(mine["common"][name], value), name
    assert done[0]["round"] >= 2


@pytest.mark.parametrize("text", [TEXTS[0], TEXTS[4]])
def test_adamw_and_four_ranks(text):
    wanted, _ = plain(4, text, "adamw", 13)
    for mine, theirs in zip(simulated(4, text, "adamw", 13), wanted, strict=True):
        assert all(torch.equal(mine["state"][n], value) for n, value in theirs.items())


@pytest.mark.parametrize("world", [2, 3])
def test_real_ranks_do_the_same(world, pool):
    wanted, _ = plain(world, TEXTS[4], "momentum", 14)
    for mine, theirs in zip(pool.run(world, on_rank, TEXTS[4], "momentum", 14), wanted, strict=True):
        assert all(torch.equal(mine["state"][n], value) for n, value in theirs.items())


def test_one_half_and_no_momentum_is_local_sgd():
    """phi - 1 (phi - mean theta) is the mean, up to rounding."""
    outer = simulated(2, "diloco:every=3,outer_lr=1,momentum=0", "momentum", 9)
    local = simulated(2, "local:every=3", "momentum", 9)
    for a, b in zip(outer, local, strict=True):
        for name in a["state"]:
            torch.testing.assert_close(a["state"][name], b["state"][name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("codec", ["bf16", "topk:ratio=0.1", "sign", "powersgd:rank=2", "qsgd:bits=4"])
@pytest.mark.parametrize("timing", ["every=2", "every=4,fragments=2,delay=1,mix=0.5"])
def test_codecs_leave_outer_parameters_equal_on_all_ranks(codec, timing):
    done = simulated(3, f"diloco:{timing}/{codec}", "adamw", 11)
    for other in done[1:]:
        for name, value in done[0]["common"].items():
            assert torch.equal(value, other["common"][name]), name
    start = Net().state_dict()
    assert not torch.equal(done[0]["common"]["first.weight"], start["first.weight"])


@pytest.mark.parametrize(
    "text",
    [
        "diloco:every=4",
        "diloco:every=4/topk:ratio=0.1",
        "diloco:every=4/powersgd:rank=2",
        "diloco:every=8,fragments=2,delay=3,mix=0.5/sign",
        "diloco:every=4,delay=2,mix=0.5",
        "diloco:every=3,eager=true",
        "local:every=4,after=3",
        "local:every=2,states=average,states_every=1",
        "diloco:every=3,states=reset",
    ],
)
def test_resumed_bit_for_bit(text):
    """In mid-round, with an exchange under way, and between rounds."""
    whole = simulated(2, text, "adamw", 13)
    for cut in (2, 5, 6, 9):
        parts = simulated(2, text, "adamw", 13, cut=cut)
        for a, b in zip(whole, parts, strict=True):
            assert a["round"] == b["round"]
            for what in ("state", "common"):
                assert all(torch.equal(a[what][n], b[what][n]) for n in a[what]), (what, cut)


def test_eager_equals_its_equation():
    """phi_i <- outer(mean(old) + (new_i - old_i) / N), with phi and momentum of each rank's own."""
    world, every, lr, mu = 3, 2, 0.7, 0.9
    models = [Net() for _ in range(world)]
    optimizers = [OPTIMIZERS["momentum"](m.parameters()) for m in models]
    phi = [[p.detach().clone() for p in m.parameters()] for m in models]
    speed = [[torch.zeros_like(p) for p in m.parameters()] for m in models]
    old = [[torch.zeros_like(p) for p in m.parameters()] for m in models]
    for step in range(1, 9):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step - 1).backward()
            optimizer.step()
        if step % every:
            continue
        with torch.no_grad():
            new = [[o - p for o, p in zip(phi[r], models[r].parameters(), strict=True)] for r in range(world)]
            means = [mean_in_order(list(same)) for same in zip(*old, strict=True)]
            for r in range(world):
                for i, p in enumerate(models[r].parameters()):
                    d = means[i] + (new[r][i] - old[r][i]) / world
                    speed[r][i] = mu * speed[r][i] + d
                    phi[r][i] = phi[r][i] - lr * (d + mu * speed[r][i])
                    p.copy_(phi[r][i])
            old = new
            for same in zip(*(m.buffers() for m in models), strict=True):
                if same[0].is_floating_point():
                    value = mean_in_order(list(same))
                    for b in same:
                        b.copy_(value)
    done = simulated(world, f"diloco:every={every},eager=true", "momentum", 8)
    for mine, model in zip(done, models, strict=True):
        for name, value in model.state_dict().items():
            torch.testing.assert_close(mine["state"][name], value, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize("text", ["diloco:every=4", "diloco:every=4,fragments=2,delay=1,mix=0.5"])
def test_one_nan_costs_one_local_step_on_one_rank(text):
    wanted, _ = plain(2, text, "momentum", 10, bad=((1, 3),))
    with pytest.warns(RuntimeWarning, match="a gradient of rank 1 was not finite"):
        done = simulated(2, text, "momentum", 10, bad=((1, 3),))
    assert [d["skipped"] for d in done] == [0, 1]
    for mine, theirs in zip(done, wanted, strict=True):
        assert all(torch.equal(mine["state"][n], value) for n, value in theirs.items())


@pytest.mark.parametrize("text", ["diloco:every=2", "local:every=2", "diloco:every=2/topk:ratio=0.5"])
def test_a_round_with_bad_parameters_is_void_and_the_second_one_an_error(text):
    def rank_of(driver):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sync = stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30)
        start = model.weight.detach().clone()
        found = []
        for step in range(8):
            optimizer.zero_grad()
            model(torch.ones(1, 4) * (driver.rank + 1)).sum().backward()
            if driver.rank == 1 and step in (1, 5, 7):
                with torch.no_grad():
                    model.weight[0, 0] = math.inf
            if step == 7:
                with pytest.raises(NonFiniteError, match="not finite on a rank, as the round before did"):
                    optimizer.step()
                continue
            optimizer.step()
            if step in (1, 3):
                found.append((sync.round, bool(model.weight.isfinite().all())))
                if step == 1 and driver.rank == 1 and text.startswith("diloco"):
                    assert torch.equal(model.weight, start)
        sync.close()
        return found

    with pytest.warns(RuntimeWarning, match="its parameters were not finite in round"):
        both = ranks(2, rank_of)
    assert both == [[(0, True), (1, True)]] * 2


def moved(text, start, moves):
    """Return each rank's weights and round after each of some moves of two ranks, made in float16."""

    def rank_of(driver):
        model = nn.Linear(1, 4, bias=False).half()
        model.weight.data.fill_(start)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        sync = stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30)
        found = []
        for move in moves:
            optimizer.zero_grad()
            (model.weight.float() * -move).sum().backward()
            optimizer.step()
            found.append((model.weight.detach().clone(), sync.round))
        sync.close()
        return found

    return ranks(2, rank_of)


def test_an_outer_step_beyond_float16_takes_nothing_and_leaves_no_trace():
    """delta = phi - theta, v <- 0.9 v + delta, phi <- phi - 0.7 (delta + 0.9 v), in float64 by hand.

    First v = -19,968 and phi = 30,016 + 1.33 * 19,968 = 56,573.44, in float16 56,576. After 4,992 more it
    would be 74,538: void, and theta stays 61,568. At 14,976 less, 46,592, delta is 9,981.44, v = 0.9 *
    -19,968 + delta = -7,989.76, and phi = 54,619.98, in float16 54,624.
    """
    with pytest.warns(RuntimeWarning, match="beyond what parameters of this type hold"):
        both = moved("diloco:every=1", 30016.0, [19968.0, 4992.0, -14976.0])
    for done in both:
        assert [(w.unique().tolist(), rounds) for w, rounds in done] == [
            ([56576.0], 1),
            ([61568.0], 1),
            ([54624.0], 2),
        ]


def test_two_outer_steps_beyond_float16_in_a_row_are_an_error_on_all_ranks():
    with pytest.warns(RuntimeWarning), pytest.raises(NonFiniteError, match="as the round before did"):
        moved("diloco:every=1", 30016.0, [19968.0, 4992.0, 0.0])


@pytest.mark.filterwarnings("ignore:.*(beyond what parameters|would not have been after|were not finite)")
@pytest.mark.parametrize(
    "text",
    [
        "diloco:every=1,eager=true",
        "diloco:every=1,topology=pairs",
        "local:every=1/terngrad",
        "gossip:graph=complete,consensus=1/terngrad",
    ],
)
def test_no_round_leads_beyond_float16(text):
    """Momentum, or what a codec draws for two ranks, overshoots; each step by itself stays below 62,000."""
    pattern = torch.tensor([[1.0], [0.9], [0.85], [0.5]])
    for done in moved(text, 0.0, [pattern * move for move in (50000.0, 9000.0, -3000.0, 2000.0, -9000.0)]):
        assert all(w.isfinite().all() for w, _ in done)
