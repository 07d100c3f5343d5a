"""The command line: `stenograd demo`, `train`, `compare`, `plan`, `link`, `emulate`, ...

Commands import what they need when they run, so that help and bad options answer at once.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import typer

from stenograd.cli import commands
from stenograd.cli.failure import DEBUG_VARIABLE, status, tell
from stenograd.errors import ConfigError, StenogradError

__all__ = ["main"]

# What earlier versions had, and what to use instead.
_GONE = {
    "simulate": "use stenograd plan --plan PLAN --workers 2,64,1024",
    **{
        f"--learn{rest}": "use stenograd compare, which trains real workers"
        for rest in ("", "-steps", "-seeds", "-workers", "-from")
    },
}
_UsageError: Any = typer.BadParameter.__bases__[0]  # typer brings its own click in some versions


def main() -> int:
    """Run the command that `sys.argv` names and return the exit status.

    0: it worked. 1: something failed while running, such as a lost worker. 2: an option, a data file or a
    checkpoint is wrong. 130: interrupted. `STENOGRAD_DEBUG=1` shows tracebacks.
    """
    try:
        return int(commands.app(prog_name="stenograd", standalone_mode=False) or 0)
    except _UsageError as error:
        return _failed(ConfigError(_told(error)))
    except BrokenPipeError:  # `stenograd methods | head`: nobody reads any more, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (StenogradError, OSError) as error:
        return _failed(error)
    except (KeyboardInterrupt, typer.Abort):
        return 130


def _told(error: Any) -> str:
    """Say what is wrong with the words of a command line, and where its help is."""
    text, context = error.format_message().rstrip("."), error.ctx
    unknown = re.match(r"No such (?:option: |command ')([\w-]+)", text)
    if unknown is not None and unknown[1] in _GONE:
        return f"{unknown[1]} is no more: {_GONE[unknown[1]]}"
    if context is None:
        return f"{text}: see stenograd --help"
    if "unexpected extra argument" in text and any(p.name == "methods" for p in context.command.params):
        text += ". Several methods are separated by commas: --methods dense,topk"
    return f"{text}: see {context.command_path} --help"


def _failed(error: Exception) -> int:
    if os.environ.get(DEBUG_VARIABLE) == "1":
        raise error
    tell(error)
    return status(error)
