"""The module that DASO trains, with Heat's interface."""

from __future__ import annotations

from typing import Any

from torch import nn

from stenograd.comm.groups import ranks_of
from stenograd.errors import ConfigError
from stenograd.heat.daso import DASO

__all__ = ["DataParallelMultiGPU"]


class DataParallelMultiGPU(nn.Module):
    """A module that DASO trains; call it like the module itself.

    Departs from Heat: weights are rank 0's instead of new ones; any device, and any number of ranks per node.

    Args:
        module: the model, alike on every rank.
        optimizer: the DASO that trains it.
        comm: None, or DASO's own process group.

    Raises:
        TypeError: module is not a torch.nn.Module, or optimizer is not a DASO.
        ConfigError: comm is another process group than DASO's.

    Example:
        >>> import torch
        >>> model = nn.Linear(2, 1)
        >>> daso = DASO(torch.optim.SGD(model.parameters(), lr=0.1), total_epochs=20)
        >>> net = DataParallelMultiGPU(model, daso)
        >>> net(torch.ones(3, 2)).shape
        torch.Size([3, 1])
        >>> daso.close()
    """

    def __init__(self, module: nn.Module, optimizer: DASO, comm: Any = None) -> None:
        if not isinstance(module, nn.Module):
            raise TypeError(f"module must be a torch.nn.Module, got {type(module).__name__}: pass the model")
        if not isinstance(optimizer, DASO):
            raise TypeError(
                f"optimizer must be a DASO, got {type(optimizer).__name__}: use DataParallel for others"
            )
        whole = optimizer.comm is None and comm is not None and ranks_of(comm) == ranks_of(None)
        if comm is not None and comm is not optimizer.comm and not whole:
            raise ConfigError("comm must be DASO's own process group, got another: leave it out here")
        super().__init__()
        self.module = module
        self.comm = optimizer.comm
        optimizer.set_model(module)  # never draws new weights: Heat does, and destroys pretrained ones

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module."""
        return self.module(*args, **kwargs)
