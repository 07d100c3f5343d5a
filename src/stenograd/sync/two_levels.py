"""Which parameters are exchanged together: fragments, and each rank's share of a node's."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TypeVar

import torch
from torch import Tensor

from stenograd.comm.driver import Driver
from stenograd.comm.node_layout import find_layout
from stenograd.data.requests import gather
from stenograd.errors import ConfigError
from stenograd.launch.detect import World
from stenograd.sync.handshake import broadcast_tensors

__all__ = ["Nodes", "by_size", "fragments_of"]

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


class Nodes:
    """Who is in this rank's node, and which part of the model it speaks for.

    With L ranks in each node, every rank exchanges 1/L of the parameters with the ranks in its place in other
    nodes, and gives its node what came of it. So all ranks' links are used, and each element crosses between
    nodes once.

    Args:
        driver: the way to all ranks.
        world: this rank's place according to the launcher.
        node_size: ranks per node, in the order of the ranks; 0 to take what the launcher says.

    Attributes:
        inside: the way to the ranks of this node.
        between: the way to those in this rank's place in other nodes.
        node, place: this rank's node, and its place in there, from 0.

    Raises:
        ConfigError: the nodes have different numbers of ranks.
    """

    inside: Driver
    between: Driver

    def __init__(self, driver: Driver, world: World, node_size: int) -> None:
        layout = find_layout(driver, world, node_size or None)
        sizes = {len(node) for node in layout.nodes}
        if len(sizes) > 1:
            raise ConfigError(
                "nodes must have equally many ranks where gradients are averaged inside, got "
                f"{layout.nodes}: start as many on each host, or give node_size="
            )
        self._driver, (self._size,) = driver, sizes
        self._nodes, self.node = layout.nodes, layout.node_of(driver.rank)
        self.place = layout.nodes[self.node].index(driver.rank)
        across = [[node[i] for node in layout.nodes] for i in range(self._size)]
        drivers = driver.split([*layout.nodes, *across], "level")
        self.inside, self.between = (d for d in drivers if d is not None)

    def shares(self, parameters: Mapping[str, T]) -> list[dict[str, T]]:
        """Return the parameters that the ranks in each place exchange with other nodes."""
        return by_size(parameters, self._size)

    def share_of(self, parameters: Mapping[str, T]) -> dict[str, T]:
        """Return the parameters that this rank exchanges with other nodes; may be none."""
        return self.shares(parameters)[self.place]

    def spread(self, parameters: Mapping[str, Tensor]) -> None:
        """Give the node what each of its ranks has of the parameters that it speaks for."""
        for place, part in enumerate(self.shares(parameters)):
            broadcast_tensors(self.inside, [p.detach() for p in part.values()], place)

    def tell(self, number: int) -> list[list[int]]:
        """Return all ranks' numbers, by node and by place in it."""
        mine = torch.tensor([number], device="cpu")
        told = [int(theirs) for (theirs,) in self._driver.run(gather(mine))]
        return [[told[rank] for rank in node] for node in self._nodes]

    def close(self) -> None:
        """Leave the groups."""
        self.inside.close()
        self.between.close()
