"""The optimizer inside a `DistOpt`: one of SINGA's, or PyTorch's behind the same few methods."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from stenograd.singa.base import Optimizer
from stenograd.singa.optimizers import SGD

__all__ = ["Inner", "TorchOptimizer", "inner"]


class Inner(Protocol):
    """What a `DistOpt` asks of its optimizer."""

    @property
    def lr_value(self) -> float:
        """The learning rate of the next update."""

    def update(self, param: Tensor, grad: Tensor) -> None:
        """Update a parameter with a gradient, now or in `step`."""

    def step(self) -> None:
        """Count a step."""

    def get_states(self) -> dict[str, Any]:
        """Return the whole state."""

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Go back to a state."""


class TorchOptimizer:
    """A PyTorch optimizer as SINGA sees one: `update` hands it a gradient, `step` lets it move.

    Args:
        optimizer: it moves the parameters that it holds; others are left alone.

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
        """Move all parameters that have a gradient."""
        self.optimizer.step()

    def get_states(self) -> dict[str, Any]:
        """Return a copy of the optimizer's `state_dict()`."""
        return copy.deepcopy(self.optimizer.state_dict())

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Load a `state_dict()`."""
        self.optimizer.load_state_dict(copy.deepcopy(dict(states)))


def inner(optimizer: Any) -> Inner:
    """Return what stands for an optimizer; None for a fresh `SGD()`.

    Raises:
        TypeError: it is neither SINGA's nor PyTorch's.
    """
    if optimizer is None:
        return SGD()
    if isinstance(optimizer, torch.optim.Optimizer):
        return TorchOptimizer(optimizer)
    if isinstance(optimizer, Optimizer):
        return optimizer
    raise TypeError(
        f"opt must be an optimizer of stenograd.singa or torch.optim, got {optimizer!r}: use SGD(lr=0.1)"
    )
