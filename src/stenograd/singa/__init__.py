"""Apache SINGA's `opt` on PyTorch tensors, under the same names: change the import.

`optimizer = DistOpt(SGD(lr=0.005, momentum=0.9))`, then `optimizer.backward_and_update(loss)` in the loop.
"""

from __future__ import annotations

from stenograd.singa import opt as opt
from stenograd.singa.distopt import DistOpt
from stenograd.singa.launch import NcclIdHolder
from stenograd.singa.opt import (
    SGD,
    AdaGrad,
    Adam,
    Constant,
    DecayScheduler,
    ExponentialDecay,
    Optimizer,
    RMSProp,
)

__all__ = [
    "SGD",
    "AdaGrad",
    "Adam",
    "Constant",
    "DecayScheduler",
    "DistOpt",
    "ExponentialDecay",
    "NcclIdHolder",
    "Optimizer",
    "RMSProp",
    "opt",
]
