"""Dion: the leading subspace of a momentum that every rank keeps, delivered with orthonormal factors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stenograd.compression.contract import (
    Average,
    Compressor,
    Exchange,
    Facts,
    Feedback,
    Kind,
    Site,
    State,
    StateKind,
    require_floating,
)
from stenograd.compression.orthogonalize import orthogonalize
from stenograd.errors import MethodError, bad_value
from stenograd.kernels.lowrank import Place, expand, project_columns, project_rows, row_sums, take_out
from stenograd.wire.finite import finite_of
from stenograd.wire.requests import Rounds, means

__all__ = ["Dion"]


@dataclass(frozen=True)
class Dion(Compressor):
    """Orthonormalised low-rank momentum: like Muon's update, from thin factors that all ranks share.

    Each rank r keeps a momentum M_r of every matrix (n rows, m columns):

        B_r = M_r + G_r
        P = orthonormal(mean_r(B_r Q))          (n, k)
        R_r = B_r^T P                           (m, k)
        M_r <- B_r - (1 - momentum) P R_r^T
        Q <- mean_r(R_r), every column divided by its length
        delivered = sqrt(n / m) P Q^T

    So what the subspace does not hold stays in the momentum whole, and what it holds decays as usual. The
    paper takes the mean R from every rank's momentum. The mean of all M_r, on which alone everything
    depends, is the same; but what sets ranks apart would stay in M_r for ever, and add up.

    It delivers a direction, not a gradient: use `torch.optim.SGD(lr, momentum=0)`, whose weight decay is then
    decoupled, with a learning rate as for Muon (about 0.01), and no `GradScaler`, which would divide the
    direction by its scale. Tensors of one dimension, and those with one row or column, are averaged exactly:
    give them an optimizer of their own, such as AdamW.

    Wire: `32 k (n + m)` bits per matrix, two all-reduces, whatever the number of ranks.

    Args:
        ratio: share of a matrix's smaller side that k is, rounded up, in (0, 1].
        momentum: what is left of the shared part after a step, in [0, 1).
        seed: of the first Q; any integer, the same on every rank.

    Raises:
        MethodError: a value outside its range.

    Example:
        >>> import torch
        >>> from stenograd.simulate import exchange
        >>> g = torch.outer(torch.tensor([3.0, 4.0]), torch.tensor([0.0, 2.0]))  # of rank 1
        >>> exchange(Dion(ratio=0.5), [g])[0].average.view(2, 2)
        tensor([[0.0000, 0.6000],
                [0.0000, 0.8000]])

    Reference: Ahn et al., "Dion: Distributed Orthonormalized Updates", arXiv 2504.05295.
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"dion": {}}
    summary: ClassVar[str] = "the leading subspace of a momentum kept on each rank; delivers a direction"

    ratio: float = 0.25
    _: KW_ONLY
    momentum: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise bad_value("ratio", "must be in (0, 1]", self.ratio, "use 0.25", MethodError)
        if not 0 <= self.momentum < 1:
            raise bad_value("momentum", "must be in [0, 1)", self.momentum, "use 0.95", MethodError)

    @classmethod
    def examples(cls) -> Iterator[Dion]:
        """Yield a low and the full rank, the latter also without memory."""
        yield cls()
        yield cls(ratio=1.0)
        yield cls(ratio=1.0, momentum=0.0)

    # `dion_q` is not named: it is made of averages, so it is equal on all ranks.
    state_kinds: ClassVar[Mapping[str, StateKind]] = {"dion_momentum": Kind.SUM}
    feedback = Feedback.OWN  # what is not sent stays in the momentum

    def init(self, like: Tensor, site: Site) -> State:
        """Start at rest, with a random Q that is equal on all ranks."""
        require_floating(like)
        wide = torch.promote_types(like.dtype, torch.float32)
        generator = site.generator(self.seed, shared=True)
        state = {"dion_momentum": torch.zeros(like.numel(), dtype=wide, device=like.device)}
        for i, ((_, _, _, _, columns), rank) in self.matrices(site).items():
            # In float32 on the CPU, whatever x is, so that every type and device begins with the same Q.
            queries = torch.randn((rank, columns), generator=generator, dtype=torch.float32, device="cpu")
            state[f"dion_q/{i}"] = queries.to(like.device, wide)
        return state

    def facts(self, site: Site) -> Facts:
        """Two all-reduces, in which NaN and infinity show; vectors are averaged exactly, in the first."""
        if not self.matrices(site):
            # Vectors get a plain mean. `Method.moves` asks by tensor, so their optimizer may have momentum.
            return Facts(rounds=int(sum(site.numels) > 0), finite=True)
        return Facts(rounds=2, finite=True, average=Average.DIRECTION)

    def exchange(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Accumulate, project on both sides in two rounds, keep the rest."""
        indices = self.matrices(site)
        b = state["dion_momentum"] + x.to(state["dion_momentum"].dtype)  # B_r = M_r + G_r
        b = b if residual is None else b.add_(residual)
        before = b.clone() if site.error else None  # b changes in place below
        exact = [piece for i, piece in enumerate(b.split(site.numels)) if i not in indices]
        average, new, finite = torch.zeros_like(b), dict(state), finite_of([])
        if sum(site.numels):
            # B_r Q, (1, k, n); what is handed over is copied, because the driver may average in place.
            thin = [project_rows(b, None, at, state[f"dion_q/{i}"][None]) for i, (at, _) in indices.items()]
            reply = yield from means([*thin, *(piece.clone() for piece in exact)])
            pts = [orthogonalize(p.mT).mT.contiguous() for p in reply[: len(thin)]]  # (1, k, n)
            outs = [piece for i, piece in enumerate(average.split(site.numels)) if i not in indices]
            for piece, out, mean in zip(exact, outs, reply[len(thin) :], strict=True):
                out.copy_(mean)
                piece.zero_()  # these have no momentum
            # R_r
            local = [project_columns(b, at, pt) for (at, _), pt in zip(indices.values(), pts, strict=True)]
            # A copy: what this rank takes out of its momentum below is its own R_r.
            rts = (yield from means([r.clone() for r in local])) if indices else ()  # (1, k, m)
            finite = finite_of([*reply, *rts])
            for (i, (at, _)), pt, own, rt in zip(indices.items(), pts, local, rts, strict=True):
                # The same bits whatever the threads; float64 hides vectors of other widths.
                length = row_sums(rt.double().square())[..., None].sqrt().to(rt.dtype)
                unit = torch.where(length > 0, rt / length, 0.0)
                scale = math.sqrt(at[3] / at[4])
                take_out(b, at, (pt, own * (1 - self.momentum)))  # M_r <- B_r - (1 - momentum) P R_r^T
                expand(average, at, (pt, unit * scale))  # sqrt(n / m) P Q^T
                # A column of zeros has no direction: it keeps the last one.
                new[f"dion_q/{i}"] = torch.where(length > 0, unit, state[f"dion_q/{i}"])[0]
        new["dion_momentum"] = b
        error = None if before is None else (x.to(b.dtype) - (before - b)).to(x.dtype)
        return Exchange(average.to(x.dtype), new, error, finite)

    def matrices(self, site: Site) -> dict[int, tuple[Place, int]]:
        """Return, by number in the flat x, where matrices lie and the rank k of each."""
        found, start = {}, 0
        for i, shape in enumerate(site.shapes):
            numel = math.prod(shape)
            if len(shape) > 1 and numel and 1 < shape[0] < numel:
                n, m = shape[0], numel // shape[0]
                found[i] = (start, n * m, 1, n, m), math.ceil(self.ratio * min(n, m))
            start += numel
        return found
