"""The schedule contract: what is averaged, and when."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Protocol

from stenograd.errors import MethodError

__all__ = ["Codec", "Schedule", "What", "refused"]


class What(Enum):
    """What travels."""

    GRADIENTS = "gradients"
    PARAMETERS = "parameters"
    PSEUDO_GRADIENTS = "pseudo-gradients"
    NEIGHBOURS = "parameters, with neighbours"


class Codec(Protocol):
    """What a schedule asks of the method after the slash before it takes it; see `Method`."""

    @property
    def text(self) -> str:
        """The canonical text."""

    @property
    def clips(self) -> bool:
        """Whether tensors are clipped before they are compressed."""

    @property
    def warmup_steps(self) -> int:
        """Number of dense exchanges before compression starts."""

    @property
    def lossless(self) -> bool:
        """Whether every element travels in its own precision."""

    @property
    def votes(self) -> bool:
        """Whether the ranks vote, so that what comes out is not the mean of what was sent."""

    @property
    def accumulates(self) -> bool:
        """Whether it keeps gradients, or an estimate of them, in a way that fits gradients only."""

    @property
    def divides_by_senders(self) -> bool:
        """Whether an element's average is the mean over those ranks only that sent it."""

    @property
    def amplifies(self) -> bool:
        """Whether what is sent is scaled up to be right on average, so that errors are larger than it."""

    @property
    def forgets(self) -> bool:
        """Whether it has no error feedback where differences of parameters need it."""

    @property
    def one_message(self) -> bool:
        """Whether each rank writes one message, of a length known before, that others read by itself."""


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

    @classmethod
    def examples(cls) -> Iterator[Schedule]:
        """Yield what the suites shall train by: ranks meet often, and every key is used in one of them."""
        yield cls()

    def check(self, codec: Codec) -> None:
        """Refuse a method after the slash that cannot be used with this schedule.

        Raises:
            MethodError: says what to write instead.
        """


def refused(schedule: Schedule, codec: Codec, why: str, instead: str) -> MethodError:
    """Return the error of a method that a schedule cannot use."""
    name = type(schedule).__name__.lower()
    return MethodError(f"{name} cannot be combined with {codec.text!r}: {why}; {instead}")
