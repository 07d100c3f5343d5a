"""LoCo against a plain loop over ranks: a moving average of errors in 8 bits, cleared from time to time."""

import pytest
import torch

import stenograd
from stenograd.compression.feedback import LoCo
from stenograd.compressors.lowbit import LowBit
from stenograd.compressors.powersgd import PowerSGD
from stenograd.compressors.sign import Sign
from stenograd.compressors.topk import TopK
from stenograd.errors import MethodError
from stenograd.simulate import exchange
from stenograd.testing.conformance import check

SHAPES = [torch.Size((40, 30)), torch.Size((5,)), torch.Size((0,)), torch.Size(())]
NUMELS = [1200, 5, 0, 1]


def gradients(world, step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(sum(NUMELS), generator=generator).to(dtype) for _ in range(world)]


def rounded(residual):
    """Round each block of 512 to 255 steps of its largest magnitude; blocks end where tensors end."""
    out = []
    for part in residual.split(NUMELS):
        for block in part.split(512):
            step = block.abs().max() / 127 if block.numel() else torch.tensor(0.0)
            out.append(torch.round(block / step) * step if step > 0 else block)
    return torch.cat(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_it_is_a_plain_loop(dtype):
    """Three ranks, memory 0.8, cleared after 4 exchanges: int4 of x + r, a fifth of the error kept."""
    inner, world = LowBit(format="int4"), 3
    method = LoCo(inner=inner, reset_steps=4)
    owed, states = [torch.zeros(sum(NUMELS)) for _ in range(world)], None
    for step in range(7):
        xs = gradients(world, step, dtype)
        out = exchange(method, xs, states, shapes=SHAPES, step=step)
        states = [e.state for e in out]
        sent = []
        for rank, x in enumerate(xs):
            v = x.to(torch.promote_types(dtype, torch.float32)) + owed[rank]
            (alone,) = exchange(inner, [v], shapes=SHAPES, want_error=True)
            sent.append(v - alone.error)
            moved = 0.8 * owed[rank] + 0.2 * alone.error
            owed[rank] = torch.zeros_like(moved) if step % 4 == 3 else rounded(moved).float()
        rtol = 1e-2 if dtype is torch.bfloat16 else 1e-5
        assert torch.allclose(out[0].average.float(), (sum(sent) / world).float(), rtol=rtol, atol=1e-5)
        if step % 4 == 3:
            assert not any(state["loco_codes"].any() for state in states)


def test_what_is_lost_every_time_is_sent_in_the_end():
    """0.9 beside 8 is below half of int2's only level; r grows by a fifth of 0.9 until it is not."""
    method, state, sent = LoCo(inner=LowBit(format="int2")), None, torch.zeros(2)
    for step in range(600):
        (out,) = exchange(method, [torch.tensor([8.0, 0.9])], None if state is None else [state], step=step)
        state, sent = out.state, sent + out.average
    assert sent[1] / 600 == pytest.approx(0.9, rel=0.1)


def test_a_residual_takes_a_byte_per_element():
    (out,) = exchange(LoCo(inner=LowBit()), [torch.randn(5120)], shapes=[torch.Size((5120,))])
    nbytes = sum(t.numel() * t.element_size() for t in out.state.values())
    assert nbytes == 5120 + 4 * 10 + 8


INNER = [LowBit(format="int4"), LowBit(), Sign(block=16), TopK(ratio=0.1), PowerSGD(rank=2)]


@pytest.mark.parametrize("inner", INNER, ids=str)
def test_conformance(inner):
    check(LoCo(inner=inner))
    check(LoCo(inner=inner, memory=0.0, reset_steps=2))


def test_states_of_other_numbers_of_ranks_start_from_nothing():
    """Counters go on, and codes that differ from rank to rank are no error."""
    method, states = LoCo(inner=LowBit(format="int4")), None
    for step in range(3):
        out = exchange(method, gradients(2, step), states, shapes=SHAPES, step=step)
        states = [e.state for e in out]
    about = {"format": 1, "method": "m", "step": 3, "skipped": 0, "world_size": 2}
    saved = [
        {
            **about,
            "rank": rank,
            "parameters": {
                "w": {"loco_codes": s["loco_codes"][:1200], "loco_age": s["loco_age/0"]},
                "b": {"loco_codes": s["loco_codes"][1200:1205], "loco_scales": s["loco_scales/1"]},
            },
        }
        for rank, s in enumerate(states)
    ]
    assert any(s["loco_codes"].any() for s in states)
    for new in stenograd.reshard(saved, 3):
        w, b = new["parameters"]["w"], new["parameters"]["b"]
        assert not w["loco_codes"].any()
        assert w["loco_codes"].dtype == torch.int8
        assert not b["loco_scales"].any()
        assert int(w["loco_age"]) == 3


def test_what_does_not_fit_is_refused():
    assert str(stenograd.method("lowbit:feedback=loco")) == "lowbit:feedback=loco"
    for text, message in {
        "qsgd:feedback=loco": "LoCo needs a biased compressor",
        "sign:majority=true,feedback=loco": "whose average is a mean",
        "lowbit:feedback=loco,feedback_decay=0.5": "feedback_decay needs error feedback",
        "diloco/lowbit:feedback=loco": "it accumulates gradients by itself",
        "lowbit:feedback=locomotive": "must be true or false, or ef21 or ef21-sgdm or loco",
    }.items():
        with pytest.raises(MethodError, match=message):
            stenograd.method(text)
    with pytest.raises(MethodError, match=r"memory must be in \[0, 1\)"):
        LoCo(inner=LowBit(), memory=1.0)
    with pytest.raises(MethodError, match="reset_steps must be at least 1"):
        LoCo(inner=LowBit(), reset_steps=0)
