"""QSGD against its definition."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stenograd.compression.contract import Site
from stenograd.compressors.qsgd import QSGD
from stenograd.errors import MethodError
from stenograd.simulate import exchange
from stenograd.wire.requests import Op

vectors = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=40)


@settings(max_examples=80)
@given(values=vectors, bits=st.integers(2, 8), block=st.integers(1, 50), seed=st.integers(0, 9))
def test_every_element_goes_to_a_neighbouring_level(values, bits, block, seed):
    """Levels are multiples of max|x| / s of the block, and no element moves by a whole level."""
    x = np.array(values, dtype=np.float32)
    (e,) = exchange(QSGD(bits=bits, block=block, seed=seed), [torch.from_numpy(x)])
    s = 2 ** (bits - 1) - 1
    for i in range(0, len(x), block):
        part, sent = x[i : i + block].astype(np.float64), e.average.numpy()[i : i + block]
        step = np.abs(part).max() / s
        assert (np.abs(sent - part) <= step * (1 + 1e-4) + 1e-30).all()
        levels = sent / step if step else sent
        assert np.allclose(levels, np.round(levels), atol=1e-3)
        assert (np.abs(np.round(levels)) <= s).all()


@pytest.mark.parametrize("bits", range(2, 9))
def test_the_largest_of_a_block_and_zero_are_exact(bits):
    x = torch.tensor([0.0, -3.0, 3.0, 0.0, 0.1, 0.0])
    for step in range(50):
        (e,) = exchange(QSGD(bits=bits, block=4), [x], step=step)
        assert e.average[[0, 3, 5]].tolist() == [0, 0, 0]
        assert torch.allclose(e.average[[1, 2, 4]], x[[1, 2, 4]], rtol=1e-6)


def test_levels_come_up_as_often_as_they_should():
    """0.3 among the levels -1, 0, 1: one in 30 % of 20,000 draws (6 deviations: 2 %), never minus one."""
    x = torch.full((20_000,), 0.3)
    x[0] = 1.0
    (e,) = exchange(QSGD(bits=2, block=20_000), [x])
    assert set(e.average.tolist()) == {0.0, 1.0}
    assert float(e.average.mean()) == pytest.approx(0.3, abs=0.02)


def test_ranks_and_steps_round_for_themselves():
    x = torch.linspace(-1, 1, 200)
    method = QSGD(bits=2)

    def codes(**site: int) -> list[int]:
        return method.encode(x, Site(shapes=(x.shape,), **site))[0].tolist()

    assert codes(rank=0, step=3) == codes(rank=0, step=3)
    assert codes(rank=0) != codes(rank=1)
    assert codes(step=0) != codes(step=1)


@pytest.mark.parametrize(("bits", "n", "block"), [(4, 1024, 512), (3, 1001, 100), (8, 7, 512), (5, 0, 8)])
def test_bytes(bits, n, block):
    requests = []
    exchange(QSGD(bits=bits, block=block), [torch.ones(n)], spy=requests.append)
    assert [(r.op, r.nbytes) for r in requests] == [(Op.GATHER, -(-n * bits // 8) + 4 * -(-n // block))]


def test_a_non_finite_element_spoils_its_block_only():
    x = torch.ones(8)
    x[1] = torch.nan
    (e,) = exchange(QSGD(block=4, bits=4), [x])
    assert e.average[:4].isnan().all()
    assert torch.allclose(e.average[4:], torch.ones(4))


def test_tiny_numbers_survive():
    """float32 down to its smallest normal number: the scale is not squared or inverted."""
    x = torch.tensor([2.0**-126, -(2.0**-126)])
    assert torch.equal(exchange(QSGD(bits=2), [x])[0].average, x)


@pytest.mark.parametrize(("field", "value"), [("bits", 1), ("bits", 9), ("block", 0)])
def test_values_outside_their_range_are_refused(field, value):
    with pytest.raises(MethodError, match=f"{field} must be .* got {value}"):
        QSGD(**{field: value})
