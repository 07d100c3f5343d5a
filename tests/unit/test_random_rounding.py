"""TernGrad and natural compression against their definitions."""

import math

import numpy as np
import pytest
import torch

import stenograd
from stenograd.compressors.natural import Natural
from stenograd.compressors.terngrad import TernGrad
from stenograd.errors import MethodError
from stenograd.simulate import exchange

SHAPES = [torch.Size(s) for s in [(8, 5), (0,), (3,), ()]]


def gradient(seed=0):
    return torch.randn(44, generator=torch.Generator().manual_seed(seed))


def test_terngrad_sends_minus_one_zero_or_one_times_each_tensors_largest():
    x = gradient()
    x[40:43] /= 1000  # the second tensor has a scale of its own
    for step in range(20):
        sent = exchange(TernGrad(), [x], shapes=SHAPES, step=step)[0].average
        for part, got in zip(x.split([40, 0, 3, 1]), sent.split([40, 0, 3, 1]), strict=True):
            if len(part):
                top = part.abs().max()
                assert set((got / top).tolist()) <= {-1.0, 0.0, 1.0}
                assert (got * part >= 0).all()
                assert got[part.abs().argmax()] == part[part.abs().argmax()]


def test_terngrad_sends_an_element_as_often_as_it_is_large():
    """0.3 of the largest: 30 % of 20,000 draws, with 6 deviations 2 %."""
    x = torch.full((20_000,), -0.3)
    x[0] = 1.0
    sent = exchange(TernGrad(), [x])[0].average
    assert set(sent[1:].tolist()) == {-1.0, 0.0}
    assert float(sent[1:].mean()) == pytest.approx(-0.3, abs=0.02)


def test_clipping_limits_each_tensor_by_its_root_mean_square():
    """15 ones and a 9: sqrt((15 + 81) / 16) = 2.449, so with clip=2 the largest is 4.899."""
    x = torch.ones(16)
    x[3] = 9.0
    (e,) = exchange(TernGrad(clip=2.0), [x], want_error=True)
    top = 2 * math.sqrt((15 + 81) / 16)
    assert float(e.average[3]) == pytest.approx(top, rel=1e-6)
    huge = exchange(TernGrad(clip=2.0), [1e20 * x])[0].average  # whose squares are beyond float32
    assert float(huge[3]) == pytest.approx(1e20 * top, rel=1e-6)
    assert float(e.error[3]) == pytest.approx(9 - top, rel=1e-5)
    assert {round(v, 4) for v in e.average.tolist()} <= {0.0, round(top, 4)}
    same = torch.full((5,), 7.0)
    assert exchange(TernGrad(clip=1.0), [same])[0].average.tolist() == pytest.approx([7.0] * 5, rel=1e-6)


def test_clipping_limits_what_ranks_add_up_of_their_own_chunks():
    """From four ranks on an owner's chunk is not encoded. A 4096 among ones: the limit is 128.02."""
    x = torch.ones(4096)
    x[0] = 4096.0
    ranks = exchange(TernGrad(clip=2.0), [x] * 4, want_error=True)
    average = ranks[0].average
    assert float(average.max()) == pytest.approx(2 * math.sqrt((4095 + 4096**2) / 4096), rel=1e-4)
    sent = torch.stack([x - rank.error for rank in ranks]).mean(0)
    torch.testing.assert_close(sent, average, rtol=1e-4, atol=1e-3)


def test_natural_sends_one_of_the_two_powers_of_two_around():
    x = gradient()
    for step in range(20):
        sent = exchange(Natural(), [x], shapes=SHAPES, step=step)[0].average.numpy().astype(np.float64)
        below = np.exp2(np.floor(np.log2(np.abs(x.numpy().astype(np.float64)))))
        assert np.all((np.abs(sent) == below) | (np.abs(sent) == 2 * below))
        assert np.all(np.sign(sent) == np.sign(x.numpy()))


def test_natural_takes_the_upper_as_often_as_it_should():
    """5 lies a quarter of the way from 4 to 8: one in four of 20,000 draws, with 6 deviations 2 %."""
    sent = exchange(Natural(), [torch.full((20_000,), 5.0)])[0].average
    assert set(sent.tolist()) == {4.0, 8.0}
    assert float((sent == 8).float().mean()) == pytest.approx(0.25, abs=0.02)


def test_natural_keeps_powers_of_two_over_its_whole_range():
    """Exact from 2^0 down to 2^-125 of the largest; 2^-127 of it is below the smallest and becomes 0."""
    x = torch.tensor([2.0**60, -(2.0**59), 2.0**-65, 2.0**-67, 0.0])
    for step in range(10):
        assert exchange(Natural(), [x], step=step)[0].average.tolist() == [*x[:3].tolist(), 0.0, 0.0]


@pytest.mark.parametrize(("codec", "bits"), [(TernGrad(), 2), (TernGrad(clip=2.5), 2), (Natural(), 8)])
def test_bytes(codec, bits):
    """Three tensors that are not empty have a float32 each; an empty one has none."""
    spied = []
    exchange(codec, [gradient()] * 3, shapes=SHAPES, spy=spied.append)
    assert [r.nbytes for r in spied] == [44 * bits // 8 + 3 * 4]


@pytest.mark.parametrize("codec", [TernGrad(), Natural()], ids=str)
def test_ranks_and_steps_draw_for_themselves(codec):
    """Two ranks with the same x send different things, and so does one rank at another step."""
    x = torch.linspace(0.1, 1, 500)
    first = exchange(codec, [x, x])[0].average
    alone = exchange(codec, [x])[0].average
    later = exchange(codec, [x], step=1)[0].average
    again = exchange(codec, [x])[0].average
    assert torch.equal(alone, again)
    assert not torch.equal(alone, later)
    assert not torch.equal(first, alone)


@pytest.mark.parametrize("codec", [TernGrad(), Natural()], ids=str)
def test_from_four_ranks_on_all_get_the_same_and_it_is_right_on_average(codec):
    """Mean of 150 exchanges of five ranks within 6 standard errors of the mean of x, element by element."""
    generator = torch.Generator().manual_seed(4)
    xs = [torch.randn(2048, generator=generator) for _ in range(5)]
    seen = []
    for step in range(150):
        out = exchange(codec, xs, step=step)
        assert all(torch.equal(e.average, out[0].average) for e in out)
        seen.append(out[0].average)
    many = torch.stack(seen).double()
    off = (many.mean(0) - torch.stack(xs).double().mean(0)).abs()
    assert (off <= 6 * many.std(0) / math.sqrt(150) + 1e-5).all()


@pytest.mark.parametrize("clip", ["-1", "inf", "nan"])
def test_a_wrong_clip_is_named(clip):
    with pytest.raises(MethodError, match="clip must be at least 0 and finite"):
        stenograd.method(f"terngrad:clip={clip}")
