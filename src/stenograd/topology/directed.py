"""Directed graphs: a rank receives from other ranks than it sends to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from stenograd.topology.checks import check_rank

__all__ = ["Directed", "DirectedOnePeer"]


@runtime_checkable
class Directed(Protocol):
    """A topology in which a rank need not receive from whom it sends to.

    Its columns sum to 1, so that the mean over the ranks is kept: either its rows do so too, or ranks carry
    push-sum weights.
    """

    def weights(self, rank: int, size: int, step: int) -> Mapping[int, float]:
        """Return a rank's row of the mixing matrix: its own weight and those of whom it receives from."""

    def targets(self, rank: int, size: int, step: int) -> Sequence[int]:
        """Return the other ranks that a rank sends to, ascending: those whose rows name it."""


@dataclass(frozen=True)
class DirectedOnePeer:
    """One rank to send to and one to receive from per step, for any number of ranks.

    At step t rank i sends to `(i + h) mod N` and receives from `(i - h) mod N`:

        x_i <- (x_i + x_{(i - h) mod N}) / 2,    h = 2**(t mod ceil(log2 N))

    That is the mean of the identity and a permutation, so rows and columns sum to 1 whatever N is. Where N is
    a power of 2, all ranks have the exact mean after log2 N steps.

    Example:
        >>> [sorted(DirectedOnePeer().weights(0, 6, step)) for step in range(4)]
        [[0, 5], [0, 4], [0, 2], [0, 5]]
        >>> [DirectedOnePeer().targets(0, 6, step) for step in range(3)]
        [(1,), (2,), (4,)]

    Reference: Assran et al., "Stochastic Gradient Push for Distributed Deep Learning", ICML 2019.
    """

    def weights(self, rank: int, size: int, step: int) -> Mapping[int, float]:
        """Return weights 1/2 for the rank and the one it receives from."""
        check_rank(rank, size)
        if size == 1:
            return {0: 1.0}
        return dict.fromkeys(sorted((rank, (rank - _hop(size, step)) % size)), 0.5)

    def targets(self, rank: int, size: int, step: int) -> Sequence[int]:
        """Return the one rank that this one sends to."""
        check_rank(rank, size)
        return () if size == 1 else ((rank + _hop(size, step)) % size,)


def _hop(size: int, step: int) -> int:
    """Return how far a message goes; below `size`, so nobody sends to itself."""
    return 1 << step % (size - 1).bit_length()  # ceil(log2 size) is the length of size - 1
