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

DEBUG_VARIABLE = "STENOGRAD_DEBUG"  # 1 shows tracebacks

_BAD_INPUT = (ConfigError, DataError, CheckpointError, TensorTypeError)
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
    """Print an error in one line, on the ranks that know something which rank 0 does not say."""
    rank = _rank()
    if rank == 0 or not isinstance(error, _EVERYWHERE):
        text = " ".join(str(error).split()) or type(error).__name__
        print(f"stenograd: error: {text}", file=sys.stderr, flush=True)


def _rank() -> int:
    try:
        return detect(os.environ).rank
    except StenogradError:
        return 0
