"""How a command ends: one line for an error, and the exit status that belongs to it."""

from __future__ import annotations

import os
import sys

from stenograd.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MismatchError,
    StenogradError,
    TensorTypeError,
)
from stenograd.launch.detect import detect

__all__ = ["DEBUG_VARIABLE", "status", "tell"]

_LAST_LINES = "; its last lines:"  # of a program, in an error of emulated hosts

DEBUG_VARIABLE = "STENOGRAD_DEBUG"  # 1 shows tracebacks

_BAD_INPUT = (ConfigError, DataError, CheckpointError, TensorTypeError)  # what the user gave: status 2
# Raised on every rank alike, so one rank's line is enough.
_EVERYWHERE = (*_BAD_INPUT, MismatchError)


def status(error: BaseException) -> int:
    """Return the exit status: 2 for what the user gave, 1 for what happened while running.

    Example:
        >>> from stenograd.errors import PeerLost
        >>> status(DataError("x")), status(PeerLost("x"))
        (2, 1)
    """
    return 2 if isinstance(error, _BAD_INPUT) else 1


def tell(error: BaseException) -> None:
    """Print an error in one line, on the ranks that know something which rank 0 does not say.

    What a program printed last keeps its lines.
    """
    rank = _rank()
    if rank == 0 or not isinstance(error, _EVERYWHERE):
        text, _, tail = str(error).partition(_LAST_LINES)
        line = " ".join(text.split()) or type(error).__name__
        tail = f"{_LAST_LINES}\n{tail.rstrip()}" if (tail := tail.lstrip("\n")).strip() else ""
        print(f"stenograd: error: {line}{tail}", file=sys.stderr, flush=True)


def _rank() -> int:
    try:
        return detect(os.environ).rank
    except StenogradError:
        return 0
