"""Sign compression against numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograd.compressors.sign import Sign
from stenograd.errors import MethodError
from stenograd.simulate import exchange
from stenograd.wire.requests import Op

vectors = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40)


def decoded(x: np.ndarray, block: int) -> np.ndarray:
    """Mean magnitude of each block times the signs, in float64."""
    signs = np.where(x >= 0, 1.0, -1.0)
    starts = range(0, len(x), block)
    return np.concatenate([signs[i : i + block] * np.abs(x[i : i + block]).mean() for i in starts])


@settings(max_examples=60)
@given(values=vectors, block=st.integers(1, 50))
def test_what_is_sent_is_numpys(values, block):
    x = np.array(values, dtype=np.float64).astype(np.float32)
    (e,) = exchange(Sign(block=block), [torch.from_numpy(x)], want_error=True)
    sent = decoded(x.astype(np.float64), block)
    assert np.allclose(e.average.numpy(), sent, atol=1e-4)
    assert np.allclose(e.error.numpy(), x - sent, atol=1e-4)


def test_the_average_is_the_mean_of_the_messages():
    """Scales 2 and 4: ([2, -2] + [4, 4]) / 2 = [3, 1]."""
    out = exchange(Sign(), [torch.tensor([3.0, -1.0]), torch.tensor([7.0, 1.0])])
    assert [e.average.tolist() for e in out] == [[3, 1], [3, 1]]


def test_the_vote():
    """Scales 2, 4 and 6, mean 4; signs ++-, +--, so [+, +, -] after the vote, times 4."""
    xs = [torch.tensor([2.0, 2, -2]), torch.tensor([4.0, -4, -4]), torch.tensor([-6.0, 6, 6])]
    out = exchange(Sign(majority=True), xs, want_error=True)
    assert all(e.average.tolist() == [4, 4, -4] for e in out)
    assert all(not e.error.any() for e in out)  # every rank's own message is exact here


def test_a_tied_vote_is_zero():
    out = exchange(Sign(majority=True), [torch.tensor([1.0, 1.0]), torch.tensor([-1.0, 1.0])])
    assert out[0].average.tolist() == [0, 1]


def test_zero_counts_as_plus_and_a_zero_block_is_zero():
    (e,) = exchange(Sign(block=2), [torch.tensor([0.0, -2.0, 0.0, -0.0, 0.0])])
    assert e.average.tolist() == [1, -1, 0, 0, 0]


@pytest.mark.parametrize(("n", "block"), [(1000, 100), (1001, 100), (7, 1024), (0, 8)])
def test_bytes(n, block):
    """One bit an element in whole bytes, and four bytes a block that has any."""
    requests = []
    exchange(Sign(block=block), [torch.ones(n)], spy=requests.append)
    assert [(r.op, r.nbytes) for r in requests] == [(Op.GATHER, -(-n // 8) + 4 * -(-n // block))]


@settings(max_examples=60)
@given(values=vectors, block=st.integers(1, 50))
def test_the_error_is_what_the_docstring_says(values, block):
    """||e||^2 = sum over blocks of ||x||_2^2 - ||x||_1^2 / d <= (1 - 1/block) ||x||_2^2."""
    x = torch.tensor(values, dtype=torch.float64)
    (e,) = exchange(Sign(block=block), [x], want_error=True)
    exact = sum(b.square().sum() - b.abs().sum() ** 2 / len(b) for b in x.split(block))
    energy = float(x.square().sum())
    assert float(e.error.square().sum()) == pytest.approx(float(exact), rel=1e-6, abs=1e-6 * (1 + energy))
    assert float(exact) <= (1 - 1 / block) * energy * (1 + 1e-9)


def test_means_of_short_types_are_taken_in_float32():
    """An eighth of float16's least number is none, and bfloat16 holds no 32 + 1/8."""
    least = torch.full((64,), 2.0**-24, dtype=torch.float16)
    assert torch.equal(exchange(Sign(), [least])[0].average, least)
    x = torch.zeros(256, dtype=torch.bfloat16)
    x[::32], x[0] = 1.0, 256.0
    assert float(exchange(Sign(), [x])[0].average[0]) == float(torch.tensor(263 / 256).bfloat16())


def test_a_block_of_nothing_is_refused():
    with pytest.raises(MethodError, match="block must be at least 1, got 0: use 1024"):
        Sign(block=0)
