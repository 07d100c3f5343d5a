"""What may be given as a group of ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from stenograd.errors import ConfigError

__all__ = ["as_group", "is_group", "joined", "ranks_of"]


def joined() -> bool:
    """Return whether this process is in a process group already.

    Example:
        >>> joined()
        False
    """
    return dist.is_initialized()


def is_group(value: object) -> bool:
    """Return whether a value is a process group of torch.distributed."""
    return isinstance(value, dist.ProcessGroup)


def as_group(group: Any) -> Any:
    """Return the process group of a `DeviceMesh` of one dimension; anything else as it is.

    Raises:
        ConfigError: the mesh has several dimensions, or torch.distributed does not know the group or its
            ranks, as it is with torchft's.
    """
    if not hasattr(group, "mesh_dim_names"):
        if is_group(group):
            _refuse_stranger(group)
        return group
    if group.ndim != 1:
        raise ConfigError(
            f"group must be a mesh of one dimension, got {group}: name one, as in mesh["
            f'"{(group.mesh_dim_names or ("replicate",))[0]}"]'
        )
    return group.get_group()


def ranks_of(group: Any) -> list[int]:
    """Return the ranks of the whole world that are in a group, or in a `DeviceMesh` of one dimension.

    Args:
        group: None for all ranks, which torch 2.6 itself does not take.
    """
    return list(dist.get_process_group_ranks(as_group(group) if group is not None else dist.group.WORLD))


def _refuse_stranger(group: dist.ProcessGroup) -> None:
    """Refuse a group to whose ranks torch.distributed has no names: no group can be made beside it."""
    try:
        known = len(dist.get_process_group_ranks(group))
    except KeyError:
        known = 0
    if known != group.size():
        raise ConfigError(
            f"group must be one that torch.distributed made, got {type(group).__name__} of {group.size()} "
            f"ranks, of which it knows {known}: make one by torch.distributed.new_group; torchft's groups, "
            "whose ranks change, are not supported"
        )
