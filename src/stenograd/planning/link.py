"""The network between ranks: what is known of it, measured or assumed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from stenograd.errors import DataError, first_line
from stenograd.planning.units import parse_link
from stenograd.reading import read_regular

__all__ = ["Link", "assumed", "from_json", "load_link"]

_FORMAT = 5  # of as_json(); a reader refuses others
# How often a message's latency counts: gloo sends no data before the receiver has offered room for it, and in
# a collective the offer leaves when the data could. Links of 5 and 20 ms show it.
_WAYS = 2
_HOP_S = 1.5e-4  # of a small message on a link of which only the rate is known; chosen, not fitted


@dataclass(frozen=True, kw_only=True)
class Link:
    """The network between some ranks.

    Attributes:
        measured: False where it was described by somebody.
        hosts: for each rank, the number of its host.
        alone_bps: bits per second, packet headers included, that each host sends to the next one while
            nothing else is sent.
        together_bps: the same while all of them send at once.
        hop_s: seconds of a small message in a collective, with what gloo asks before it.
        latency_s: of a small message one way, half a ping, from the first host to the one farthest from it.
        seconds: that measuring took.
        sent_bytes: that each rank sent for it.
    """

    measured: bool
    hosts: tuple[int, ...]
    alone_bps: tuple[float, ...]
    together_bps: tuple[float, ...]
    hop_s: float
    latency_s: float = 0.0
    seconds: float = 0.0
    sent_bytes: int = 0

    @property
    def bps(self) -> float:
        """The rate of the slowest host while all send, as they do in a training."""
        return min(self.together_bps)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON-able values, for `load_link`."""
        return {"format": _FORMAT, **asdict(self)}


def assumed(text: str, hosts: Sequence[int]) -> Link:
    """Return a link that somebody describes.

    Args:
        text: `RATE[/DOWN][,LATENCY]`, see `units.parse_link`.
        hosts: for each rank, the number of its host.

    Example:
        >>> link = assumed("1gbit,0.2ms", [0, 1])
        >>> link.measured, link.bps, round(link.hop_s, 6)
        (False, 1000000000.0, 0.00055)
    """
    said = parse_link(text)
    rates = (min(said.up_bps, said.down_bps),) * (max(hosts) + 1)
    return Link(
        measured=False,
        hosts=tuple(hosts),
        alone_bps=rates,
        together_bps=rates,
        hop_s=_HOP_S + _WAYS * said.latency_s,
        latency_s=said.latency_s,
    )


def load_link(path: Path) -> Link:
    """Read what `stenograd link --out` wrote.

    Raises:
        DataError: there is no such file, or it is of another kind.
    """
    try:
        return from_json(json.loads(read_regular(path)))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as cause:
        raise DataError(
            f"{path}: cannot be read as a link ({first_line(cause)}): give a file of stenograd link --out"
        ) from cause


def from_json(told: Mapping[str, Any]) -> Link:
    """Undo `Link.as_json`.

    Raises:
        DataError: it is of another version.
    """
    values = dict(told)
    if values.pop("format") != _FORMAT:
        raise DataError(f"the link's format must be {_FORMAT}, got {told['format']}: measure it again")
    values |= {key: tuple(values[key]) for key in ("hosts", "alone_bps", "together_bps")}
    return Link(**values)
