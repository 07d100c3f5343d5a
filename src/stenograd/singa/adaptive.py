"""RMSProp, AdaGrad and Adam: each element's step is scaled by the size of its gradients."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from stenograd.singa.base import Optimizer, Setting
from stenograd.singa.slots import Slot

__all__ = ["AdaGrad", "Adam", "RMSProp"]


class RMSProp(Optimizer):
    """RMSProp: `a <- rho*a + (1-rho)*g^2`, `p <- p - lr*g / sqrt(a+epsilon)`, with `g <- g + weight_decay*p`.

    Args:
        lr: learning rate, >= 0. Each hyper-parameter is a number or a schedule.
        rho: share of the running average that a step keeps, in [0, 1).
        epsilon: added inside the square root (PyTorch adds it outside), >= 0; 0 makes NaN of zero gradients.
        weight_decay: L2 penalty, >= 0.
        dtype: type of the state tensors where the parameter's own is narrower.

    Raises:
        TypeError, ConfigError: a hyper-parameter is not a number or schedule, or is outside its range.

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
        average.mul_(values["rho"]).addcmul_(grad, grad, value=1 - values["rho"])
        param.addcdiv_(grad, (average + values["epsilon"]).sqrt_(), value=-values["lr"])


class AdaGrad(Optimizer):
    """AdaGrad: `h <- h + g^2`, `p <- p - lr*g / sqrt(h+epsilon)`, with `g <- g + weight_decay*p`.

    Args:
        lr: learning rate, >= 0. Each hyper-parameter is a number or a schedule.
        epsilon: added inside the square root (PyTorch adds it outside), >= 0; 0 makes NaN of zero gradients.
        weight_decay: L2 penalty, >= 0.
        dtype: type of the state tensors where the parameter's own is narrower.

    Raises:
        TypeError, ConfigError: a hyper-parameter is not a number or schedule, or is outside its range.

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
        history = slot.buffer("history", grad).addcmul_(grad, grad)
        param.addcdiv_(grad, (history + values["epsilon"]).sqrt_(), value=-values["lr"])


class Adam(Optimizer):
    """Adam: `p <- p - lr*mhat / (sqrt(vhat)+epsilon)`, with `g <- g + weight_decay*p`.

    The averages are `m <- beta_1*m + (1-beta_1)*g` and `v <- beta_2*v + (1-beta_2)*g^2`; corrected for their
    bias, `mhat = m/(1-beta_1^t)` and `vhat = v/(1-beta_2^t)`. As in SINGA, t is the number of the optimizer's
    step, from 1; PyTorch counts each parameter's own updates.

    Args:
        lr: learning rate, >= 0; SINGA's default is a hundred times PyTorch's. Each hyper-parameter is a
            number or a schedule.
        beta_1: share of m that a step keeps, in [0, 1).
        beta_2: share of v that a step keeps, in [0, 1).
        epsilon: added to the root, >= 0; 0 makes NaN of zero gradients.
        weight_decay: L2 penalty, >= 0.
        dtype: type of the state tensors where the parameter's own is narrower.

    Raises:
        TypeError, ConfigError: a hyper-parameter is not a number or schedule, or is outside its range.

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
        m = slot.buffer("m", grad).lerp_(grad, 1 - beta_1)
        v = slot.buffer("v", grad).mul_(beta_2).addcmul_(grad, grad, value=1 - beta_2)
        root = v.sqrt().div_((1 - beta_2**t) ** 0.5).add_(values["epsilon"])
        param.addcdiv_(m, root, value=-values["lr"] / (1 - beta_1**t))
