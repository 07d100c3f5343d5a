"""The schedule contract: what is averaged, and when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

__all__ = ["Schedule", "What"]


class What(Enum):
    """What travels."""

    GRADIENTS = "gradients"
    PARAMETERS = "parameters"


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Base of what stands before the slash in a method's text.

    A subclass in a module of `stenograd.schedules` is found by itself: its `names` may stand in texts, its
    fields become their keys.
    """

    # Names, each with the field values that the name stands for.
    names: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    # One line for `stenograd methods`.
    summary: ClassVar[str] = ""
    what: ClassVar[What] = What.GRADIENTS
