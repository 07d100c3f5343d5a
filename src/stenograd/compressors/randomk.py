"""Random-k sparsification: the same few random elements on every rank, so that no place is sent."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stenograd.compression.contract import Compressor, Exchange, Facts, Feedback, Site, State
from stenograd.devices import bring
from stenograd.errors import MethodError, bad_value
from stenograd.wire.requests import Rounds, mean

__all__ = ["RandomK"]

_SMALL = 4096
_SPARSE = 32  # with fewer of n indices, sorting those takes less than marking all


@dataclass(frozen=True)
class RandomK(Compressor):
    """Send `k = ceil(ratio * n)` random elements: `S` uniform, equal on all ranks; `sent = x` on S, else 0.

    All ranks draw S from one seed, so only the values travel and they can be averaged on the way. As it is,
    biased: `E[sent] = k/n x`, use error feedback. With `unbiased`, `sent = n/k x` on S, whose variance is
    `(n/k - 1) x^2`: no contraction, so do not combine it with error feedback, which would diverge.
    Wire: k values, `4 k` bytes for float32, one all-reduce, whatever the number of ranks.

    Args:
        ratio: share of the elements to send, in (0, 1].
        unbiased: whether to scale by n/k, so that the expectation is x.
        seed: of the drawing; any integer, the same on every rank.

    Raises:
        MethodError: ratio outside its range.

    Example:
        >>> import torch
        >>> from stenograd.simulate import exchange
        >>> ones = exchange(RandomK(ratio=0.5), [torch.ones(6), torch.ones(6)])[0].average
        >>> ones.sum()
        tensor(3.)

    Reference: Stich et al., "Sparsified SGD with Memory", NeurIPS 2018 (where every rank draws its own).
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"randomk": {}}
    summary: ClassVar[str] = "the same random elements on all ranks, by all-reduce"

    ratio: float = 0.01
    _: KW_ONLY
    unbiased: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise bad_value("ratio", "must be in (0, 1]", self.ratio, "use 0.01 to send 1 %", MethodError)

    @classmethod
    def examples(cls) -> Iterator[RandomK]:
        """Yield sparse, dense and complete selections, both as they are and scaled."""
        for ratio in (0.01, 0.3, 0.8, 1.0):
            yield cls(ratio=ratio)
        for ratio in (0.1, 0.7):
            yield cls(ratio=ratio, unbiased=True)

    @property
    def feedback(self) -> Feedback:
        """Unscaled, the expectation is k/n of x; scaled, what is sent is n/k times as large."""
        return Feedback.NEVER if self.unbiased else Feedback.ON

    def facts(self, site: Site) -> Facts:
        """One all-reduce; what was not drawn may hide NaN."""
        return Facts()

    def exchange(self, x: Tensor, residual: Tensor | None, state: State, site: Site) -> Rounds[Exchange]:
        """Draw, average the drawn elements, put them back."""
        x = x if residual is None else x.add_(residual)
        n = x.numel()
        k = math.ceil(self.ratio * n)
        scale = n / k if self.unbiased and k else 1.0  # each place is drawn with the chance k / n
        # drawn on the CPU: alike for all devices
        indices = bring(self.draw(n, k, site.generator(self.seed, shared=True)), x.device)
        values = x.index_select(0, indices)
        # Before the values travel, because the driver may average them in place.
        error = None
        if site.error:  # x - scale x, which is an exact zero without scaling
            error = x.index_copy_(0, indices, values * (1 - scale))
        average = yield from mean(values)
        return Exchange(torch.zeros_like(x).index_copy_(0, indices, average * scale), state, error)

    def draw(self, n: int, k: int, generator: torch.Generator) -> Tensor:
        """Return k of n indices, every choice of k equally likely, in ascending order.

        Draws with repetition until k are distinct, then drops a random surplus; so it costs O(k log k) for
        small k instead of a permutation's O(n), which is only taken where n is small.
        """
        if n <= _SMALL:
            return torch.randperm(n, generator=generator, device="cpu")[:k].sort().values
        if 2 * k > n:  # draw the few that are left out
            return _others(n, self.draw(n, n - k, generator))
        found = _distinct(n, k, generator)
        # At random, since `found` ascends: dropping its last ones would favour low indices.
        surplus = self.draw(found.numel(), found.numel() - k, generator)
        return found[_others(found.numel(), surplus)]


def _distinct(n: int, k: int, generator: torch.Generator) -> Tensor:
    """Return k or a few more distinct indices, ascending, without preference for any."""
    found = torch.empty(0, dtype=torch.int64, device="cpu")
    while found.numel() < k:
        many = k + k * k // n + 8  # k are distinct among about n ln(n / (n - k))
        draws = torch.randint(n, (many,), generator=generator, device="cpu")
        found = torch.cat([found, draws])
        if _SPARSE * k < n:
            found = found.unique()
        else:  # marking is faster than sorting
            marks = torch.zeros(n, dtype=torch.bool, device="cpu").index_fill_(0, found, True)
            found = torch.nonzero(marks).view(-1)
    return found


def _others(n: int, indices: Tensor) -> Tensor:
    """Return the indices below n that are not among the given ones."""
    left = torch.ones(n, dtype=torch.bool, device="cpu").index_fill_(0, indices, False)
    return torch.nonzero(left).view(-1)
