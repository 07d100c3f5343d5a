"""Which ranks share a node, and which of them speak for it to the other nodes."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from stenograd.arguments import whole
from stenograd.errors import ConfigError, LaunchError, bad_value
from stenograd.launch.detect import World
from stenograd.wire.agreement import everyone
from stenograd.wire.driver import Driver

__all__ = ["Layout", "find_layout"]

_ADVICE = "give node_size=, or nodes=[[0, 1], [2, 3]] with every rank once"


@dataclass(frozen=True, slots=True)
class Layout:
    """The nodes of a group of ranks.

    Args:
        nodes: every node's ranks, ascending.

    Example:
        >>> layout = Layout(((0, 1, 2), (3,)))
        >>> layout.group_count, layout.group(2), layout.weights
        (3, (2, 3), (1.5, 0.5))
    """

    nodes: tuple[tuple[int, ...], ...]

    @property
    def group_count(self) -> int:
        """Number of groups across the nodes: as many as the largest node has ranks; none for one node."""
        return max(map(len, self.nodes)) if len(self.nodes) > 1 else 0

    def group(self, index: int) -> tuple[int, ...]:
        """Return the ranks of group `index`, one a node: its worker `index` modulo its size."""
        return tuple(node[index % len(node)] for node in self.nodes)

    @property
    def weights(self) -> tuple[float, ...]:
        """Each node's share in an average, times the number of nodes: nodes count by their ranks."""
        total = sum(map(len, self.nodes))
        return tuple(len(node) * len(self.nodes) / total for node in self.nodes)

    def node_of(self, rank: int) -> int:
        """Return the number of the node that holds a rank."""
        return next(i for i, node in enumerate(self.nodes) if rank in node)


def find_layout(
    driver: Driver, world: World, node_size: int | None = None, nodes: Sequence[Sequence[int]] | None = None
) -> Layout:
    """Find out which ranks share a node: as given, or else as the launcher placed them.

    Args:
        driver: the way to the other ranks, all of which call this.
        world: this rank's place according to the launcher.
        node_size: ranks a node, in the order of the ranks.
        nodes: each node's ranks; every rank once.

    Raises:
        ConfigError: both are given, or they do not fit the number of ranks.
        LaunchError: the launcher's variables contradict each other.
    """
    if node_size is not None and nodes is not None:
        raise ConfigError(f"give node_size or nodes, got both ({node_size!r} and {nodes!r}): leave one out")
    if nodes is not None:
        return _listed(nodes, driver.world_size)
    if node_size is not None:
        return _even(node_size, driver.world_size)
    place = {"host": socket.gethostname(), "local": world.local_rank, "size": world.local_world_size}
    own = json.dumps({**place, "first": world.rank - world.local_rank})
    indices = [json.loads(text) for text in everyone(driver, own)]
    return _placed_part(indices) if driver.world_size < world.world_size else _placed(indices)


def _even(node_size: int, world_size: int) -> Layout:
    whole("node_size", node_size, _ADVICE)
    if world_size % node_size:
        raise ConfigError(
            f"node_size must divide the number of ranks, got {node_size} for {world_size}: {_ADVICE}"
        )
    return Layout(tuple(tuple(range(at, at + node_size)) for at in range(0, world_size, node_size)))


def _listed(nodes: Sequence[Sequence[int]], world_size: int) -> Layout:
    try:
        layout = Layout(tuple(tuple(sorted(node)) for node in nodes))
        complete = sorted(rank for node in layout.nodes for rank in node) == list(range(world_size))
    except TypeError:
        complete = False
    if not complete or not all(layout.nodes):
        rule = f"must hold each of the {world_size} ranks once and no empty node"
        raise bad_value("nodes", rule, nodes, "for example [[0, 1, 2], [3]]")
    return layout


def _placed(indices: Sequence[Mapping[str, object]]) -> Layout:
    """Group ranks by host name, or where one host plays several, by the blocks that local ranks count off."""
    hosts: dict[object, list[int]] = {}
    for rank, place in enumerate(indices):
        hosts.setdefault(place["host"], []).append(rank)
    by_host = list(hosts.values())
    # Each host has as many ranks as the launcher says: no two nodes have one host name.
    if all(indices[rank]["size"] == len(node) for node in by_host for rank in node):
        return Layout(tuple(map(tuple, by_host)))
    blocks: list[list[int]] = []
    for rank, place in enumerate(indices):
        if place["local"] == 0:
            blocks.append([])
        if not blocks or place["local"] != len(blocks[-1]):
            break
        blocks[-1].append(rank)
    whole = all(indices[rank]["size"] == len(block) for block in blocks for rank in block)
    if not whole or sum(map(len, blocks)) != len(indices):
        seen = [(place["local"], place["size"]) for place in indices]
        raise LaunchError(
            f"the launcher's local ranks and sizes do not tell the nodes apart, got {seen}: {_ADVICE}"
        )
    return Layout(tuple(map(tuple, blocks)))


def _placed_part(indices: Sequence[Mapping[str, object]]) -> Layout:
    """Group ranks of a part of the world, beside which others may run on their hosts.

    Where nodes are numbered one after another, the world's rank less the local one names the node, also
    where one host plays several.
    """
    nodes: dict[object, dict[object, list[int]]] = {}
    for rank, place in enumerate(indices):
        nodes.setdefault(place["host"], {}).setdefault(place["first"], []).append(rank)
    for of_host in nodes.values():
        local = [indices[rank]["local"] for node in of_host.values() for rank in node]
        # Ranks that are dealt out to nodes in turns: only hosts that are in the group as a whole tell.
        if len(of_host) > 1 and len({*local}) == len(local):
            return _placed(indices)
    return Layout(tuple(sorted(tuple(node) for of_host in nodes.values() for node in of_host.values())))
