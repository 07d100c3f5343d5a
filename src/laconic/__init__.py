"""Data-parallel PyTorch training that sends less.

`sync = laconic.distribute(model, optimizer, "topk:ratio=0.01")` makes every `loss.backward()` leave
gradients that are averaged over all ranks, written on the wire by the method of your choice.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from laconic.version import __version__ as __version__

if TYPE_CHECKING:
    from laconic import ddp, heat, mlbench, singa
    from laconic.compressor import Codec, Compressor, Exchange, Site
    from laconic.engine import GradientSync, distribute
    from laconic.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        LaconicError,
        LaunchError,
        MethodError,
        MismatchError,
        NonFiniteError,
        PeerLost,
        ReplicaDivergence,
        TensorTypeError,
        WireError,
    )
    from laconic.feedback import ErrorFeedback
    from laconic.groups import World, init, shutdown
    from laconic.guard import ReplicaGuard
    from laconic.parsing import Method, method, methods
    from laconic.resharding import reshard
    from laconic.saving import Loaded, PerRank, load_checkpoint, save_checkpoint
    from laconic.traffic import Traffic
    from laconic.wrappers import Clip, PerSize, Warmup

__all__ = [
    "CheckpointError",
    "Clip",
    "Codec",
    "Compressor",
    "ConfigError",
    "DataError",
    "ErrorFeedback",
    "Exchange",
    "GradientSync",
    "LaconicError",
    "LaunchError",
    "Loaded",
    "Method",
    "MethodError",
    "MismatchError",
    "NonFiniteError",
    "PeerLost",
    "PerRank",
    "PerSize",
    "ReplicaDivergence",
    "ReplicaGuard",
    "Site",
    "TensorTypeError",
    "Traffic",
    "Warmup",
    "WireError",
    "World",
    "ddp",
    "distribute",
    "heat",
    "init",
    "load_checkpoint",
    "method",
    "methods",
    "mlbench",
    "reshard",
    "save_checkpoint",
    "shutdown",
    "singa",
]

# Where each public name lives. They are imported when first used, so that `laconic --help` and the parent of
# local workers answer at once: importing torch takes seconds.
_HOMES = {
    "compressor": ["Codec", "Compressor", "Exchange", "Site"],
    "engine": ["GradientSync", "distribute"],
    "errors": [name for name in __all__ if name.endswith(("Error", "Lost", "Divergence"))],
    "feedback": ["ErrorFeedback"],
    "guard": ["ReplicaGuard"],
    "groups": ["World", "init", "shutdown"],
    "parsing": ["Method", "method", "methods"],
    "resharding": ["reshard"],
    "saving": ["Loaded", "PerRank", "load_checkpoint", "save_checkpoint"],
    "traffic": ["Traffic"],
    "wrappers": ["Clip", "PerSize", "Warmup"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in ("ddp", "heat", "mlbench", "singa"):
        return importlib.import_module(f"laconic.{name}")
    if name not in _HOME_OF:
        raise AttributeError(f"module 'laconic' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"laconic.{_HOME_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
