"""One mixing: a rank's tensors become a weighted mean of its own and those of its neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from stenograd.data.finite import is_finite
from stenograd.data.requests import Rounds, exchange

__all__ = ["by_dtype", "mixing"]


def mixing(
    tensors: Sequence[Tensor],
    weights: Mapping[int, float],
    rank: int,
    targets: Sequence[int] | None = None,
    share: Tensor | None = None,
) -> Rounds[bool]:
    """Mix tensors in place: `x_i <- sum_j W_ij x_j`, summed in rank order, in float32 or wider.

    Equal inputs give equal bits, whatever the order in which messages arrive. All tensors go in one message a
    neighbour.

    A rank whose tensors are not all finite takes no part: what its neighbours would have taken from it they
    take from themselves, so on a symmetric graph the mean over the other ranks is kept wherever it is
    otherwise. The rank itself becomes the mean of its finite neighbours, with their weights; without any it
    stays as it is. Whoever receives its message sees that, so all that it concerns decide alike.

    With `share`, the push-sum weight w_i, the mean is kept wherever the columns of W sum to 1:

        x_i <- sum_j W_ij w_j x_j / sum_j W_ij w_j
        w_i <- sum_j W_ij w_j

    so that `sum_i w_i x_i` and `sum_i w_i` stay what they are. What a rank that is not finite would have
    given is taken out of both, and its neighbours keep what is their own.

    Args:
        tensors: real floating-point tensors, of the same shapes and dtypes on all ranks.
        weights: this rank's row W_i of the mixing matrix, its own weight included.
        rank: this rank.
        targets: the other ranks that this one sends to; None for those in its row.
        share: this rank's push-sum weight, 0-d float64, changed in place; on all ranks or on none.

    Returns:
        Whether this rank's tensors and those that came were finite.

    Example:
        >>> from stenograd.simulate import run
        >>> xs = [torch.tensor([0.0]), torch.tensor([4.0])]
        >>> W = [{0: 0.75, 1: 0.25}, {0: 0.5, 1: 0.5}]
        >>> _ = run([mixing([x], W[rank], rank) for rank, x in enumerate(xs)])
        >>> [x.tolist() for x in xs]
        [[1.0], [2.0]]

    Reference: Kempe et al., "Gossip-Based Computation of Aggregate Information", FOCS 2003 (push-sum).
    """
    groups = by_dtype(tensors)
    mine = [torch.cat([t.detach().reshape(-1) for t in group]) for group in groups]
    told = [] if share is None else [share]
    sources = [r for r in weights if r != rank]
    message = [flat.clone() for flat in (*mine, *told)]
    theirs = yield from exchange(message, sources if targets is None else targets, sources)
    rows = {r: (*mine, *told) if r == rank else theirs[r] for r in sorted(weights)}
    fit = {r for r, flats in rows.items() if all(map(is_finite, flats))}
    kept = _without(weights, fit, rank) if share is None else _pushed(weights, fit, rank, rows, share)
    with torch.no_grad():
        for i, (group, flat) in enumerate(zip(groups, mine, strict=True)):
            weighted = ((kept[r], rows[r][i]) for r in sorted(kept))
            mixed = _weighted_sum(weighted, flat).split([t.numel() for t in group])
            for t, piece in zip(group, mixed, strict=True):
                t.copy_(piece.view(t.shape))
    return len(fit) == len(rows)


def by_dtype(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Group tensors that can lie in one flat tensor, in the order of their first members."""
    groups: dict[torch.dtype, list[Tensor]] = {}
    for t in tensors:
        groups.setdefault(t.dtype, []).append(t)
    return list(groups.values())


def _without(weights: Mapping[int, float], fit: set[int], rank: int) -> Mapping[int, float]:
    """Return a row of weights in which only finite ranks are left, still summing to 1."""
    kept = {r: w for r, w in weights.items() if r in fit and w}
    if len(fit) == len(weights):
        return weights
    if rank in fit:
        return {**kept, rank: weights[rank] + math.fsum(w for r, w in weights.items() if r not in fit)}
    total = math.fsum(kept.values())
    return {r: w / total for r, w in kept.items()} if total > 0 else {rank: 1.0}


def _pushed(
    weights: Mapping[int, float],
    fit: set[int],
    rank: int,
    rows: Mapping[int, Sequence[Tensor]],
    share: Tensor,
) -> Mapping[int, float]:
    """Return the weights of what came, by push-sum, and set this rank's own weight to their sum.

    A rank that has no finite tensors and gets none keeps its weight, as it keeps its tensors: it has nothing
    that it could give away, and takes part again as soon as it gets some.
    """
    kept = {r: weights[r] * float(rows[r][-1]) for r in sorted(fit)}
    total = math.fsum(kept.values())
    if not total > 0:
        return {rank: 1.0}
    share.fill_(total)
    return {r: w / total for r, w in kept.items()}


def _weighted_sum(rows: Iterable[tuple[float, Tensor]], like: Tensor) -> Tensor:
    total = torch.zeros_like(like, dtype=torch.promote_types(like.dtype, torch.float32))
    for weight, row in rows:
        total.add_(row, alpha=weight)
    return total
