"""Error feedback: the examples of the field, and what it must not touch."""

import pytest
import torch

from stenograd.compression.feedback import ErrorFeedback
from stenograd.compressors.cast import Cast
from stenograd.compressors.identity import Identity
from stenograd.compressors.topk import TopK
from stenograd.errors import MethodError, TensorTypeError
from stenograd.simulate import exchange
from stenograd.testing.checks import SHAPES, data
from stenograd.testing.conformance import cases


def test_topk_residual_step_by_step():
    """v = [.1, .9, -.3, .2], a quarter: .9 is sent, [.1, 0, -.3, .2] stays; with g = 0 then -.3, .2, .1."""
    method, v = ErrorFeedback(inner=TopK(ratio=0.25, values="float32")), torch.tensor([0.1, 0.9, -0.3, 0.2])
    (e,) = exchange(method, [v])
    assert e.average.tolist() == torch.tensor([0, 0.9, 0, 0]).tolist()
    assert e.state["residual"].tolist() == torch.tensor([0.1, 0, -0.3, 0.2]).tolist()
    sent = []
    for step in (1, 2, 3, 4):
        (e,) = exchange(method, [torch.zeros(4)], [e.state], step=step)
        sent.append(e.average.sum())
    assert sent == pytest.approx([-0.3, 0.2, 0.1, 0])


def test_a_complete_selection_is_dense():
    xs = [torch.tensor([1.0, -2.0]), torch.tensor([3.0, 0.5])]
    for e in exchange(ErrorFeedback(inner=TopK(ratio=1.0)), xs):
        assert e.average.tolist() == [2, -0.75]
        assert not e.state["residual"].any()


def test_without_feedback_dropped_mass_is_lost():
    """0.2 is never among the largest quarter: never sent without feedback, sent in full with it."""
    x = torch.tensor([1.0, 0.2, 0, 0])
    plain, fed, states = torch.zeros(4), torch.zeros(4), None
    method = ErrorFeedback(inner=TopK(ratio=0.25))
    for step in range(60):
        plain += exchange(TopK(ratio=0.25), [x], step=step)[0].average
        (e,) = exchange(method, [x], states, step=step)
        states = [e.state]
        fed += e.average
    assert plain[1] == 0
    assert float((fed + e.state["residual"])[1]) == pytest.approx(12, rel=1e-5)
    assert fed[1] > 10


def test_the_residual_of_16_bit_gradients_is_float32():
    """bfloat16 has 8 bits: 256 steps of 1/256 beside 1 would all vanish in a bfloat16 residual."""
    method, states = ErrorFeedback(inner=Cast(dtype="bfloat16")), None
    x = torch.tensor([1 / 512], dtype=torch.bfloat16)
    for step in range(3):
        (e,) = exchange(method, [x], states, step=step)
        states = [e.state]
    assert e.state["residual"].dtype == torch.float32
    assert e.average.dtype == torch.bfloat16


def test_float64_keeps_its_precision():
    (e,) = exchange(ErrorFeedback(inner=TopK(ratio=0.5)), [torch.tensor([1.0, 1e-12], dtype=torch.float64)])
    assert e.state["residual"].tolist() == [0, 1e-12]


def test_the_error_asked_for_is_that_of_this_exchange():
    """x = 1, residual 2: 3 is sent, so x - error = 3 and error = -2."""
    method = ErrorFeedback(inner=TopK(ratio=1.0))
    (e,) = exchange(method, [torch.ones(1)], [{"residual": torch.tensor([2.0])}], want_error=True)
    assert e.average.tolist() == [3]
    assert e.error.tolist() == [-2]


def test_lossless_compressors_are_refused():
    with pytest.raises(MethodError, match="loses nothing"):
        ErrorFeedback(inner=Identity())


def test_integers_are_refused():
    with pytest.raises(TensorTypeError, match=r"got torch.int64: convert it"):
        exchange(ErrorFeedback(inner=TopK()), [torch.ones(3, dtype=torch.int64)])


@pytest.mark.parametrize("name", [name for name, c in cases() if isinstance(c, ErrorFeedback)])
def test_narrow_types_send_no_more_than_float32(name):
    """With a residual, 16-bit numbers are float32 before they are written, so as many bytes travel."""
    codec, sent = dict(cases())[name], {}
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for world in (2, 5):
            xs, asked = [x.to(dtype) for x in data(world)], []
            exchange(codec, xs, shapes=SHAPES, spy=lambda request, asked=asked: asked.append(request.nbytes))
            sent[dtype, world] = sum(asked)
    for (dtype, world), nbytes in sent.items():
        assert nbytes <= sent[torch.float32, world], (dtype, world)
