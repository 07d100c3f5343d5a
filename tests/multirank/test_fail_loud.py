"""What was asked for and cannot be had is an error or one visible warning, and nothing is silent."""

import warnings

import pytest
import torch
from models import SMALL_BUCKETS, flat, mlp, shards
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import stenograd
from stenograd.mlbench.decentralized import DecentralizedSGD
from stenograd.sync.gossip import Gossip
from stenograd.topology import Complete, Graph
from stenograd.wire.driver import Driver


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _backward(model, rank, scale=1.0, step=0):
    xs, ys = shards(step, 3)
    (nn.functional.mse_loss(model(xs[rank]), ys[rank]) * scale).backward()


def _refusals(rank):
    wrapped = DistributedDataParallel(mlp(0))
    with pytest.raises(
        stenograd.errors.ConfigError, match=r"plain module, got DistributedDataParallel.*ddp.register"
    ):
        stenograd.distribute(wrapped, _sgd(wrapped))
    stenograd.ddp.register(wrapped, "dense", timeout_s=30)
    with pytest.raises(stenograd.StenogradError, match="has a communication hook already"):
        stenograd.ddp.register(wrapped, "dense", timeout_s=30)
    with pytest.raises(stenograd.errors.MismatchError, match="method"):
        stenograd.ddp.register(DistributedDataParallel(mlp(0)), "fp16" if rank else "dense", timeout_s=30)
    model = mlp(0)
    optimizer = _sgd(model)
    with stenograd.distribute(model, optimizer, timeout_s=30):
        with pytest.raises(stenograd.errors.ConfigError, match="attached already"):
            stenograd.distribute(model, optimizer)
        with pytest.raises(stenograd.errors.TensorTypeError, match="create_graph=True"):
            model(torch.ones(1, 10)).sum().backward(create_graph=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("stenograd.sync.handshake.__version__", f"0.{rank}")
        with pytest.raises(
            stenograd.errors.MismatchError, match=r"stenograd version: rank 0 has 0\.0, rank 1 has 0\.1"
        ):
            stenograd.distribute(model, optimizer, timeout_s=30)
    with pytest.raises(stenograd.errors.MismatchError, match="check_every"):
        stenograd.distribute(model, optimizer, timeout_s=30, check_every=1 + rank)


def _builds(rank, minor):
    """Attach with another torch on each rank: 2.13.0 and 2.13.1, or 2.13 and 2.14."""
    model = mlp(0)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setattr(torch, "__version__", f"2.{13 + rank}.0" if minor else f"2.13.{rank}")
        try:
            stenograd.distribute(model, _sgd(model), timeout_s=30).close()
        except stenograd.errors.MismatchError as error:
            return str(error)
        return " ".join(str(w.message) for w in caught)


def test_other_builds_of_one_torch_are_a_warning_and_other_versions_an_error(pool):
    first, second = pool.run(2, _builds, False)
    assert "2.13.0, 2.13.1" in first
    assert second == ""
    for said in pool.run(2, _builds, True):
        assert "torch version: rank 0 has 2.13, rank 1 has 2.14" in said


def test_what_is_refused(pool):
    pool.run(2, _refusals)


def _steps_too_early(rank):
    model = mlp(0)
    optimizer = _sgd(model)
    model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    with (
        stenograd.distribute(model, optimizer, bucket_bytes=SMALL_BUCKETS, timeout_s=30),
        pytest.raises(stenograd.StenogradError, match="stepped during a backward pass"),
    ):
        _backward(model, rank)


def test_an_optimizer_that_steps_inside_backward(pool):
    pool.run(1, _steps_too_early)


def _drifts(rank):
    model = mlp(0)
    optimizer = _sgd(model)
    _backward(model, 0)
    told = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sync = stenograd.distribute(model, optimizer, timeout_s=30)
        optimizer.zero_grad()
        optimizer.step()  # no gradients, nothing to say
        with sync.no_sync():
            _backward(model, rank)
        _backward(model, rank)
        optimizer.step()  # averages
        told.append(len(caught))
        with sync.no_sync():
            _backward(model, rank)
        optimizer.step()
        optimizer.step()
        told.append(sum("the ranks drift apart" in str(w.message) for w in caught))
        sync.close()
    return told


def test_a_step_on_gradients_of_one_rank_is_told_once(pool):
    assert pool.run(2, _drifts) == [[0, 1]] * 2


def _different_passes(rank):
    model = mlp(0)
    sync = stenograd.distribute(model, _sgd(model), timeout_s=30)
    if rank == 1:
        with sync.no_sync():
            _backward(model, rank)
    with pytest.raises(stenograd.StenogradError, match="the ranks are at different backward passes"):
        _backward(model, rank)
    sync.close()


def test_no_sync_on_one_rank_only_is_an_error_on_all(pool):
    pool.run(3, _different_passes)


def _overflow(rank, method, bad):
    """1e6 on rank 1 is above float16's 65,504; the step is lost on all ranks and told once, on rank 0."""
    model = mlp(0)
    optimizer = _sgd(model)
    sync = stenograd.distribute(model, optimizer, method, bucket_bytes=SMALL_BUCKETS, timeout_s=30)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for s in range(4):
            optimizer.zero_grad()
            _backward(model, rank, bad if rank == 1 and s in (1, 2) else 1.0, s)
            if sync.finite:
                optimizer.step()
    sync.close()
    told = [str(w.message) for w in caught if "overflowed" in str(w.message)]
    return sync.skipped, sync.step, told, flat(model)


@pytest.mark.parametrize(
    "method", ["fp16", "fp16:feedback=true", "fp16:dense_below=20", "fp16:clip_norm=1e9"]
)
def test_an_overflow_of_float16_is_counted_and_told_once(pool, method):
    ranks = pool.run(3, _overflow, method, 1e9)
    for rank, (skipped, applied, told, parameters) in enumerate(ranks):
        assert (skipped, applied, len(told)) == (2, 2, 1 if rank == 0 else 0)
        assert torch.equal(parameters, ranks[0][3])
    assert "bf16 in place of fp16" in ranks[0][2][0]


@pytest.mark.parametrize(("method", "bad"), [("fp16", float("nan")), ("bf16", 1e9), ("dense", float("inf"))])
def test_a_gradient_that_was_not_finite_is_no_overflow(pool, method, bad):
    for skipped, _, told, parameters in pool.run(3, _overflow, method, bad):
        assert (skipped, told) == (0 if method == "bf16" else 2, [])
        assert torch.isfinite(parameters).all()


def _gossip(rank, separately):
    """Rank 1 of 0 - 1 - 2 holds NaN in its first tensor and then in nothing."""
    gossip = Gossip(Driver(timeout_s=30), Graph.chain(3))
    first, second = torch.full((2,), float(rank)), torch.full((3,), 10.0 * rank)
    if rank == 1:
        first[0] = torch.nan
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        gossip.mix([first, second], separately=separately)
        counted = gossip.skipped
        gossip.mix([first, second], separately=separately)
    assert (gossip.skipped, len(caught)) == (1, 1)
    return first.tolist(), counted


@pytest.mark.parametrize("separately", [False, True])
def test_gossip_leaves_out_who_is_not_finite_and_heals_it(pool, separately):
    """Weights of a chain: 1/2 and 1/3. First 0, (0 + 2) / 2 and 2; then 1/2, 1 and 3/2."""
    ranks = pool.run(3, _gossip, separately)
    assert [counted for _, counted in ranks] == [1, 1, 1]
    for (first, _), expected in zip(ranks, [0.5, 1.0, 1.5], strict=True):
        assert first == pytest.approx([expected] * 2)


def _all_bad(rank):
    x = torch.full((2,), torch.inf)
    with pytest.warns(RuntimeWarning, match="were not finite"):
        Gossip(Driver(timeout_s=30), Complete()).mix([x])
    assert x.isinf().all()


def test_gossip_without_a_finite_rank_keeps_what_there_is(pool):
    pool.run(2, _all_bad)


def _lost_step(rank, lose):
    model = mlp(rank)
    optimizer = DecentralizedSGD(rank, [r for r in range(3) if r != rank], model, 0.05, 0.9, timeout_s=30)
    for s in range(5):
        optimizer.zero_grad()
        if s != 2 or rank != 1:
            _backward(model, rank, 1.0, s)
        elif lose:
            _backward(model, rank, torch.nan, s)
        optimizer.step()
    return flat(model), optimizer.skipped


def test_a_bad_gradient_costs_a_decentralized_rank_its_own_step(pool):
    """Equal, bit for bit, to rank 1 having had no gradients in that step."""
    bad, clean = pool.run(3, _lost_step, True), pool.run(3, _lost_step, False)
    assert [skipped for _, skipped in bad] == [0, 1, 0]
    for (parameters, _), (expected, _) in zip(bad, clean, strict=True):
        assert torch.equal(parameters, expected)
