"""SINGA's fusion rule: which tensors travel as one group."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from stenograd.errors import bad_value

__all__ = ["DEFAULT_THRESHOLD", "Fusion", "Group"]

DEFAULT_THRESHOLD = 2_097_152  # elements; SINGA's default

Group: TypeAlias = list[str]


class Fusion:
    """Cuts a stream of tensors into groups, in backward order.

    A tensor with more than `threshold` elements is a group of its own, and the open group stays open. Other
    tensors join the open group, which is complete when it holds more than `threshold` elements; so a group of
    several has at most `2 threshold` elements. Tensors of different type or device never share a group.

    Args:
        threshold: in elements, at least 0; 0 makes every tensor a group.

    Raises:
        ConfigError: threshold is negative or not a whole number.

    Example:
        >>> fusion = Fusion(8)
        >>> [fusion.add(name, torch.empty(n)) for name, n in {"a": 4, "big": 9, "b": 4, "c": 4}.items()]
        [None, ['big'], None, ['a', 'b', 'c']]
        >>> fusion.add("d", torch.empty(1)), fusion.rest()
        (None, [['d']])
    """

    def __init__(self, threshold: int) -> None:
        if not isinstance(threshold, int) or isinstance(threshold, bool) or threshold < 0:
            rule = "must be a whole number of elements, at least 0"
            raise bad_value("threshold", rule, threshold, f"{DEFAULT_THRESHOLD} is the default")
        self.threshold = threshold
        self._open: dict[tuple[torch.dtype, torch.device], tuple[Group, int]] = {}

    def add(self, name: str, tensor: Tensor) -> Group | None:
        """Add the next tensor; return the names of the group that it completes, or None."""
        if tensor.numel() > self.threshold:
            return [name]
        kind = (tensor.dtype, tensor.device)
        group, numel = self._open.pop(kind, ([], 0))
        group.append(name)
        if numel + tensor.numel() > self.threshold:
            return group
        self._open[kind] = (group, numel + tensor.numel())
        return None

    def rest(self) -> list[Group]:
        """Return the groups that are still open, and close them."""
        groups = [group for group, _ in self._open.values()]
        self._open = {}
        return groups
