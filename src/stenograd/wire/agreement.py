"""Small exact agreements between ranks; give them a driver of their own, so that no method pays for them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from stenograd import errors
from stenograd.errors import PeerLost, StenogradError
from stenograd.wire.drivers import AnyDriver
from stenograd.wire.requests import gather

__all__ = ["agree", "everyone", "sum_over_ranks"]

T = TypeVar("T")


def sum_over_ranks(driver: AnyDriver, values: Sequence[float]) -> list[float]:
    """Add numbers over the ranks in float64 and in rank order, so that every rank gets the same bits.

    Args:
        driver: the way to the other ranks.
        values: as many on every rank.

    Example:
        >>> from stenograd.wire.driver import Driver
        >>> from stenograd.launch.process_group import init, shutdown
        >>> _ = init()
        >>> sum_over_ranks(Driver(), [0.1, 2])
        [0.1, 2.0]
        >>> shutdown()
    """
    own = torch.tensor([float(value) for value in values], dtype=torch.float64, device="cpu")
    totals = torch.zeros_like(own)
    for (other,) in driver.run(gather(own)):
        totals += other
    return [float(total) for total in totals]


def everyone(driver: AnyDriver, text: str) -> list[str]:
    """Bring every rank's text to every rank, in rank order."""
    return [message.decode() for message in driver.gather_bytes(text.encode())]


def agree(driver: AnyDriver, action: Callable[[], T]) -> T:
    """Do something that may fail on one rank alone, and fail on all ranks if it fails on any.

    Without this the others would wait for the failed rank until the timeout, and then report that instead of
    the cause.

    Args:
        driver: the way to the other ranks.
        action: what to do; it may not communicate.

    Raises:
        StenogradError: on every rank, the error of the lowest rank that has one, naming the rank unless all
            have the same. One of Stenograd's own keeps its class; another's class stands in the text (but for
            OSError, which says enough). A rank's own error is the cause.
    """
    own: Exception | None = None
    try:
        result = action()
    # A lost rank would not answer this agreement either: the wait would end in the timeout.
    except PeerLost:
        raise
    except Exception as error:  # whatever it is, the other ranks are about to wait for this one
        own = error
    received = everyone(driver, json.dumps(_described(own)))
    if all(text == "null" for text in received):
        return result
    rank = next(rank for rank, text in enumerate(received) if text != "null")
    name, message = json.loads(received[rank])
    where = "" if all(text == received[rank] for text in received) else f"rank {rank}: "
    # Subclasses that stand elsewhere, such as MissingState, are not found by name, and become the base class.
    raise getattr(errors, name, StenogradError)(where + message) from own


def _described(error: Exception | None) -> tuple[str, str] | None:
    """Return the class to raise everywhere and what to say."""
    if error is None or isinstance(error, StenogradError):
        return None if error is None else (type(error).__name__, str(error))
    kind = "" if isinstance(error, OSError) else type(error).__name__
    return StenogradError.__name__, ": ".join(part for part in (kind, str(error)) if part)
