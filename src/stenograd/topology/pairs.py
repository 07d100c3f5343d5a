"""Random disjoint pairs of ranks, and how far an outer optimizer lets models drift apart on them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from stenograd.topology.checks import check_rank

__all__ = ["RandomPairs", "spread_per_round"]


@dataclass(frozen=True)
class RandomPairs:
    """Disjoint pairs, drawn anew at every step: `x_i <- (x_i + x_{partner of i}) / 2`.

    Every rank draws the same pairs from the seed and the step, so nobody need ask for them. Where the number
    of ranks is odd, one of them has no partner and keeps what it has.

    Args:
        seed: the same on all ranks.

    Example:
        >>> [RandomPairs().partner(rank, 5, step=0) for rank in range(5)]
        [4, 3, None, 1, 0]
        >>> RandomPairs().weights(0, 5, step=0)
        {0: 0.5, 4: 0.5}

    Reference: Boyd et al., "Randomized Gossip Algorithms", IEEE Transactions on Information Theory 2006.
    """

    seed: int = 0

    def partner(self, rank: int, size: int, step: int) -> int | None:
        """Return the other rank of the pair; None for the one that is left over."""
        check_rank(rank, size)
        # seed + step alone would give seed 1 the pairs that seed 0 has one step later.
        word = (self.seed * 0x9E3779B97F4A7C15 + step) & 0x7FFFFFFFFFFFFFFF
        generator = torch.Generator(device="cpu").manual_seed(word)
        order = torch.randperm(size, generator=generator, device="cpu").tolist()
        at = order.index(rank) ^ 1  # neighbours in the order: 0 and 1, 2 and 3, ...
        return order[at] if at < size else None

    def weights(self, rank: int, size: int, step: int) -> Mapping[int, float]:
        """Return weights 1/2 for the rank and its partner, or 1 for a rank without."""
        partner = self.partner(rank, size, step)
        return {rank: 1.0} if partner is None else dict.fromkeys(sorted((rank, partner)), 0.5)


def spread_per_round(lr: float, momentum: float, nesterov: bool) -> float:
    """Return the factor by which the variance among ranks is multiplied per round of outer SGD on pairs.

    Each of many ranks makes an SGD step along `g_i = x_i - (x_i + x_j) / 2`, j being its random partner. With
    `A = E x^2`, `B = E x v`, `C = E v^2` over ranks that are independent of each other, one round maps (A, B,
    C) linearly; the factor is the spectral radius of that matrix. From 1 on, ranks drift apart without bound.

    Args:
        lr: of the SGD, positive.
        momentum: in [0, 1).
        nesterov: whether it is Nesterov's.

    Example:
        >>> spread_per_round(1.0, 0.0, False)  # x_i <- (x_i + x_j) / 2
        0.5
        >>> spread_per_round(0.7, 0.5, False) < 1 < spread_per_round(0.7, 0.9, False)
        True

    Reference: Kolehmainen et al., "NoLoCo: No-all-reduce Low Communication Training Method for Large Models",
    arXiv 2506.10911, which bounds the same variance.
    """
    # v' = momentum v + g, and x' = x - lr v', or x - lr (g + momentum v') by Nesterov. Rows say what a moment
    # is in (A, B, C): E g^2 = E x g = A / 2 and E v g = B / 2.
    half = torch.tensor([0.5, 0.0, 0.0], dtype=torch.float64, device="cpu")
    vv = torch.tensor([0.5, momentum, momentum**2], dtype=torch.float64, device="cpu")
    xv = torch.tensor([0.5, momentum, 0.0], dtype=torch.float64, device="cpu")
    gv = torch.tensor([0.5, momentum / 2, 0.0], dtype=torch.float64, device="cpu")
    x_moved, v_moved, moved_twice = xv, vv, vv
    if nesterov:
        x_moved, v_moved = half + momentum * xv, gv + momentum * vv
        moved_twice = half + 2 * momentum * gv + momentum**2 * vv
    first = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64, device="cpu")
    matrix = torch.stack([first - 2 * lr * x_moved + lr**2 * moved_twice, xv - lr * v_moved, vv])
    # Rounded, so that LAPACK's last digits do not decide whether a radius of 1 counts as growth.
    return round(float(torch.linalg.eigvals(matrix).abs().max()), 12)
