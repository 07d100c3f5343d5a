"""Data-parallel PyTorch training that sends less.

`sync = stenograd.distribute(model, optimizer, "topk:ratio=0.01")` makes every `loss.backward()` leave
gradients that are averaged over all ranks, written on the wire by the method of your choice.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

from stenograd.version import __version__ as __version__

if TYPE_CHECKING:
    from stenograd import compression as compression
    from stenograd import compressors as compressors
    from stenograd import ddp, heat, mlbench, singa
    from stenograd import errors as errors
    from stenograd import schedules as schedules
    from stenograd import testing as testing
    from stenograd.catalog.method import Method, method, methods
    from stenograd.checkpoint.api import PerRank, load_checkpoint, load_state, save_checkpoint, save_state
    from stenograd.checkpoint.reshard import reshard
    from stenograd.errors import PeerLost, StenogradError
    from stenograd.launch.process_group import init, shutdown
    from stenograd.planning.plan import load_plan, plan
    from stenograd.planning.trial import Trial
    from stenograd.stopping import stop_on
    from stenograd.sync.attached import Sync
    from stenograd.sync.distribute import distribute
    from stenograd.wire.traffic import Traffic

__all__ = [
    "Method",
    "PeerLost",
    "PerRank",
    "StenogradError",
    "Sync",
    "Traffic",
    "Trial",
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
    "stop_on",
]

# Where each public name lives. They are imported when first used, so that `stenograd --help` and the parent
# of local workers answer at once: importing torch takes seconds.
_HOMES = {
    "catalog.method": ["Method", "method", "methods"],
    "checkpoint.api": ["PerRank", "load_checkpoint", "load_state", "save_checkpoint", "save_state"],
    "checkpoint.reshard": ["reshard"],
    "wire.traffic": ["Traffic"],
    "errors": ["PeerLost", "StenogradError"],
    "launch.process_group": ["init", "shutdown"],
    "planning.plan": ["load_plan", "plan"],
    "planning.trial": ["Trial"],
    "stopping": ["stop_on"],
    "sync.attached": ["Sync"],
    "sync.distribute": ["distribute"],
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

if not TYPE_CHECKING:  # to mypy and to editors, a name that is not above is misspelt

    def __getattr__(name: str) -> Any:
        if name in _HOME_OF:
            value = getattr(importlib.import_module(f"stenograd.{_HOME_OF[name]}"), name)
        elif name.startswith("_") or importlib.util.find_spec(f"stenograd.{name}") is None:
            raise AttributeError(f"module 'stenograd' has no attribute {name!r}{_hint(name)}")
        else:  # an adapter says here which extra it needs
            value = importlib.import_module(f"stenograd.{name}")
        globals()[name] = value
        return value


def _hint(name: str) -> str:
    for home in ("errors", "compression") if name[:1].isupper() else ():
        if hasattr(importlib.import_module(f"stenograd.{home}"), name):
            return f": it is stenograd.{home}.{name}"
    return ""


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
