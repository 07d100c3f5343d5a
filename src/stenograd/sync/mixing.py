"""One mixing: a rank's tensors become a weighted mean of its own and those of its neighbours."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from stenograd.catalog.method import Method
from stenograd.compression.codec import Codec
from stenograd.compression.contract import Site
from stenograd.compression.feedback import ErrorFeedback
from stenograd.errors import CheckpointError, MethodError, StenogradError
from stenograd.exchange.flat_parameters import holds
from stenograd.wire.carried import mean_of_finite, wide
from stenograd.wire.finite import are_finite, is_finite
from stenograd.wire.requests import Op, Rounds, exchange

__all__ = ["Estimates", "Number", "by_dtype", "codec_of", "mixing"]

T = TypeVar("T")


def mixing(
    tensors: Sequence[Tensor],
    weights: Mapping[int, float],
    rank: int,
    targets: Sequence[int] | None = None,
    share: Tensor | None = None,
    *,
    carried: Sequence[Tensor] = (),
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
        carried: more tensors, such as buffers, which decide nothing: where they are not finite they are left
            out, element by element, and where they are equal they stay; see `wire.carried`.

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
    judged = len(by_dtype(tensors))
    groups = [*by_dtype(tensors), *by_dtype(carried)]
    own = [torch.cat([t.detach().reshape(-1) for t in group]) for group in groups]
    received = [] if share is None else [share]
    sources = [r for r in weights if r != rank]
    message = [flat.clone() for flat in (*own, *received)]
    other = yield from exchange(message, sources if targets is None else targets, sources)
    rows = {r: (*own, *received) if r == rank else other[r] for r in sorted(weights)}
    fit = {r for r, flats in rows.items() if are_finite(flats[:judged])}
    kept = _without(weights, fit, rank) if share is None else _pushed(weights, fit, rank, rows, share)
    with torch.no_grad():
        for i, (group, flat) in enumerate(zip(groups, own, strict=True)):
            # Without weights of 0: 0 times a carried infinity is NaN, and `mean_of_finite` wants w > 0.
            weighted = [(kept[r], rows[r][i]) for r in sorted(kept) if kept[r]]
            mixed = _weighted_sum(weighted, flat)
            if i >= judged:
                mixed = mean_of_finite([row for _, row in weighted], [w for w, _ in weighted], mixed, flat)
            for t, piece in zip(group, mixed.split([t.numel() for t in group]), strict=True):
                t.copy_(piece.view(t.shape))
    return len(fit) == len(rows)


class Number:
    """The number of a rank's backward passes modulo 256, one byte behind the first message to neighbours.

    Args:
        passes: this rank's.
    """

    def __init__(self, passes: int) -> None:
        self._passes = passes
        self._others: dict[int, int] = {}
        self._sent = False

    def carried_by(self, rounds: Rounds[T]) -> Rounds[T]:
        """Run a coroutine; the first that sends to neighbours takes the number along, and brings theirs."""
        reply: Any = None
        while True:
            try:
                request = rounds.send(reply)
            except StopIteration as stop:
                # StopIteration has no type parameter: its value is Any.
                return stop.value  # type: ignore[no-any-return]
            if self._sent or request.op is not Op.EXCHANGE:
                reply = yield request
                continue
            self._sent = True
            device = request.tensors[0].device
            own = torch.tensor([self._passes % 256], dtype=torch.uint8, device=device)
            received = yield replace(request, tensors=(*request.tensors, own))
            self._others = {rank: int(other[-1]) for rank, other in received.items()}
            reply = {rank: other[:-1] for rank, other in received.items()}

    def refuse_others(self) -> None:
        """Raise a StenogradError, here and there, if a neighbour is at another backward pass."""
        for rank, number in sorted(self._others.items()):
            if number != self._passes % 256:
                raise StenogradError(
                    f"the ranks are at different backward passes, this one at number {self._passes} and its "
                    f"neighbour {rank} at another: use no_sync() and backward() for the same batches on "
                    "every rank, and restart from a checkpoint"
                )


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
    kept = {r: weights[r] * float(rows[r][-1]) for r in sorted(fit)}  # W_ij w_j; w_j is the last in a message
    total = math.fsum(kept.values())
    if not total > 0:
        return {rank: 1.0}
    share.fill_(total)
    return {r: w / total for r, w in kept.items()}  # W_ij w_j / sum_j W_ij w_j


def _weighted_sum(rows: Iterable[tuple[float, Tensor]], like: Tensor) -> Tensor:
    total = torch.zeros_like(like, dtype=wide(like.dtype))
    for weight, row in rows:
        total.add_(row.to(total.dtype), alpha=weight)
    return total


def codec_of(how: Method) -> Codec | None:
    """Return what writes messages to neighbours; None where they travel as they are.

    Error feedback is taken off: what a message leaves out stays in the difference, and so goes out later.

    Raises:
        MethodError: the method needs all ranks, writes messages of different lengths, or votes or clips.
    """
    how.require_every_step("gossip")
    compressor = how.compressor
    inner = compressor.inner if isinstance(compressor, ErrorFeedback) else compressor
    if how.lossless:
        return None
    fit = how.one_message and not (how.votes or how.clips or how.warmup_steps)
    if not isinstance(inner, Codec) or not fit:
        raise MethodError(
            f"gossip needs a codec that writes one message of fixed length per rank, got {how}: use fp16, "
            "bf16, topk, sign or qsgd, without clipping, warm-up or majority"
        )
    return inner


class Estimates:
    """What a rank and its neighbours know of each other's tensors, equal at both ends of every edge.

    A rank keeps one copy per neighbour, not only their weighted sum, which would take less memory: rounding
    in a running sum stays there, so every later mixing would move the mean of all x by it again.

    With `q_i = C(x_i - h_i)`, every rank sends q to its neighbours, and all who know h_i take `h_i <- h_i +
    q_i`. Then `x_i <- x_i + gamma sum_j W_ij (h_j - h_i)`. Where W is symmetric the mean of all x is kept,
    whatever the codec loses.

    Args:
        codec: C, from `codec_of`.
        consensus: gamma, in (0, 1]; the fewer elements travel, the smaller it must be.

    Reference: Koloskova et al., "Decentralized Stochastic Optimization and Gossip Algorithms with Compressed
    Communication", ICML 2019 (CHOCO-Gossip).
    """

    def __init__(self, codec: Codec, consensus: float) -> None:
        self._codec, self._consensus = codec, consensus
        self._known: dict[str, dict[int, Tensor]] = {}

    def anchor(self, group: str, tensors: Sequence[Tensor], ranks: Sequence[int]) -> None:
        """Take tensors of one type, equal on all ranks, as what all know of each other.

        Args:
            group: their name, as for `mix`.
            tensors: real, of one dtype.
            ranks: this rank and its neighbours.
        """
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        x = torch.cat([t.detach().reshape(-1).to(wide) for t in tensors])
        self._known[group] = {rank: x.clone() for rank in ranks}

    def mix(
        self, group: str, tensors: Sequence[Tensor], weights: Mapping[int, float], site: Site
    ) -> Rounds[bool]:
        """Mix tensors of one type in place; see the class.

        Args:
            group: name of these tensors, equal on all ranks and at every step.
            tensors: real, of one dtype; they are averaged in float32 or wider.
            weights: this rank's row W_i, the same at every step.
            site: this rank and step.

        Returns:
            Whether this rank's tensors and its neighbours' were finite and within what the code can say, and
            this rank's are finite after it. One whose tensors are not keeps them, and its estimate stays what
            it was everywhere; one that would leave the range of its type keeps them, too.
        """
        wide = torch.promote_types(tensors[0].dtype, torch.float32)
        x = torch.cat([t.detach().reshape(-1).to(wide) for t in tensors])
        known = self._known.get(group) or {rank: torch.zeros_like(x) for rank in weights}
        # What was loaded lies where it was saved, or in the CPU's memory.
        known = self._known[group] = {rank: t.to(x.device) for rank, t in known.items()}
        site = replace(site, shapes=tuple(t.shape for t in tensors), dtype=wide, device=x.device)
        sound = is_finite(x)
        # q_i = C(x_i - h_i); zeros leave the estimates of a rank that is not finite as they are.
        payload = self._codec.encode(x - known[site.rank] if sound else torch.zeros_like(x), site)
        own = self._codec.decode(payload, x, site)
        if sound and not is_finite(own):  # the code ends before this type does, as fp16 does at 65,504
            sound, payload = False, self._codec.encode(torch.zeros_like(x), site)
        # Zeros alone would not say it: a rank that has not moved sends them, too.
        flag = torch.tensor([sound], dtype=torch.uint8, device=x.device)
        other = yield from exchange((*payload, flag), [rank for rank in weights if rank != site.rank])
        flags = torch.cat([ok for *_, ok in other.values()]).tolist() if other else []
        fit = [rank for rank, ok in zip(other, flags, strict=True) if ok]
        for rank in fit:
            *message, _ = other[rank]
            known[rank] = known[rank] + self._codec.decode(tuple(message), x, replace(site, rank=rank))
        if sound:
            known[site.rank] = own = known[site.rank] + own  # h_i + q_i
            for rank, weight in sorted(weights.items()):  # x_i + gamma sum_j W_ij (h_j - h_i), in rank order
                x.add_(known[rank] - own, alpha=self._consensus * weight)
        moves = sound and is_finite(x) and holds(tensors[0].dtype, x)
        if moves:
            with torch.no_grad():
                for t, piece in zip(tensors, x.split(site.numels), strict=True):
                    t.copy_(piece.view(t.shape))
        return moves and len(fit) == len(other)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all estimates; save them on every rank."""
        return {group: {r: t.clone() for r, t in known.items()} for group, known in self._known.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take saved estimates.

        Raises:
            CheckpointError: they are of another graph.
        """
        for group, known in state.items():
            own = self._known.get(group)
            if own is not None and own.keys() != known.keys():
                raise CheckpointError(
                    f"the estimates must be of rank(s) {sorted(own)}, got {sorted(known)}: load them into "
                    "the same graph"
                )
        self._known = {group: {r: t.clone() for r, t in known.items()} for group, known in state.items()}
