"""Checks of DASO's arguments."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from stenograd.comm.groups import is_group
from stenograd.errors import ConfigError, bad_value

__all__ = ["CAST_METHODS", "check_arguments", "made_scheduler"]

# The method that stands for each downcast_type. It writes differences of parameters, not parameters: an
# update of 1e-4 of a weight vanishes in a bfloat16 weight, and survives in a bfloat16 difference.
CAST_METHODS = {torch.bfloat16: "bf16", torch.half: "fp16", torch.float: "dense"}
_LEAST = {  # of the arguments that are whole numbers
    "total_epochs": 1,
    "warmup_epochs": 0,
    "cooldown_epochs": 0,
    "max_global_skips": 0,
    "sending_chunk_size": 1,
    "skip_reduction_factor": 2,
    "local_skip_factor": 1,
}


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Check types and ranges of DASO's arguments, given by name.

    Raises:
        TypeError: one is of the wrong type.
        ConfigError: one is outside its range; a ValueError.

    Example:
        >>> check_arguments({"total_epochs": 0})
        Traceback (most recent call last):
        stenograd.errors.ConfigError: total_epochs must be at least 1, got 0: raise it
    """
    for name, value in arguments.items():
        if name in _LEAST:
            if not isinstance(value, int) or isinstance(value, bool):
                raise _wrong_type(name, "a whole number", value)
            if value < _LEAST[name]:
                raise bad_value(name, f"must be at least {_LEAST[name]}", value, "raise it")
        elif name in ("use_mpi_groups", "verbose"):
            if not isinstance(value, bool):
                raise _wrong_type(name, "True or False", value)
        elif name == "stability_level":
            if not isinstance(value, (int, float)) or isinstance(value, bool):
                raise _wrong_type(name, "a number", value)
            if not 0 <= value < float("inf"):
                raise bad_value(name, "must be at least 0 and finite", value, "0.05 is 5 %")
        elif name == "local_optimizer" and not isinstance(value, torch.optim.Optimizer):
            raise _wrong_type(name, "a torch.optim.Optimizer", value)
        elif name == "comm" and value is not None and not is_group(value):
            raise _wrong_type(name, "a process group of torch.distributed, or None for all ranks", value)
        elif name == "downcast_type":
            if not isinstance(value, torch.dtype):
                raise _wrong_type(name, "a torch.dtype", value)
            if value not in CAST_METHODS:
                rule = "must be torch.bfloat16, torch.half or torch.float"
                raise bad_value(name, rule, value, "choose one, or give global_method")


def made_scheduler(scheduler: Any, optimizer: torch.optim.Optimizer) -> Any:
    """Return the learning-rate scheduler to step: the given one, or the one that the given factory makes.

    Args:
        scheduler: a scheduler of torch, or a callable that takes the optimizer and returns one.
        optimizer: DASO's local optimizer.

    Raises:
        TypeError: it is neither a scheduler nor a factory, or it needs the loss to step.
        ConfigError: it schedules another optimizer.
    """
    if scheduler is None:
        return None
    kind = torch.optim.lr_scheduler.LRScheduler
    made = scheduler if isinstance(scheduler, kind) or not callable(scheduler) else scheduler(optimizer)
    if not isinstance(made, kind):
        wanted = "a learning-rate scheduler, or a callable that makes one from the optimizer"
        raise _wrong_type("scheduler", wanted, made)
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise TypeError(
            "scheduler must step without a loss, got ReduceLROnPlateau: leave it out here, and call its "
            "step(loss) yourself once per epoch"
        )
    if made.optimizer is not optimizer:
        raise ConfigError(
            "scheduler must schedule local_optimizer, got one of another: make it from that one"
        )
    return made


def _wrong_type(name: str, wanted: str, value: Any) -> TypeError:
    return TypeError(f"{name} must be {wanted}, got {value!r} ({type(value).__name__})")
