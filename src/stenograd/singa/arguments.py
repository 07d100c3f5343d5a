"""Checks of the arguments that users pass to an optimizer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from stenograd.errors import TensorTypeError, bad_value

__all__ = ["check_devices", "check_gradient", "check_states", "named_members"]


def check_devices(tensors: Iterable[Tensor]) -> None:
    """Check that tensors lie on one device.

    Raises:
        ConfigError: they lie on several.
    """
    devices = {str(tensor.device) for tensor in tensors}
    if len(devices) > 1:
        raise bad_value("tensors", "must lie on one device", sorted(devices), "move them with .to(device)")


def check_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Check that a gradient has its parameter's shape, and is dense and real.

    Raises:
        TensorTypeError: the gradient is sparse, complex or an integer.
        ConfigError: shapes differ.
    """
    if gradient.shape != parameter.shape:
        rule = f"must have the parameter's shape {tuple(parameter.shape)}"
        raise bad_value("gradient", rule, tuple(gradient.shape), "pass the gradient of this parameter")
    if not gradient.is_floating_point() or gradient.is_sparse:
        raise TensorTypeError(
            f"gradient must be dense and real, got {gradient.layout} of {gradient.dtype}: "
            "use floating-point parameters, and sparse=False for embeddings"
        )


def check_states(states: Mapping[str, Any], names: Sequence[str]) -> int:
    """Check that saved states come from an optimizer with state tensors `names`; return their step counter.

    Raises:
        ConfigError: they come from another kind of optimizer, or are damaged.
    """
    expected = {"step_counter", *names}
    if not isinstance(states, Mapping) or "step_counter" not in states or not expected.issuperset(states):
        got = sorted(states) if isinstance(states, Mapping) else type(states).__name__
        raise bad_value("states", f"must hold {sorted(expected)}", got, "use the same kind of optimizer")
    counter = float(states["step_counter"])
    if counter < 0 or not counter.is_integer():
        raise bad_value("step_counter", "must be a whole number of steps", counter, "use what was saved")
    return int(counter)


def named_members(group: Tensor | Iterable[Tensor | tuple[str, Tensor]]) -> list[tuple[str | None, Tensor]]:
    """Return the parameters of a group, each with its name or None.

    Raises:
        TypeError: a member is neither a tensor nor a (name, tensor) pair.

    Example:
        >>> import torch
        >>> named_members(torch.nn.Linear(1, 1).named_parameters())[1][0]
        'bias'
    """
    pairs: list[tuple[str | None, Tensor]] = []
    for member in [group] if isinstance(group, Tensor) else group:
        name, tensor = member if isinstance(member, tuple) and len(member) == 2 else (None, member)
        if not isinstance(tensor, Tensor) or not isinstance(name, str | None):
            raise TypeError(
                f"param_group must hold tensors or (name, tensor) pairs, got {type(member).__name__}: "
                "pass model.parameters() or model.named_parameters()"
            )
        pairs.append((name, tensor))
    return pairs
