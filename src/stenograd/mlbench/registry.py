"""MLBench's optimizers by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from stenograd.errors import bad_value
from stenograd.mlbench.centralized import CentralizedAdam, CentralizedSGD, PowerSGD
from stenograd.mlbench.decentralized import DecentralizedSGD
from stenograd.mlbench.signsgd import SignSGD
from stenograd.mlbench.sparsified import CentralizedSparsifiedSGD, SparsifiedSGD

__all__ = ["get_optimizer"]

_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "centralized_adam": CentralizedAdam,
    "centralized_sgd": CentralizedSGD,
    "centralized_sparsified_sgd": CentralizedSparsifiedSGD,
    "decentralized_sgd": DecentralizedSGD,
    "power_sgd": PowerSGD,
    "sign_sgd": SignSGD,
    "sparsified_sgd": SparsifiedSGD,
}


def get_optimizer(name: str, **kwargs: Any) -> torch.optim.Optimizer:
    """Make an optimizer by its name.

    Args:
        name: sign_sgd, sparsified_sgd, centralized_sparsified_sgd, centralized_sgd, centralized_adam,
            power_sgd or decentralized_sgd.
        kwargs: its arguments.

    Raises:
        ConfigError: the name is unknown, or as the optimizer.

    Example:
        >>> w = torch.zeros(2, requires_grad=True)
        >>> type(get_optimizer("sign_sgd", params=[w], lr=0.1)).__name__
        'SignSGD'
    """
    if name not in _OPTIMIZERS:
        raise bad_value("name", f"must be one of {', '.join(_OPTIMIZERS)}", name, "choose one")
    return _OPTIMIZERS[name](**kwargs)
