"""The public surface: explicit, sorted, documented; and what is refused before any connection."""

import inspect

import pytest
import torch
from torch import nn

import stenograd
from stenograd.errors import ConfigError, MethodError, TensorTypeError


def test_all_is_sorted_complete_and_documented():
    assert stenograd.__all__ == sorted(stenograd.__all__)
    for name in stenograd.__all__:
        member = getattr(stenograd, name)
        assert inspect.getdoc(member), f"{name} has no docstring"


def _sgd(*parameters):
    return torch.optim.SGD(list(parameters), lr=0.1)


def test_a_model_without_trainable_parameters():
    model = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ConfigError, match="trainable parameters, got none"):
        stenograd.distribute(model, _sgd(nn.Parameter(torch.ones(1))))


def test_an_optimizer_of_another_model():
    with pytest.raises(ConfigError, match="must hold the model's parameters, got 2 of 2"):
        stenograd.distribute(nn.Linear(2, 2), _sgd(*nn.Linear(2, 2).parameters()))


def test_complex_parameters():
    model = nn.Module()
    model.z = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    with pytest.raises(TensorTypeError, match=r"z must be real, got torch.complex64"):
        stenograd.distribute(model, _sgd(model.z))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"method": "tpk"}, MethodError, "did you mean 'topk'"),
        ({"bucket_bytes": 0}, ConfigError, "bucket_bytes must be at least 1"),
        ({"timeout_s": 0}, ConfigError, "timeout_s must be"),
    ],
)
def test_bad_options(options, error, says):
    model = nn.Linear(2, 2)
    with pytest.raises(error, match=says):
        stenograd.distribute(model, _sgd(*model.parameters()), **options)


def test_integers_cannot_be_compressed():
    from stenograd.simulate import exchange

    compressor = stenograd.method("topk").compressor
    with pytest.raises(TensorTypeError, match="floating-point"):
        exchange(compressor, [torch.ones(3, dtype=torch.int64)])
