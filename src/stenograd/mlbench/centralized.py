"""MLBench's CentralizedSGD and CentralizedAdam: torch's SGD and Adam on the ranks' mean gradient."""

from __future__ import annotations

import torch
from torch import nn

from stenograd.mlbench.arguments import check_lr
from stenograd.mlbench.generic import GenericCentralizedOptimizer

__all__ = ["CentralizedAdam", "CentralizedSGD"]


class CentralizedSGD(GenericCentralizedOptimizer):
    """`torch.optim.SGD` on `g = sum_r g_r / N`; with agg_grad=False `p <- sum_r p_r / N` after its step.

    Args:
        world_size: number of ranks; None is the group's.
        model: the model to train; all its parameters form one group.
        lr: learning rate, at least 0; must be given.
        momentum: at least 0.
        dampening: of the momentum; 0 with nesterov.
        weight_decay: L2 penalty, at least 0.
        nesterov: Nesterov's momentum; needs momentum above 0.
        use_cuda: taken for compatibility.
        by_layer: one collective a parameter.
        agg_grad: average gradients; else weights.

    Raises:
        ConfigError: as in `GenericCentralizedOptimizer`, or lr is not given.
        ValueError: a value is outside the range that torch gives.

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

    Args:
        world_size: number of ranks; None is the group's.
        model: the model to train; all its parameters form one group.
        lr: learning rate, at least 0; must be given (the text says 1e-3, the signature required).
        betas: averaging factors of the gradient and of its square, each in [0, 1).
        eps: added to the denominator, at least 0.
        weight_decay: L2 penalty, at least 0.
        amsgrad: the variant of Reddi et al., ICLR 2018.
        use_cuda: taken for compatibility.
        by_layer: one collective a parameter.
        agg_grad: average gradients; else weights.

    Raises:
        ConfigError: as in `GenericCentralizedOptimizer`, or lr is not given.
        ValueError: a value is outside the range that torch gives.

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
