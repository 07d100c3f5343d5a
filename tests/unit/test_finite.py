"""NaN and infinity are found wherever they are."""

import math

import pytest
import torch

import stenograd
from stenograd.exchange.tensor_exchange import TensorExchange
from stenograd.simulate import ranks
from stenograd.wire import finite as judge
from stenograd.wire.carried import mean_of_finite


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("weights", [[1.0, 1.0, 1.0], [1.5, 0.75, 0.75], [0.5, 0.25, 0.25]])
def test_a_mean_of_what_is_finite_does_not_overflow(dtype, weights):
    """Large numbers a and b of two ranks, of three: (w_a a + w_b b) / (w_a + w_b)."""
    most = torch.finfo(dtype).max
    rows = [torch.tensor([x, math.nan], dtype=dtype) for x in (most, most / 2, math.nan)]
    found = mean_of_finite(rows, weights, torch.full((2,), math.nan, dtype=dtype), torch.zeros(2))
    share = weights[0] / (weights[0] + weights[1])
    torch.testing.assert_close(found, torch.tensor([most / 2 * (1 + share), 0.0], dtype=dtype))


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
