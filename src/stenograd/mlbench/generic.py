"""The base of MLBench's centralized optimizers: average over the ranks, then step, or the other way round."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from stenograd.mlbench.aggregation import AVG_WORLD, Aggregation, AllReduceAggregation, Denominator
from stenograd.mlbench.arguments import check_held, checked_model
from stenograd.mlbench.exchange import meet
from stenograd.mlbench.wrapper import Closure, Marks, Wrapper, evaluate
from stenograd.sync.handshake import broadcast_model

__all__ = ["GenericCentralizedOptimizer"]


class GenericCentralizedOptimizer(Wrapper):
    """Steps with the ranks' mean gradient, or steps alone and takes the ranks' mean weights.

    `agg_grad=True`: `g <- sum_r g_r / N`, then the optimizer inside steps. `agg_grad=False`: it steps with
    this rank's gradient, then `p <- sum_r p_r / N`; the weights are averaged once at construction, too.
    Momentum and the like are never averaged. A subclass sets `self.optimizer`.

    Args:
        world_size: number of ranks; None is the group's.
        model: its trainable parameters are averaged.
        use_cuda: taken for compatibility: tensors travel on the device where they are.
        by_layer: one collective a parameter, instead of one for all of a dtype.
        divide_before: divide before adding, so that 16-bit sums cannot overflow.
        agg_grad: average gradients; else weights.

    Attributes:
        aggregation: how averages come about. traffic: this rank's bytes.

    Raises:
        ConfigError: world_size is not the group's, model is no module with trainable parameters, or the
            optimizer inside holds others.
        MismatchError: the ranks' models or options differ.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> optimizer = GenericCentralizedOptimizer(1, model)
        >>> optimizer.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> optimizer.step(lambda: model(torch.ones(1)).sum() * 0 + 3)
        tensor(3., grad_fn=<AddBackward0>)

    Departures: with a closure, the gradients that it computes are averaged (D-M2). Rank 0's weights are
    broadcast at construction with agg_grad=True, where MLBench trusts in equal seeds. Copies and pickles
    work (D-M7), and hold a copy of the model.
    """

    agg_mode = AVG_WORLD

    def __init__(
        self,
        world_size: int | None,
        model: nn.Module | None,
        use_cuda: bool = False,
        by_layer: bool = False,
        divide_before: bool = False,
        agg_grad: bool = True,
    ) -> None:
        self._set_up(
            model, AllReduceAggregation(world_size, divide_before, use_cuda), bool(by_layer), bool(agg_grad)
        )

    def _set_up(
        self, model: nn.Module | None, aggregation: Aggregation, by_layer: bool, agg_grad: bool
    ) -> None:
        self.model = checked_model(model)
        self.aggregation = aggregation
        self.world_size = aggregation.world_size
        self.by_layer, self.agg_grad = by_layer, agg_grad
        super().__init__(self.model.parameters())
        if self.world_size > 1:
            options = {"optimizer": type(self).__name__, "by_layer": by_layer, "agg_grad": agg_grad}
            meet(aggregation.driver, dict(self.model.named_parameters()), options)
            if agg_grad:
                broadcast_model(aggregation.driver, self.model)
            else:
                aggregation.agg_model(by_layer)(self.model, AVG_WORLD)

    def step(self, closure: Closure | None = None, tracker: Marks | None = None) -> Any:
        """Average and step.

        Args:
            closure: re-evaluates the model, computes gradients and returns the loss.
            tracker: is told when aggregation has ended, and when the parameters have moved.

        Returns:
            The closure's loss, of this rank; None without a closure.
        """
        return self._step(closure, tracker, None)

    def _step(self, closure: Closure | None, tracker: Marks | None, denom: Denominator) -> Any:
        loss = evaluate(closure)
        if self.agg_grad:
            applied = self.aggregation.agg_grad(self.by_layer)(self.model, self.agg_mode, denom)
            if tracker is not None:
                tracker.record_batch_agg()
            if applied:
                self._move()
            if tracker is not None:
                tracker.record_batch_opt_step()
            return loss
        self._move()
        if tracker is not None:
            tracker.record_batch_opt_step()
        if isinstance(self.aggregation, AllReduceAggregation):
            # frozen weights are equal already, and averaging them again would round them again
            moving = [p for p in self.model.parameters() if p.requires_grad]
            self.aggregation.average_weights(moving, self.agg_mode, denom, by_layer=self.by_layer)
        if tracker is not None:
            tracker.record_batch_agg()
        return loss

    def _move(self) -> None:
        self.optimizer.step()

    def _check_inner(self, inner: torch.optim.Optimizer) -> None:
        check_held(inner, self.model)

    def _extra_state(self) -> dict[str, Any]:
        state = self.aggregation.state_dict()
        return {"aggregation": state} if state else {}

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        if state:
            self.aggregation.load_state_dict(state["aggregation"])
