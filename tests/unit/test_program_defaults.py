"""A program's default dtype and device change nothing: both are stated wherever a tensor is made."""

import ast
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

import stenograd
from stenograd.catalog.presets import PRESETS
from stenograd.catalog.registry import schedules
from stenograd.simulate import exchange, ranks
from stenograd.sync.step_settings import step_together
from stenograd.testing.checks import SHAPES, data, same, same_states
from stenograd.testing.conformance import cases
from stenograd.testing.methods import suite
from stenograd.wire.driver import Driver

CASES = dict(cases())
STEPS = 2
# What makes a tensor where torch.set_default_device says, unless it is told where.
MAKERS = {
    "Generator",
    "arange",
    "asarray",
    "as_tensor",
    "empty",
    "empty_strided",
    "eye",
    "full",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "range",
    "scalar_tensor",
    "sparse_coo_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
}
# And what takes torch.set_default_dtype's type, whatever it is given.
REAL_MAKERS = {
    "empty",
    "empty_strided",
    "eye",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "rand",
    "randn",
    "zeros",
}


@contextmanager
def defaults(dtype, device):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
        torch.set_default_device(None)


def exchanged(compressor, inputs):
    """Return every rank's exchange after a few steps, as a caller sees its error, and what was sent."""
    states, seen, asked = None, [], []
    for step, xs in enumerate(inputs):
        done = exchange(compressor, xs, states, shapes=SHAPES, step=step, want_error=True, spy=asked.append)
        states = [e.state for e in done]
        seen += done
    seen += exchange(compressor, inputs[0], states, shapes=SHAPES, step=STEPS, commits=True)
    return seen, [request.nbytes for request in asked]


@pytest.mark.parametrize("kernels", ["numba", "reference"])
def test_other_defaults_change_neither_bits_nor_bytes_of_any_method(kernels, monkeypatch):
    """Nothing can be computed on "meta", so whatever was made there would raise."""
    monkeypatch.setenv("STENOGRAD_KERNELS", kernels)
    inputs = [data(3, seed=step) for step in range(STEPS)]
    for name, compressor in CASES.items():
        wanted, sent = exchanged(compressor, inputs)
        for dtype in (torch.float64, torch.bfloat16):
            with defaults(dtype, "meta"):
                got, nbytes = exchanged(compressor, inputs)
            _expect_same((name, dtype), got, wanted)
            assert nbytes == sent, (name, dtype)


def _expect_same(name, got, wanted):
    for a, b in zip(got, wanted, strict=True):
        assert same(a.average, b.average), name
        assert same_states(a.state, b.state), name
        assert (a.error is None) == (b.error is None), name
        assert a.error is None or same(a.error, b.error), name
        assert a.finite is None or same(a.finite, b.finite), name


def test_a_scaler_is_updated_in_a_step_without_gradients():
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)], lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    with defaults(torch.float64, "cpu"):
        assert step_together(scaler, optimizer, Driver())
    assert scaler.get_scale() == 65536.0


@pytest.mark.parametrize("how", [*suite(), *schedules(), *PRESETS])
def test_training_ignores_another_default_device(how):
    """The default is the thread's, so each simulated rank sets it; models are on the CPU."""

    def rank_of(driver, device):
        model = nn.Sequential(nn.Linear(6, 8, device="cpu"), nn.Linear(8, 2, device="cpu"))
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.arange(p.numel(), device="cpu").view(p.shape) / p.numel() - 0.5)
        x = torch.arange(24, dtype=torch.float32, device="cpu").view(4, 6) / (10 + driver.rank)
        with defaults(torch.float32, device):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            sync = stenograd.distribute(model, optimizer, how, group=driver)
            for _ in range(3):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            sync.load_state_dict(sync.state_dict())
            with sync.consensus():
                found = torch.cat([p.detach().view(-1) for p in model.parameters()])
            sync.close()
        return found

    for a, b in zip(ranks(2, rank_of, None), ranks(2, rank_of, "meta"), strict=True):
        assert torch.equal(a, b)


def test_every_new_tensor_is_told_where():
    """And of which type, except in suites. Who passes `**options` has looked at them."""
    left_out = []
    for path in Path(stenograd.__file__).parent.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(call, ast.Call) and ast.unparse(call.func).startswith("torch.")):
                continue
            told, maker = {k.arg for k in call.keywords}, ast.unparse(call.func).removeprefix("torch.")
            typed = maker not in REAL_MAKERS or path.parent.name == "testing" or told & {"dtype", "out", None}
            if maker in MAKERS and not (typed and told & {"device", "out", None}):
                left_out.append(f"{path.name}:{call.lineno}: {ast.unparse(call)}")
    assert not left_out
