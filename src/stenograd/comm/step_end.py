"""The end of a step's exchange: what a rank brings to it and what comes of it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stenograd.checks import Doubt, refuse
from stenograd.compression.contract import Exchange
from stenograd.data.finite import Finite, is_finite, read
from stenograd.data.requests import Rounds

__all__ = ["End", "Outcome", "read_end", "warn_of_overflow"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step's exchange gave.

    averages: one flat tensor a bucket; all NaN where a rank's bucket was not finite.
    any_used: whether any rank used each parameter, as given to `finish`.
    any_flags: whether any rank set each of the flags given to `finish`.
    applied: False where a non-finite bucket kept all states as they were.
    errors: what this rank's bucket lost in compression; None where nothing was lost or nobody asked. They may
        live in the buckets' memory.
    extra: what the further coroutine given to `finish` returned.
    """

    averages: list[Tensor]
    any_used: list[bool]
    any_flags: list[bool]
    applied: bool
    errors: list[Tensor | None]
    extra: Any = None


@dataclass(frozen=True, slots=True)
class End:
    """What a rank brings to the end of a step; the arguments of `TensorExchange.finish`."""

    used: Sequence[bool]
    flags: Sequence[bool]
    extra: Rounds[Any] | None
    bad: bool

    @property
    def told(self) -> list[bool]:
        """What all ranks must hear of; a bad gradient elsewhere only where there is an elsewhere."""
        return [*([self.bad] if self.extra is not None else []), *self.used, *self.flags]


def read_end(
    flags: Tensor, exchanges: Mapping[int, Exchange], asked: Sequence[Tensor], doubts: list[Doubt]
) -> tuple[list[bool], dict[int, bool], bool]:
    """Read what is known when all has come, alike on all ranks; the host waits once for a device.

    Nobody looks through an average of bounded messages, unless it was written as float16: bounds are those of
    float32, in which sums are taken.

    Args:
        flags: of all ranks, above 0 where any has set one.
        exchanges: those that have ended.
        asked: what the others have asked by `Op.COMMIT`.
        doubts: about what has come.

    Returns:
        The flags; whether all was finite, new states included, in each exchange that has ended; and in those
        that asked.

    Raises:
        WireError: a doubt was right.
    """
    told = {i: e.finite for i, e in exchanges.items() if e.finite is not None}
    seen = {
        i: _sum(e.average)
        for i, e in exchanges.items()
        if e.finite is None or e.average.dtype is torch.float16
    }
    small = [flags, *told.values(), *seen.values(), *asked, *(good for good, _ in doubts)]
    set_flags, *rest = read(small)
    numbers = iter([number for (number,) in rest])
    codes, sums = ({i: next(numbers) for i in found} for found in (told, seen))
    bounded = [next(numbers) == Finite.BOUNDED for _ in asked]
    refuse(doubts, list(numbers))
    fine = {
        i: codes.get(i, Finite.BOUNDED) == Finite.BOUNDED
        and (i not in sums or math.isfinite(sums[i]) or is_finite(e.average))
        for i, e in exchanges.items()
    }
    return [flag > 0 for flag in set_flags], fine, all(bounded)


def _sum(x: Tensor) -> Tensor:
    """Add up all elements: NaN and infinity stay in a sum."""
    return x.sum(dtype=torch.promote_types(x.dtype, torch.float32))


def warn_of_overflow(method: str, step: int) -> None:
    """Say that the method's numbers were too small for what the ranks gave it."""
    warnings.warn(
        f"{method}: an average overflowed after {step} steps, though every rank's values were finite. Such a "
        "step changes no state and is counted as skipped; later ones are only counted. Clip gradients "
        "(clip_norm=...), lower the loss scale, or use bf16 in place of fp16",
        RuntimeWarning,
        stacklevel=3,
    )
