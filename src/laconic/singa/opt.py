"""SINGA's module `opt`: write `from laconic.singa import opt` for `from singa import opt`."""

from __future__ import annotations

from laconic.singa.base import Optimizer
from laconic.singa.distopt import DistOpt
from laconic.singa.optimizers import SGD, AdaGrad, Adam, RMSProp
from laconic.singa.schedules import Constant, DecayScheduler, ExponentialDecay

__all__ = [
    "SGD",
    "AdaGrad",
    "Adam",
    "Constant",
    "DecayScheduler",
    "DistOpt",
    "ExponentialDecay",
    "Optimizer",
    "RMSProp",
]
