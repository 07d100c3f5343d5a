"""Chunks, two-bit values and the mean over senders, against plain loops over chunks and ranks."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gradients import ranks_of

import stenograd
from stenograd.compression.contract import Site
from stenograd.compression.feedback import ErrorFeedback
from stenograd.compression.sparse import pack_binned, unpack_binned
from stenograd.compressors.topk import TopK
from stenograd.errors import MethodError, WireError
from stenograd.simulate import exchange

SHAPES = [torch.Size(s) for s in [(9, 11), (3,), (0,), (), (130,)]]
NUMEL = sum(s.numel() for s in SHAPES)


def loop_over_chunks(x, shapes, chunk, ratio):
    """What one rank keeps: tensor by tensor, chunk by chunk, with torch.topk."""
    kept, start = torch.zeros_like(x), 0
    for shape in shapes:
        for begin in range(start, start + shape.numel(), chunk):
            part = x[begin : min(begin + chunk, start + shape.numel())]
            k = max(1, round(ratio * len(part)))
            places = torch.topk(part.abs(), k).indices
            kept[begin + places] = part[places]
        start += shape.numel()
    return kept


@pytest.mark.parametrize("chunk", [1, 7, 16, 64, 1000])
@pytest.mark.parametrize("ratio", [0.02, 0.25, 1.0])
@pytest.mark.parametrize("compact", [True, False])
def test_chunks_are_selected_as_a_plain_loop_does(chunk, ratio, compact):
    xs = ranks_of(3, NUMEL)
    codec = TopK(ratio=ratio, chunk=chunk, compact=compact, values="float32")
    out = exchange(codec, xs, shapes=SHAPES, want_error=True)
    kept = [loop_over_chunks(x, SHAPES, chunk, ratio) for x in xs]
    assert torch.allclose(out[0].average, (kept[0] + kept[1] + kept[2]) / 3, atol=1e-7)
    for x, mine, e in zip(xs, kept, out, strict=True):
        assert torch.equal(e.error, x - mine)


def test_what_is_kept_of_a_tensor_does_not_depend_on_its_neighbours():
    x = ranks_of(1, NUMEL)[0]
    (together,) = exchange(TopK(ratio=0.1, chunk=16), [x], shapes=SHAPES)
    pieces = x.split([s.numel() for s in SHAPES])
    apart = [exchange(TopK(ratio=0.1, chunk=16), [p])[0].average for p in pieces]
    assert torch.equal(together.average, torch.cat(apart))


@pytest.mark.parametrize("world", [1, 2, 5])
def test_the_mean_over_senders_is_a_plain_loop(world):
    xs = ranks_of(world, NUMEL, seed=world)
    codec = TopK(ratio=0.1, chunk=16, divide="senders", values="float32")
    out = exchange(codec, xs, shapes=SHAPES)
    sent = [loop_over_chunks(x, SHAPES, 16, 0.1).double().numpy() for x in xs]
    for i in range(NUMEL):
        values = [s[i] for s in sent if s[i]]
        assert out[0].average[i].item() == pytest.approx(np.mean(values) if values else 0, rel=1e-5)
    assert all(torch.equal(e.average, out[0].average) for e in out)


def test_senders_also_without_chunks():
    """Ranks send 8 and 4 at place 0, and only one sends place 2: (8 + 4) / 2, and 3 / 1."""
    xs = [torch.tensor([8.0, 1.0, 3.0, 0.0]), torch.tensor([4.0, 2.0, 0.0, 0.0])]
    kept = exchange(TopK(ratio=0.5, divide="senders"), xs)[0].average
    assert kept.tolist() == [6.0, 2.0, 3.0, 0.0]
    assert exchange(TopK(ratio=0.5), xs)[0].average.tolist() == [6.0, 1.0, 1.5, 0.0]


def test_keeping_whole_chunks_leaves_nothing_behind_whatever_the_decay():
    fed = ErrorFeedback(inner=TopK(ratio=1.0, chunk=16, divide="senders", values="float32"))
    states = None
    for step in range(3):
        xs = ranks_of(2, NUMEL, seed=step)
        out = exchange(fed, xs, states, shapes=SHAPES, step=step)
        states = [e.state for e in out]
        assert torch.allclose(out[0].average, (xs[0] + xs[1]) / 2, atol=1e-7)
        assert not any(s["residual"].any() for s in states)


def test_in_float64_what_was_sent_and_the_residual_add_up_exactly_enough():
    """Sum of sent + e = sum of Delta: 20 steps of float64 numbers of order 1 round by far less than 1e-13."""
    fed = ErrorFeedback(inner=TopK(ratio=1 / 64, chunk=64))
    given, sent, states = torch.zeros(NUMEL, dtype=torch.float64), 0, None
    for step in range(20):
        x = ranks_of(1, NUMEL, seed=step)[0].double()
        (e,) = exchange(fed, [x], states, shapes=SHAPES, step=step)
        given, sent, states = given + x, sent + e.average, [e.state]
    assert (sent + states[0]["residual"] - given).abs().max() < 1e-13


def four_bins(values):
    """The definition, in NumPy: bins of 1.5 sigma around the mean, read back as their means."""
    v = np.asarray(values, dtype=np.float64)
    mean, sigma = v.mean(), v.std()
    edges = [mean - 1.5 * sigma, mean, mean + 1.5 * sigma]
    code = np.array([0 if x <= edges[0] else 1 if x < edges[1] else 2 if x < edges[2] else 3 for x in v])
    return code, np.array([v[code == b].mean() for b in code])


@settings(max_examples=60)
@given(st.lists(st.floats(-50, 50, width=16), min_size=1, max_size=40), st.integers(0, 40))
def test_two_bits_are_the_means_of_four_bins_per_tensor(values, cut):
    cut = min(cut, len(values))
    x, places, numels = torch.tensor(values), torch.arange(len(values)), [cut, 0, len(values) - cut]
    payload = pack_binned(x, places, numels)
    got = unpack_binned(payload, places, numels).numpy()
    parts = [p for p in (values[:cut], values[cut:]) if p]
    wanted = np.concatenate([four_bins(p)[1] for p in parts])
    # a value within a rounding of a bin's edge may fall to either side of it
    edges = [abs(np.array(p) - e).min() for p in parts for e in _edges(p)]
    if min(edges) > 1e-9:
        assert np.allclose(got, wanted, rtol=1e-6, atol=1e-30)
    assert (payload[0].numel(), payload[1].numel()) == (math.ceil(len(values) / 4), 4 * len(parts))


def _edges(part):
    v = np.asarray(part, dtype=np.float64)
    return [v.mean() - 1.5 * v.std(), v.mean(), v.mean() + 1.5 * v.std()] if v.std() else [math.inf]


def test_both_signs_get_two_levels_each():
    """For numbers around zero the bins are alike on both sides, so C(-x) = -C(x)."""
    x = torch.randn(1000, generator=torch.Generator().manual_seed(3))
    x = torch.cat([x, -x])
    codec = TopK(ratio=0.25, values="int2")
    plus, minus = (exchange(codec, [y])[0].average for y in (x, -x))
    assert torch.allclose(plus, -minus, atol=1e-6)
    assert plus.unique().numel() == 5  # four levels and zero


def test_bytes_of_a_sparse_pseudo_gradient():
    """64 of 4,096 elements: 14 bits apiece in the paper; here 8 bits at most for a place, 2 for a value.

    Two chunks: k = 128, n = 8,192, l = 6 low bits, 128 + 128 unary bits, so 1,024 bits; 256 bits of values;
    four means.
    """
    spied = []
    codec = TopK(ratio=1 / 64, chunk=4096, values="int2")
    exchange(codec, [torch.randn(64, 128)] * 2, spy=spied.append)
    assert [r.nbytes for r in spied] == [128 + 32 + 16]


def test_a_damaged_message_is_refused():
    codec, like = TopK(ratio=0.5, values="int2", compact=False), torch.zeros(8)
    site = Site(shapes=(like.shape,))
    places, codes, means = codec.encode(torch.arange(8.0), site)
    with pytest.raises(WireError, match="1 tensors have 4 float32 means, got 3"):
        codec.decode((places, codes, means[:3]), like, site)
    with pytest.raises(WireError, match="indices lie in"):
        codec.decode((places + 5, codes, means), like, site)


@pytest.mark.parametrize("chunk", [0, 1000])
@pytest.mark.parametrize("world", [1, 6])
def test_the_ratio_falls_by_the_same_factor_per_step(world, chunk):
    """From 0.4 by a half per step to 0.05 after three, of 1,000: 400, 200, 100, 50 and 50 are sent."""
    codec = TopK(ratio=0.05, ratio_from=0.4, ramp_steps=3, compact=False, chunk=chunk, values="float32")
    counts = []
    for step in range(5):
        spied = []
        xs = [torch.randn(1000, generator=torch.Generator().manual_seed(step + r)) for r in range(world)]
        exchange(codec, xs, step=step, spy=spied.append)
        counts.append(sum(r.nbytes for r in spied) // 8)
    assert counts == pytest.approx([400, 200, 100, 50, 50], abs=1)  # the factor is rounded


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("topk:chunk=-1", "chunk must be at least 1, got -1"),
        ("topk:divide=ranks2", "divide must be one of ranks, senders, got 'ranks2'"),
        ("topk:values=int3", "values must be one of float32, bfloat16, int8, int2"),
        ("topk:chunk=64,reduce=regions", "reduce must be auto or gather with chunk"),
        ("topk:divide=senders,reduce=regions", "reduce must be auto or gather with chunk"),
        ("topk:ramp_steps=4,reduce=regions", "reduce must be auto or gather with chunk"),
        ("topk:ramp_steps=4,ratio=0.5", r"ratio_from must be in \[0.5, 1\], from the ratio up, got 0.25"),
    ],
)
def test_wrong_keys_are_named(text, says):
    with pytest.raises(MethodError, match=says):
        stenograd.method(text)
