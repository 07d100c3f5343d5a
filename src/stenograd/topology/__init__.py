"""With whom a rank averages: graphs of neighbours, the weights on them, and how fast they spread values."""

from stenograd.topology.mixing import (
    Checked,
    Complete,
    Graph,
    OnePeer,
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
    "Graph",
    "OnePeer",
    "Ring",
    "Topology",
    "check",
    "describe",
    "mixing_matrix",
    "second_eigenvalue",
]
