"""Ordinary training programs, a few steps each, and by every method for 200 (`pytest -m soak`)."""

import pytest
import torch
from accounts import digest, unfit
from models import SMALL_BUCKETS, mlp, shards
from programs import METHODS as EVERY_METHOD
from programs import PROGRAMS, SCHEDULED, faults, run
from support.training import descend
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import stenograd
from stenograd.errors import StenogradError

# One round, one round with feedback, several rounds, and one with two kinds of buckets in several rounds.
METHODS = ["dense", "topk:ratio=0.1", "powersgd:rank=2", "sign:dense_below=20"]
STEPS = 12
# A program runs under a method of one round and one of several rounds, its variants likewise.
CASES = [(p, m) for i, p in enumerate(PROGRAMS) for m in METHODS[i % 2 :: 2]]


@pytest.mark.parametrize(("program", "method"), CASES)
def test_an_ordinary_program_runs_and_no_gradient_is_lost(pool, program, method):
    assert list(faults(pool.run(2, run, 2, program, method, STEPS, timeout_s=60))) == []


@pytest.mark.parametrize("method", SCHEDULED)
@pytest.mark.parametrize("program", [p for p in PROGRAMS if not unfit(p, SCHEDULED[0])])
def test_ranks_agree_after_every_round_of_a_schedule(pool, program, method):
    assert list(faults(pool.run(2, run, 2, program, method, STEPS, timeout_s=60))) == []


@pytest.mark.parametrize("program", ["gan", "clip", "mixture", "ddp-unused", "uneven"])
def test_it_does_on_four_ranks_too(pool, program):
    assert list(faults(pool.run(4, run, 4, program, "topk:ratio=0.1", STEPS, timeout_s=60))) == []


@pytest.mark.soak
@pytest.mark.parametrize("method", EVERY_METHOD + SCHEDULED)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_runs_long_under_every_method(pool, program, world, method):
    if reason := unfit(program, method):
        pytest.skip(reason)
    assert list(faults(pool.run(world, run, world, program, method, 200, timeout_s=280))) == []


def _clamped(rank, world, through):
    """Train with a hook that clamps `.grad`, registered after whatever exchanges the gradients."""
    model = mlp(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    if through == "ddp":
        model = DistributedDataParallel(model, bucket_cap_mb=SMALL_BUCKETS / 2**20)
    else:
        sync = stenograd.distribute(model, optimizer, "dense", bucket_bytes=SMALL_BUCKETS, timeout_s=30)

    def clamp(p):
        p.grad.clamp_(-1e-2, 1e-2)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(clamp)
    for step in range(STEPS):
        xs, ys = shards(step, world)
        descend(optimizer, nn.functional.mse_loss(model(xs[rank]), ys[rank]))
    if through == "stenograd":
        sync.close()
    return digest(list(model.parameters()))


def test_a_later_hook_that_clamps_gradients_does_what_it_does_under_ddp(pool):
    wanted = pool.run(2, _clamped, 2, "ddp")
    assert wanted[0] == wanted[1]
    for _ in range(2):
        assert pool.run(2, _clamped, 2, "stenograd") == wanted


class _Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(20, 20)), nn.Parameter(torch.zeros(20, 20))


def _in_turn(rank, method, whole):
    """Let two optimizers step in turn; each clears only its own gradients, or all are cleared."""
    model = _Heads()
    optimizers = [torch.optim.SGD([p], lr=1.0) for p in model.parameters()]
    sync = stenograd.distribute(model, optimizers, method, bucket_bytes=4096, timeout_s=30)
    slope = torch.randn(20, 20, generator=torch.Generator().manual_seed(rank))
    for step in range(20):
        p = [model.a, model.b][step % 2]
        (model if whole else optimizers[step % 2]).zero_grad()
        (p * slope).sum().backward()
        optimizers[step % 2].step()
    owed = [sync.state_dict()["parameters"][name]["residual"].view(20, 20) for name in "ab"]
    sync.close()
    return slope, [p.detach() for p in model.parameters()], owed


@pytest.mark.parametrize("whole", [False, True], ids=["own gradients cleared", "all gradients cleared"])
@pytest.mark.parametrize("method", ["topk:ratio=0.05", "powersgd:rank=2", "sign:dense_below=0"])
def test_optimizers_that_step_in_turn_apply_every_gradient_once(pool, method, whole):
    """At a rate of 1, minus the parameter is what was applied: 10 mean slopes, but for the mean residual."""
    ranks = pool.run(2, _in_turn, method, whole)
    computed = 10 * (ranks[0][0] + ranks[1][0]) / 2
    for i in range(2):
        applied, owed = -ranks[0][1][i], (ranks[0][2][i] + ranks[1][2][i]) / 2
        assert float((computed - applied - owed).norm() / computed.norm()) < 1e-5


def _left_alone(rank, method):
    """Accumulate two passes into one step, both with an exchange; the second does not use `a`."""
    model = _Heads()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    sync = stenograd.distribute(model, optimizer, method, bucket_bytes=SMALL_BUCKETS, timeout_s=30)
    slope = torch.randn(20, 20, generator=torch.Generator().manual_seed(rank))
    kept = []
    for _ in range(3):
        optimizer.zero_grad()
        ((model.a + model.b) * slope).sum().backward()
        before = model.a.grad.clone()
        (model.b * slope).sum().backward()
        kept.append(torch.equal(model.a.grad, before))
        optimizer.step()
    sync.close()
    return kept


@pytest.mark.parametrize("method", [*METHODS, "qsgd"])
def test_a_gradient_stays_as_it_is_in_a_pass_that_does_not_use_it(pool, method):
    for kept in pool.run(2, _left_alone, method):
        assert all(kept)


def _ran_out(rank):
    """Two engines in one Join, the second with another method; rank 1 has no batch at all in the first."""
    models = [mlp(0), mlp(1)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in models]
    syncs = [
        stenograd.distribute(m, o, how, bucket_bytes=SMALL_BUCKETS, timeout_s=30)
        for m, o, how in zip(models, optimizers, ["dense", "topk:ratio=0.1"], strict=True)
    ]
    for batches in [(5, 0), (2, 6)]:
        with Join(syncs):
            for step in range(batches[rank]):
                xs, ys = shards(step, 2)
                for model, optimizer in zip(models, optimizers, strict=True):
                    descend(optimizer, nn.functional.mse_loss(model(xs[rank]), ys[rank]))
    for sync in syncs:
        sync.close()
    return digest([p for m in models for p in m.parameters()]), [sync.step for sync in syncs]


def test_two_engines_run_out_of_data_together_and_a_rank_may_have_none(pool):
    """The longest rank decides: 5 + 6 exchanges of each engine on both ranks."""
    first, second = pool.run(2, _ran_out)
    assert first == second
    assert first[1] == [11, 11]


def _reentrant(rank, form):
    """Run one pass with segments of which each starts a backward pass of its own; return what it says."""
    model = nn.ModuleList([nn.Linear(10, 32), nn.Linear(32, 16), nn.Linear(16, 3)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    sync = stenograd.distribute(model, optimizer, "topk:ratio=0.1", bucket_bytes=SMALL_BUCKETS, timeout_s=30)
    h = shards(0, 2)[0][rank].requires_grad_()
    for place, layer in enumerate(model):
        nested = {"all": True, "first": place == 0, "inner": place == 1, "last": place == 2}[form]
        h = checkpoint(layer, h, use_reentrant=True) if nested else layer(h)
    try:
        h.sum().backward()
    except StenogradError as error:
        return str(error)
    finally:
        sync.close()
    return "no error"


@pytest.mark.parametrize("form", ["all", "first", "inner", "last"])
def test_reentrant_checkpoints_are_refused_in_every_form(pool, form):
    for told in pool.run(2, _reentrant, form):
        assert "use_reentrant=False" in told
