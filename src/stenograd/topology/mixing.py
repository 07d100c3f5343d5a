"""Topologies of gossip: graphs of neighbours, their mixing weights, and how fast they reach consensus.

A topology gives each rank a row of the mixing matrix W: `x_i <- sum_j W_ij x_j`. Rows sum to 1, so equal
values stay as they are. Where columns sum to 1 too (Metropolis weights, or equal degrees), the mean over the
ranks is kept. With push-sum, columns must sum to 1 and rows need not.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from stenograd.errors import bad_value
from stenograd.topology.checks import check_columns, check_peers, check_rank, check_symmetric, check_targets
from stenograd.topology.directed import Directed, DirectedOnePeer
from stenograd.topology.graph import Graph
from stenograd.topology.pairs import RandomPairs

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

_ROUNDING = 1e-6  # how far from 1 a row's sum may be, so that weights rounded to float32 pass


class Topology(Protocol):
    """Which ranks average with each other, and with which weights."""

    def weights(self, rank: int, size: int, step: int) -> Mapping[int, float]:
        """Return a rank's row of the mixing matrix: its own weight and its neighbours', summing to 1.

        Args:
            rank: the row's rank, in 0..size-1.
            size: number of ranks.
            step: number of mixings before this one, equal on every rank.
        """


@dataclass(frozen=True)
class Complete:
    """Every rank with all others: `x_i <- mean_j x_j`.

    Example:
        >>> Complete().weights(0, 2, step=0)
        {0: 0.5, 1: 0.5}
    """

    def weights(self, rank: int, size: int, step: int) -> Mapping[int, float]:
        """Return equal weights for all ranks."""
        check_rank(rank, size)
        return dict.fromkeys(range(size), 1 / size)


@dataclass(frozen=True)
class Ring:
    """Each rank with the ranks before and after it: `x_i <- (x_{i-1} + x_i + x_{i+1}) / 3`.

    Example:
        >>> sorted(Ring().weights(0, 4, step=0))
        [0, 1, 3]
    """

    def weights(self, rank: int, size: int, step: int) -> Mapping[int, float]:
        """Return equal weights for the rank and its one or two neighbours."""
        check_rank(rank, size)
        row = sorted({rank, (rank - 1) % size, (rank + 1) % size})
        return dict.fromkeys(row, 1 / len(row))


@dataclass(frozen=True)
class OnePeer:
    """One neighbour per step, `rank XOR 2**(step mod log2(size))`, with weight 1/2.

    After log2(size) steps all ranks have the mean. Their number must be a power of 2; `DirectedOnePeer` takes
    any. The pairs are symmetric: ranks receive from whom they send to.

    Example:
        >>> [sorted(OnePeer().weights(0, 8, step)) for step in range(4)]
        [[0, 1], [0, 2], [0, 4], [0, 1]]

    Reference: Ying et al., "Exponential graph is provably efficient for decentralized deep training", 2021.
    """

    def weights(self, rank: int, size: int, step: int) -> Mapping[int, float]:
        """Return weights 1/2 for the rank and its peer of this step."""
        check_rank(rank, size)
        if size & (size - 1):
            raise bad_value("size", "must be a power of 2 for OnePeer", size, "use DirectedOnePeer()")
        if size == 1:
            return {0: 1.0}
        peer = rank ^ (1 << step % (size.bit_length() - 1))
        return dict.fromkeys(sorted((rank, peer)), 0.5)


def mixing_matrix(topology: Topology, size: int, step: int = 0) -> Tensor:
    """Return W with `x_i <- sum_j W_ij x_j`, float64, shape (size, size).

    Example:
        >>> mixing_matrix(Graph.star(3, "metropolis"), 3)[0].tolist()
        [0.33333333333333337, 0.3333333333333333, 0.3333333333333333]
    """
    matrix = torch.zeros(size, size, dtype=torch.float64, device="cpu")
    for rank in range(size):
        for other, weight in topology.weights(rank, size, step).items():
            matrix[rank, other] = weight
    return matrix


def second_eigenvalue(topology: Topology, size: int, step: int = 0) -> float:
    """Return the second largest absolute eigenvalue of the mixing matrix, in [0, 1].

    After t mixings the distance from consensus is about its t-th power. The spectral gap is 1 minus it.

    Example:
        >>> round(second_eigenvalue(Ring(), 8), 4)  # (1 + 2 cos(pi / 4)) / 3
        0.8047
    """
    if size == 1:
        return 0.0
    values = torch.linalg.eigvals(mixing_matrix(topology, size, step)).abs()
    return float(values.sort().values[-2])


class Checked:
    """A topology for a number of ranks, checked at every step before anything is sent.

    Rows that were correct in the last step are not checked again unless ranks name targets, and the
    topologies of this module are correct at every step if they are at the first. Others cost one evaluation
    of all rows per step.

    Args:
        topology: which ranks mix, the same on all ranks.
        size: number of ranks.
        push_sum: whether ranks carry push-sum weights.

    Raises:
        ConfigError: as `row` does, for step 0.

    Example:
        >>> Checked(Ring(), 4).row(0, step=7)
        {0: 0.3333333333333333, 1: 0.3333333333333333, 3: 0.3333333333333333}
    """

    def __init__(self, topology: Topology, size: int, *, push_sum: bool = False) -> None:
        self._topology, self._size, self._push_sum = topology, size, push_sum
        self._checked_once = type(topology) in _ALWAYS_CORRECT
        self._rows = check(topology, size, push_sum=push_sum)

    def row(self, rank: int, step: int) -> Mapping[int, float]:
        """Return a rank's row of the mixing matrix of a step, as `Topology.weights` does.

        Raises:
            ConfigError: with the rows of this step ranks would hang, or equal values would change; raised on
                every rank.
        """
        if self._checked_once:
            return self._topology.weights(rank, self._size, step)
        self._rows = check(self._topology, self._size, step, self._rows, push_sum=self._push_sum)
        return self._rows[rank]

    def targets(self, rank: int, step: int) -> Sequence[int]:
        """Return the other ranks that a rank sends to in a step, ascending.

        Example:
            >>> Checked(DirectedOnePeer(), 5).targets(4, step=1), Checked(Ring(), 4).targets(0, step=1)
            ((1,), (1, 3))
        """
        if isinstance(self._topology, Directed):
            return self._topology.targets(rank, self._size, step)
        return tuple(sorted(other for other in self.row(rank, step) if other != rank))


def describe(topology: Topology, size: int) -> str:
    """Describe a topology; descriptions are equal if the rows of the first 16 steps (or of all steps) are.

    Example:
        >>> describe(Ring(), 4)
        'Ring() (digest c4fc50f1)'
    """
    if type(topology) in _ALWAYS_CORRECT:
        name = whole = repr(topology)
    else:
        name = type(topology).__name__
        rows = [topology.weights(rank, size, step) for step in range(_DESCRIBED) for rank in range(size)]
        whole = repr([sorted((int(j), float(weight)) for j, weight in row.items()) for row in rows])
    return f"{name[:80]} (digest {hashlib.sha256(whole.encode()).hexdigest()[:8]})"


def check(
    topology: Topology,
    size: int,
    step: int = 0,
    known: Sequence[Mapping[int, float]] = (),
    *,
    push_sum: bool = False,
) -> Sequence[Mapping[int, float]]:
    """Refuse a topology with which ranks would hang, or whose mixing would change equal values.

    Args:
        topology: which ranks mix.
        size: number of ranks.
        step: number of mixings before this one.
        known: rows that were checked before; those of a `Directed` topology are checked again.
        push_sum: whether ranks carry push-sum weights, so that columns must sum to 1 instead of rows.

    Returns:
        Each rank's row of the mixing matrix.

    Raises:
        ConfigError: a rank's weights do not sum to 1, lack its own, or name no rank; the relation is neither
            symmetric nor that of a `Directed` topology's targets; or columns do not sum to 1 with push-sum or
            a `Directed` topology.
    """
    rows = [dict(topology.weights(rank, size, step)) for rank in range(size)]
    if rows == known and not isinstance(topology, Directed):  # targets may change while rows stay
        return rows
    for rank, row in enumerate(rows):
        lost = not push_sum and abs(math.fsum(row.values()) - 1) > _ROUNDING
        if lost or rank not in row:
            advice = f"give rank {rank} a weight of its own, and divide by the sum"
            what = f"weights of rank {rank} at step {step}"
            raise bad_value(what, "must sum to 1, its own included", row, advice)
        check_peers(rank, [other for other in row if other != rank], size)
    for rank, row in enumerate(rows):
        if isinstance(topology, Directed):
            check_targets(rank, topology.targets(rank, size, step), rows, step)
        else:
            check_symmetric(rank, row, rows, f" at step {step}")
    if push_sum or isinstance(topology, Directed):
        check_columns(rows, step, _ROUNDING)
    return rows


# Exactly these: a subclass may change the rows.
_ALWAYS_CORRECT = (Complete, DirectedOnePeer, Graph, OnePeer, RandomPairs, Ring)
_DESCRIBED = 16  # steps: several periods of a topology that repeats after log2(size) steps
