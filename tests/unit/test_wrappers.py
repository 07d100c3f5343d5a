"""Clipping, a dense start, and dense small tensors."""

import math

import pytest
import torch

from stenograd.catalog.wrappers import Clip, PerSize, Warmup
from stenograd.compression.contract import Site
from stenograd.compression.error_feedback import ErrorFeedback
from stenograd.compressors.identity import Identity
from stenograd.compressors.powersgd import PowerSGD
from stenograd.compressors.topk import TopK
from stenograd.errors import MethodError
from stenograd.simulate import exchange

DENSE = Identity()


def test_values_are_clipped_before_averaging():
    """1000 and 0 at 100: the mean of the clipped is 50, not the clipped mean of 100."""
    out = exchange(Clip(inner=DENSE, value=100.0), [torch.tensor([1000.0]), torch.tensor([0.0])])
    assert out[0].average.tolist() == [50]


def test_norms_are_clipped_tensor_by_tensor():
    """[3, 4] has norm 5 and becomes [.6, .8]; [.5] is short enough and an empty tensor stays empty."""
    shapes = [torch.Size(s) for s in [(2,), (1,), (0,)]]
    (e,) = exchange(Clip(inner=DENSE, norm=1.0), [torch.tensor([3.0, 4.0, 0.5])], shapes=shapes)
    assert e.average.tolist() == pytest.approx([0.6, 0.8, 0.5])


def test_fifteen_equal_gradients():
    """Norm of 15 twos is 2 sqrt(15), so each becomes 1 / sqrt(15)."""
    (e,) = exchange(Clip(inner=DENSE, norm=1.0), [torch.full((15,), 2.0)])
    assert e.average.tolist() == pytest.approx([1 / math.sqrt(15)] * 15)


@pytest.mark.parametrize("bounds", [{"value": 1.0}, {"norm": 1.0}])
def test_clipping_does_not_hide_nan(bounds):
    (e,) = exchange(Clip(inner=DENSE, **bounds), [torch.tensor([torch.nan, 1.0])])
    assert e.average[0].isnan()


@pytest.mark.parametrize(
    "bounds", [{}, {"value": 0.0}, {"norm": -1.0}, {"value": math.inf}, {"norm": math.nan}]
)
def test_senseless_bounds_are_refused(bounds):
    with pytest.raises(MethodError):
        Clip(inner=DENSE, **bounds)


def test_warmup_is_dense_until_its_step():
    x, method = torch.tensor([1.0, 2.0, 3.0, 4.0]), Warmup(inner=TopK(ratio=0.25), steps=2)
    sent = [exchange(method, [x], step=step)[0].average.tolist() for step in range(4)]
    assert sent == [[1, 2, 3, 4]] * 2 + [[0, 0, 0, 4]] * 2


def test_warmup_leaves_the_state_inside_alone():
    method = Warmup(inner=ErrorFeedback(inner=TopK(ratio=0.25)), steps=1)
    state = {"residual": torch.tensor([5.0, 0, 0, 0])}
    (e,) = exchange(method, [torch.ones(4)], [state], step=0, want_error=True)
    assert e.state == state
    assert not e.error.any()


def test_small_tensors_travel_densely_in_the_same_rounds():
    """4 and 2 elements, below 3 dense: one MEAN of 8 bytes and one GATHER of one place and value."""
    method, requests = PerSize(inner=TopK(ratio=0.25, compact=False), below=3), []
    xs = [torch.tensor([1.0, 2, 9, 4, 0.5, 0.25]), torch.tensor([1.0, 2, 3, 5, 0.5, 0.75])]
    shapes = [torch.Size((4,)), torch.Size((2,))]
    out = exchange(method, xs, shapes=shapes, want_error=True, spy=requests.append)
    assert out[1].average.tolist() == [0, 0, 4.5, 2.5, 0.5, 0.5]
    assert out[0].error.tolist() == [1, 2, 0, 4, 0, 0]
    assert sorted((r.op.name, r.nbytes) for r in requests) == [("GATHER", 8), ("MEAN", 8)]


def test_state_inside_is_named_by_place_in_the_whole():
    shapes = tuple(torch.Size(s) for s in [(3,), (30, 20), (2,), (10, 10)])
    method, x = PerSize(inner=PowerSGD(rank=1), below=10), torch.ones(sum(s.numel() for s in shapes))
    start = method.init(x, Site(shapes=shapes))
    assert sorted(start) == ["q/1", "q/3"]
    (e,) = exchange(method, [x], [start], shapes=shapes)
    assert sorted(e.state) == ["q/1", "q/3"]
    assert torch.allclose(e.average, x, atol=1e-5)


@pytest.mark.parametrize(
    "wrap", [lambda: Warmup(inner=TopK(), steps=0), lambda: PerSize(inner=TopK(), below=0)]
)
def test_counts_below_one_are_refused(wrap):
    with pytest.raises(MethodError, match="must be at least 1, got 0"):
        wrap()


def test_wrappers_pass_on_what_is_inside():
    for inner in (TopK(), Identity(), PowerSGD()):
        for wrapped in (
            Clip(inner=inner, norm=1.0),
            Warmup(inner=inner, steps=1),
            PerSize(inner=inner, below=1),
        ):
            assert wrapped.biased == inner.biased
            assert wrapped.lossless == inner.lossless
            assert wrapped.propagates == inner.propagates


def test_clamping_hides_an_infinity_and_says_so():
    assert Identity().propagates
    assert Clip(inner=Identity(), norm=1.0).propagates
    assert not Clip(inner=Identity(), value=1.0).propagates
