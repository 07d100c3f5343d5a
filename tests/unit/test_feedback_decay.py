"""Decayed error feedback against a plain loop: e <- beta e + x, send C(e), keep the rest."""

from dataclasses import replace

import pytest
import torch

import stenograd
from stenograd.compression.contract import Site
from stenograd.compression.feedback import ErrorFeedback
from stenograd.compressors.lowbit import LowBit
from stenograd.compressors.powersgd import PowerSGD
from stenograd.compressors.qsgd import QSGD
from stenograd.compressors.sign import Sign
from stenograd.compressors.topk import TopK
from stenograd.simulate import exchange, run
from stenograd.testing.conformance import check

SHAPES = [torch.Size((16, 24)), torch.Size((7,))]
NUMEL = 16 * 24 + 7


def gradients(world, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(NUMEL, generator=generator).to(dtype) for _ in range(world)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("beta", [0.5, 0.95])
def test_the_residual_is_that_of_a_plain_loop(beta, dtype):
    """Top 10 % by torch.topk, on two ranks, for eight steps."""
    codec, k = TopK(ratio=0.1, values="float32"), -(-NUMEL // 10)
    fed = ErrorFeedback(inner=codec, decay=beta)
    wide = torch.promote_types(dtype, torch.float32)
    owed, states = [torch.zeros(NUMEL, dtype=wide) for _ in range(2)], None
    for step in range(8):
        xs = gradients(2, step, dtype)
        out = exchange(fed, xs, states, shapes=SHAPES, step=step)
        states = [e.state for e in out]
        sent = []
        for rank in range(2):
            v = beta * owed[rank] + xs[rank].to(wide)
            places = v.abs().topk(k).indices
            kept = torch.zeros_like(v)
            kept[places] = v[places]
            sent.append(kept)
            owed[rank] = v - kept
        assert torch.allclose(out[0].average, ((sent[0] + sent[1]) / 2).to(dtype), rtol=1e-5, atol=1e-6)
        for state, wanted in zip(states, owed, strict=True):
            assert state["residual"].dtype is wide
            assert torch.allclose(state["residual"], wanted, atol=1e-6)


def test_what_was_lost_t_steps_ago_is_owed_beta_to_the_t_times():
    """A single small element beside a large one, ratio 1/2: 1, then 0.5, 0.25, ... until it is alone."""
    fed = ErrorFeedback(inner=TopK(ratio=0.5), decay=0.5)
    (e,) = exchange(fed, [torch.tensor([1.0, 8.0])])
    for owed in (0.5, 0.25, 0.125):
        (e,) = exchange(fed, [torch.tensor([0.0, 8.0])], [e.state])
        assert e.state["residual"].tolist() == [owed, 0.0]
    (e,) = exchange(fed, [torch.zeros(2)], [e.state])
    assert e.average.tolist() == [0.0625, 0.0]


INNER = [TopK(ratio=0.1), Sign(block=16), PowerSGD(rank=2), QSGD(), LowBit()]


@pytest.mark.parametrize("inner", INNER, ids=str)
def test_without_decay_the_residual_goes_straight_to_the_inner_compressor(inner):
    """Bit for bit what the inner compressor's own pass over x and residual gives, on four ranks."""
    fed, states = ErrorFeedback(inner=inner), None
    residuals = [torch.zeros(NUMEL) for _ in range(4)]
    for step in range(4):
        xs, ranks = gradients(4, step), []
        for rank, x in enumerate(xs):
            site = Site(shapes=tuple(SHAPES), rank=rank, world_size=4, step=step)
            mine = inner.init(x, site) if states is None else states[rank]
            own = {key: t for key, t in mine.items() if key != "residual"}
            ranks.append(inner.exchange(x.clone(), residuals[rank].clone(), own, replace(site, error=True)))
        wanted = run(ranks)
        out = exchange(fed, xs, states, shapes=SHAPES, step=step, commits=True)
        states, residuals = [e.state for e in out], [e.error for e in wanted]
        assert torch.equal(out[0].average, wanted[0].average)
        for state, residual in zip(states, residuals, strict=True):
            assert torch.equal(state["residual"], residual)


@pytest.mark.parametrize("inner", [TopK(ratio=0.1), Sign(block=16), PowerSGD(rank=2)], ids=str)
def test_decayed_feedback_conforms(inner):
    check(ErrorFeedback(inner=inner, decay=0.9))


def test_the_old_residual_is_whole_until_the_step_counts():
    fed, xs = ErrorFeedback(inner=TopK(ratio=0.1), decay=0.9), gradients(2, 0)
    states = [e.state for e in exchange(fed, xs)]
    before = [s["residual"].clone() for s in states]
    exchange(fed, gradients(2, 1), states, commits=True)
    assert all(torch.equal(s["residual"], old) for s, old in zip(states, before, strict=True))


def test_a_method_takes_it():
    how = stenograd.method("topk:ratio=0.1,feedback_decay=0.95")
    assert how.compressor == ErrorFeedback(inner=TopK(ratio=0.1), decay=0.95)
    assert stenograd.method(str(how)) == how
