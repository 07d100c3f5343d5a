"""Top-k, threshold, random-k and random block against numpy."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gradients import ranks_of

from stenograd.compression.contract import Feedback, Site
from stenograd.compressors.randomblock import RandomBlock
from stenograd.compressors.randomk import RandomK
from stenograd.compressors.threshold import Threshold
from stenograd.compressors.topk import TopK
from stenograd.errors import MethodError
from stenograd.simulate import exchange
from stenograd.wire.requests import Op

floats = st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=40)


@settings(max_examples=50)
@given(values=floats, ratio=st.floats(0.01, 1))
def test_topk_sends_the_largest_and_keeps_the_rest(values, ratio):
    x = np.array(values, dtype=np.float32)
    k = math.ceil(ratio * len(x))
    (e,) = exchange(TopK(ratio=ratio, values="float32"), [torch.from_numpy(x)], want_error=True)
    sent, kept = e.average.numpy(), e.error.numpy()
    assert (sent + kept == x).all()
    assert (sent * kept == 0).all()
    assert np.sort(np.abs(sent))[-k:].tolist() == np.sort(np.abs(x))[-k:].tolist()


@settings(max_examples=50)
@given(values=floats, ratio=st.floats(0.01, 1))
def test_topk_rounds_what_it_sends_and_keeps_what_that_loses(values, ratio):
    """bfloat16 is the upper half of float32: of 8 bits of mantissa, rounded to even."""
    x = np.array(values, dtype=np.float32)
    (e,) = exchange(TopK(ratio=ratio), [torch.from_numpy(x)], want_error=True)
    sent, kept = e.average.numpy(), e.error.numpy()
    bits = x.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).astype(np.uint32).view(np.float32)
    chosen = sent != 0
    assert (sent[chosen] == rounded[chosen]).all()
    assert (sent + kept == x).all()
    k = math.ceil(ratio * len(x))
    largest = np.sort(np.abs(x))[::-1]
    assert chosen.sum() <= k
    left = ~chosen & (rounded != 0)  # what rounds to zero may have been sent, as zero
    assert (np.abs(x[left]) <= largest[k - 1]).all()


@settings(max_examples=50)
@given(values=floats, value=st.floats(0.01, 5))
def test_threshold_sends_what_is_large_enough(values, value):
    x = np.array(values, dtype=np.float32)
    (e,) = exchange(Threshold(value=value), [torch.from_numpy(x)], want_error=True)
    large = np.abs(x) >= np.float32(value)
    assert e.average.tolist() == np.where(large, x, 0).tolist()
    assert e.error.tolist() == np.where(large, 0, x).tolist()


def test_threshold_with_zeros_and_equality():
    """v = [0, 0, .1, .2] at .05 on N ranks: the sum is exactly [0, 0, .1 N, .2 N]; .05 itself is sent."""
    v = torch.tensor([0, 0, 0.1, 0.2])
    for world in (1, 2, 3):
        (e, *_) = exchange(Threshold(value=0.05), [v] * world)
        assert torch.allclose(e.average * world, v * world, rtol=1e-6)
        assert e.average[:2].tolist() == [0, 0]
    (e,) = exchange(Threshold(value=0.05), [torch.tensor([0.05, -0.05, 0.049])])
    assert e.average.tolist() == torch.tensor([0.05, -0.05, 0]).tolist()


def test_threshold_with_as_many_elements_as_each_rank_has():
    """Ranks with 0, 1 and 3 large elements: 4 bytes for the count, then 3 x 8 bytes each."""
    xs = [torch.zeros(4), torch.tensor([0, 3.0, 0, 0]), torch.tensor([6.0, 0, 9.0, 3.0])]
    requests = []
    out = exchange(Threshold(value=1.0), xs, spy=requests.append)
    assert all(e.average.tolist() == [2, 1, 3, 1] for e in out)
    assert [(r.op, r.nbytes) for r in requests] == [(Op.GATHER, 4), (Op.GATHER, 24)]


def test_topk_takes_the_whole_bucket():
    """Two tensors in one bucket: both elements come from the larger-valued one."""
    x = torch.tensor([0.1, 0.2, 5.0, 6.0])
    (e,) = exchange(TopK(ratio=0.5), [x], shapes=[torch.Size((2,)), torch.Size((2,))])
    assert e.average.tolist() == [0, 0, 5, 6]


@pytest.mark.parametrize("method", [RandomK, RandomBlock])
@settings(max_examples=40)
@given(n=st.integers(1, 60), ratio=st.floats(0.01, 1), world=st.integers(1, 3), step=st.integers(0, 9))
def test_random_sparsifiers_send_k_of_the_mean(method, n, ratio, world, step):
    """All ranks send the same k places, so what arrives is the mean there and 0 elsewhere."""
    k, xs = math.ceil(ratio * n), ranks_of(world, n, seed=step)
    requests = []
    out = exchange(method(ratio=ratio), xs, step=step, want_error=True, spy=requests.append)
    places = out[0].average != 0
    assert int(places.sum()) == k
    mean = torch.from_numpy(np.mean([x.double().numpy() for x in xs], axis=0)).float()
    assert torch.allclose(out[0].average, torch.where(places, mean, 0), atol=1e-6)
    for x, e in zip(xs, out, strict=True):
        assert torch.equal(e.error, torch.where(places, 0, x))
    assert [(r.op, r.nbytes) for r in requests] == [(Op.MEAN, 4 * k)]


@pytest.mark.parametrize("method", [RandomK, RandomBlock])
def test_unbiased_scales_by_n_over_k(method):
    """ratio .25 of 8 elements: 2 are sent, four times as large."""
    (e,) = exchange(method(ratio=0.25, unbiased=True), [torch.ones(8)], want_error=True)
    assert sorted(e.average.tolist()) == [0] * 6 + [4] * 2
    assert torch.equal(e.error, 1 - e.average)
    assert method(unbiased=True).feedback is Feedback.NEVER
    assert method().feedback is Feedback.ON


@pytest.mark.parametrize("method", [RandomK, RandomBlock])
def test_every_element_is_equally_likely(method):
    """4000 draws of 3 of 10: each place 1200 times, within 6 standard deviations (6 * 29)."""
    count = torch.zeros(10)
    for step in range(4000):
        (e,) = exchange(method(ratio=0.3), [torch.ones(10)], step=step)
        count += e.average
    assert count.sum() == 12000
    assert (count - 1200).abs().max() < 6 * (4000 * 0.3 * 0.7) ** 0.5


@pytest.mark.parametrize("k", [1, 60, 500, 3000, 5999, 6000])
def test_large_draws_are_distinct_and_uniform(k):
    """Above 4096 places the drawing rejects repetitions; 6000 places in 10 bins, 6 standard deviations."""
    places = RandomK().draw(6000, k, torch.Generator().manual_seed(k))
    assert places.numel() == k == places.unique().numel()
    assert places.diff().gt(0).all()
    bins = torch.bincount(places // 600, minlength=10)
    assert (bins - k / 10).abs().max() <= 6 * (k * 0.1 * 0.9) ** 0.5


def test_a_random_block_is_contiguous_and_wraps_around():
    """30 starts of a block of 3 in 5: some must reach over the end."""
    wrapped = 0
    for step in range(30):
        (e,) = exchange(RandomBlock(ratio=0.6), [torch.ones(5)], step=step)
        sent = e.average.bool()
        edges = (sent != sent.roll(1)).sum()
        assert edges == 2
        wrapped += bool(sent[0] and sent[-1])
    assert wrapped


def test_draws_change_with_step_seed_and_bucket_but_not_with_the_rank():
    def drawn(method: RandomK, **site: int) -> list[int]:
        generator = Site(shapes=(), **site).generator(method.seed, shared=True)
        return method.draw(1000, 10, generator).tolist()

    base = drawn(RandomK())
    assert base == drawn(RandomK(), rank=3, world_size=5)
    others = [drawn(RandomK(seed=1)), drawn(RandomK(), step=1), drawn(RandomK(), key=1)]
    assert all(other != base for other in others)


@pytest.mark.parametrize("method", [TopK, RandomK, RandomBlock])
@pytest.mark.parametrize("ratio", [0, -0.1, 1.01, float("nan")])
def test_ratios_outside_their_range_are_refused(method, ratio):
    with pytest.raises(MethodError, match=r"ratio must be in \(0, 1\], got .*: use 0.01"):
        method(ratio=ratio)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan")])
def test_thresholds_outside_their_range_are_refused(value):
    with pytest.raises(MethodError, match="value must be positive and finite, got"):
        Threshold(value=value)
