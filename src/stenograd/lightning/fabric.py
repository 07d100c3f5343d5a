"""The strategy for Lightning Fabric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from stenograd.adapters import Attached, refuse_clipping
from stenograd.errors import ConfigError
from stenograd.lightning.exchanging import Exchanging, copied, fabric, register_names

__all__ = ["StenogradFabricStrategy"]


class StenogradFabricStrategy(Exchanging, fabric.strategies.DDPStrategy):
    """Trains by a Stenograd method; otherwise what Fabric's `DDPStrategy` is.

    See `StenogradStrategy`. With a schedule, `fabric.setup(model, optimizer)` must get both at once;
    evaluate inside `with fabric.strategy.sync.consensus():`, and save outside.

    Args:
        method: as text such as "topk:ratio=0.05"; see `stenograd methods`.
        timeout_s: seconds after which a silent peer is an error, > 0.
        check_every: after every so many exchanges, compare the ranks' parameters bit for bit; 0 for never.
        repair: overwrite parameters that differ by the majority's and warn, instead of raising.
        check_buffers: compare and repair buffers too.
        skip_bad_steps: after an exchange that was not finite on some rank, the optimizers change nothing.
        ddp_options: for Fabric's `DDPStrategy`.

    Attributes:
        syncs: the hook or synchronisation of each model, in the order of `fabric.setup`.

    Raises:
        MethodError: unknown method or key, or a value outside its range.
        ConfigError: an option that would have no effect.

    Example:
        fabric = Fabric(devices=2, strategy=StenogradFabricStrategy("topk:ratio=0.05"))
    """

    strategy_name = "stenograd"

    @property
    def syncs(self) -> list[Any]:
        """The hook or synchronisation of each model, in the order of `fabric.setup`."""
        return [one.sync for one in self._attached]

    @property
    def sync(self) -> Any:
        """The hook or synchronisation of the only model; None before `fabric.setup`.

        Raises:
            ConfigError: several models are set up.
        """
        if len(self._attached) > 1:
            raise ConfigError(f"sync needs one model, got {len(self._attached)} set up: take one of `syncs`")
        return self._attached[0].sync if self._attached else None

    def setup_module(self, module: nn.Module) -> Any:
        """Wrap a model in DistributedDataParallel, with the method as its hook.

        Raises:
            ConfigError: the method trains in rounds, which needs the optimizers too.
        """
        if self._in_rounds:
            raise ConfigError(
                f"{self._method} needs the model and its optimizers together: call "
                "fabric.setup(model, optimizer)"
            )
        ddp = super().setup_module(module)
        self._attach_ddp(ddp)
        return ddp

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], *rest: Any
    ) -> tuple[Any, ...]:
        """Attach the method to a model and its optimizers."""
        if not self._in_rounds:
            return tuple(super().setup_module_and_optimizers(module, optimizers, *rest))
        self._attach(module, optimizers)
        self._backward_sync_control = _RoundsControl(self._attached)
        return (module, list(optimizers), *rest)

    def clip_gradients_norm(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Clip the norm of gradients, but not of what is none."""
        self._refuse_clipping(module)
        return super().clip_gradients_norm(module, *args, **kwargs)

    def clip_gradients_value(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        """Clip the elements of gradients, but not of what is none."""
        self._refuse_clipping(module)
        super().clip_gradients_value(module, *args, **kwargs)

    def _refuse_clipping(self, module: nn.Module) -> None:
        refuse_clipping(self._method, module.parameters(), "leave fabric.clip_gradients out")

    def teardown(self) -> None:
        """Leave the process groups of all models, and take threads and hooks away; `syncs` still tell.

        Fabric never calls it: call `fabric.strategy.teardown()` where a program goes on after training.
        """
        super().teardown()

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Return a model's state, for methods in rounds the consensus; all ranks call it."""
        for one in self._attached:
            if one.module is module and one.in_rounds:
                with one.shown():
                    return copied(super().get_module_state_dict(module))
        state: dict[str, Any] = super().get_module_state_dict(module)
        return state

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Save a checkpoint and, if it holds an optimizer, what each rank keeps beside it."""
        with self._saved_beside(path, _holds_optimizer(state)) as names:
            super().save_checkpoint(path, {**state, **names}, *args, **kwargs)

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Load a checkpoint and, if it is into an optimizer, then what each rank keeps beside it."""
        rest = dict(super().load_checkpoint(path, state, *args, **kwargs))
        if self._attached and isinstance(state, Mapping) and _holds_optimizer(state):
            self._load_beside(path, rest)
            return rest
        loaded = state.values() if isinstance(state, Mapping) else [state]
        for one in self._attached:
            # An outer optimizer, and estimates of neighbours, would lead back to the weights before.
            if one.in_rounds and any(one.module is part for part in loaded):
                one.begin_anew()
        return rest


class _RoundsControl:
    """What `fabric.no_backward_sync` does with models that are not wrapped."""

    def __init__(self, attached: Sequence[Attached]) -> None:
        self._attached = attached

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Accumulate gradients locally: passes inside do not count."""
        syncs = [one.sync for one in self._attached if one.module is module]
        return syncs[0].no_sync() if enabled and syncs else nullcontext()


def _holds_optimizer(state: Mapping[str, Any]) -> bool:
    return any(isinstance(part, torch.optim.Optimizer) for part in state.values())


register_names(fabric.strategies.STRATEGY_REGISTRY.register, StenogradFabricStrategy)
