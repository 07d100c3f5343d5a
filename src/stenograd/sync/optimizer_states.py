"""Optimizers' own states in rounds: averaged over the ranks, or forgotten."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from stenograd.comm.drivers import AnyDriver
from stenograd.sync.parameter_averaging import average

__all__ = ["average_states", "forget_states"]

_SECOND = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf", "acc_delta")


def average_states(
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, Tensor],
    driver: AnyDriver,
    *,
    second: bool,
) -> None:
    """Average the optimizers' moments over the ranks, in place.

    Moments are those of their tensors that have the parameter's shape. A rank without the state of a
    parameter (all its steps so far were skipped) counts as zero, which is what optimizers start from.

    Args:
        optimizers: the same on all ranks.
        parameters: by name, alike on all ranks.
        driver: the way to the other ranks; nothing of this user's may be under way.
        second: whether second moments (those of squares) are averaged, too.

    Raises:
        NonFiniteError: on every rank, if a mean is not finite; all moments are kept then.
    """
    mine = _moments(optimizers, parameters, second)
    device = next(iter(parameters.values())).device
    told = driver.gather_bytes(json.dumps([*mine]).encode(), device)
    everywhere = list(dict.fromkeys(name for message in told for name in json.loads(message)))
    tensors = {
        name: mine[name] if name in mine else torch.zeros_like(parameters[name.rsplit("|", 1)[0]])
        for name in sorted(everywhere)
    }
    if tensors:
        average(list(tensors.values()), driver, in_order=True)


def forget_states(optimizers: Sequence[torch.optim.Optimizer], parameters: Iterable[Tensor]) -> None:
    """Drop what the optimizers remember of parameters, so that their next steps start afresh."""
    wanted = list(parameters)
    for optimizer in optimizers:
        for p in wanted:
            optimizer.state.pop(p, None)


def _moments(
    optimizers: Sequence[torch.optim.Optimizer], parameters: Mapping[str, Tensor], second: bool
) -> dict[str, Tensor]:
    """Return moments by "parameter|key", in the order of the parameters."""
    found = {}
    for name, p in parameters.items():
        for optimizer in optimizers:
            for key, value in sorted(optimizer.state.get(p, {}).items()):
                moment = isinstance(value, Tensor) and value.shape == p.shape and value.is_floating_point()
                if moment and key != "step" and (second or key not in _SECOND):
                    found[f"{name}|{key}"] = value
    return found
