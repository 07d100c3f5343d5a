"""Averages in two hops: equal on all ranks, those of NumPy, and no more bytes than a ring moves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograd.catalog.method import method
from stenograd.compression.contract import Site
from stenograd.compression.means import small_means
from stenograd.simulate import run
from stenograd.testing import check
from stenograd.wire.requests import Op, means
from stenograd.wire.traffic import moved_bytes


def ranks_of(world, shapes, dtype=torch.float32):
    generator = torch.Generator().manual_seed(world)
    return [[torch.randn(shape, generator=generator).to(dtype) for shape in shapes] for _ in range(world)]


@settings(max_examples=60)
@given(
    world=st.integers(1, 9), shapes=st.lists(st.lists(st.integers(0, 7), max_size=3), min_size=1, max_size=4)
)
def test_is_the_mean_on_every_rank(world, shapes):
    ranks = ranks_of(world, shapes)
    wanted = [np.mean([t.double().numpy() for t in same], axis=0) for same in zip(*ranks, strict=True)]
    out = run([small_means([t.clone() for t in ts], world) for ts in ranks])
    for mine in out:
        for average, first, exact in zip(mine, out[0], wanted, strict=True):
            assert torch.equal(average, first)
            assert average.shape == exact.shape
            np.testing.assert_allclose(average.numpy(), exact, atol=1e-5)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 5, 8, 64])
@pytest.mark.parametrize("numel", [1, 4096, 16384, 16385])
def test_moves_what_a_ring_moves(world, numel):
    """Up to 64 KiB and from four ranks on in two requests; parts are padded to the same length."""
    requests, ring = [], []
    run([small_means([torch.ones(numel)], world) for _ in range(world)], spy=requests.append)
    run([means([torch.ones(numel)]) for _ in range(world)], spy=ring.append)
    direct = world >= 4 and numel <= 16384
    assert [r.op for r in requests] == ([Op.SCATTER, Op.GATHER] if direct else [Op.MEAN])
    moved, least = (sum(moved_bytes(r.op, r.nbytes, world) for r in found) for found in (requests, ring))
    assert least <= moved <= least + 8 * (world - 1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_other_types_stay_what_they_are(dtype):
    ranks = ranks_of(4, [(3, 5), ()], dtype)
    for wide, scalar in run([small_means(ts, 4) for ts in ranks]):
        assert (wide.dtype, scalar.dtype) == (dtype, dtype)
        exact = torch.stack([ts[0].double() for ts in ranks]).mean(0)
        # Three sums of four numbers below 2.3, each rounded once.
        assert torch.allclose(wide.double(), exact, rtol=0, atol=2 * torch.finfo(dtype).eps)


def test_a_sum_that_would_overflow_does_not():
    (average,) = run([small_means([torch.full((6,), 3e38)], 4) for _ in range(4)])[1]
    assert torch.allclose(average, torch.full((6,), 3e38))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_arrives(bad):
    xs = [torch.zeros(9) for _ in range(5)]
    xs[3][7] = bad
    for (average,) in run([small_means([x], 5) for x in xs]):
        assert not average[7].isfinite()
        assert int(average.isfinite().sum()) == 8


def test_the_dense_small_buckets_of_a_method_conform():
    """From four ranks on they are averaged in two hops; every promise of its facts is measured."""
    small, _ = method("topk:dense_below=100").compressors(dense=True)
    site = Site(shapes=(torch.Size((7,)),), world_size=4)
    assert small.facts(site).rounds == 2
    check(small)
