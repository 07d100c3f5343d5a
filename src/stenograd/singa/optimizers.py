"""SINGA's optimizers, which find parameters in the loss's graph: SGD, RMSProp, AdaGrad and Adam."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, ClassVar

import torch
from torch import Tensor

from stenograd.checkpoint.files import write_tensors
from stenograd.errors import CheckpointError, TensorTypeError, bad_value
from stenograd.singa.gradients import Walker, backward
from stenograd.singa.schedules import Constant, DecayScheduler, as_schedule, values_at
from stenograd.singa.slots import Slot, Slots, named_members

__all__ = ["SGD", "AdaGrad", "Adam", "File", "Optimizer", "RMSProp", "Saved", "Setting"]

Setting = float | DecayScheduler
File = str | os.PathLike[str] | IO[bytes]


class Saved:
    """What has states writes them to files, and reads them back."""

    def get_states(self) -> dict[str, Any]:
        """Return copies of the whole state."""
        raise NotImplementedError

    def set_states(self, states: Mapping[str, Any]) -> None:
        """Continue from a state that `get_states` returned."""
        raise NotImplementedError

    def save(self, file: File) -> None:
        """Write `get_states()` to a path, where a file is always whole, or to a binary file.

        Raises:
            CheckpointError: the path cannot be written, or could not be loaded again; an earlier file stays.
        """
        states = self.get_states()
        if isinstance(file, str | os.PathLike):
            write_tensors(Path(file), states, states, f".{os.getpid()}")
        else:
            torch.save(states, file)

    def load(self, file: File) -> None:
        """Load what `save` wrote; only tensors and plain values are read, so a file cannot run code.

        Raises:
            CheckpointError: the file is missing, damaged, or of another optimizer or run.
        """
        try:
            self.set_states(torch.load(file, map_location="cpu", weights_only=True))
        except Exception as cause:  # torch.load raises a dozen types for what is not a checkpoint
            raise CheckpointError(
                f"{file}: cannot be loaded ({cause}): give a file that save() wrote"
            ) from cause


class Optimizer(Saved):
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
        if param_grad.shape != param_value.shape:
            rule = f"must have the parameter's shape {tuple(param_value.shape)}"
            raise bad_value("gradient", rule, tuple(param_grad.shape), "pass the gradient of this parameter")
        if not param_grad.is_floating_point() or param_grad.is_sparse:
            raise TensorTypeError(
                f"gradient must be dense and real, got {param_grad.layout} of {param_grad.dtype}: "
                "use floating-point parameters, and sparse=False for embeddings"
            )
        slot = self._slots.to_update(param_value, param_name if isinstance(param_name, str) else None)
        values = {**self._values, **slot.values}
        # so state is never narrower than `dtype`
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
        expected = {"step_counter", *self.state_names}
        if not isinstance(states, Mapping) or "step_counter" not in states or not expected.issuperset(states):
            got = sorted(states) if isinstance(states, Mapping) else type(states).__name__
            raise bad_value("states", f"must hold {sorted(expected)}", got, "use the same kind of optimizer")
        counter = float(states["step_counter"])
        if counter < 0 or not counter.is_integer():
            raise bad_value("step_counter", "must be a whole number of steps", counter, "use what was saved")
        self._slots.restore({name: states[name] for name in self.state_names if name in states})
        self.step_counter = int(counter)
        self._refresh()

    def device_check(self, *tensors: Tensor) -> None:
        """Raise a ConfigError unless the tensors lie on one device."""
        devices = {str(tensor.device) for tensor in tensors}
        if len(devices) > 1:
            raise bad_value(
                "tensors", "must lie on one device", sorted(devices), "move them with .to(device)"
            )

    def _check(self, config: Mapping[str, DecayScheduler]) -> None:
        """Check rules that hold between hyper-parameters; subclasses define them."""

    def _refresh(self) -> None:
        """Evaluate all schedules at the present step."""
        self._values = values_at(self.step_counter, self.config)
        # Slots that come later need no values: only `register` gives overrides, and it calls this.
        for slot in self._slots:
            slot.values = values_at(self.step_counter, slot.overrides or {})


class SGD(Optimizer):
    """Gradient descent: `g <- g + weight_decay*p`, `v <- momentum*v + (1-dampening)*g`, `p <- p - lr*v`.

    Nesterov: `p <- p - lr*(g + momentum*v)`. Without momentum: `p <- p - lr*g`. At a parameter's first update
    `v = g`, undampened.

    Args:
        lr: learning rate, >= 0. Each hyper-parameter is a number or a schedule.
        momentum: factor of the velocity, >= 0.
        dampening: share of the gradient that does not enter the velocity; 0 for none.
        weight_decay: L2 penalty, >= 0.
        nesterov: whether to look ahead; needs momentum > 0 and dampening 0.
        dtype: type of the state tensors where the parameter's own is narrower.

    Raises:
        TypeError, ConfigError: a hyper-parameter is not a number or schedule, or is outside its range.
        ConfigError: nesterov without momentum, or with dampening.

    Departs from SINGA's latest version, which dampens the first gradient too; its documents and PyTorch do
    not. Momentum is off if it is the constant 0, not if a schedule starts at 0.

    Example:
        >>> w = torch.tensor([1.0], requires_grad=True)
        >>> SGD(lr=0.1, momentum=0.9)((2 * w).sum())
        >>> w.tolist()
        [0.800000011920929]

    Reference: Sutskever et al., "On the importance of initialization and momentum in deep learning", ICML
    2013, in the form where lr multiplies the velocity.
    """

    state_names = ("moments",)

    def __init__(
        self,
        lr: Setting = 0.1,
        momentum: Setting = 0,
        dampening: Setting = 0,
        weight_decay: Setting = 0,
        nesterov: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        inertia: dict[str, Setting] = {"momentum": momentum, "dampening": dampening, "nesterov": nesterov}
        super().__init__({"lr": lr, **inertia, "weight_decay": weight_decay}, dtype)

    @property
    def nesterov(self) -> bool:
        """Whether updates look ahead."""
        return bool(self._values["nesterov"])

    def _check(self, config: Mapping[str, DecayScheduler]) -> None:
        momentum, dampening = config["momentum"].init_value, config["dampening"].init_value
        if config["nesterov"].init_value and (momentum <= 0 or dampening != 0):
            got = f"momentum {momentum}, dampening {dampening}"
            advice = "use SGD(lr=0.1, momentum=0.9, nesterov=True)"
            raise bad_value("nesterov", "needs momentum > 0 and dampening 0", got, advice)

    def change(self, param: Tensor, grad: Tensor, slot: Slot, values: Mapping[str, float]) -> None:
        """Update a parameter with its velocity."""
        schedule = (slot.overrides or {}).get("momentum", self.config["momentum"])
        # A schedule that begins at 0 keeps a velocity from the start, for when it rises.
        if not (isinstance(schedule, Constant) and schedule.init_value == 0):
            if "moments" in slot.state:
                velocity = slot.buffer("moments", grad)
                # v <- momentum v + (1 - dampening) g
                velocity.mul_(values["momentum"]).add_(grad, alpha=1 - values["dampening"])
            else:
                velocity = slot.state["moments"] = grad.clone()  # the first is not damped, as in torch
            # Nesterov: g + momentum v
            grad = grad.add(velocity, alpha=values["momentum"]) if values["nesterov"] else velocity
        param.add_(grad, alpha=-values["lr"])


class RMSProp(Optimizer):
    """RMSProp: `a <- rho*a + (1-rho)*g^2`, `p <- p - lr*g / sqrt(a+epsilon)`, with `g <- g + weight_decay*p`.

    Args:
        lr, weight_decay, dtype: as for `SGD`.
        rho: share of the running average that a step keeps, in [0, 1).
        epsilon: added inside the square root (PyTorch adds it outside), >= 0; 0 makes NaN of zero gradients.

    Example:
        >>> w = torch.tensor([1.0], requires_grad=True)
        >>> RMSProp(lr=0.1, rho=0.75)(w.sum())
        >>> round(w.item(), 4)
        0.8

    Reference: Tieleman and Hinton, "Lecture 6.5: RMSProp", COURSERA, 2012.
    """

    state_names = ("running_average",)

    def __init__(
        self,
        lr: Setting = 0.1,
        rho: Setting = 0.9,
        epsilon: Setting = 1e-8,
        weight_decay: Setting = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__({"lr": lr, "rho": rho, "epsilon": epsilon, "weight_decay": weight_decay}, dtype)

    def change(self, param: Tensor, grad: Tensor, slot: Slot, values: Mapping[str, float]) -> None:
        """Update a parameter with its gradient, divided by the root of the running mean of its square."""
        average = slot.buffer("running_average", grad)
        # a <- rho a + (1 - rho) g^2
        average.mul_(values["rho"]).addcmul_(grad, grad, value=1 - values["rho"])
        # Epsilon inside the root, as in SINGA; torch.optim.RMSprop adds it outside.
        param.addcdiv_(grad, (average + values["epsilon"]).sqrt_(), value=-values["lr"])


class AdaGrad(Optimizer):
    """AdaGrad: `h <- h + g^2`, `p <- p - lr*g / sqrt(h+epsilon)`, with `g <- g + weight_decay*p`.

    Arguments are as for `RMSProp`.

    Example:
        >>> w = torch.tensor([1.0], requires_grad=True)
        >>> AdaGrad(lr=0.1)((3 * w).sum())
        >>> round(w.item(), 4)
        0.9

    Reference: Duchi et al., "Adaptive Subgradient Methods", JMLR 12, 2011.
    """

    state_names = ("history",)

    def __init__(
        self,
        lr: Setting = 0.1,
        epsilon: Setting = 1e-8,
        weight_decay: Setting = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__({"lr": lr, "epsilon": epsilon, "weight_decay": weight_decay}, dtype)

    def change(self, param: Tensor, grad: Tensor, slot: Slot, values: Mapping[str, float]) -> None:
        """Update a parameter with its gradient, divided by the root of the sum of all squares so far."""
        history = slot.buffer("history", grad).addcmul_(grad, grad)  # h <- h + g^2
        # Epsilon inside the root, as in SINGA; torch.optim.Adagrad adds it outside.
        param.addcdiv_(grad, (history + values["epsilon"]).sqrt_(), value=-values["lr"])


class Adam(Optimizer):
    """Adam: `p <- p - lr*mhat / (sqrt(vhat)+epsilon)`, with `g <- g + weight_decay*p`.

    The averages are `m <- beta_1*m + (1-beta_1)*g` and `v <- beta_2*v + (1-beta_2)*g^2`; corrected for their
    bias, `mhat = m/(1-beta_1^t)` and `vhat = v/(1-beta_2^t)`. As in SINGA, t is the number of the optimizer's
    step, from 1; PyTorch counts each parameter's own updates.

    Args:
        lr, weight_decay, dtype: as for `SGD`; SINGA's default of lr is a hundred times PyTorch's.
        beta_1: share of m that a step keeps, in [0, 1).
        beta_2: share of v that a step keeps, in [0, 1).
        epsilon: added to the root, >= 0; 0 makes NaN of zero gradients.

    Example:
        >>> w = torch.tensor([1.0], requires_grad=True)
        >>> Adam(lr=0.1)((3 * w).sum())
        >>> round(w.item(), 4)
        0.9

    Reference: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015.
    """

    state_names = ("m", "v")

    def __init__(
        self,
        lr: Setting = 0.1,
        beta_1: Setting = 0.9,
        beta_2: Setting = 0.999,
        epsilon: Setting = 1e-8,
        weight_decay: Setting = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        betas = {"beta_1": beta_1, "beta_2": beta_2}
        super().__init__({"lr": lr, **betas, "epsilon": epsilon, "weight_decay": weight_decay}, dtype)

    def change(self, param: Tensor, grad: Tensor, slot: Slot, values: Mapping[str, float]) -> None:
        """Update a parameter with its gradients' mean, divided by the root of their mean square."""
        t, beta_1, beta_2 = self.step_counter + 1, values["beta_1"], values["beta_2"]
        m = slot.buffer("m", grad).lerp_(grad, 1 - beta_1)  # m <- beta_1 m + (1 - beta_1) g
        # v <- beta_2 v + (1 - beta_2) g^2
        v = slot.buffer("v", grad).mul_(beta_2).addcmul_(grad, grad, value=1 - beta_2)
        # sqrt(v / (1 - beta_2^t)) + epsilon
        root = v.sqrt().div_((1 - beta_2**t) ** 0.5).add_(values["epsilon"])
        param.addcdiv_(m, root, value=-values["lr"] / (1 - beta_1**t))  # m's own correction is in the rate
