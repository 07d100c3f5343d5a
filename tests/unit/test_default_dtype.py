"""A program's `torch.set_default_dtype` changes nothing: types are stated wherever a tensor is made."""

from contextlib import contextmanager

import pytest
import torch

from stenograd.simulate import exchange
from stenograd.testing.checks import SHAPES, data, same, same_states
from stenograd.testing.conformance import cases

CASES = dict(cases())
STEPS = 3


@contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def exchanged(compressor, inputs):
    """Return every rank's exchange after a few steps, as in training and as a caller sees its error."""
    states, seen = None, []
    for step, xs in enumerate(inputs):
        done = exchange(compressor, xs, states, shapes=SHAPES, step=step, want_error=True)
        states = [e.state for e in done]
        seen += done
    last = exchange(compressor, inputs[0], states, shapes=SHAPES, step=STEPS, commits=True)
    return seen + last


@pytest.mark.parametrize("kernels", ["numba", "reference"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=["float64", "bfloat16"])
def test_another_default_dtype_changes_no_bit_of_any_method(dtype, kernels, monkeypatch):
    monkeypatch.setenv("STENOGRAD_KERNELS", kernels)
    inputs = [data(3, seed=step) for step in range(STEPS)]
    for name, compressor in CASES.items():
        wanted = exchanged(compressor, inputs)
        with default_dtype(dtype):
            got = exchanged(compressor, inputs)
        for a, b in zip(got, wanted, strict=True):
            assert same(a.average, b.average), name
            assert same_states(a.state, b.state), name
            assert (a.error is None) == (b.error is None), name
            assert a.error is None or same(a.error, b.error), name
            assert a.finite is None or same(a.finite, b.finite), name
