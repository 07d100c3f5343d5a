"""The command line: `stenograd demo`, `train`, `compare`, `plan`, `link`, `simulate`, `emulate`, ...

Commands import what they need when they run, so that help and bad options answer at once.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import typer

from stenograd.cli import commands
from stenograd.cli.failure import DEBUG_VARIABLE, status, tell
from stenograd.errors import ConfigError, StenogradError

__all__ = ["main"]

_UsageError: Any = typer.BadParameter.__bases__[0]  # typer brings its own click in some versions


def main() -> int:
    """Run the command that `sys.argv` names and return the exit status.

    0: it worked. 1: something failed while running, such as a lost worker. 2: an option, a data file or a
    checkpoint is wrong. 130: interrupted. `STENOGRAD_DEBUG=1` shows tracebacks.
    """
    try:
        return int(commands.app(prog_name="stenograd", standalone_mode=False) or 0)
    except _UsageError as error:
        wrong = ConfigError(f"{error.format_message().rstrip('.')}: see stenograd --help")
        return _failed(wrong)
    except BrokenPipeError:  # `stenograd methods | head`: nobody reads any more, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (StenogradError, OSError) as error:
        return _failed(error)
    except (KeyboardInterrupt, typer.Abort):
        return 130


def _failed(error: Exception) -> int:
    if os.environ.get(DEBUG_VARIABLE) == "1":
        raise error
    tell(error)
    return status(error)
