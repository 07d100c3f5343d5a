"""Averages in 16 bits: equal on all ranks, near NumPy's, and every rank knows what it has lost."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograd.compression.means import half_means, half_rounds
from stenograd.simulate import run
from stenograd.wire.requests import means
from stenograd.wire.traffic import moved_bytes


def ranks_of(world, numel, size=1.0):
    generator = torch.Generator().manual_seed(world)
    return [torch.randn(numel, generator=generator) * size for _ in range(world)]


@settings(max_examples=100)
@given(world=st.integers(1, 9), numel=st.integers(0, 40), size=st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
def test_the_average_is_the_mean_of_what_was_sent(world, numel, size):
    """And nothing is lost but roundings: to 8 bits of each number, and once more of the mean."""
    xs = ranks_of(world, numel, size)
    before = [x.clone() for x in xs]
    out = run([half_means(x, rank, world) for rank, x in enumerate(xs)])
    average = out[0][0]
    assert all(torch.equal(mine, average) for mine, _ in out)
    assert all(torch.equal(x, kept) for x, kept in zip(xs, before, strict=True))
    assert all(sent.shape == x.shape for (_, sent), x in zip(out, xs, strict=True))
    sent = np.mean([sent.double().numpy() for _, sent in out], axis=0)
    np.testing.assert_allclose(average.numpy(), sent, rtol=1e-5, atol=1e-5 * size)
    exact = np.mean([x.double().numpy() for x in xs], axis=0)
    largest = max((float(x.abs().max()) for x in xs if numel), default=0.0)
    assert np.abs(average.double().numpy() - exact).max(initial=0.0) <= 2**-7 * largest


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8])
def test_moves_half_of_what_an_all_reduce_moves_or_a_little_more(world):
    """Gathered among three, half as much as there would be one more hop to save; parts are padded."""
    requests, ring = [], []
    run([half_means(torch.ones(1000), rank, world) for rank in range(world)], spy=requests.append)
    run([means([torch.ones(1000)]) for _ in range(world)], spy=ring.append)
    assert len(requests) == half_rounds(world)
    moved, full = (sum(moved_bytes(r.op, r.nbytes, world) for r in found) for found in (requests, ring))
    share = {3: 0.75}.get(world, 0.5)
    assert share * full <= moved <= share * full + 8 * world


@pytest.mark.parametrize("world", [2, 4])
def test_what_is_not_finite_stays_so(world):
    xs = ranks_of(world, 7)
    xs[1][3] = float("inf")
    xs[0][5] = float("nan")
    for average, _ in run([half_means(x, rank, world) for rank, x in enumerate(xs)]):
        assert average.isfinite().tolist() == [True, True, True, False, True, False, True]
