"""SINGA's fusion rule: which tensors travel together."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

from stenograd.errors import bad_value

__all__ = ["DEFAULT_THRESHOLD", "Fusion", "Group"]

DEFAULT_THRESHOLD = 2_097_152  # elements

Group: TypeAlias = list[str]


class Fusion:
    """Cuts a stream of tensors into groups, in backward order.

    A tensor with more than `threshold` elements is a group by itself, and leaves the open group open. Others
    join the open group, which is complete as soon as it holds more than `threshold` elements. So a group of
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
        """Take the next tensor; return the names of the group that it completes, if it does."""
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
        """Return what is still open, and start anew."""
        groups = [group for group, _ in self._open.values()]
        self._open = {}
        return groups
