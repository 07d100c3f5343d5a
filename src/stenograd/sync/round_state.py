"""The state of a round's parts as one table by parameter name, which `stenograd.reshard` understands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from stenograd.errors import CheckpointError
from stenograd.sync.round_parts import Part

__all__ = ["check_shapes", "joined", "of_part"]

_IN_ROUNDS = " in rounds"  # behind a parameter's name: what rounds keep of it, not its compressor
_Table = Mapping[str, Mapping[str, Tensor]]


def joined(parts: Sequence[Part], *, own: bool) -> dict[str, Any]:
    """Return the counters of the parts' exchanges, and all tensors by name and by what they are.

    Args:
        parts: each with parameters of its own.
        own: whether this rank's parameters are among the tensors.
    """
    parameters: dict[str, dict[str, Tensor]] = {}
    exchanges = []
    for part in parts:
        state = part.state_dict(own=own)
        exchanges.append({key: state["exchange"][key] for key in ("step", "skipped")})
        parameters |= {name: dict(tensors) for name, tensors in state["exchange"]["parameters"].items()}
        for key, named in state["tensors"].items():
            for name, tensor in named.items():
                parameters.setdefault(name + _IN_ROUNDS, {})[key] = tensor
    return {"exchanges": exchanges, "parameters": parameters}


def of_part(part: Part, number: int, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of one part out of `joined`, as it gave it."""
    found: _Table = state["parameters"]
    codec = {name: found[name] for name in part.exchanged() if name in found}
    tensors: dict[str, dict[str, Tensor]] = {}
    for name in part.names:
        for key, tensor in found.get(name + _IN_ROUNDS, {}).items():
            tensors.setdefault(key, {})[name] = tensor
    return {"exchange": {**state["exchanges"][number], "parameters": codec}, "tensors": tensors}


def check_shapes(parts: Sequence[Part], state: Mapping[str, Any]) -> None:
    """Refuse the state of another model.

    Raises:
        CheckpointError: names the first difference.
    """
    mine = {name: p.shape for part in parts for name, p in part.parameters.items()}
    saved: _Table = state["parameters"]
    found = {n.removesuffix(_IN_ROUNDS): ts for n, ts in saved.items() if n.endswith(_IN_ROUNDS)}
    for name in sorted(found.keys() ^ mine.keys()) if found else ():
        raise CheckpointError(
            f"checkpoint and model differ in parameter {name!r}: load it into the same model"
        )
    for name, tensors in found.items():
        for key, tensor in tensors.items():
            if tensor.shape != mine[name]:
                raise CheckpointError(
                    f"the checkpoint's {key} of {name} must have shape {tuple(mine[name])}, got "
                    f"{tuple(tensor.shape)}: load it into the same model"
                )
