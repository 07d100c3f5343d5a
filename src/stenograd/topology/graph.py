"""Graphs of ranks, given by their neighbours or by name, with weights that average."""

from __future__ import annotations

import math
from collections.abc import Mapping

from stenograd.errors import bad_value
from stenograd.topology.checks import Neighbours, check_rank, relation

__all__ = ["Graph"]

_RULES = ("uniform", "metropolis")


class Graph:
    """A symmetric graph, made from lists of neighbours.

    Uniform weights are `W_ij = 1 / (1 + degree_i)` for the rank itself and each neighbour; they keep the mean
    over the ranks only if all degrees are equal. Metropolis weights always keep it: they are
    `W_ij = 1 / (1 + max(degree_i, degree_j))` for each neighbour and the rest for the rank itself.

    Args:
        neighbours: the ranks that each rank is connected with, without itself: a sequence in rank order, a
            mapping, or a graph of networkx with nodes 0..size-1.
        weights: "uniform" or "metropolis".

    Raises:
        ConfigError: ranks are not 0..size-1, a rank is its own neighbour or twice another's, the relation is
            not symmetric, or the rule is unknown.

    Example:
        >>> Graph([[1, 2], [0], [0]]).weights(1, 3, step=0)
        {0: 0.5, 1: 0.5}

    Reference: Xiao, Boyd, "Fast linear iterations for distributed averaging", 2004 (Metropolis weights).
    """

    def __init__(self, neighbours: Neighbours, weights: str = "uniform") -> None:
        if weights not in _RULES:
            raise bad_value("weights", f"must be one of {', '.join(_RULES)}", weights, "use 'uniform'")
        self.rule = weights
        self.neighbours = relation(neighbours)

    def __repr__(self) -> str:
        return f"Graph({[list(row) for row in self.neighbours]}, weights={self.rule!r})"

    def weights(self, rank: int, size: int, step: int) -> Mapping[int, float]:
        """Return the weights of the rank and its neighbours."""
        check_rank(rank, size)
        if size != len(self.neighbours):
            advice = "give neighbours for every rank of the run and no more"
            raise bad_value("size", f"must be the graph's, {len(self.neighbours)}", size, advice)
        own = self.neighbours[rank]
        if self.rule == "uniform":
            return dict.fromkeys(sorted((rank, *own)), 1 / (1 + len(own)))
        row = {j: 1 / (1 + max(len(own), len(self.neighbours[j]))) for j in own}
        row[rank] = 1 - math.fsum(row.values())
        return dict(sorted(row.items()))

    @classmethod
    def star(cls, size: int, weights: str = "uniform") -> Graph:
        """Connect rank 0 with all others, and the others with rank 0 only."""
        return cls([range(1, size), *([0] for _ in range(size - 1))], weights)

    @classmethod
    def chain(cls, size: int, weights: str = "uniform") -> Graph:
        """Connect neighbouring ranks, as a ring that is cut between the last rank and rank 0."""
        return cls([[j for j in (i - 1, i + 1) if 0 <= j < size] for i in range(size)], weights)

    @classmethod
    def torus(cls, rows: int, columns: int, weights: str = "uniform") -> Graph:
        """Connect the ranks of a grid, `row * columns + column`, whose opposite edges are joined."""
        # Sets below, because on a side of 2 both neighbours are one rank, and on a side of 1 the rank itself.
        offsets = ((-1, 0), (1, 0), (0, -1), (0, 1))
        return cls(
            [
                {(r + dr) % rows * columns + (c + dc) % columns for dr, dc in offsets} - {r * columns + c}
                for r in range(rows)
                for c in range(columns)
            ],
            weights,
        )

    @classmethod
    def hypercube(cls, dimensions: int, weights: str = "uniform") -> Graph:
        """Connect those of `2**dimensions` ranks whose numbers differ in one bit."""
        return cls([[i ^ (1 << d) for d in range(dimensions)] for i in range(1 << dimensions)], weights)

    @classmethod
    def exponential(cls, size: int, weights: str = "uniform") -> Graph:
        """Connect ranks at distances 1, 2, 4, ... around a ring, in both directions."""
        hops = [1 << d for d in range(max(size - 1, 0).bit_length())]
        return cls([{(i + s) % size for h in hops for s in (h, -h)} - {i} for i in range(size)], weights)
