"""NaN and infinity are found wherever they are."""

import math

import pytest
import torch

import stenograd
from stenograd.comm.tensor_exchange import TensorExchange
from stenograd.data import finite as judge
from stenograd.simulate import ranks
from stenograd.testing.methods import wrapped


@pytest.mark.parametrize("n", [0, 1, 1023, 1024, 5000])
def test_one_infinite_element_is_found_anywhere(n):
    """The sum of 3e38 is infinite from two elements on, though each of them is finite."""
    x = torch.full((n,), 3e38)
    assert judge.is_finite(x)
    for bad in (math.nan, math.inf, -math.inf):
        for at in {0, n // 2, n - 1} if n else ():
            y = x.clone()
            y[at] = bad
            assert (judge.is_finite(y), float(judge.not_bounded(y))) == (False, 1.0)
            assert int(judge.finite_of([x, y])) == judge.Finite.NO


def _cases(dtype, rank):
    """What a rank gives, by what is special about it: (name, tensors, whether some rank's are not finite)."""
    top = 0.97 * torch.finfo(dtype).max
    generator = torch.Generator().manual_seed(rank)
    plain = torch.randn(24, 10, generator=generator, dtype=torch.float64)
    changes = {
        "moderate": lambda w: None,
        "one rank has nearly the largest": lambda w: w.view(-1).__setitem__(34, 0.0 if rank else top),
        "all have nearly the largest": lambda w: w.view(-1).__setitem__(34, top),
        "of other signs": lambda w: w.view(-1).__setitem__(34, -top if rank % 2 else top),
        "everywhere": lambda w: w.clamp_(-1, 1).mul_(top),
        "infinity": lambda w: w.view(-1).__setitem__(34, math.inf if rank == 1 else 0.0),
        "NaN": lambda w: w.view(-1).__setitem__(34, math.nan if rank == 1 else 0.0),
    }
    for name, change in changes.items():
        w = plain.clone()
        change(w)
        yield name, {"w": w.to(dtype), "b": plain[0].to(dtype)}, name in ("infinity", "NaN")


def _judged(driver, how, dtype):
    exchange, found = TensorExchange(how, driver, waits=True, bucket_bytes=300), []
    for name, given, bad in _cases(dtype, driver.rank):
        before = exchange.state_dict()
        averages = {key: t.clone() for key, t in exchange.average(given).items()}
        after = exchange.state_dict()
        found.append((name, bad, exchange.finite, averages, before["parameters"], after["parameters"]))
    exchange.close()
    return found


@pytest.mark.filterwarnings("ignore:.*an average overflowed")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("how", [*stenograd.methods(), *wrapped()])
def test_a_step_is_finite_everywhere_or_changes_nothing_anywhere(how, dtype):
    """Four ranks, up to 0.97 of the type's largest number: averages and states are finite, or kept."""
    for found in zip(*ranks(4, _judged, how, dtype), strict=True):
        name, bad, finite, averages, *_ = found[0]
        assert {rank[2] for rank in found} == {finite}, name
        assert not (bad and finite), name
        assert finite or name != "moderate"
        for _, _, _, mine, before, after in found:
            states = [(before[key][kind], after[key][kind]) for key in before for kind in before[key]]
            assert finite or all(torch.equal(old, new) for old, new in states), name
            assert all(new.isfinite().all() for _, new in states if new.is_floating_point()), name
            assert not finite or all(t.isfinite().all() for t in mine.values()), name
            assert not finite or all(torch.equal(t, averages[key]) for key, t in mine.items()), name


@pytest.mark.filterwarnings("ignore:natural.*an average overflowed")
@pytest.mark.parametrize("world", [2, 4])  # from four on messages of codes travel in two phases
@pytest.mark.parametrize("how", [*stenograd.methods(), "topk:feedback=false"])
def test_the_sum_of_ranks_needs_no_room_in_float16(how, world):
    """All ranks have 4e4, whose sum is beyond 65,504 and whose mean is 4e4; directions have 0 or 1."""
    given = torch.full((32, 32), 4e4, dtype=torch.float16)
    text = stenograd.method(f"{how}{',' if ':' in how else ':'}dense_below=0")

    def rank_of(driver):
        exchange = TensorExchange(text, driver, waits=True)
        average = exchange.average({"w": given})["w"].clone()
        exchange.close()
        return average, exchange.finite

    average, finite = ranks(world, rank_of)[0]
    assert not finite or average.isfinite().all()
    assert finite or how == "natural"  # which may round 4e4 up to 65,536


@pytest.mark.parametrize(
    ("size", "dtype"), [(2e4, torch.float16), (1e20, torch.bfloat16), (1e20, torch.float32)]
)
def test_a_norm_beyond_the_type_clips_and_does_not_erase(size, dtype):
    """100 equal elements have ten times an element's norm, so at a norm of 1 each becomes 0.1."""
    for how in ("dense:clip_norm=1", "dgc:clip=1.0"):
        x = torch.full((10, 10), size, dtype=dtype)
        (average,) = ranks(1, lambda driver, how=how, x=x: TensorExchange(how, driver).average({"x": x})["x"])
        assert float(average.abs().max()) == pytest.approx(0.1, rel=1e-2)
