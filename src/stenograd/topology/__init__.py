"""Topologies of gossip: graphs of neighbours, their mixing weights, and how fast they reach consensus."""

from stenograd.topology.mixing import (
    Checked,
    Complete,
    Directed,
    DirectedOnePeer,
    Graph,
    OnePeer,
    RandomPairs,
    Ring,
    Topology,
    check,
    describe,
    mixing_matrix,
    second_eigenvalue,
)

__all__ = [
    "Checked",
    "Complete",
    "Directed",
    "DirectedOnePeer",
    "Graph",
    "OnePeer",
    "RandomPairs",
    "Ring",
    "Topology",
    "check",
    "describe",
    "mixing_matrix",
    "second_eigenvalue",
]
