"""Gradients, in every backward pass: what a text without a slash means."""

from __future__ import annotations

from dataclasses import dataclass

from stenograd.schedules.schedule import Schedule

__all__ = ["EveryStep"]


@dataclass(frozen=True, kw_only=True)
class EveryStep(Schedule):
    """Average the gradients of every backward pass."""
