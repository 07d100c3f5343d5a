"""What the optimizers of MLBench require of their arguments, and how they read and write gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn

from stenograd.arguments import number
from stenograd.errors import ConfigError, TensorTypeError, bad_value

__all__ = [
    "AVG_CUSTOM",
    "AVG_WORLD",
    "Denominator",
    "averaging_mode",
    "check_denominator",
    "check_lr",
    "checked_clip",
    "checked_model",
    "gradient",
    "put_gradient",
    "trainable",
    "unused_names",
]

AVG_WORLD = "avg_world"
AVG_CUSTOM = "avg_custom"
Denominator: TypeAlias = Tensor | float | None


def check_lr(lr: float | None) -> float:
    """Return a learning rate that was given, and is finite and not negative."""
    advice = "try 0.1 with SGD, 0.001 with Adam"
    if lr is None:
        raise bad_value("lr", "must be given, finite and at least 0", lr, advice)
    return number("lr", lr, advice, least=0)


def checked_model(model: nn.Module | None) -> nn.Module:
    """Return a module that has trainable parameters."""
    if not isinstance(model, nn.Module):
        raise bad_value("model", "must be a torch.nn.Module", model, "pass the model to train")
    trainable(model)
    return model


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that require a gradient, at least one, by name; tied ones once."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ConfigError("model must have trainable parameters, got none: call requires_grad_() on some")
    for name, p in named.items():
        if not p.is_floating_point():
            advice = "keep real and imaginary parts"
            raise TensorTypeError(f"parameter {name} must be real, got {p.dtype}: {advice}")
    return named


def averaging_mode(average_world: bool, average_custom: bool) -> str:
    """Return the aggregation's op; exactly one of the two must be chosen."""
    if bool(average_world) == bool(average_custom):
        got = (average_world, average_custom)
        raise bad_value("average_world, average_custom", "must be one True, one False", got, "choose one")
    return AVG_WORLD if average_world else AVG_CUSTOM


def check_denominator(mode: str, denom: Denominator) -> None:
    """Raise where denom is given to an average that does not use it, or missing where it is used."""
    if mode == AVG_WORLD and denom is not None:
        raise bad_value("denom", "needs average_custom=True", denom, "leave it out")
    if mode == AVG_CUSTOM and denom is None:
        raise ConfigError("denom must be given with average_custom, got None: pass step(denom=...)")


def checked_clip(grad_clip: float) -> float:
    """Return a norm that is above 0; infinity is no clipping."""
    return number("grad_clip", grad_clip, "leave it out for none", above=0, finite=False)


def gradient(parameter: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a dense gradient to read, of its own or another dtype; zeros where it is None."""
    grad = parameter.grad
    if grad is None:
        return torch.zeros_like(parameter, dtype=dtype, requires_grad=False)
    if grad.layout is not torch.strided:
        advice = "use sparse=False in the embedding"
        raise TensorTypeError(f"gradients must be dense, got {grad.layout}: {advice}")
    return grad.detach().to(dtype or grad.dtype)


def put_gradient(parameter: Tensor, average: Tensor) -> None:
    """Copy an average into the parameter's gradient, which is made where it is None."""
    if parameter.grad is None:
        parameter.grad = torch.empty_like(parameter)
    parameter.grad.copy_(average)


def unused_names(named: Mapping[str, Tensor]) -> set[str]:
    """Return the names of parameters without a gradient."""
    return {name for name, p in named.items() if p.grad is None}
