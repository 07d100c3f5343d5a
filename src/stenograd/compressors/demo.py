"""DeMo: the strongest frequencies of a momentum that every rank keeps, and the signs of what they make."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
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
from stenograd.errors import MethodError, bad_value, check_count
from stenograd.wire.finite import finite_of
from stenograd.wire.requests import Rounds, gather

__all__ = ["DeMo", "cosines"]

_MOST_CHUNK = 128  # chunk^2 coefficients are numbered in 16 bits


@dataclass(frozen=True, kw_only=True)
class DeMo(Compressor):
    """Decoupled momentum: ranks share the fast part of their momenta, and keep the slow part to themselves.

    Each tensor is a matrix of `out` rows, cut into blocks whose sides are the largest divisors of its own up
    to `chunk` (vectors into pieces). With D the orthonormal DCT-II of a block,

        delta <- decay * delta + g
        S_r = the `keep` largest coefficients of D(delta) in every block
        delta <- delta - D^-1(S_r)
        delivered = sign(D^-1(mean of each coefficient over the ranks that sent it))

    So it delivers a direction, not a gradient: use `torch.optim.SGD(lr, momentum=0)` with a learning rate as
    for sign descent (1e-3 and below), whose weight decay is then decoupled, and no `GradScaler`, which would
    divide the direction by its scale. The paper multiplies g by the learning rate, which differs from this
    where the rate changes; signs do not see a constant factor.

    Wire: `keep` coefficients of 16 + 32 bits per block of up to `chunk^2` elements, in an all-gather, which
    moves N-1 times that. Blocks of one element, which sides without a divisor give, take 32 bits.

    Args:
        chunk: largest side of a block, from 2 to 128.
        keep: coefficients to send per block, from 1; a smaller block sends all of its own.
        decay: of the momentum, in [0, 1).

    Raises:
        MethodError: a value outside its range.

    Example:
        >>> import torch
        >>> from stenograd.simulate import exchange
        >>> g = torch.tensor([[4.0, 1.0], [2.0, 1.0]])  # its mean is the strongest coefficient
        >>> (out,) = exchange(DeMo(chunk=2, keep=1), [g], shapes=[torch.Size((2, 2))])
        >>> out.average
        tensor([1., 1., 1., 1.])

    Reference: Peng, Quesnelle and Kingma, "DeMo: Decoupled Momentum Optimization", arXiv 2411.19870.
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"demo": {}}
    summary: ClassVar[str] = "the strongest frequencies of a momentum kept on each rank; delivers signs"

    chunk: int = 64
    keep: int = 32
    decay: float = 0.999

    def __post_init__(self) -> None:
        check_count("chunk", self.chunk, "use 64", MethodError, most=_MOST_CHUNK)
        if self.chunk < 2:
            raise bad_value("chunk", "must be at least 2", self.chunk, "use 64", MethodError)
        check_count("keep", self.keep, "use 32", MethodError)
        if not 0 <= self.decay < 1:
            raise bad_value("decay", "must be in [0, 1)", self.decay, "use 0.999", MethodError)

    @classmethod
    def examples(cls) -> Iterator[DeMo]:
        """Yield large and small blocks, and one that sends all."""
        yield cls()
        yield cls(chunk=4, keep=2, decay=0.9)
        yield cls(chunk=8, keep=64, decay=0.5)

    state_kinds: ClassVar[Mapping[str, StateKind]] = {"demo_momentum": Kind.SUM}
    feedback = Feedback.OWN  # what is not sent stays in the momentum

    def init(self, like: Tensor, site: Site) -> State:
        """Start at rest."""
        require_floating(like)
        wide = torch.promote_types(like.dtype, torch.float32)
        return {"demo_momentum": torch.zeros(like.numel(), dtype=wide, device=like.device)}

    def facts(self, site: Site) -> Facts:
        """One all-gather of numbered coefficients, the largest, which NaN and infinity are."""
        return Facts(rounds=1 if sum(site.numels) else 0, finite=True, average=Average.DIRECTION)

    def exchange(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Accumulate, transform, select, gather, transform back."""
        wide = state["demo_momentum"].dtype
        g = x.to(wide) if residual is None else x.to(wide) + residual
        delta = torch.add(g, state["demo_momentum"], alpha=self.decay)  # decay * delta + g
        chosen, values, sent = [], [], []
        for part, shape in zip(delta.split(site.numels), site.shapes, strict=True):
            if not part.numel():
                continue
            found = self.forward(part, shape)  # (blocks, height * width)
            best = found.abs().topk(min(self.keep, found.shape[1]), dim=1).indices  # (blocks, keep)
            picked = found.gather(1, best)
            if found.shape[1] > 1:  # the only coefficient of a block needs no number
                chosen.append(best.to(torch.int16).reshape(-1))
            # Not rounded for the wire: the momentum gives up what these very values make.
            values.append(picked.reshape(-1))
            sent.append(self.backward(torch.zeros_like(found).scatter_(1, best, picked), shape))
        # No collective here: `facts` says 0 rounds where all tensors are empty, alike on all ranks.
        if not values:
            return Exchange(torch.zeros_like(x), {"demo_momentum": delta}, torch.zeros_like(x), finite_of([]))
        own = torch.cat(sent)  # D^-1(S_r), flat like x
        numbers = torch.cat(chosen) if chosen else x.new_empty(0, dtype=torch.int16)
        everyone = yield from gather(numbers, torch.cat(values))
        average = self._directions(everyone, site, wide)
        error = (x.to(wide) - own).to(x.dtype) if site.error else None
        finite = finite_of(values for _, values in everyone)
        return Exchange(average.to(x.dtype), {"demo_momentum": delta - own}, error, finite)

    def blocks(self, shape: torch.Size) -> tuple[int, int, int, int]:
        """Return how many blocks lie below and beside each other, and their two sides."""
        rows = shape[0] if len(shape) > 1 else 1
        columns = shape.numel() // max(rows, 1)
        height, width = _divisor(rows, self.chunk), _divisor(columns, self.chunk)
        return rows // height, columns // width, height, width

    def forward(self, part: Tensor, shape: torch.Size) -> Tensor:
        """Return the coefficients of a flat tensor, one row per block."""
        a, b, height, width = self.blocks(shape)
        blocks = part.view(a, height, b, width).transpose(1, 2)
        left, right = cosines(height, part), cosines(width, part)
        return (left @ blocks @ right.T).reshape(a * b, height * width)  # D B D^T

    def backward(self, coefficients: Tensor, shape: torch.Size) -> Tensor:
        """Return the flat tensor of such coefficients."""
        a, b, height, width = self.blocks(shape)
        left, right = cosines(height, coefficients), cosines(width, coefficients)
        blocks = left.T @ coefficients.view(a, b, height, width) @ right  # D^T S D
        return blocks.transpose(1, 2).reshape(-1)

    def _directions(self, everyone: list[tuple[Tensor, ...]], site: Site, wide: torch.dtype) -> Tensor:
        """Average each coefficient over its senders, transform back and take signs."""
        parts, at, numbered = [], 0, 0
        for shape in site.shapes:
            if not shape.numel():
                continue
            a, b, height, width = self.blocks(shape)
            keep = min(self.keep, height * width)
            total = torch.zeros(a * b, height * width, dtype=wide, device=everyone[0][1].device)
            senders = torch.zeros_like(total)
            count = a * b * keep
            given = count if height * width > 1 else 0  # numbers that came with the values
            alone = torch.zeros(a * b, 1, dtype=torch.int64, device=total.device)
            for chosen, values in everyone:  # in rank order, no index twice in one: the same bits everywhere
                indices = chosen[numbered : numbered + given].long().view(-1, keep) if given else alone
                total.scatter_add_(1, indices, values[at : at + count].view(a * b, keep))
                senders.scatter_add_(1, indices, torch.ones_like(indices, dtype=wide))
            # Each rank transforms back for itself, by BLAS. On unlike processors a value near zero
            # may get another sign; see Numbers in docs/design.md.
            parts.append(self.backward(total / senders.clamp_(min=1), shape).sign_())
            at += count
            numbered += given
        return torch.cat(parts)


def _divisor(size: int, most: int) -> int:
    """Return the largest divisor of a size up to a bound."""
    return next((d for d in range(min(size, most), 0, -1) if size % d == 0), 1)


def cosines(size: int, like: Tensor) -> Tensor:
    """Return the orthonormal matrix of the DCT-II of so many numbers, of the dtype and device of `like`.

    Example:
        >>> m = cosines(3, torch.zeros(1))
        >>> torch.allclose(m @ m.T, torch.eye(3), atol=1e-6)
        True
    """
    return _cosines(size, like.device, like.dtype)


# No bound: a block's side is at most 128, so there are few sizes for each device and type.
@cache
def _cosines(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    i = torch.arange(size, dtype=torch.float64, device="cpu")  # rounded once, and alike for all devices
    matrix = torch.cos(math.pi / size * (i + 0.5) * i[:, None]) * math.sqrt(2 / size)
    matrix[0] /= math.sqrt(2)  # the constant row is sqrt(2) times as long as the others
    return matrix.to(device, dtype)
