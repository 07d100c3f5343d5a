"""Checks of arguments; each error says the name, the rule, the value that was got, and what to do."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any, TypeVar

from stenograd.errors import bad_value

__all__ = ["choice", "number", "typed", "whole"]

T = TypeVar("T")


def typed(name: str, got: object, kind: type[T] | tuple[type[T], ...], what: str, advice: str) -> T:
    """Return a value of a type; True and False are numbers only where `kind` is bool.

    Raises:
        TypeError: it is of another type.

    Example:
        >>> typed("timeout_s", "3", (int, float), "a number", "use 30")
        Traceback (most recent call last):
        TypeError: timeout_s must be a number, got '3' (str): use 30
    """
    if not isinstance(got, kind) or (isinstance(got, bool) and kind is not bool):
        text, shown = repr(got), type(got).__name__
        if len(text) < 40 and "\n" not in text:  # a model's text fills pages
            shown = f"{text} ({shown})"
        raise TypeError(f"{name} must be {what}, got {shown}: {advice}")
    return got


def number(
    name: str,
    got: T,
    advice: str,
    *,
    least: float | None = None,
    above: float | None = None,
    finite: bool = True,
) -> T:
    """Return a number that is finite, at least `least`, and above `above`; finite=False takes infinity too.

    Raises:
        ConfigError: it is not.

    Example:
        >>> number("momentum", -1.0, "use 0 for none", least=0)
        Traceback (most recent call last):
        stenograd.errors.ConfigError: momentum must be finite and at least 0, got -1.0: use 0 for none
    """
    value: Any = got
    fits = -math.inf < value < math.inf if finite else value == value  # NaN equals nothing
    if not fits or not (least is None or value >= least) or not (above is None or value > above):
        bounds = [f"at least {least}"] * (least is not None) + [f"above {above}"] * (above is not None)
        raise bad_value(name, "must be " + " and ".join(["finite"] * finite + bounds), got, advice)
    return got


def whole(name: str, got: Any, advice: str, *, least: int = 1) -> int:
    """Return a whole number of at least `least`.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(got, int) or isinstance(got, bool) or got < least:
        raise bad_value(name, f"must be a whole number of at least {least}", got, advice)
    return got


def choice(name: str, got: T, choices: Collection[T], advice: str = "choose one") -> T:
    """Return one of some values.

    Raises:
        ConfigError: it is none of them.
    """
    if got not in choices:
        *first, last = map(repr, choices)
        several = f"{', '.join(first)} or {last}" if first else last
        raise bad_value(name, f"must be {'one of ' * (len(first) > 2)}{several}", got, advice)
    return got
