"""The command line: `stenograd demo`, `train`, `compare`, `plan`, `link`, `emulate`, ...

Commands import what they need when they run, so that help and bad options answer at once.
"""

from __future__ import annotations

import io
import os
import re
import sys
from typing import Any

import typer

from stenograd.cli import commands
from stenograd.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    MismatchError,
    StenogradError,
    TensorTypeError,
)
from stenograd.launch.detect import detect

__all__ = ["main"]

_DEBUG_VARIABLE = "STENOGRAD_DEBUG"  # 1 shows tracebacks
_LAST_LINES = "; its last lines:"  # of a program, in an error of emulated hosts
_BAD_INPUT = (ConfigError, DataError, CheckpointError, TensorTypeError)  # what the user gave: status 2
_EVERYWHERE = (*_BAD_INPUT, MismatchError)  # raised on every rank alike, at least of one host

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
    _replace_closed()
    if isinstance(sys.stdout, io.TextIOWrapper):  # a letter that an encoding lacks shall end nothing
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        status = int(commands.app(prog_name="stenograd", standalone_mode=False) or 0)
        sys.stdout.flush()  # at exit nobody could catch what it raises
        return status
    except _UsageError as error:
        return _failed(ConfigError(_worded(error)))
    except BrokenPipeError:  # `stenograd methods | head`: nobody reads any more, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (StenogradError, OSError) as error:
        return _failed(error)
    except (KeyboardInterrupt, typer.Abort):
        return 130


def _replace_closed() -> None:
    """Let what is printed to a closed output go nowhere; Python has None in its place.

    Its number is taken, too: a file would get it, and what is started here would print there.
    """
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), "w"))


def _worded(error: Any) -> str:
    """Say what is wrong with the words of a command line, and where its help is."""
    text, context = error.format_message().rstrip("."), error.ctx
    unknown = re.match(r"No such (?:option: |command ')([\w-]+)", text)
    if unknown is not None and unknown[1] in _GONE:
        return f"{unknown[1]} is no more: {_GONE[unknown[1]]}"
    if context is None:
        return f"{text}: see stenograd --help"
    if "unexpected extra argument" in text and any(p.name == "methods" for p in context.command.params):
        text += ". Each method has a --method of its own: --method dense --method topk"
    return f"{text}: see {context.command_path} --help"


def _failed(error: Exception) -> int:
    """Print an error in one line, and return its status: 2 for what the user gave, 1 for what happened.

    What all ranks of a host know is printed once there, the rest by each rank. What a program printed last
    keeps its lines.

    Example:
        >>> _failed(DataError("x")), _failed(StenogradError("x"))
        (2, 1)
    """
    if os.environ.get(_DEBUG_VARIABLE) == "1":
        raise error
    if not isinstance(error, _EVERYWHERE) or _local_rank() == 0:
        text, _, tail = str(error).partition(_LAST_LINES)
        line = " ".join(text.split()) or type(error).__name__
        tail = f"{_LAST_LINES}\n{tail.rstrip()}" if (tail := tail.lstrip("\n")).strip() else ""
        print(f"stenograd: error: {line}{tail}", file=sys.stderr, flush=True)
    return 2 if isinstance(error, _BAD_INPUT) else 1


def _local_rank() -> int:
    try:
        return detect(os.environ).local_rank
    except StenogradError:
        return 0
