"""The command line: `laconic train`, `compare`, `methods` and `doctor`.

Commands import what they need when they run, so that help and bad options answer at once.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from laconic.cli import commands
from laconic.cli.failure import DEBUG_VARIABLE, status, tell
from laconic.errors import ConfigError, LaconicError

__all__ = ["main"]

_UsageError: Any = typer.BadParameter.__bases__[0]  # typer brings its own click in some versions


def main() -> int:
    """Run the command that `sys.argv` names and return the exit status.

    0: it worked. 1: something failed while running, such as a lost worker. 2: an option, a data file or a
    checkpoint is wrong. 130: interrupted. `LACONIC_DEBUG=1` shows tracebacks.
    """
    try:
        return int(commands.app(prog_name="laconic", standalone_mode=False) or 0)
    except _UsageError as error:
        wrong = ConfigError(f"{error.format_message().rstrip('.')}: see laconic --help")
        return _failed(wrong)
    except BrokenPipeError:  # `laconic methods | head`: nobody reads any more, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (LaconicError, OSError) as error:
        return _failed(error)
    except (KeyboardInterrupt, typer.Abort):
        return 130


def _failed(error: Exception) -> int:
    if os.environ.get(DEBUG_VARIABLE) == "1":
        raise error
    tell(error)
    return status(error)
