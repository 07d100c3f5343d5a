"""Averaging parameters over gloo ranks: exactly, and compressed with delay."""

import pytest
import torch
from models import mlp

from stenograd.errors import CheckpointError, MethodError, NonFiniteError
from stenograd.heat.across import ParameterAverager, spread
from stenograd.sync.averaging import average, difference_method
from stenograd.testing.methods import differences
from stenograd.testing.pool import RanksFailed
from stenograd.wire.driver import Driver

METHODS = differences()


def _parameters(rank, seed=0):
    """Equal at first; then different on every rank."""
    model = mlp(seed)
    return dict(model.named_parameters())


def _move(parameters, rank, size):
    g = torch.Generator().manual_seed(100 + rank)
    with torch.no_grad():
        for p in parameters.values():
            p.add_(torch.randn(p.shape, generator=g), alpha=size)


def _flat(parameters):
    return torch.cat([p.detach().reshape(-1) for p in parameters.values()]).clone()


def _consensus(rank, how, rounds, chunk):
    parameters = _parameters(rank)
    averager = ParameterAverager(parameters, Driver(timeout_s=30), how, chunk=chunk)
    averager.anchor()
    _move(parameters, rank, 0.1)
    out = [_flat(parameters)]
    for _ in range(rounds):
        averager.pack()
        averager.send()
        assert averager.merge(0.5)
        out.append(_flat(parameters))
    averager.close()
    return out


@pytest.mark.parametrize("how", METHODS)
def test_merging_keeps_the_mean_and_brings_ranks_together(pool, how):
    """p <- p + share (H + (p - h) - p): H - h has mean zero over the ranks, whatever was lost."""
    ranks = pool.run(3, _consensus, how, 40, 300)
    means = [torch.stack(step).mean(0) for step in zip(*ranks, strict=True)]
    rounding = {"fp16": 2e-3, "bf16": 2e-2}.get(how, 1e-5)  # sums of 16-bit numbers are rounded
    torch.testing.assert_close(means[-1], means[0], rtol=rounding, atol=rounding)
    apart = [(step[0] - mean).norm() for step, mean in zip(zip(*ranks, strict=True), means, strict=True)]
    assert apart[-1] < 0.25 * apart[0]


def _exact(rank, weight, dtype):
    parameters = _parameters(rank)
    _move(parameters, rank, 1.0)
    parameters = {name: torch.nn.Parameter(p.detach().to(dtype)) for name, p in parameters.items()}
    parameters["odd"] = torch.nn.Parameter(torch.full((3, 2), float(rank), dtype=torch.float64).t())
    before = _flat(parameters)
    averager = ParameterAverager(parameters, Driver(timeout_s=30), "bf16", weight=weight[rank], chunk=97)
    assert averager.replace()
    averager.close()
    return before, _flat(parameters), parameters["odd"].is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_replacing_is_exact_in_mixed_dtypes_and_by_weight(pool, dtype):
    """The mean is taken in float32 or wider, and rounded once."""
    weight = [1.5, 0.75, 0.75]
    ranks = pool.run(3, _exact, weight, dtype)
    wide = [before.double() * w for (before, *_), w in zip(ranks, weight, strict=True)]
    want = torch.stack(wide).mean(0)
    rounding = {torch.bfloat16: 2**-8}.get(dtype, 1e-6)
    for _, after, contiguous in ranks:
        assert torch.equal(after, ranks[0][1])
        torch.testing.assert_close(after.double(), want, rtol=rounding, atol=1e-6)
        assert not contiguous


def _resumed(rank, how, interrupt):
    parameters = _parameters(rank)
    driver = Driver(timeout_s=30)
    averager = ParameterAverager(parameters, driver, how, chunk=300)
    averager.anchor()
    for number in range(6):
        _move(parameters, rank + 10 * number, 0.1)
        averager.pack()
        averager.send()
        if interrupt and number == 3:
            state = averager.state_dict()
            averager.close()
            averager = ParameterAverager(parameters, driver, how, chunk=300)
            averager.load_state_dict(state)
        _move(parameters, rank + 10 * number + 5, 0.1)
        averager.merge(0.5)
    averager.close()
    return _flat(parameters)


@pytest.mark.parametrize("how", ["dense", "bf16", "topk:ratio=0.1", "powersgd:rank=2"])
def test_a_saved_exchange_in_flight_goes_on_bit_for_bit(pool, how):
    for got, want in zip(pool.run(2, _resumed, how, True), pool.run(2, _resumed, how, False), strict=True):
        assert torch.equal(got, want)


def _not_finite(rank, how):
    parameters = _parameters(rank)
    driver = Driver(timeout_s=30)
    averager = ParameterAverager(parameters, driver, how, chunk=300)
    averager.anchor()
    _move(parameters, rank, 0.1)
    if rank == 1:
        with torch.no_grad():
            parameters["2.weight"][0, 0] = torch.nan
    before = _flat(parameters)
    averager.pack()
    averager.send()
    merged = averager.merge(0.5)
    kept = torch.equal(before.nan_to_num(), _flat(parameters).nan_to_num())
    averager.close()
    return merged, kept


@pytest.mark.parametrize("how", METHODS)
def test_nothing_moves_where_a_rank_is_not_finite(pool, how):
    assert pool.run(2, _not_finite, how) == [(False, True)] * 2


def _spread(rank, finite):
    parameters = _parameters(rank, seed=rank)
    spread(parameters, Driver(timeout_s=30), 1, finite)
    return _flat(parameters)


def test_spreading_gives_all_the_source_s_or_the_error(pool):
    ranks = pool.run(3, _spread, True)
    assert all(torch.equal(weights, _flat(_parameters(1, seed=1))) for weights in ranks)
    with pytest.raises(RanksFailed) as failed:
        pool.run(3, _spread, False)
    assert sorted(failed.value.errors) == [0, 1, 2]
    assert all(NonFiniteError.__name__ in text for text in failed.value.errors.values())


def _average(rank):
    tensors = [torch.full((2,), float(rank)), torch.full((1, 3), rank * 2.0, dtype=torch.float64)]
    average(tensors, Driver(timeout_s=30))
    average([], Driver(timeout_s=30))
    return [t.tolist() for t in tensors]


def test_average_of_mixed_tensors(pool):
    assert pool.run(3, _average) == [[[1.0, 1.0], [[2.0, 2.0, 2.0]]]] * 3


@pytest.mark.parametrize("how", ["sign:majority=true", "topk:clip_value=1.0", "randomk:unbiased=true"])
def test_methods_that_do_not_send_the_difference_are_refused(how):
    with pytest.raises(MethodError, match="as they are"):
        difference_method(how)


def _foreign(rank):
    parameters = _parameters(rank)
    averager = ParameterAverager(parameters, Driver(), "bf16")
    averager.anchor()
    state = averager.state_dict()
    state["mine"] = [state["mine"][0][:-1]]
    try:
        averager.load_state_dict(state)
    except CheckpointError as error:
        return str(error)
    finally:
        averager.close()


def test_a_foreign_state_is_refused(pool):
    assert pool.run(1, _foreign) == ["the state's mine is of another model: load it into the same model"]
