"""Averaging with neighbours by compressed differences: neighbours keep estimates of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from stenograd.catalog.method import Method
from stenograd.compression.codec import Codec
from stenograd.compression.contract import Site
from stenograd.compression.feedback import ErrorFeedback
from stenograd.data.finite import is_finite
from stenograd.data.flat_parameters import holds
from stenograd.data.requests import Rounds, exchange
from stenograd.errors import CheckpointError, MethodError

__all__ = ["Estimates", "codec_of"]


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
        payload = self._codec.encode(x - known[site.rank] if sound else torch.zeros_like(x), site)
        mine = self._codec.decode(payload, x, site)
        if sound and not is_finite(mine):  # the code ends before this type does, as fp16 does at 65,504
            sound, payload = False, self._codec.encode(torch.zeros_like(x), site)
        flag = torch.tensor([sound], dtype=torch.uint8, device=x.device)
        theirs = yield from exchange((*payload, flag), [rank for rank in weights if rank != site.rank])
        flags = torch.cat([ok for *_, ok in theirs.values()]).tolist() if theirs else []
        fit = [rank for rank, ok in zip(theirs, flags, strict=True) if ok]
        for rank in fit:
            *message, _ = theirs[rank]
            known[rank] = known[rank] + self._codec.decode(tuple(message), x, replace(site, rank=rank))
        if sound:
            known[site.rank] = mine = known[site.rank] + mine
            for rank, weight in sorted(weights.items()):
                x.add_(known[rank] - mine, alpha=self._consensus * weight)
        moves = sound and is_finite(x) and holds(tensors[0].dtype, x)
        if moves:
            with torch.no_grad():
                for t, piece in zip(tensors, x.split(site.numels), strict=True):
                    t.copy_(piece.view(t.shape))
        return moves and len(fit) == len(theirs)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all estimates; save them on every rank."""
        return {group: {r: t.clone() for r, t in known.items()} for group, known in self._known.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take saved estimates.

        Raises:
            CheckpointError: they are of another graph.
        """
        for group, known in state.items():
            mine = self._known.get(group)
            if mine is not None and mine.keys() != known.keys():
                raise CheckpointError(
                    f"the estimates must be of rank(s) {sorted(mine)}, got {sorted(known)}: load them into "
                    "the same graph"
                )
        self._known = {group: {r: t.clone() for r, t in known.items()} for group, known in state.items()}
