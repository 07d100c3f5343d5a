"""MLBench's CustomCentralizedOptimizer: any torch optimizer, clipping, and a denominator of one's own."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from stenograd.mlbench.aggregation import Denominator
from stenograd.mlbench.arguments import (
    averaging_mode,
    check_denominator,
    check_held,
    checked_clip,
    checked_model,
)
from stenograd.mlbench.generic import GenericCentralizedOptimizer
from stenograd.mlbench.wrapper import Closure, Marks

__all__ = ["CustomCentralizedOptimizer"]


class CustomCentralizedOptimizer(GenericCentralizedOptimizer):
    """Any optimizer on `g = sum_r g_r / d`, d the world size or `denom`, after `g <- g min(1, c / ||g||)`.

    With agg_grad=False the optimizer steps with this rank's (clipped) gradient, then `p <- sum_r p_r / d`.
    At construction weights are averaged over the world size in either case.

    Args:
        model: the model to train.
        world_size: number of ranks; None is the group's.
        optimizer: over the model's parameters; any that uses its gradients once a step.
        use_cuda: taken for compatibility.
        by_layer: one collective a parameter.
        agg_grad: average gradients; else weights.
        grad_clip: largest L2 norm of all gradients together, above 0.
        average_world: divide by the world size.
        average_custom: divide by the `denom` given to each step; exactly one of the two is wanted.
        divide_before: divide before adding.

    Raises:
        ConfigError: as in `GenericCentralizedOptimizer`; neither or both averages are chosen; grad_clip is
            not above 0.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> optimizer = CustomCentralizedOptimizer(model, 1, sgd, average_custom=True)
        >>> model(torch.ones(4, 1)).sum().backward()
        >>> optimizer.step(denom=8)
        >>> model.weight.item()
        0.5

    Departures: `step` returns the closure's loss, not True; `denom` counts with weights and with one worker,
    too, and clipping works with agg_grad=False (D-M2, D-M3).
    """

    def __init__(
        self,
        model: nn.Module,
        world_size: int | None,
        optimizer: torch.optim.Optimizer,
        use_cuda: bool = False,
        by_layer: bool = False,
        agg_grad: bool = True,
        grad_clip: float = math.inf,
        average_world: bool = False,
        average_custom: bool = False,
        divide_before: bool = False,
    ) -> None:
        self.agg_mode = averaging_mode(average_world, average_custom)
        self.grad_clip = checked_clip(grad_clip)
        if isinstance(optimizer, torch.optim.Optimizer):
            check_held(optimizer, checked_model(model))  # before any rank waits for another
        super().__init__(world_size, model, use_cuda, by_layer, divide_before, agg_grad)
        self.optimizer = optimizer

    def step(
        self, closure: Closure | None = None, tracker: Marks | None = None, denom: Denominator = None
    ) -> Any:
        """Average, clip and step.

        Args:
            closure: re-evaluates the model, computes gradients and returns the loss.
            tracker: is told when aggregation has ended, and when the parameters have moved.
            denom: with average_custom: what to divide the sum by, above 0, equal on all ranks.

        Returns:
            The closure's loss, of this rank; None without a closure.

        Raises:
            ConfigError: denom is missing, out of range, or given without average_custom.
        """
        check_denominator(self.agg_mode, denom)
        return self._step(closure, tracker, denom)

    def _move(self) -> None:
        if self.grad_clip < math.inf:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        super()._move()
