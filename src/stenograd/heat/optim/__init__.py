"""Heat's `ht.optim`: its optimizers, and all of `torch.optim` under the same names."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.optim import lr_scheduler

from stenograd.heat import plateau as utils
from stenograd.heat.daso import DASO
from stenograd.heat.data_parallel import DataParallelOptimizer
from stenograd.heat.optim import dp_optimizer
from stenograd.heat.plateau import DetectMetricPlateau

__all__ = ["DASO", "DataParallelOptimizer", "DetectMetricPlateau", "dp_optimizer", "lr_scheduler", "utils"]

# Heat's programs have `from heat.optim.lr_scheduler import StepLR`, which looks for a module of that name.
sys.modules.update({f"{__name__}.lr_scheduler": lr_scheduler, f"{__name__}.utils": utils})


def __getattr__(name: str) -> Any:
    """Look a name up in `torch.optim`."""
    # __path__ and the like belong to each module itself
    if name.startswith("__") or not hasattr(torch.optim, name):
        raise AttributeError(f"neither stenograd.heat.optim nor torch.optim has {name!r}")
    return getattr(torch.optim, name)
