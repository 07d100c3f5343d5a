"""The end of a step's exchange: what a rank brings to it and what comes of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from stenograd.compression.contract import Exchange
from stenograd.data.finite import Finite, is_finite
from stenograd.data.requests import Rounds

__all__ = ["End", "Outcome", "on", "record", "shows_finite", "warn_of_overflow"]


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


def shows_finite(exchange: Exchange) -> bool:
    """Return whether an exchange shows, alike on all ranks, that all was finite."""
    reported = Finite.YES if exchange.finite is None else int(exchange.finite)
    return reported != Finite.NO and (reported == Finite.BOUNDED or is_finite(exchange.average))


def warn_of_overflow(method: str, step: int) -> None:
    """Say that the method's numbers were too small for what the ranks gave it."""
    warnings.warn(
        f"{method}: an average overflowed after {step} steps, though every rank's values were finite. Such a "
        "step changes no state and is counted as skipped; later ones are only counted. Clip gradients "
        "(clip_norm=...), lower the loss scale, or use bf16 in place of fp16",
        RuntimeWarning,
        stacklevel=3,
    )


def record(device: torch.device) -> torch.cuda.Event | None:
    """Note on a CUDA stream how far it is; nothing on CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


class on:
    """Work on a side stream after an event; nothing on CPU."""

    def __init__(self, stream: torch.cuda.Stream | None, ready: torch.cuda.Event | None) -> None:
        self._stream, self._ready = stream, ready
        self._context = torch.cuda.stream(stream) if stream is not None else None

    def __enter__(self) -> None:
        if self._context is not None and self._stream is not None:
            self._context.__enter__()
            if self._ready is not None:
                self._stream.wait_event(self._ready)

    def __exit__(self, *exc: object) -> None:
        if self._context is not None:
            self._context.__exit__(*exc)
