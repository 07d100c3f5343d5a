"""Stenograd's methods inside Lightning: a strategy for the Trainer, one for Fabric, and callbacks.

`Trainer(strategy=StenogradStrategy("topk:ratio=0.05"))` is all that a program changes. Lightning itself is an
extra: `pip install stenograd[lightning]`.
"""

from __future__ import annotations

from stenograd.lightning.fabric import StenogradFabricStrategy
from stenograd.lightning.trainer import StenogradStrategy, StopOnRequest, TrafficLogger

__all__ = ["StenogradFabricStrategy", "StenogradStrategy", "StopOnRequest", "TrafficLogger"]
