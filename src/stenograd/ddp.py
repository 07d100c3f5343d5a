"""Stenograd's methods as a communication hook of DistributedDataParallel: `stenograd.ddp.register`."""

from stenograd.sync.ddp import DDPHook, register

__all__ = ["DDPHook", "register"]
