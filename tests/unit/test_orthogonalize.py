"""Orthonormal columns for every input, with the same bits everywhere."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograd.compression.orthogonalize import orthogonalize
from stenograd.errors import ConfigError


def deviation(q: torch.Tensor) -> float:
    """Largest element of |Q^T Q - I|, in float64."""
    q = q.double()
    return float((q.mT @ q - torch.eye(q.shape[-1], dtype=q.dtype)).abs().max())


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape)).float()


def test_columns_are_numpys_qr_up_to_sign():
    p = random(50, 4)
    q, r = np.linalg.qr(p.double().numpy())
    assert torch.allclose(orthogonalize(p).double(), torch.from_numpy(q * np.sign(np.diag(r))), atol=1e-6)


@pytest.mark.parametrize(
    "p",
    [
        random(50, 4),
        random(4, 4),
        random(2, 2),
        random(40, 32),
        torch.zeros(50, 4),
        torch.ones(50, 4),
        torch.zeros(4, 4),
        torch.zeros(1, 1),
        random(50, 1) * torch.tensor([1.0, 2.0, -1.0, 0.0]),
        random(50, 2) @ random(2, 6),
        random(50, 4) * 1e-42,
        random(50, 4) * 1e37,
        random(50, 1) + 1e-6 * random(50, 4, seed=1),
        random(3000, 3),
        random(2, 3, 20, 4),
        torch.cat([torch.zeros(1, 9, 2), random(1, 9, 2)]),
    ],
    ids=lambda p: str(tuple(p.shape)),
)
def test_columns_are_orthonormal(p):
    q = orthogonalize(p)
    assert (q.shape, q.dtype) == (p.shape, p.dtype)
    assert deviation(q) < 1e-5


@settings(max_examples=40)
@given(n=st.integers(1, 30), r=st.integers(1, 8), rank=st.integers(0, 8), seed=st.integers(0, 99))
def test_the_span_of_p_is_kept(n, r, rank, seed):
    """Q Q^T P = P for every rank of P."""
    r = min(n, r)
    p = random(n, rank, seed=seed).double() @ random(rank, r, seed=seed + 1).double()
    q = orthogonalize(p)
    assert deviation(q) < 1e-10
    assert torch.allclose(q @ (q.mT @ p), p, atol=1e-9)


def test_a_batch_is_its_matrices_one_by_one():
    p = random(5, 30, 3)
    assert torch.equal(orthogonalize(p), torch.stack([orthogonalize(m) for m in p]))


@pytest.mark.parametrize("shape", [(70000, 3), (5000, 8), (6, 2000, 4)])
def test_bits_do_not_depend_on_the_number_of_threads(shape):
    p, threads = random(*shape), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = orthogonalize(p)
        for n in (2, 3, 7):
            torch.set_num_threads(n)
            assert torch.equal(orthogonalize(p), alone)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", [(0, 5, 2), (5, 0), (0, 0)])
def test_nothing_is_orthonormal(shape):
    assert orthogonalize(torch.zeros(shape)).shape == shape


@pytest.mark.parametrize("shape", [(3, 4), (5,), ()])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ConfigError, match=r"p must have shape .* got"):
        orthogonalize(torch.zeros(shape))


def test_nan_does_not_crash():
    assert orthogonalize(torch.full((5, 2), torch.nan)).shape == (5, 2)
