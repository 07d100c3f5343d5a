"""MLBench's SignSGD: a local optimizer that moves every element by the learning rate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from stenograd.errors import bad_value
from stenograd.mlbench.arguments import check_lr
from stenograd.mlbench.wrapper import Closure, evaluate

__all__ = ["SignSGD"]


class SignSGD(torch.optim.Optimizer):
    """`d = g + wd p`, `b <- mu b + (1 - dampening) d`, `p <- p - lr sign(b)`, with `sign(0) = 0`.

    The first step takes `b = d`; Nesterov's variant uses `d + mu b` for b. It does not communicate: put it in
    a `CustomCentralizedOptimizer` for the sign of the mean gradient, or use `stenograd.distribute(...,
    "sign")` to send signs.

    Args:
        params: parameters, or groups of them.
        lr: learning rate, at least 0; must be given. A value outside its range is a ConfigError.
        momentum, weight_decay: mu and wd, at least 0.
        dampening, nesterov: as for `torch.optim.SGD`.

    Example:
        >>> w = torch.zeros(3, requires_grad=True)
        >>> w.grad = torch.tensor([3.0, -0.1, 0.0])
        >>> SignSGD([w], lr=0.5).step()
        >>> w.tolist()
        [-0.5, 0.5, 0.0]
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | None = None,
        momentum: float = 0,
        weight_decay: float = 0,
        dampening: float = 0,
        nesterov: bool = False,
    ) -> None:
        check_lr(lr)
        for name, value in (("momentum", momentum), ("weight_decay", weight_decay)):
            if not 0 <= value < float("inf"):
                raise bad_value(name, "must be finite and at least 0", value, "use 0 for none")
        if nesterov and (momentum <= 0 or dampening != 0):
            got = (momentum, dampening)
            raise bad_value("momentum, dampening", "must be above 0 and 0 with nesterov", got, "change them")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "dampening": dampening, "nesterov": nesterov})

    @torch.no_grad()
    def step(self, closure: Closure | None = None) -> Any:
        """Move every parameter that has a gradient, and return the closure's loss."""
        loss = evaluate(closure)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(self._direction(p, p.grad, group).sign_(), alpha=group["lr"])
        return loss

    def _direction(self, p: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        """Return d, with momentum if there is any; in memory of its own."""
        d = grad.add(p, alpha=group["weight_decay"])
        mu = group["momentum"]
        if not mu:
            return d
        buffer: Tensor | None = self.state[p].get("momentum_buffer")
        if buffer is None:
            buffer = self.state[p]["momentum_buffer"] = d.clone()
        else:
            buffer.mul_(mu).add_(d, alpha=1 - group["dampening"])
        return d.add_(buffer, alpha=mu) if group["nesterov"] else buffer.clone()
