"""What the optimizers of MLBench require of their arguments."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stenograd.errors import ConfigError, bad_value
from stenograd.mlbench.aggregation import AVG_CUSTOM, AVG_WORLD, Denominator
from stenograd.mlbench.exchange import trainable

__all__ = [
    "averaging_mode",
    "check_denominator",
    "check_held",
    "check_lr",
    "checked_clip",
    "checked_model",
    "fitting_parameters",
]


def check_lr(lr: float | None) -> float:
    """Return a learning rate that was given.

    Raises:
        ConfigError: it was not, or is negative or not finite.
    """
    if lr is None or not 0 <= lr < float("inf"):
        raise bad_value("lr", "must be given, finite and at least 0", lr, "try 0.1 with SGD, 0.001 with Adam")
    return lr


def checked_model(model: nn.Module | None) -> nn.Module:
    """Return a module that has trainable parameters."""
    if not isinstance(model, nn.Module):
        raise bad_value("model", "must be a torch.nn.Module", model, "pass the model to train")
    trainable(model)
    return model


def check_held(inner: torch.optim.Optimizer, model: nn.Module) -> None:
    """Raise unless the optimizer holds parameters of the model only: others would drift apart."""
    known = {id(p) for p in model.parameters()}
    strangers = [p for group in inner.param_groups for p in group["params"] if id(p) not in known]
    if strangers:
        raise ConfigError(
            f"optimizer must hold the model's parameters, got {len(strangers)} not in it: "
            "create it from model.parameters(), after moving or replacing layers"
        )


def averaging_mode(average_world: bool, average_custom: bool) -> str:
    """Return the aggregation's op.

    Raises:
        ConfigError: neither or both are chosen.
    """
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
    if not grad_clip > 0:
        raise bad_value("grad_clip", "must be above 0", grad_clip, "leave it out for none")
    return grad_clip


def fitting_parameters(model: nn.Module, flat: Tensor) -> list[nn.Parameter]:
    """Return the trainable parameters that lie one after another in a flat tensor."""
    parameters = list(trainable(model).values())
    total = sum(p.numel() for p in parameters)
    if total != flat.numel():
        raise ConfigError(
            f"fp32_params must have as many elements as the model's trainable parameters, got {flat.numel()} "
            f"and {total}: after freezing or unfreezing, make a new FP16Optimizer"
        )
    return parameters
