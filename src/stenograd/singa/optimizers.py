"""SINGA's optimizers: SGD, RMSProp, AdaGrad and Adam."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stenograd.errors import bad_value
from stenograd.singa.adaptive import AdaGrad, Adam, RMSProp
from stenograd.singa.base import Optimizer, Setting
from stenograd.singa.schedules import Constant, DecayScheduler
from stenograd.singa.slots import Slot

__all__ = ["SGD", "AdaGrad", "Adam", "RMSProp"]


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
        self.nesterov = nesterov
        inertia = {"momentum": momentum, "dampening": dampening}
        super().__init__({"lr": lr, **inertia, "weight_decay": weight_decay}, dtype)

    def _check(self, config: Mapping[str, DecayScheduler]) -> None:
        momentum, dampening = config["momentum"].init_value, config["dampening"].init_value
        if self.nesterov and (momentum <= 0 or dampening != 0):
            raise bad_value(
                "nesterov",
                "needs momentum > 0 and dampening 0",
                f"momentum {momentum}, dampening {dampening}",
                "use SGD(lr=0.1, momentum=0.9, nesterov=True)",
            )

    def change(self, param: Tensor, grad: Tensor, slot: Slot, values: Mapping[str, float]) -> None:
        """Update a parameter with its velocity."""
        schedule = (slot.overrides or {}).get("momentum", self.config["momentum"])
        if not (isinstance(schedule, Constant) and schedule.init_value == 0):
            if "moments" in slot.state:
                velocity = slot.buffer("moments", grad)
                velocity.mul_(values["momentum"]).add_(grad, alpha=1 - values["dampening"])
            else:
                velocity = slot.state["moments"] = grad.clone()
            grad = grad.add(velocity, alpha=values["momentum"]) if self.nesterov else velocity
        param.add_(grad, alpha=-values["lr"])
