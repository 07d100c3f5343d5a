"""Rates, times and links as text: `1gbit`, `0.2ms`, `100mbit/20mbit,5ms`."""

from __future__ import annotations

import re
from dataclasses import dataclass

from stenograd.errors import ConfigError, bad_value

__all__ = ["LinkText", "parse_link", "parse_rate", "parse_seconds", "rate_text", "time_text"]

_RATE_UNITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_TIME_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_NUMBER = r"(\d+(?:\.\d+)?)"


@dataclass(frozen=True, slots=True)
class LinkText:
    """A link as somebody describes it.

    Args:
        up_bps: bits per second that a host can send.
        down_bps: bits per second that it can receive.
        latency_s: seconds that a message takes one way, half a ping; 0 where it is not said.
    """

    up_bps: float
    down_bps: float
    latency_s: float = 0.0


def parse_rate(text: str) -> float:
    """Return bits per second from a number and kbit, mbit or gbit, as `tc` writes them.

    Raises:
        ConfigError: it is not written like that, or it is 0.

    Example:
        >>> parse_rate("100mbit"), parse_rate("2.5gbit")
        (100000000.0, 2500000000.0)
        >>> parse_rate("1gbps")
        Traceback (most recent call last):
        stenograd.errors.ConfigError: rate must be a number and kbit, mbit or gbit, got '1gbps': write 1gbit
    """
    match = re.fullmatch(_NUMBER + "(kbit|mbit|gbit)", text.strip())
    if match is None or float(match[1]) == 0:
        guess = re.fullmatch(_NUMBER + r"\s*([kmg]?)\w*(?:/s)?", text.strip(), re.IGNORECASE)
        unit = (guess[2].lower() or "m") if guess else ""
        advice = f"write {guess[1]}{unit}bit" if guess and float(guess[1]) else "write 1gbit"
        raise bad_value("rate", "must be a number and kbit, mbit or gbit", text, advice)
    return float(match[1]) * _RATE_UNITS[match[2]]


def parse_seconds(text: str) -> float:
    """Return seconds from a number and us, ms or s.

    Example:
        >>> parse_seconds("0.2ms")
        0.0002
    """
    match = re.fullmatch(_NUMBER + "(us|ms|s)", text.strip())
    if match is None:
        raise bad_value("latency", "must be a number and us, ms or s", text, "write 0.2ms")
    return float(match[1]) * _TIME_UNITS[match[2]]


def parse_link(text: str) -> LinkText:
    """Return a link from `RATE[/DOWN][,LATENCY]`.

    Example:
        >>> parse_link("100mbit/20mbit,5ms")
        LinkText(up_bps=100000000.0, down_bps=20000000.0, latency_s=0.005)
    """
    rate, *rest = text.split(",")
    if len(rest) > 1:
        raise ConfigError(f"a link must be RATE or RATE,LATENCY, got {text!r}: write 1gbit,0.2ms")
    up, *down = rate.split("/")
    if len(down) > 1:
        raise ConfigError(f"a link must have one or two rates, got {text!r}: write 100mbit/20mbit")
    if down and re.fullmatch(_NUMBER + "(us|ms|s)", down[0].strip()):
        raise ConfigError(f"a link's latency stands after a comma, got {text!r}: write {up},{down[0]}")
    up_bps = parse_rate(up)
    return LinkText(up_bps, parse_rate(down[0]) if down else up_bps, parse_seconds(rest[0]) if rest else 0.0)


def rate_text(bits_per_s: float) -> str:
    """Write a rate for people.

    Example:
        >>> rate_text(94.13e6), rate_text(1.9e9), rate_text(640e3)
        ('94.1 Mbit/s', '1.9 Gbit/s', '640 kbit/s')
    """
    for unit, name in ((1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")):
        if bits_per_s >= unit:
            return f"{bits_per_s / unit:.3g} {name}"
    return f"{bits_per_s:.3g} bit/s"


def time_text(seconds: float) -> str:
    """Write a duration for people, with three digits.

    Example:
        >>> time_text(0.000213), time_text(0.0415), time_text(2.5)
        ('0.213 ms', '41.5 ms', '2.5 s')
    """
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
