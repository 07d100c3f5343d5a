"""Heat's `ht.nn`: its data-parallel modules, and all of `torch.nn` under the same names."""

from __future__ import annotations

import sys
from typing import Any

import torch

from stenograd.heat.data_parallel import DataParallel, DataParallelMultiGPU

__all__ = ["DataParallel", "DataParallelMultiGPU"]

# Heat's programs have `import heat.nn.functional as F`, which looks for a module of that name.
sys.modules[f"{__name__}.functional"] = torch.nn.functional


def __getattr__(name: str) -> Any:
    """Look a name up in `torch.nn`."""
    # __path__ and the like belong to each module itself
    if name.startswith("__") or not hasattr(torch.nn, name):
        raise AttributeError(f"neither stenograd.heat.nn nor torch.nn has {name!r}")
    return getattr(torch.nn, name)
