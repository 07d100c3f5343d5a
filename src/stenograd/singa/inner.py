"""The optimizer inside a `DistOpt`: one of SINGA's, or one of PyTorch's with the same few methods."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from stenograd.errors import ConfigError
from stenograd.singa.base import Optimizer
from stenograd.singa.optimizers import SGD

__all__ = ["Inner", "TorchOptimizer", "inner"]


class Inner(Protocol):
    """The methods that a `DistOpt` calls on its optimizer."""

    @property
    def lr_value(self) -> float:
        """The learning rate of the next update."""

    def update(self, param: Tensor, grad: Tensor) -> None:
        """Update a parameter with a gradient, at once or in `step`."""

    def step(self) -> None:
        """Count a step."""

    def get_states(self) -> dict[str, Any]:
        """Return copies of the whole state."""

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Continue from a state that `get_states` returned."""


class TorchOptimizer:
    """A PyTorch optimizer with SINGA's methods: `update` sets a gradient, `step` updates all parameters.

    Args:
        optimizer: updates the parameters that it holds; others stay as they are.

    Example:
        >>> w = torch.ones(1, requires_grad=True)
        >>> optimizer = TorchOptimizer(torch.optim.SGD([w], lr=0.5))
        >>> optimizer.update(w, torch.ones(1))
        >>> optimizer.step()
        >>> w.tolist()
        [0.5]
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def lr_value(self) -> float:
        """The learning rate of the first parameter group."""
        return float(self.optimizer.param_groups[0]["lr"])

    def update(self, param: Tensor, grad: Tensor) -> None:
        """Set a parameter's gradient."""
        param.grad = grad

    def step(self) -> None:
        """Update all parameters that have a gradient."""
        self.optimizer.step()

    def get_states(self) -> dict[str, Any]:
        """Return a copy of the optimizer's `state_dict()`."""
        return copy.deepcopy(self.optimizer.state_dict())

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Load a `state_dict()`."""
        self.optimizer.load_state_dict(copy.deepcopy(dict(states)))


def inner(optimizer: Any) -> Inner:
    """Return an optimizer with the methods of `Inner`; for None a new `SGD()`.

    Raises:
        TypeError: optimizer is neither SINGA's nor PyTorch's.
        ConfigError: it is an LBFGS, which computes gradients several times per step.
    """
    if optimizer is None:
        return SGD()
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigError("opt must use gradients once per step, got LBFGS: use SGD, Adam, ...")
    if isinstance(optimizer, torch.optim.Optimizer):
        return TorchOptimizer(optimizer)
    if isinstance(optimizer, Optimizer):
        return optimizer
    raise TypeError(
        f"opt must be an optimizer of stenograd.singa or torch.optim, got {optimizer!r}: use SGD(lr=0.1)"
    )
