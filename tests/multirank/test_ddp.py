"""Stenograd's methods as a DDP communication hook on gloo, with several buckets."""

import copy
import warnings

import pytest
import torch
from models import buckets_of, flat, mlp, shards, step
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stenograd
from stenograd.checkpoint.reshard import alike
from stenograd.errors import StenogradError
from stenograd.testing.pool import RanksFailed

TINY_MB = 0.0001  # four buckets, after DDP has rebuilt them


def _ddp(rank, method=None, seed=0, bucket_cap_mb=TINY_MB, **options):
    model = DistributedDataParallel(mlp(seed), bucket_cap_mb=bucket_cap_mb, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, stenograd.ddp.register(model, method, timeout_s=30) if method else None


def _run(model, optimizer, rank, world_size, first, steps):
    for s in range(first, first + steps):
        xs, ys = shards(s, world_size)
        step(model, optimizer, xs[rank], ys[rank])


def _identity(rank, world_size):
    plain, plain_optimizer, _ = _ddp(rank)
    hooked, hooked_optimizer, hook = _ddp(rank, "dense")
    for s in range(10):
        _run(plain, plain_optimizer, rank, world_size, s, 1)
        _run(hooked, hooked_optimizer, rank, world_size, s, 1)
        assert torch.equal(flat(plain), flat(hooked)), f"differs after step {s}"
    hook.close()
    return buckets_of(hook)


@pytest.mark.parametrize("world_size", [2, 3])
def test_identity_equals_plain_ddp_bit_for_bit(pool, world_size):
    assert min(pool.run(world_size, _identity, world_size)) >= 3


def _powersgd_once(rank, world_size):
    model, optimizer, hook = _ddp(rank, "powersgd:rank=2")
    _run(model, optimizer, rank, world_size, 0, 4)
    hook.close()
    return buckets_of(hook)


def test_powersgd_with_four_buckets_on_three_ranks_finishes_10_of_10(pool):
    """PyTorch's own PowerSGD hook finished 0 of 10 here: it issues rounds in an order that timing decides."""
    finished = [pool.run(3, _powersgd_once, 3, timeout_s=60) for _ in range(10)]
    assert len(finished) == 10
    assert all(buckets >= 4 for run in finished for buckets in run)


def test_a_model_without_ddp_is_refused():
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        stenograd.ddp.register(mlp(0), "dense")


def _python_reducer(rank):
    with torch._dynamo.config.patch(optimize_ddp="python_reducer"):
        return _ddp(rank, "dense")


def test_a_reducer_that_calls_no_hook_is_refused(pool):
    """Torch has the option; a training with it would send nothing by the method."""
    with pytest.raises(RanksFailed) as failed:
        pool.run(2, _python_reducer)
    for told in failed.value.errors.values():
        assert 'StenogradError: DDP runs with torch._dynamo.config.optimize_ddp = "python_reducer"' in told


def _back_to_the_start(rank):
    model, optimizer, hook = _ddp(rank, "topk:ratio=0.1", bucket_cap_mb=25)  # more buckets select otherwise
    first, steps = hook.state_dict(), 3
    _run(model, optimizer, rank, 2, 0, steps)
    once, later = flat(model).clone(), hook.state_dict()
    with pytest.raises(stenograd.errors.CheckpointError, match="differ in parameter"):
        hook.load_state_dict({**later, "parameters": {}})
    model.module.load_state_dict(mlp(0).state_dict())
    optimizer.state.clear()
    hook.load_state_dict(first)
    _run(model, optimizer, rank, 2, 0, steps)
    assert torch.equal(flat(model), once)


def test_a_state_from_before_the_first_exchange_begins_anew(pool):
    """DDP tells of buckets in the first pass only, so such a state knows no parameter."""
    pool.run(2, _back_to_the_start)


def _closed(rank):
    model, optimizer, hook = _ddp(rank, "topk")
    _run(model, optimizer, rank, 2, 0, 1)
    hook.close()
    with pytest.raises(stenograd.StenogradError, match=r"hook was closed.*DistributedDataParallel anew"):
        _run(model, optimizer, rank, 2, 1, 1)


def test_a_model_whose_hook_was_closed_says_so(pool):
    pool.run(2, _closed)


def _unfrozen(rank, wrapped_before):
    """Train two layers of which one is frozen at first, and return what the fourth step says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    if wrapped_before:
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        model[0].requires_grad_(False)
    else:
        model[0].requires_grad_(False)
        ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with stenograd.ddp.register(ddp, "dense"):
        for step in range(4):
            if step == 3:
                model[0].requires_grad_(True)
                optimizer.add_param_group({"params": list(model[0].parameters())})
            ddp(torch.full((4, 8), rank + 1.0)).square().sum().backward()
            try:
                optimizer.step()
            except StenogradError as error:
                return step, str(error)
            optimizer.zero_grad()
    return None


def test_what_ddp_has_found_frozen_is_not_trained_unaveraged(pool):
    for at, said in pool.run(2, _unfrozen, False):
        assert at == 3
        assert "after unfreezing wrap it again" in said
    assert pool.run(2, _unfrozen, True) == [None, None]


def _resumed(rank, method, world_size, options, steps):
    """Some steps and three more, and these again in a new model: what came of both, and the buckets."""
    model, optimizer, hook = _ddp(rank, method, **options)
    _run(model, optimizer, rank, world_size, 0, steps)
    hook.before_save()
    parts = copy.deepcopy([part.state_dict() for part in (hook, model, optimizer)])
    _run(model, optimizer, rank, world_size, steps, 3)
    again = _ddp(rank, method, seed=1, **options)
    for part, state in zip((again[2], *again[:2]), parts, strict=True):
        part.load_state_dict(state)
    _run(*again[:2], rank, world_size, steps, 3)
    owed = [ended.state_dict()["parameters"] for ended in (hook, again[2])]
    return flat(model), flat(again[0]), alike(*owed), buckets_of(hook)


@pytest.mark.parametrize(
    ("method", "options", "steps"),
    [
        ("dense", {}, 3),
        ("topk:ratio=0.1", {"gradient_as_bucket_view": True}, 3),
        ("topk:ratio=0.1", {"gradient_as_bucket_view": True}, 1),
        ("qsgd", {"static_graph": True}, 3),
        ("qsgd", {"static_graph": True}, 2),
        ("sign:dense_below=20", {}, 3),
        ("qsgd:dense_below=20", {}, 1),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(pool, method, options, steps):
    """DDP begins with buckets other than those that it makes after its first step, or two."""
    for row, again, owed, buckets in pool.run(3, _resumed, method, 3, options, steps):
        assert buckets >= 3
        assert torch.equal(row, again)
        assert owed


def _gone_back(rank):
    """Train three steps, go back by the last of them, and take it again: what is warned of."""
    model, optimizer, hook = _ddp(rank, "topk:ratio=0.1")
    _run(model, optimizer, rank, 2, 0, 2)
    parts = copy.deepcopy([part.state_dict() for part in (hook, model, optimizer)])
    _run(model, optimizer, rank, 2, 2, 1)
    for part, state in zip((hook, model, optimizer), parts, strict=True):
        part.load_state_dict(state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _run(model, optimizer, rank, 2, 2, 1)
    hook.close()
    return [str(one.message) for one in caught]


def test_going_back_by_one_step_warns_of_nothing(pool):
    """The step after it has the number of the one before, and its gradients are averaged."""
    assert pool.run(2, _gone_back) == [[], []]


def _in_another_model(rank):
    model, optimizer, hook = _ddp(rank, "topk:ratio=0.1")
    _run(model, optimizer, rank, 2, 0, 2)
    state, said = hook.state_dict(), []
    for other in (nn.Sequential(nn.Linear(11, 32), *list(mlp(0))[1:]), nn.Linear(10, 4)):
        ddp = DistributedDataParallel(other)
        fresh = stenograd.ddp.register(ddp, "topk:ratio=0.1", timeout_s=30)
        with pytest.raises(stenograd.errors.CheckpointError) as told:
            fresh.load_state_dict(state)
        said.append(str(told.value))
        assert fresh.state_dict()["parameters"] == {}
    return said


def test_a_state_of_another_model_is_refused_before_the_first_pass(pool):
    """Its residuals would wait for ever, or fail in the first backward pass."""
    for shape, name in pool.run(2, _in_another_model):
        assert "must have shape" in shape
        assert "differ in parameter" in name
