"""Which parameters of a model are exchanged together where it is exchanged in parts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

from torch import Tensor

from stenograd.errors import ConfigError

__all__ = ["by_size", "fragments_of"]

T = TypeVar("T", bound=Tensor)
_BLOCK = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def fragments_of(parameters: Mapping[str, T], count: int, layout: str = "strided") -> list[dict[str, T]]:
    """Share out named parameters to so many fragments; every fragment gets some.

    Parameters whose names hold the same first number (`layers.3.weight`) are a block, which stays together.
    What has no number, such as embeddings and the last norm, is fragment 0 where there are enough blocks for
    the others; with fewer blocks, parameters are shared out one by one, so that fragments are of like size.

    Args:
        parameters: by name, in the order of definition.
        count: number of fragments.
        layout: "strided" (block b goes to fragment b modulo their number) or "sequential".

    Raises:
        ConfigError: there are fewer parameters than fragments.

    Example:
        >>> import torch
        >>> names = ["embed", "h.0.w", "h.1.w", "h.2.w", "h.3.w", "head"]
        >>> parts = fragments_of({name: torch.ones(2) for name in names}, 3)
        >>> [list(part) for part in parts]
        [['embed', 'head'], ['h.0.w', 'h.2.w'], ['h.1.w', 'h.3.w']]
    """
    if count == 1:
        return [dict(parameters)]
    if len(parameters) < count:
        raise ConfigError(
            f"fragments must be at most the number of parameter tensors ({len(parameters)}), got {count}: "
            f"use fragments={len(parameters)}"
        )
    rest: dict[str, T] = {}
    blocks: dict[int, dict[str, T]] = {}
    for name, p in parameters.items():
        found = _BLOCK.search(name)
        if found is None:
            rest[name] = p
        else:
            blocks.setdefault(int(found[1]), {})[name] = p
    left = count - bool(rest)
    if len(blocks) < left:
        return by_size(parameters, count)
    parts: list[dict[str, T]] = [{} for _ in range(left)]
    for i, number in enumerate(sorted(blocks)):
        at = i % left if layout == "strided" else i * left // len(blocks)
        parts[at] |= blocks[number]
    return [rest, *parts] if rest else parts


def by_size(parameters: Mapping[str, T], count: int) -> list[dict[str, T]]:
    """Share out single tensors to so many parts: the largest first, always to the smallest part so far."""
    sizes, chosen = [0] * count, dict[str, int]()
    for name, p in sorted(parameters.items(), key=lambda item: -item[1].numel()):
        at = min(range(count), key=lambda i: (sizes[i], i))
        sizes[at] += max(p.numel(), 1)
        chosen[name] = at
    return [{n: p for n, p in parameters.items() if chosen[n] == at} for at in range(count)]
