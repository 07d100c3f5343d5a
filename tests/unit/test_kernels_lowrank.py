"""The low-rank kernels: numba against plain torch, on matrices that lie apart in a flat tensor."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograd.testing.checks import Plain

cpu = pytest.importorskip("stenograd.kernels.cpu.lowrank")

reference = Plain("lowrank")


@st.composite
def _cases(draw):
    count, rows = draw(st.integers(1, 3)), draw(st.integers(1, 23))
    columns = draw(st.integers(1, 40) | st.integers(1020, 1032))  # on both sides of a wide one
    rank, start, gap = draw(st.integers(1, 9)), draw(st.integers(0, 5)), draw(st.integers(0, 7))
    return (start, rows * columns + gap, count, rows, columns), rank, draw(st.integers(0, 99))


def _tensors(place, rank, seed):
    start, stride, count, rows, columns = place
    g = torch.Generator().manual_seed(seed)
    x, addend = (torch.randn(start + count * stride + 3, generator=g) for _ in range(2))
    thin = (torch.randn(count, rank, n, generator=g) for n in (rows, columns))
    return x, addend, *thin


@settings(max_examples=120)
@given(_cases(), st.booleans())
def test_projections_agree(case, adds):
    place, rank, seed = case
    x, addend, factors, queries = _tensors(place, rank, seed)
    ours, theirs = x.clone(), x.clone()
    more = addend if adds else None
    found = cpu.project_rows(ours, more, place, queries)
    expected = reference.project_rows(theirs, more, place, queries)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=5e-4)  # sums of 1,000 in another order
    assert torch.equal(ours, theirs)  # only the matrices are changed, and alike
    torch.testing.assert_close(
        cpu.project_columns(ours, place, factors), reference.project_columns(theirs, place, factors)
    )


@settings(max_examples=120)
@given(_cases(), st.sampled_from(["expand", "take_out"]))
def test_expansions_agree(case, name):
    place, rank, seed = case
    x, _, factors, queries = _tensors(place, rank, seed)
    ours, theirs = x.clone(), x.clone()
    for kernels, out in ((cpu, ours), (reference, theirs)):
        getattr(kernels, name)(out, place, (factors, queries))
    torch.testing.assert_close(ours, theirs)
    start, stride, count, rows, columns = place
    inside = torch.zeros_like(x, dtype=torch.bool)
    for c in range(count):
        inside[start + c * stride : start + c * stride + rows * columns] = True
    assert torch.equal(ours[~inside], x[~inside])


@settings(max_examples=80)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 40), st.integers(0, 99), st.booleans())
def test_orthonormal_rows_agree(count, rank, more, seed, depends):
    g = torch.Generator().manual_seed(seed)
    n = rank + more
    rows = torch.randn(count, rank, n, generator=g, dtype=torch.float64)
    spare = torch.randn(rank, n, generator=g, dtype=torch.float64)
    if depends and rank > 1:
        rows[:, -1] = 2 * rows[:, 0]
        rows[0, 0] = 0
        rows[0, -1] = 0
    ours = cpu.orthonormal(rows, spare, 1e-12)
    torch.testing.assert_close(ours, reference.orthonormal(rows, spare, 1e-12), rtol=0, atol=1e-6)
    eye = torch.eye(rank, dtype=torch.float64).expand(count, -1, -1)
    torch.testing.assert_close(ours @ ours.mT, eye, rtol=0, atol=1e-9)


def test_what_is_not_finite_shows():
    place = (0, 6, 1, 2, 3)
    x = torch.tensor([1.0, torch.nan, 3, 4, 5, torch.inf])
    assert not cpu.project_rows(x.clone(), None, place, torch.ones(1, 1, 3)).isfinite().any()
