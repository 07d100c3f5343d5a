"""Data-parallel PyTorch training that sends less.

`sync = stenograd.distribute(model, optimizer, "topk:ratio=0.01")` makes every `loss.backward()` leave
gradients that are averaged over all ranks, written on the wire by the method of your choice.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from stenograd.version import __version__ as __version__

if TYPE_CHECKING:
    from stenograd import ddp, heat, mlbench, singa
    from stenograd.catalog.method import Method, method, methods
    from stenograd.checkpoint.api import Loaded, PerRank, load_checkpoint, save_checkpoint
    from stenograd.checkpoint.beside import load_state, save_state
    from stenograd.checkpoint.reshard import reshard
    from stenograd.comm.traffic import Traffic
    from stenograd.compression.codec import Codec
    from stenograd.compression.contract import Compressor, Exchange, Feedback, Site, Transport
    from stenograd.compression.error_feedback import ErrorFeedback
    from stenograd.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        LaunchError,
        MethodError,
        MismatchError,
        NonFiniteError,
        PeerLost,
        ReplicaDivergence,
        StenogradError,
        TensorTypeError,
        WireError,
    )
    from stenograd.launch.process_group import World, init, shutdown
    from stenograd.planning.plan import Plan, load_plan, plan
    from stenograd.planning.trial import Trial
    from stenograd.sync.distribute import distribute
    from stenograd.sync.gradient_sync import GradientSync
    from stenograd.sync.replica_guard import ReplicaGuard

__all__ = [
    "CheckpointError",
    "Codec",
    "Compressor",
    "ConfigError",
    "DataError",
    "ErrorFeedback",
    "Exchange",
    "Feedback",
    "GradientSync",
    "LaunchError",
    "Loaded",
    "Method",
    "MethodError",
    "MismatchError",
    "NonFiniteError",
    "PeerLost",
    "PerRank",
    "Plan",
    "ReplicaDivergence",
    "ReplicaGuard",
    "Site",
    "StenogradError",
    "TensorTypeError",
    "Traffic",
    "Transport",
    "Trial",
    "WireError",
    "World",
    "ddp",
    "distribute",
    "heat",
    "init",
    "load_checkpoint",
    "load_plan",
    "load_state",
    "method",
    "methods",
    "mlbench",
    "plan",
    "reshard",
    "save_checkpoint",
    "save_state",
    "shutdown",
    "singa",
]

# Where each public name lives. They are imported when first used, so that `stenograd --help` and the parent
# of local workers answer at once: importing torch takes seconds.
_HOMES = {
    "catalog.method": ["Method", "method", "methods"],
    "checkpoint.api": ["Loaded", "PerRank", "load_checkpoint", "save_checkpoint"],
    "checkpoint.beside": ["load_state", "save_state"],
    "checkpoint.reshard": ["reshard"],
    "comm.traffic": ["Traffic"],
    "compression.codec": ["Codec"],
    "compression.contract": ["Compressor", "Exchange", "Feedback", "Site", "Transport"],
    "compression.error_feedback": ["ErrorFeedback"],
    "errors": [name for name in __all__ if name.endswith(("Error", "Lost", "Divergence"))],
    "launch.process_group": ["World", "init", "shutdown"],
    "planning.plan": ["Plan", "load_plan", "plan"],
    "planning.trial": ["Trial"],
    "sync.distribute": ["distribute"],
    "sync.gradient_sync": ["GradientSync"],
    "sync.replica_guard": ["ReplicaGuard"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in ("accelerate", "ddp", "heat", "mlbench", "simulate", "singa", "topology", "transformers"):
        return importlib.import_module(f"stenograd.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'stenograd' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"stenograd.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
