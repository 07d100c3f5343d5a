"""The base class of SINGA's optimizers: finds parameters in the loss's graph, and keeps their state."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import IO, Any, ClassVar

import torch
from torch import Tensor

from stenograd.errors import CheckpointError, bad_value
from stenograd.singa.arguments import check_devices, check_gradient, check_states, named_members
from stenograd.singa.graph import Walker, backward
from stenograd.singa.schedules import DecayScheduler, as_schedule, values_at
from stenograd.singa.slots import Slot, Slots

__all__ = ["File", "Optimizer", "Setting"]

Setting = float | DecayScheduler
File = str | os.PathLike[str] | IO[bytes]


class Optimizer:
    """Base of SINGA's optimizers; takes no parameters: `optimizer(loss)` finds them in the loss's graph.

    Each update is `p <- change(p, g + weight_decay * p)`. Subclasses define `change`, or `apply` as in SINGA.

    Args:
        config: the hyper-parameters by name, each a number or a schedule; or the learning rate alone.
        dtype: type of the state tensors where the parameter's own is narrower (float16, bfloat16).
        lr: the learning rate, where it is given by name.

    Raises:
        TypeError, ConfigError: a hyper-parameter is not a number or schedule, or is outside its range.

    Departs from SINGA: `register`, `load` and `save` work; states are complete, and can be loaded before the
    first update; gradients are left unchanged; tensors on the wrong device are an error and are not moved.

    Example:
        >>> class SignDescent(Optimizer):
        ...     def change(self, param, grad, slot, values):
        ...         param.sub_(grad.sign(), alpha=values["lr"])
        >>> w = torch.tensor([1.0, -1.0], requires_grad=True)
        >>> SignDescent(lr=0.5)((w * w).sum())
        >>> w.tolist()
        [0.5, -0.5]
    """

    state_names: ClassVar[tuple[str, ...]] = ()  # names of the tensors that `change` keeps for each parameter

    def __init__(
        self,
        config: Mapping[str, Setting] | Setting | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        lr: Setting | None = None,
    ) -> None:
        given = dict(config) if isinstance(config, Mapping) else {} if config is None else {"lr": config}
        if lr is not None:
            given["lr"] = lr
        self.config = {name: as_schedule(name, value) for name, value in given.items()}
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise bad_value("dtype", "must be a floating-point torch.dtype", dtype, "use torch.float32")
        self.dtype = dtype
        self.step_counter = 0
        self._slots, self._walker = Slots(), Walker()
        self._check(self.config)
        self._refresh()

    @property
    def lr(self) -> DecayScheduler:
        """The learning rate's schedule."""
        return self.config["lr"]

    @property
    def lr_value(self) -> float:
        """The learning rate of the next update."""
        return self._values["lr"]

    def __call__(self, loss: Tensor) -> None:
        """Train one step: `call(loss)`, then `step()`; the loss has one element and a graph."""
        self.call(loss)
        self.step()

    def backward_and_update(self, loss: Tensor) -> None:
        """Train one step; the older name of `optimizer(loss)`."""
        self(loss)

    def call(self, loss: Tensor) -> None:
        """Compute new gradients of all parameters of the loss, and update each; the step is not counted."""
        parameters: list[Tensor] = []
        backward(loss, parameters.append, self._walker)
        with torch.no_grad():
            for parameter in parameters:  # after backward, which may still need the old values
                if parameter.grad is not None:
                    self.update(parameter, parameter.grad)

    def update(self, param: Tensor, grad: Tensor) -> None:
        """Update a parameter with a gradient: calls `apply` with the parameter's name."""
        self.apply(self._slots.name_of(param) or id(param), param, grad)

    @torch.no_grad()
    def apply(self, param_name: str | int | None, param_value: Tensor, param_grad: Tensor) -> None:
        """Update a parameter in place.

        Args:
            param_name: key of its state; None or a number for a parameter without a name.
            param_value: the parameter.
            param_grad: its gradient, of the same shape and device; it is not changed.

        Raises:
            TensorTypeError, ConfigError: the gradient is sparse or not real, or does not fit.
            CheckpointError: state was loaded for parameters of other names.
        """
        self.device_check(param_value, param_grad)
        check_gradient(param_value, param_grad)
        slot = self._slots.to_update(param_value, param_name if isinstance(param_name, str) else None)
        values = {**self._values, **slot.values}
        grad = param_grad.to(torch.promote_types(param_value.dtype, self.dtype))
        if decay := values.get("weight_decay"):
            grad = grad.add(param_value, alpha=decay)
        self.change(param_value, grad, slot, values)

    def change(self, param: Tensor, grad: Tensor, slot: Slot, values: Mapping[str, float]) -> None:
        """Change a parameter in place; subclasses define this.

        Args:
            param: the parameter.
            grad: its gradient with weight decay, at least as wide as `dtype`; must not be changed.
            slot: the parameter's state; `slot.buffer(name, grad)` is a state tensor.
            values: its hyper-parameters at this step.
        """
        raise NotImplementedError(f"{type(self).__name__} must define change or apply")

    def step(self) -> None:
        """Count a step and advance the schedules; update number t, from 0, used their values at t."""
        self.step_counter += 1
        self._refresh()

    def register(
        self, param_group: Tensor | Iterable[Tensor | tuple[str, Tensor]], config: Mapping[str, Setting]
    ) -> None:
        """Give parameters hyper-parameters of their own, and names if they come as (name, tensor) pairs.

        Args:
            param_group: `tensor`, `model.head.parameters()`, `model.named_parameters()`, ...
            config: the settings that differ from the optimizer's; may be empty.

        Raises:
            TypeError, ConfigError: a member or setting is wrong, or a parameter is already registered.
        """
        if unknown := sorted(set(config) - set(self.config)):
            raise bad_value("config", f"must have keys of {sorted(self.config)}", unknown, "rename them")
        overrides = {name: as_schedule(name, value) for name, value in config.items()}
        self._check({**self.config, **overrides})
        for name, parameter in named_members(param_group):
            self._slots.register(parameter, name, overrides)
        self._refresh()

    def get_states(self) -> dict[str, Any]:
        """Return copies of the step counter and the state tensors, by kind and parameter's name or number."""
        return {"step_counter": self.step_counter, **self._slots.export(self.state_names)}

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Continue from what `get_states` returned, also in a new process before the first update.

        Raises:
            ConfigError: the states come from another kind of optimizer.
        """
        counter = check_states(states, self.state_names)
        self._slots.restore({name: states[name] for name in self.state_names if name in states})
        self.step_counter = counter
        self._refresh()

    def save(self, file: File) -> None:
        """Write `get_states()` to a path or a binary file."""
        torch.save(self.get_states(), file)

    def load(self, file: File) -> None:
        """Load what `save` wrote; only tensors and plain values are read, so a file cannot run code.

        Raises:
            CheckpointError: the file is missing, damaged, or of another optimizer.
        """
        try:
            self.set_states(torch.load(file, map_location="cpu", weights_only=True))
        except Exception as cause:  # torch.load raises a dozen types for what is not a checkpoint
            raise CheckpointError(
                f"{file}: cannot be loaded ({cause}): give a file that save() wrote"
            ) from cause

    def device_check(self, *tensors: Tensor) -> None:
        """Raise a ConfigError unless the tensors lie on one device."""
        check_devices(tensors)

    def _check(self, config: Mapping[str, DecayScheduler]) -> None:
        """Check rules that hold between hyper-parameters; subclasses define them."""

    def _refresh(self) -> None:
        """Evaluate all schedules at the present step."""
        self._values = values_at(self.step_counter, self.config)
        for slot in self._slots:
            slot.values = values_at(self.step_counter, slot.overrides or {})
