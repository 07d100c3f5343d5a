"""MLBench's centralized optimizers: average over the ranks, then step, or the other way round."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from stenograd.errors import bad_value
from stenograd.mlbench.aggregation import (
    AVG_WORLD,
    Aggregation,
    AllReduceAggregation,
    Denominator,
    PowerAggregation,
)
from stenograd.mlbench.wrapper import (
    Closure,
    Marks,
    Wrapper,
    averaging_mode,
    check_denominator,
    check_lr,
    checked_clip,
    checked_model,
    evaluate,
    step_settings,
)
from stenograd.sync.copies import Copies
from stenograd.sync.handshake import (
    broadcast_model,
    broadcast_tensors,
    compare,
    describe_optimizers,
    synced_parameters,
)

__all__ = [
    "CentralizedAdam",
    "CentralizedSGD",
    "CustomCentralizedOptimizer",
    "GenericCentralizedOptimizer",
    "PowerSGD",
]


class GenericCentralizedOptimizer(Wrapper):
    """Steps with the ranks' mean gradient, or steps alone and takes the ranks' mean weights.

    `agg_grad=True`: `g <- sum_r g_r / N`, then the optimizer inside steps. `agg_grad=False`: it steps with
    this rank's gradient, then `p <- sum_r p_r / N`; the weights are averaged once at construction, too.
    Momentum and the like are never averaged. A subclass sets `self.optimizer`.

    Args:
        world_size: number of ranks; None is the group's.
        model: the model to train; its trainable parameters are averaged.
        use_cuda: taken for compatibility: tensors travel on the device where they are.
        by_layer: one collective per parameter, instead of one for all of a dtype.
        divide_before: divide before adding, so that 16-bit sums cannot overflow.
        agg_grad: average gradients; else weights.

    Attributes:
        aggregation: how averages come about. traffic: this rank's bytes.

    Raises:
        ConfigError: world_size is not the group's, model is no module with trainable parameters, the
            optimizer inside holds others, or an argument is outside its range.
        ValueError: an argument of torch's optimizer is outside its range.
        MismatchError: the ranks' models or options differ.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> optimizer = GenericCentralizedOptimizer(1, model)
        >>> optimizer.optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        >>> optimizer.step(lambda: model(torch.ones(1)).sum() * 0 + 3)
        tensor(3., grad_fn=<AddBackward0>)

    docs/mlbench.md lists the departures from MLBench. Rank 0's weights are broadcast at construction
    with agg_grad=True. Copies and pickles hold a copy of the model.
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
        self._set_up(model, AllReduceAggregation(world_size, divide_before, use_cuda), by_layer, agg_grad)

    def _set_up(
        self, model: nn.Module | None, aggregation: Aggregation, by_layer: bool, agg_grad: bool
    ) -> None:
        self.model, self.aggregation = checked_model(model), aggregation
        self.world_size = aggregation.world_size
        self.by_layer, self.agg_grad = bool(by_layer), bool(agg_grad)
        super().__init__(self.model.parameters())
        if self.world_size > 1:
            options = {"optimizer": type(self).__name__, "by_layer": self.by_layer, "agg_grad": self.agg_grad}
            # before tensors travel by position
            aggregation.meet(dict(self.model.named_parameters()), options, self.model)
            if self.agg_grad:
                broadcast_model(aggregation.driver, self.model)
            else:
                self._start_from_mean()

    @torch.no_grad()
    def _start_from_mean(self) -> None:
        """Average the weights, so that equal ones, as after loading a checkpoint, keep every bit."""
        weights = [p for p in self.model.parameters() if p.is_floating_point()]
        own = [p.clone() for p in weights]
        broadcast_tensors(self.aggregation.driver, [p.detach() for p in weights])
        # Of differences from rank 0's: a mean of equal numbers may be another one, as of three in bfloat16.
        # Where both are infinite, their difference would be NaN.
        apart = [torch.where(p == first, 0.0, p - first) for p, first in zip(own, weights, strict=True)]
        self.aggregation.average_weights(apart, AVG_WORLD, None, self.by_layer)
        for p, mean in zip(weights, apart, strict=True):
            p.add_(mean)

    def step(self, closure: Closure | None = None, tracker: Marks | None = None) -> Any:
        """Average and step.

        Args:
            closure: re-evaluates the model, computes gradients and returns the loss.
            tracker: is told when aggregation has ended, and when the parameters have moved.

        Returns:
            The closure's loss, of this rank; None without a closure.

        Raises:
            MismatchError: the ranks' learning rates differ; told within eight steps.
        """
        return self._step(closure, tracker, None)

    def _step(self, closure: Closure | None, tracker: Marks | None, denom: Denominator) -> Any:
        loss = evaluate(closure)
        self.aggregation.settings = step_settings(self if self.agg_grad else None, denom)
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
        # Frozen weights are equal already, and averaging them again would round them again.
        moving = [p for p in self.model.parameters() if p.requires_grad]
        with Copies(self.optimizer).follow(moving):
            self.aggregation.average_weights(moving, self.agg_mode, denom, self.by_layer)
        if tracker is not None:
            tracker.record_batch_agg()
        return loss

    def _move(self) -> None:
        self.optimizer.step()

    def _check_inner(self, inner: torch.optim.Optimizer) -> None:
        synced_parameters(self.model, [inner])
        if self.world_size > 1:
            settings = describe_optimizers(self.model, [inner], alike=self.agg_grad)
            compare(self.aggregation.driver, settings)

    def _extra_state(self) -> dict[str, Any]:
        state = self.aggregation.state_dict()
        return {"aggregation": state} if state else {}

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        if state:
            self.aggregation.load_state_dict(state["aggregation"])


class CentralizedSGD(GenericCentralizedOptimizer):
    """`torch.optim.SGD` on `g = sum_r g_r / N`; with agg_grad=False `p <- sum_r p_r / N` after its step.

    All parameters form one group. Arguments that are not listed are `GenericCentralizedOptimizer`'s.

    Args:
        lr: learning rate, at least 0; must be given.
        momentum, dampening, weight_decay, nesterov: as for `torch.optim.SGD`.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> optimizer = CentralizedSGD(1, model, lr=0.1)
        >>> model(torch.ones(1)).sum().backward()
        >>> optimizer.step()
        >>> round(model.weight.item(), 6)
        0.9
    """

    def __init__(
        self,
        world_size: int | None = None,
        model: nn.Module | None = None,
        lr: float | None = None,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        use_cuda: bool = False,
        by_layer: bool = False,
        agg_grad: bool = True,
    ) -> None:
        rate = check_lr(lr)
        super().__init__(world_size, model, use_cuda, by_layer, agg_grad=agg_grad)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), rate, momentum, dampening, weight_decay, nesterov
        )


class CentralizedAdam(GenericCentralizedOptimizer):
    """`torch.optim.Adam` on `g = sum_r g_r / N`; with agg_grad=False `p <- sum_r p_r / N` after its step.

    All parameters form one group. Arguments that are not listed are `GenericCentralizedOptimizer`'s.

    Args:
        lr: learning rate, at least 0; must be given (MLBench's text says 1e-3, its signature required).
        betas, eps, weight_decay, amsgrad: as for `torch.optim.Adam`.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> optimizer = CentralizedAdam(1, model, lr=0.5)
        >>> model(torch.ones(1)).sum().backward()
        >>> optimizer.step()
        >>> round(model.weight.item(), 6)
        0.5
    """

    def __init__(
        self,
        world_size: int | None = None,
        model: nn.Module | None = None,
        lr: float | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        use_cuda: bool = False,
        by_layer: bool = False,
        agg_grad: bool = True,
    ) -> None:
        rate = check_lr(lr)
        super().__init__(world_size, model, use_cuda, by_layer, agg_grad=agg_grad)
        self.optimizer = torch.optim.Adam(self.model.parameters(), rate, betas, eps, weight_decay, amsgrad)


class CustomCentralizedOptimizer(GenericCentralizedOptimizer):
    """Any optimizer on `g = sum_r g_r / d`, d the world size or `denom`, after `g <- g min(1, c / ||g||)`.

    With agg_grad=False the optimizer steps with this rank's (clipped) gradient, then `p <- sum_r p_r / d`.
    At construction weights are averaged over the world size in either case. Arguments that are not listed
    are `GenericCentralizedOptimizer`'s.

    Args:
        optimizer: over the model's parameters; any that uses its gradients once per step.
        grad_clip: largest L2 norm of all gradients together, above 0.
        average_world: divide by the world size.
        average_custom: divide by the `denom` given to each step; exactly one of the two is wanted.

    Example:
        >>> model = nn.Linear(1, 1, bias=False)
        >>> _ = nn.init.ones_(model.weight)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> optimizer = CustomCentralizedOptimizer(model, 1, sgd, average_custom=True)
        >>> model(torch.ones(4, 1)).sum().backward()
        >>> optimizer.step(denom=8)
        True
        >>> model.weight.item()
        0.5

    docs/mlbench.md lists the departures from MLBench.
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
            synced_parameters(checked_model(model), [optimizer])  # before any rank waits for another
        # At construction the weights move, and so must the copies that some optimizers keep of them.
        with Copies(optimizer).follow(checked_model(model).parameters()):
            super().__init__(world_size, model, use_cuda, by_layer, divide_before, agg_grad)
        self.optimizer = optimizer

    def step(
        self, closure: Closure | None = None, tracker: Marks | None = None, denom: Denominator = None
    ) -> Any:
        """Average, clip and step as in `GenericCentralizedOptimizer.step`; without a closure return True.

        denom, with average_custom and only then, is what to divide the sum by: above 0, equal on all ranks. A
        rank with another one is a MismatchError within eight steps.
        """
        check_denominator(self.agg_mode, denom)
        loss = self._step(closure, tracker, denom)
        return True if closure is None else loss  # as MLBench: its programs then step their schedulers

    def _move(self) -> None:
        if self.grad_clip < math.inf:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip)
        super()._move()


class PowerSGD(GenericCentralizedOptimizer):
    """SGD on `P Q^T`, where `P = orthonormal(mean(M Q0))`, `Q = mean(M^T P)`, `M_r = g_r + e_r`.

    Then `e_r <- M_r - P (M_r^T P)^T`. Tensors that two factors would not make smaller (1-D ones, small
    matrices) are averaged exactly, with `e = 0`. In a world of one this is `torch.optim.SGD`. A step whose
    gradients are not finite on some rank changes nothing on any; `aggregation.skipped` counts these.
    Arguments that are not listed are `GenericCentralizedOptimizer`'s.

    Args:
        lr: learning rate, at least 0; must be given.
        momentum, weight_decay, dampening, nesterov: as for `torch.optim.SGD`, on what was decompressed.
        average_world: must be True.
        reuse_query: start from the last step's Q (warm start), instead of a random one; better at no cost.
        rank: largest rank of an approximation, at least 1.

    Example:
        >>> optimizer = PowerSGD(nn.Linear(4, 4), lr=0.1, rank=2, reuse_query=True)
        >>> optimizer.param_groups[0]["lr"]
        0.1

    docs/mlbench.md lists the departures from MLBench. There `e_r = M_r - P Q^T`, which has the same sum over
    the ranks and also gathers the differences between them.

    Reference: Vogels et al., "PowerSGD", NeurIPS 2019.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        lr: float | None = None,
        momentum: float = 0,
        weight_decay: float = 0,
        dampening: float = 0,
        nesterov: bool = False,
        average_world: bool = True,
        use_cuda: bool = False,
        by_layer: bool = False,
        reuse_query: bool = False,
        world_size: int | None = 1,
        rank: int = 1,
    ) -> None:
        if not average_world:
            raise bad_value("average_world", "must be True", average_world, "sums are not implemented")
        rate = check_lr(lr)
        aggregation = PowerAggregation(checked_model(model), use_cuda, reuse_query, world_size, rank)
        # Not `super().__init__`, which makes an aggregation of its own.
        self._set_up(model, aggregation, by_layer, agg_grad=True)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), rate, momentum, dampening, weight_decay, nesterov
        )
