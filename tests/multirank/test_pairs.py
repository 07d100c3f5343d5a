"""DiLoCo in random pairs (NoLoCo), against a loop over the pairing in one process."""

import copy
import math
import os
import pickle
import warnings

import pytest
import torch
from gossip_training import OPTIMIZERS, Net, loss_of
from torch import nn

import stenograd
from stenograd.errors import ConfigError, MethodError, PeerLost
from stenograd.simulate import ranks
from stenograd.sync.outer import fragments_of
from stenograd.testing.pool import RanksFailed
from stenograd.topology import RandomPairs, mixing_matrix
from stenograd.topology.pairs import spread_per_round

NOLOCO = "noloco:every=2"
TEXTS = [
    NOLOCO,
    "diloco:every=3,topology=pairs",
    "diloco:every=2,topology=pairs,outer_lr=1,momentum=0,buffers=keep",
    "diloco:every=4,fragments=2,topology=pairs,momentum=0.5",
]


def train(driver, text, kind, steps, *, cut=None, bad=()):
    """Train one rank; with `cut`, save after so many steps and go on with everything new."""
    saved = None
    for begin, end in [(0, steps)] if cut is None else [(0, cut), (cut, steps)]:
        model = Net()
        optimizer = OPTIMIZERS[kind](model.parameters())
        sync = stenograd.distribute(model, optimizer, text, group=driver, timeout_s=30)
        before = sync.traffic.moved_bytes
        if saved is not None:
            sync.load_state_dict(saved[2])
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            sync.after_load()
        for step in range(begin, end):
            optimizer.zero_grad()
            loss_of(model, sync.rank, step).backward()
            if (sync.rank, step) in bad:
                with torch.no_grad():
                    model.first.weight[0, 0] = math.nan
            optimizer.step()
        moved = sync.traffic.moved_bytes - before
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), sync.state_dict()))
        with sync.consensus():
            common = copy.deepcopy(model.state_dict())
        sync.close()
    return {"own": saved[0], "sync": saved[2], "common": common, "moved": moved, "round": sync.round}


def simulated(world, *args, **kwargs):
    return ranks(world, lambda driver: train(driver, *args, **kwargs))


def on_rank(rank, *args, **kwargs):
    return train(None, *args, **kwargs)


def plain(world, text, kind, steps):
    """The same in one process: d <- mu d + g, g = mean_pair(phi - theta) + phi - mean_pair(phi)."""
    how = stenograd.method(text).schedule
    models = [Net() for _ in range(world)]
    optimizers = [OPTIMIZERS[kind](m.parameters()) for m in models]
    phi = [{n: p.detach().double() for n, p in m.named_parameters()} for m in models]
    d = [{n: torch.zeros_like(p) for n, p in mine.items()} for mine in phi]
    groups, mixings = fragments_of(phi[0], how.fragments, how.layout), 0
    for step in range(1, steps + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            loss_of(model, rank, step - 1).backward()
            optimizer.step()
        for f in range(how.fragments):
            if (step - f * (how.every // how.fragments)) % how.every:
                continue
            partners = [RandomPairs().partner(rank, world, mixings) for rank in range(world)]
            theta = [{n: p.detach().double() for n, p in m.named_parameters()} for m in models]
            before, mixings = copy.deepcopy(phi), mixings + 1
            for rank, other in enumerate(partners):
                pair = [rank] if other is None else [rank, other]
                for n in groups[f]:
                    delta = sum(before[r][n] - theta[r][n] for r in pair) / len(pair)
                    g = delta + before[rank][n] - sum(before[r][n] for r in pair) / len(pair)
                    d[rank][n] = how.momentum * d[rank][n] + g
                    ahead = g + how.momentum * d[rank][n] if how.nesterov else d[rank][n]
                    phi[rank][n] = before[rank][n] - how.outer_lr * ahead
                    with torch.no_grad():
                        dict(models[rank].named_parameters())[n].copy_(phi[rank][n])
            if f == 0 and how.buffers == "average":
                floating = [[b for b in m.buffers() if b.is_floating_point()] for m in models]
                old = [[b.clone() for b in mine] for mine in floating]
                for rank, other in enumerate(partners):
                    for i, b in enumerate(floating[rank]):
                        b.copy_((old[rank][i] + old[rank if other is None else other][i]) / 2)
    return [m.state_dict() for m in models], mixings


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("world", [1, 2, 3, 4, 5])
def test_equals_a_loop_over_the_pairing(world, text):
    """In float64 there; the equation's terms stand apart there, where the library has phi - mean(theta)."""
    done = simulated(world, text, "momentum", 9)
    wanted, mixings = plain(world, text, "momentum", 9)
    for mine, theirs in zip(done, wanted, strict=True):
        for name, value in theirs.items():
            torch.testing.assert_close(mine["own"][name], value, rtol=2e-4, atol=2e-5, msg=name)
    assert done[0]["round"] == 9 // stenograd.method(text).schedule.every
    if world in (2, 4) and "fragments" not in text:  # all have a partner in every round
        own = [t for n, t in done[0]["own"].items() if t.is_floating_point()]
        buffers = [n for n in done[0]["own"] if "running" in n] if "keep" in text else []
        nbytes = 4 * sum(t.numel() for t in own) - 4 * sum(done[0]["own"][n].numel() for n in buffers)
        assert [d["moved"] for d in done] == [mixings * (nbytes + 1)] * world


def test_a_pair_of_two_ranks_is_diloco():
    """One group of all ranks: the ranks' phi are equal, and phi - mean(theta) is the mean pseudo-gradient."""
    pairs = simulated(2, "diloco:every=3,topology=pairs", "adamw", 10)
    everyone = simulated(2, "diloco:every=3", "adamw", 10)
    for a, b in zip(pairs, everyone, strict=True):
        for name in a["own"]:
            torch.testing.assert_close(a["own"][name], b["own"][name], rtol=1e-4, atol=1e-5)


def test_real_ranks_do_the_same(pool):
    real = pool.run(3, on_rank, NOLOCO, "momentum", 9)
    for mine, theirs in zip(real, simulated(3, NOLOCO, "momentum", 9), strict=True):
        for what in ("own", "common"):
            assert all(torch.equal(mine[what][n], value) for n, value in theirs[what].items())
    assert not torch.equal(real[0]["own"]["first.weight"], real[1]["own"]["first.weight"])
    assert torch.equal(real[0]["common"]["first.weight"], real[1]["common"]["first.weight"])


@pytest.mark.parametrize("cut", [3, 4, 5])
@pytest.mark.parametrize("text", [TEXTS[0], TEXTS[3]])
def test_resumed_bit_for_bit(text, cut):
    """Also which pairs come next."""
    whole, parts = (simulated(3, text, "adamw", 11, cut=c) for c in (None, cut))
    for a, b in zip(whole, parts, strict=True):
        for what in ("own", "common"):
            assert all(torch.equal(a[what][n], b[what][n]) for n in a[what]), what


def test_a_rank_with_bad_parameters_costs_nobody_else_anything():
    """Rank 1 of 4 takes its partner's parameters, with a new optimizer state; all go on."""
    with pytest.warns(RuntimeWarning, match="not finite"):
        done = simulated(4, NOLOCO, "momentum", 8, bad=((1, 3),))
    assert all(bool(t.isfinite().all()) for d in done for t in d["own"].values())
    assert [d["round"] for d in done] == [4] * 4


def test_a_lone_rank_with_bad_parameters_goes_back_to_its_outer_ones():
    with pytest.warns(RuntimeWarning, match="not finite"):
        (done,) = simulated(1, NOLOCO, "momentum", 4, bad=((0, 1),))
    assert all(bool(t.isfinite().all()) for t in done["own"].values())


@pytest.mark.parametrize("size", [1, 2, 3, 6, 7])
def test_pairs_are_disjoint_and_change(size):
    """Each row has one partner who has it; over 40 rounds everybody meets everybody."""
    met = set()
    for step in range(40):
        partners = [RandomPairs().partner(rank, size, step) for rank in range(size)]
        assert partners.count(None) == size % 2
        assert all(p is None or partners[p] == rank != p for rank, p in enumerate(partners))
        met |= {(rank, p) for rank, p in enumerate(partners) if p is not None}
        matrix = mixing_matrix(RandomPairs(), size, step)
        assert torch.equal(matrix, matrix.T)
        assert torch.equal(matrix.sum(0), torch.ones(size, dtype=torch.float64))
    assert len(met) == size * (size - 1)
    assert [RandomPairs(1).partner(0, 8, s) for s in range(8)] != [
        RandomPairs(2).partner(0, 8, s) for s in range(8)
    ]


@pytest.mark.parametrize(
    ("lr", "momentum", "nesterov"), [(0.7, 0.5, False), (0.7, 0.9, False), (0.7, 0.9, True), (0.9, 0.9, True)]
)
def test_the_spread_among_ranks_grows_as_predicted(lr, momentum, nesterov):
    """1,000 ranks of 30 numbers, torch's SGD along x_i - (x_i + x_j) / 2: variance per round, late rounds."""
    x = torch.nn.Parameter(
        torch.randn(1000, 30, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    )
    sgd = torch.optim.SGD([x], lr=lr, momentum=momentum, nesterov=nesterov)
    variances = []
    for step in range(40):
        order = torch.randperm(1000, generator=torch.Generator().manual_seed(step))
        other = torch.empty(1000, dtype=torch.long)
        other[order[0::2]], other[order[1::2]] = order[1::2], order[0::2]
        x.grad = x.detach() - (x.detach() + x.detach()[other]) / 2
        sgd.step()
        variances.append(float(x.detach().var(0).mean()))
    got = (variances[-1] / variances[9]) ** (1 / 30)
    assert got == pytest.approx(spread_per_round(lr, momentum, nesterov), rel=0.06)


def test_what_pairs_cannot_do_is_refused_or_warned_of():
    for keys, left_out in {
        "delay=1,mix=0.5": "delay",
        "eager=true": "eager",
        "inside=dense": "inside",
        "states=average": "states",
    }.items():
        with pytest.raises(MethodError, match=f"topology must be all with {left_out}.*leave out {left_out}"):
            stenograd.method(f"diloco:topology=pairs,{keys}")
    with pytest.raises(MethodError, match="topology must be one of all, pairs"):
        stenograd.method("diloco:topology=ring")
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="replicas differ by design"):
        stenograd.distribute(model, optimizer, "noloco", check_every=1)
    with pytest.warns(UserWarning, match=r"grows 1\.10 times per round; give momentum=0\.5"):
        stenograd.distribute(model, optimizer, "noloco:momentum=0.9").close()
    wanted = "diloco:every=50,outer_lr=0.7,momentum=0.5,nesterov=false,topology=pairs"
    assert str(stenograd.method("noloco")) == wanted


def _dies(rank, folder, text):
    """Train; rank 2 dies before its second round."""
    model = nn.Linear(3, 1, bias=False).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sync = stenograd.distribute(model, optimizer, text, timeout_s=6)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(20):
            if (rank, step) == (2, 3):
                os._exit(9)
            optimizer.zero_grad()
            (model(torch.ones(1, 3, dtype=torch.float64)) - rank).square().sum().backward()
            try:
                optimizer.step()
            except PeerLost as error:
                (folder / f"{rank}").write_bytes(pickle.dumps(error.ranks))
                return
    with sync.consensus():
        common = float(model.weight.sum())
    told = sum("were lost" in str(w.message) for w in caught)
    (folder / f"{rank}").write_bytes(
        pickle.dumps((common, sync.world_size, [e["lost"] for e in sync.events], told))
    )
    sync.close()


@pytest.mark.parametrize("lost", ["drop", "raise"])
def test_a_lost_rank_is_dropped_or_named(pool, tmp_path, lost):
    """Whoever is paired with it goes on alone; targets 0, 1 and 3 have the mean 4 / 3."""
    with pytest.raises(RanksFailed) as failed:
        pool.run(4, _dies, tmp_path, f"noloco:every=2,lost={lost}")
    assert list(failed.value.errors) == [2], failed.value
    told = [pickle.loads((tmp_path / f"{rank}").read_bytes()) for rank in (0, 1, 3)]
    if lost == "raise":
        assert told == [(2,)] * 3
        return
    assert [found[1:] for found in told] == [(3, [[2]], 1)] * 3
    assert [found[0] for found in told] == [pytest.approx(told[0][0], rel=1e-9)] * 3
    assert told[0][0] == pytest.approx(4 / 3, abs=0.15)
