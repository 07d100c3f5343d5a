"""Low-bit formats against their definition: the nearest level, by a search over all of them."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stenograd
from stenograd.compression.contract import Site
from stenograd.compressors.lowbit import LowBit
from stenograd.errors import MethodError, WireError
from stenograd.simulate import exchange

# Written out: a sign, three exponent bits and no mantissa; a power of two from 1/64 to 1.
E3M0 = [0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]
LEVELS = {"e3m0": [*E3M0, *(-v for v in E3M0)], "int4": [k / 7 for k in range(-7, 8)], "int2": [-1, 0, 1]}
vectors = st.lists(st.floats(-100, 100, width=32), min_size=1, max_size=60)


def sent_of(codec, x):
    return exchange(codec, [x])[0].average


def test_all_16_codes_of_e3m0():
    """Code c is sign (bit 3) and exponent e (bits 0 to 2): 0 for e = 0, else 2^(e - 7), times the scale 8."""
    codes = torch.arange(16, dtype=torch.uint8)
    packed = codes[0::2] | codes[1::2] << 4
    codec, like = LowBit(), torch.empty(16)
    got = codec.decode((packed, torch.tensor([8.0])), like, Site(shapes=(like.shape,)))
    assert got.tolist() == [8 * v for v in LEVELS["e3m0"]]
    again, scales = codec.encode(got, Site(shapes=(like.shape,)))
    assert scales.tolist() == [8.0]
    written = [int(byte) >> shift & 15 for byte in again for shift in (0, 4)]
    assert written == [*range(8), 0, *range(9, 16)]  # minus zero is written as zero


@pytest.mark.parametrize("name", LEVELS)
@settings(max_examples=80)
@given(values=vectors, block=st.integers(1, 50))
def test_every_element_goes_to_the_nearest_level(name, values, block):
    """No level of the block is nearer than the one that was sent, up to a rounding of float32."""
    x = np.array(values, dtype=np.float32)
    sent = sent_of(LowBit(format=name, block=block), torch.from_numpy(x)).numpy()
    for i in range(0, len(x), block):
        part, got = x[i : i + block].astype(np.float64), sent[i : i + block]
        levels = np.abs(part).max() * np.array(LEVELS[name], dtype=np.float64)
        nearest = np.abs(part[:, None] - levels).min(1)
        assert (np.abs(got - part) <= nearest + 1e-6 * np.abs(levels).max() + 1e-40).all()
        assert (np.abs(got[:, None] - levels).min(1) <= 1e-6 * np.abs(levels).max() + 1e-40).all()


@pytest.mark.parametrize("name", LEVELS)
@settings(max_examples=60)
@given(values=vectors, block=st.integers(1, 50))
def test_what_is_sent_twice_is_sent_unchanged(name, values, block):
    codec = LowBit(format=name, block=block)
    once = sent_of(codec, torch.tensor(values))
    assert torch.equal(sent_of(codec, once), once)


def test_values_around_the_boundaries_of_e3m0():
    """Half-way between 1/2 and 1 is 3/4; below the smallest level, 1/64, half-way to zero is 1/128."""
    x = torch.tensor([1.0, 0.76, 0.74, -0.38, -0.37, 0.012, 0.0079, 0.0077, -0.0001])
    wanted = [1.0, 1.0, 0.5, -0.5, -0.25, 1 / 64, 1 / 64, 0.0, 0.0]
    assert sent_of(LowBit(), x).tolist() == wanted


@pytest.mark.parametrize(("name", "relative"), [("e3m0", 1 / 3), ("int4", 1 / 14), ("int2", 1 / 2)])
def test_error_bounds(name, relative):
    """e3m0: a third of the element from 3/256 of the scale on; the integers: half a level of the scale."""
    x = torch.rand(100_000, generator=torch.Generator().manual_seed(0)) * 2 - 1
    x[0] = 1.0
    error = (sent_of(LowBit(format=name, block=len(x)), x) - x).abs()
    bound = x.abs() if name == "e3m0" else torch.ones(())
    kept = x.abs() >= 0.75 / 64
    worst = float((error / bound)[kept].max())
    assert 0.99 * relative < worst <= relative * (1 + 1e-5)
    assert (error <= x.abs() * (1 + 1e-6)).all()


@pytest.mark.parametrize(("name", "bits"), [("e3m0", 4), ("int4", 4), ("int2", 2)])
def test_bytes(name, bits):
    """n b / 8 and one float32 per 512 elements: 1,000 elements have two blocks."""
    spied = []
    exchange(LowBit(format=name), [torch.ones(1000)] * 2, spy=spied.append)
    assert [r.nbytes for r in spied] == [1000 * bits // 8 + 8]


def test_from_four_ranks_on_averages_are_rounded_twice_and_residuals_keep_both_losses():
    """mean(x - error) is the average, whatever the second rounding loses."""
    generator = torch.Generator().manual_seed(1)
    xs = [torch.randn(4096, generator=generator) for _ in range(5)]
    out = exchange(LowBit(), xs, want_error=True)
    kept = torch.stack([x - e.error for x, e in zip(xs, out, strict=True)]).double().mean(0)
    assert torch.allclose(out[0].average.double(), kept, atol=1e-5)
    assert all(torch.equal(e.average, out[0].average) for e in out)


def test_a_layer_keeps_its_own_scale():
    x = torch.tensor([1000.0, 1.0, 0.002, 0.001])
    done = exchange(LowBit(format="int4"), [x], shapes=[torch.Size((2,)), torch.Size((2,))])
    assert done[0].average[2:].tolist() == pytest.approx([0.002, 0.001], rel=0.2)


def test_wrong_arguments_and_messages_are_refused():
    with pytest.raises(MethodError, match="format must be one of e3m0, int4, int2, got 'e2m1': use e3m0"):
        stenograd.method("lowbit:format=e2m1")
    with pytest.raises(MethodError, match="block must be at least 1, got 0: use 512"):
        LowBit(block=0)
    like, site = torch.empty(16), Site(shapes=(torch.Size((16,)),))
    with pytest.raises(WireError):
        LowBit().decode((torch.zeros(7, dtype=torch.uint8), torch.ones(1)), like, site)
    with pytest.raises(WireError):
        LowBit().decode((torch.zeros(8, dtype=torch.uint8), torch.ones(2)), like, site)
