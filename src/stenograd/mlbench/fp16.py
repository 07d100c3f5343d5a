"""MLBench's FP16Optimizer: a 16-bit model, float32 master weights, a dynamic loss scale."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from stenograd.arguments import number
from stenograd.errors import CheckpointError, ConfigError, StenogradError, bad_value
from stenograd.mlbench.aggregation import AllReduceAggregation, Denominator, gradient, trainable
from stenograd.mlbench.wrapper import (
    Closure,
    Marks,
    Wrapper,
    averaging_mode,
    check_denominator,
    checked_clip,
    checked_model,
    evaluate,
    step_settings,
)
from stenograd.sync.handshake import broadcast_model

__all__ = ["DynamicLossScaler", "FP16Optimizer"]


class DynamicLossScaler:
    """Divides the scale by a factor at each overflow; multiplies after `scale_window` good steps in a row.

    Args:
        init_scale: first scale, above 0.
        scale_factor: above 1.
        scale_window: steps, at least 1.
        max_scale: largest scale, at least init_scale; None is no limit.

    Attributes:
        loss_scale: the scale of the next step.

    Example:
        >>> scaler = DynamicLossScaler(init_scale=1024, scale_window=2)
        >>> scales = []
        >>> for overflow in (False, False, True, False, False):
        ...     scaler.update_scale(overflow)
        ...     scales.append(scaler.loss_scale)
        >>> scales
        [1024, 2048.0, 1024.0, 1024.0, 2048.0]
    """

    def __init__(
        self,
        init_scale: float = 2.0**15,
        scale_factor: float = 2.0,
        scale_window: int = 2000,
        max_scale: float | None = None,
    ) -> None:
        if max_scale is not None and not max_scale >= init_scale:
            raise bad_value("max_scale", f"must be at least init_scale ({init_scale})", max_scale, "raise it")
        self.loss_scale = number("init_scale", init_scale, "use 1024", above=0)
        self.scale_factor = number("scale_factor", scale_factor, "use 2", above=1)
        self.scale_window = number("scale_window", scale_window, "use 128", least=1, finite=False)
        self.max_scale = max_scale
        self._iter, self._last_overflow_iter = 0, -1  # -1: the first window is as long as the others

    def update_scale(self, overflow: bool) -> None:
        """Take note of one step."""
        if overflow:
            self.loss_scale /= self.scale_factor
            self._last_overflow_iter = self._iter
        elif (self._iter - self._last_overflow_iter) % self.scale_window == 0:
            self.loss_scale *= float(self.scale_factor)
            if self.max_scale is not None:
                self.loss_scale = min(self.loss_scale, self.max_scale)
        self._iter += 1

    @staticmethod
    def has_overflow(grad_norm: Tensor | float) -> bool:
        """Return whether a norm is infinite or NaN."""
        return not bool(
            torch.isfinite(torch.as_tensor(grad_norm, device=getattr(grad_norm, "device", "cpu"))).all()
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and the counters."""
        return {"scale": self.loss_scale, "iter": self._iter, "last_overflow_iter": self._last_overflow_iter}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take a saved state."""
        self.loss_scale = state["scale"]
        self._iter, self._last_overflow_iter = int(state["iter"]), int(state["last_overflow_iter"])


class FP16Optimizer(Wrapper):
    """`w <- step(w, sum_r g_r / (d * scale * multiplier))` in float32, then the model is `w` in 16 bits.

    g are the 16-bit gradients of `scale * loss`, averaged in 16 bits over d, the world size or `denom`.
    If the result is not finite, nothing moves and the scale shrinks, on all ranks alike. Give it the
    optimizer that moves the master weights: `fp.set_optimizer(torch.optim.SGD([fp.fp32_params], lr=0.1))`.

    Args:
        fp16_model: the model, cast to float16 or bfloat16; some parameters may be float32.
        world_size, use_cuda, by_layer: as for `GenericCentralizedOptimizer`.
        use_horovod: taken for compatibility; must be False.
        grad_clip: largest L2 norm of the averaged, unscaled gradients, above 0.
        init_scale, scale_factor, scale_window, max_scale: as for `DynamicLossScaler`.
        min_scale: smallest scale, above 0; one below it is an error.
        average_world, average_custom: as for `CustomCentralizedOptimizer`.
        divide_before: divide before adding, so that the 16-bit sum cannot overflow; recommended.

    Attributes:
        fp32_params: master weights, flat. loss_scaler: see `DynamicLossScaler`. applied: whether the last
            step moved. traffic: this rank's bytes.

    Raises:
        ConfigError: an argument is out of range, world_size is not the group's, or use_horovod is given.
        MismatchError: the ranks' models or options differ.

    Example:
        >>> model = nn.Linear(2, 1).to(torch.bfloat16)
        >>> fp = FP16Optimizer(model, world_size=1, average_world=True)
        >>> fp.set_optimizer(torch.optim.SGD([fp.fp32_params], lr=0.1))
        >>> fp.backward_loss(model(torch.ones(1, 2, dtype=torch.bfloat16)).sum())
        >>> fp.step()
        True

    docs/mlbench.md lists the departures from MLBench. Gradients that are None count as zeros, frozen
    parameters stay out, and rank 0's weights are broadcast at construction.

    Reference: Micikevicius et al., "Mixed Precision Training", ICLR 2018.
    """

    def __init__(
        self,
        fp16_model: nn.Module,
        world_size: int | None,
        use_cuda: bool = False,
        use_horovod: bool = False,
        by_layer: bool = False,
        grad_clip: float = math.inf,
        init_scale: float = 1024,
        scale_factor: float = 2,
        scale_window: int = 128,
        max_scale: float | None = None,
        min_scale: float = 1e-4,
        average_world: bool = False,
        average_custom: bool = False,
        divide_before: bool = False,
    ) -> None:
        if use_horovod:
            raise bad_value("use_horovod", "must be False", use_horovod, "torch.distributed carries the sums")
        self.agg_mode = averaging_mode(average_world, average_custom)
        self.grad_clip, self.by_layer = checked_clip(grad_clip), bool(by_layer)
        self.min_scale = number("min_scale", min_scale, "use 1e-4", above=0, finite=False)
        self.loss_scaler = DynamicLossScaler(init_scale, scale_factor, scale_window, max_scale)
        self.fp16_model = checked_model(fp16_model)
        self.aggregation = AllReduceAggregation(world_size, divide_before, use_cuda)
        self.world_size, self.applied = self.aggregation.world_size, False
        if self.world_size > 1:
            self.aggregation.meet(trainable(fp16_model), {"by_layer": self.by_layer}, fp16_model)
            broadcast_model(self.aggregation.driver, fp16_model)
        self.fp32_params = self.initialize_flat_fp32_weight()  # after the broadcast: alike on all ranks
        super().__init__([self.fp32_params])

    def set_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the optimizer that moves `fp32_params`, and nothing else."""
        self.optimizer = optimizer

    def initialize_flat_fp32_weight(self) -> nn.Parameter:
        """Return a flat float32 copy of the model's trainable parameters, in the order of definition."""
        flats = [p.detach().reshape(-1).float() for p in trainable(self.fp16_model).values()]
        return nn.Parameter(torch.cat(flats))

    @staticmethod
    @torch.no_grad()
    def fp16_to_fp32_flat_grad(fp32_params: Tensor, fp16_model: nn.Module) -> None:
        """Make the model's gradients, flat and in float32, the gradient of the master weights."""
        parameters = _fitting(fp16_model, fp32_params)
        # in float32 before they are unscaled: small ones would vanish
        fp32_params.grad = torch.cat([gradient(p, torch.float32).reshape(-1) for p in parameters])

    @staticmethod
    @torch.no_grad()
    def fp32_to_fp16_weights(fp16_model: nn.Module, fp32_params: Tensor) -> None:
        """Copy the master weights, rounded, into the model."""
        parameters = _fitting(fp16_model, fp32_params)
        for p, w in zip(parameters, fp32_params.split([p.numel() for p in parameters]), strict=True):
            p.copy_(w.view(p.shape))

    def backward_loss(self, loss: Tensor) -> None:
        """Compute the gradients of `scale * loss`; the loss itself is not changed."""
        (loss.float() * self.loss_scaler.loss_scale).backward()  # float16 ends at 65,504

    def step(
        self,
        closure: Closure | None = None,
        tracker: Marks | None = None,
        multiplier: float = 1,
        denom: Denominator = None,
    ) -> Any:
        """Average, unscale, clip, and step unless something is not finite.

        Args:
            closure: re-evaluates the model, calls `backward_loss` and returns the loss.
            tracker: is told when gradients are averaged, and when parameters have moved.
            multiplier: divides the gradients, above 0: the number of batches accumulated.
            denom: as in `CustomCentralizedOptimizer.step`.

        Returns:
            The closure's loss, of this rank; without a closure, whether the step was applied.

        Raises:
            StenogradError: the loss scale fell below min_scale.
        """
        check_denominator(self.agg_mode, denom)
        number("multiplier", multiplier, "count the batches", above=0)
        inner = self.optimizer
        loss = evaluate(closure)
        scaling = {"loss scale": float(self.loss_scaler.loss_scale)}
        self.aggregation.settings = scaling | step_settings(inner, denom)
        self.aggregation.agg_grad(self.by_layer)(self.fp16_model, self.agg_mode, denom)
        if tracker is not None:
            tracker.record_batch_agg()
        # Averages are equal on all ranks, so all decide alike without another message.
        self.applied = self._unscale(self.loss_scaler.loss_scale * multiplier)
        self.loss_scaler.update_scale(not self.applied)
        if self.applied:
            inner.step()
            self.fp32_to_fp16_weights(self.fp16_model, self.fp32_params)
        if tracker is not None:
            tracker.record_batch_opt_step()
        if (scale := self.loss_scaler.loss_scale) < self.min_scale:
            advice = "lower the learning rate, or use divide_before"
            raise StenogradError(f"the loss scale is {scale:g}, below min_scale={self.min_scale:g}: {advice}")
        return self.applied if closure is None else loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of the master weights and of the model."""
        self.fp32_params.grad = None
        self.fp16_model.zero_grad(set_to_none)

    def _unscale(self, scale: float) -> bool:
        """Fill the master weights' gradient, clipped; return whether it is finite."""
        self.fp16_to_fp32_flat_grad(self.fp32_params, self.fp16_model)
        if self.fp32_params.grad is not None:
            self.fp32_params.grad.div_(scale)  # before clipping: grad_clip bounds the unscaled norm
        # With the default grad_clip, infinity, this only measures.
        norm = nn.utils.clip_grad_norm_([self.fp32_params], self.grad_clip)
        return not self.loss_scaler.has_overflow(norm)

    def _check_inner(self, inner: torch.optim.Optimizer) -> None:
        if any(p is not self.fp32_params for group in inner.param_groups for p in group["params"]):
            raise ConfigError("optimizer must hold fp32_params alone: create it over [fp.fp32_params]")

    def _extra_state(self) -> dict[str, Any]:
        return {
            "fp32_params": self.fp32_params.detach().clone(),
            "loss_scaler": self.loss_scaler.state_dict(),
        }

    def _load_extra_state(self, state: Mapping[str, Any]) -> None:
        saved, own = state["fp32_params"].numel(), self.fp32_params.numel()
        if saved != own:  # before anything changes
            raise CheckpointError(
                f"the state's fp32_params must have {own} elements, got {saved}: load it into the same model"
            )
        self.loss_scaler.load_state_dict(state["loss_scaler"])
        with torch.no_grad():
            self.fp32_params.copy_(state["fp32_params"])  # in place: the optimizer inside holds this tensor
        self.fp32_to_fp16_weights(self.fp16_model, self.fp32_params)


def _fitting(model: nn.Module, flat: Tensor) -> list[nn.Parameter]:
    """Return the trainable parameters that lie one after another in a flat tensor."""
    parameters = list(trainable(model).values())
    total = sum(p.numel() for p in parameters)
    if total != flat.numel():
        raise ConfigError(
            f"fp32_params must have as many elements as the model's trainable parameters, got {flat.numel()} "
            f"and {total}: after freezing or unfreezing, make a new FP16Optimizer"
        )
    return parameters
