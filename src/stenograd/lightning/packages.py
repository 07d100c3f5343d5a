"""Lightning's package: `lightning`, or `pytorch_lightning`, a copy of its code with other classes."""

from __future__ import annotations

import importlib
from importlib.util import find_spec
from typing import Any

__all__ = ["fabric", "pytorch"]


def _find() -> tuple[Any, Any]:
    """Return the package with the Trainer and the one with Fabric, from the one distribution of both.

    Raises:
        ImportError: neither is installed; it says what to install.
    """
    for trainer, loop in (
        ("lightning.pytorch", "lightning.fabric"),
        ("pytorch_lightning", "lightning_fabric"),
    ):
        if find_spec(trainer.split(".")[0]) is not None:
            return importlib.import_module(trainer), importlib.import_module(loop)
    raise ImportError("stenograd.lightning needs Lightning: pip install stenograd[lightning]")


pytorch, fabric = _find()
