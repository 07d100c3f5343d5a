"""SINGA's module `opt`: write `from stenograd.singa import opt` instead of `from singa import opt`."""

from __future__ import annotations

from stenograd.singa.distopt import DistOpt
from stenograd.singa.optimizers import SGD, AdaGrad, Adam, Optimizer, RMSProp
from stenograd.singa.schedules import Constant, DecayScheduler, ExponentialDecay

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
