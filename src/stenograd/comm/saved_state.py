"""Checks on saved state before any of it is taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from stenograd.errors import CheckpointError

__all__ = ["check_state"]


def check_state(
    state: Mapping[str, Any], expected: Mapping[str, Any], parameters: Mapping[str, Mapping[str, Tensor]]
) -> None:
    """Check that a saved state fits what runs now.

    Args:
        state: what was saved.
        expected: values that must be equal, by key.
        parameters: the running state by parameter name, whose names, keys and shapes must be equal; empty
            before any bucket is known.

    Raises:
        CheckpointError: naming the first difference.
    """
    for key, want in expected.items():
        got = state.get(key, "nothing")
        if got != want:
            advice = "load it where it was saved"
            if key in ("rank", "world_size"):
                advice += ", or re-shard it with stenograd.load_checkpoint or stenograd.reshard"
            raise CheckpointError(f"the checkpoint's {key} must be {want!r}, got {got!r}: {advice}")
    saved = state.get("parameters", {})
    if not parameters:
        return
    missing = [name for name in parameters if name not in saved] + [
        name for name in saved if name not in parameters
    ]
    if missing:
        raise CheckpointError(
            f"checkpoint and model differ in parameter {missing[0]!r}: load it into the same model"
        )
    for name, tensors in parameters.items():
        for key, tensor in tensors.items():
            shape = tuple(saved[name][key].shape) if key in saved[name] else None
            if shape != tuple(tensor.shape):
                raise CheckpointError(
                    f"the checkpoint's {key} of {name} must have shape {tuple(tensor.shape)}, got {shape}: "
                    "load it into the same model"
                )
