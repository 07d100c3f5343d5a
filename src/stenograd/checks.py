"""Checks of what other ranks have sent: at once on the CPU, elsewhere once per step, when the host waits."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeAlias

from torch import Tensor

from stenograd.errors import WireError

__all__ = ["Doubt", "doubts_kept_in", "refuse", "require"]

# What must be true, as a 0-d tensor that nobody has read yet, and what to say if it is not.
Doubt: TypeAlias = tuple[Tensor, str]


class _Thread(threading.local):
    # On the class, so that a thread which keeps no doubts finds None, and reads at once.
    kept: list[Doubt] | None = None


_thread = _Thread()


def require(good: Tensor, rule: str) -> None:
    """Refuse a message that breaks a rule.

    Reading a number of another device than the CPU makes the host wait for it; there it is read later, by
    whoever has called `doubts_kept_in`, and until then the caller goes on with what it got.

    Args:
        good: 0-d and boolean.
        rule: what holds otherwise, and what was broken.

    Raises:
        WireError: now, if it is read now.

    Example:
        >>> import torch
        >>> require((torch.tensor([0, 4]) < 4).all(), "indices lie in [0, 4): the message is damaged")
        Traceback (most recent call last):
        stenograd.errors.WireError: indices lie in [0, 4): the message is damaged
    """
    if good.is_cpu or _thread.kept is None:
        if not bool(good):
            raise WireError(rule)
    else:
        _thread.kept.append((good, rule))


@contextmanager
def doubts_kept_in(kept: list[Doubt]) -> Iterator[None]:
    """Let `require` add to a list in this thread, for `refuse`."""
    before, _thread.kept = _thread.kept, kept
    try:
        yield
    finally:
        _thread.kept = before


def refuse(doubts: list[Doubt], found: list[float]) -> None:
    """Raise for the first doubt that was right, and forget them all.

    Args:
        doubts: from `doubts_kept_in`.
        found: what was read of them, 0 for False.

    Raises:
        WireError: one was.
    """
    rules = [rule for (_, rule), good in zip(doubts, found, strict=True) if not good]
    doubts.clear()
    if rules:
        raise WireError(rules[0])
