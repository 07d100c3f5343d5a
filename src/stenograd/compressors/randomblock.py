"""Random-block sparsification: one contiguous stretch of elements, the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from stenograd.compressors.randomk import RandomK

__all__ = ["RandomBlock"]


@dataclass(frozen=True, kw_only=True)
class RandomBlock(RandomK):
    """Send `k = ceil(ratio * n)` neighbours: `S = {s, ..., s + k - 1} mod n`, s uniform, equal on all ranks.

    As `RandomK`, but a stretch of memory is cheaper to read than scattered elements. It wraps around at the
    end, so every element is sent with probability k/n. Wire: k values, `4 k` bytes for float32, one
    all-reduce, whatever the number of ranks.

    Args:
        ratio: share of the elements to send, in (0, 1].
        unbiased: whether to scale by n/k, so that the expectation is x; then without error feedback.
        seed: of the drawing; any integer, the same on every rank.

    Raises:
        MethodError: ratio outside its range.

    Example:
        >>> import torch
        >>> from stenograd.simulate import exchange
        >>> exchange(RandomBlock(ratio=0.5), [torch.arange(1.0, 7.0)])[0].average
        tensor([1., 2., 0., 0., 0., 6.])

    Reference: Vogels et al., "PowerSGD", NeurIPS 2019, section 5 ("random block").
    """

    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {"randomblock": {}}
    summary: ClassVar[str] = "one random stretch of elements, the same on all ranks, by all-reduce"

    @classmethod
    def examples(cls) -> Iterator[RandomBlock]:
        """Yield short, long and complete stretches, both as they are and scaled."""
        for ratio in (0.01, 0.5, 1.0):
            yield cls(ratio=ratio)
        yield cls(ratio=0.2, unbiased=True)

    def draw(self, n: int, k: int, generator: torch.Generator) -> Tensor:
        """Return k neighbours from a random start on, wrapping around."""
        start = int(torch.randint(max(n, 1), (), generator=generator, device="cpu"))
        return (torch.arange(k, device="cpu") + start) % max(n, 1)
