"""The options that several commands share, and the values they take."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

__all__ = ["FILES", "WORK", "Options", "Out", "Trace", "option", "with_options"]

WORK, FILES = "What to train", "Files"  # titles under which options are listed
_RECIPE, _RUN = "Recipe (default: the task's own)", "How to run"


def _path(text: str) -> Path:
    """Refuse the empty text that `--out "$UNSET"` gives: as a path it would be the current folder."""
    if not text:
        raise typer.BadParameter("it is empty; give a path")
    return Path(text)


def option(metavar: str, what: str, panel: str | None = None, **more: Any) -> Any:
    """Describe an option, which is called as its parameter is.

    Args:
        metavar: stands for its value in the help.
        what: the help text.
        panel: title under which the help lists it.
        more: as for `typer.Option`.

    Example:
        >>> option("N", "Seed.", WORK).help
        'Seed.'
    """
    return typer.Option(metavar=metavar, help=what, rich_help_panel=panel, **more)


Out = Annotated[Path | None, option("DIR", "Folder for the results.", FILES, parser=_path)]
_TRACE = "File for what each worker did when; open it with ui.perfetto.dev."
Trace = Annotated[Path | None, option("FILE", _TRACE, FILES, parser=_path)]

_DATA = "mnist: the folder with its four files. text: a UTF-8 file (default: Python's help pages)."
WORKERS = "Start N processes on this machine. Leave it out under torchrun, mpiexec or srun."
_SHARDS = "Whether a worker's samples are a stretch of the data or drawn from all of it."
_THREADS = "Threads per worker (default: OMP_NUM_THREADS, or the cores divided by the workers)."


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says about a training; None where the task or the machine decides.

    `epochs` may be 0, which only evaluates. Each attribute is the option of the same name.
    """

    task: Annotated[str, option("digits|glyphs|mnist|text", "Data set and model.", WORK)] = "digits"
    data: Annotated[Path | None, option("PATH", _DATA, WORK, parser=_path)] = None
    workers: Annotated[int | None, option("N", WORKERS, _RUN)] = None
    epochs: Annotated[int | None, option("N", "Passes over the data.", _RECIPE)] = None
    batch_size: Annotated[int | None, option("N", "Samples per worker and step.", _RECIPE)] = None
    lr: Annotated[float | None, option("X", "Peak learning rate.", _RECIPE)] = None
    momentum: Annotated[float | None, option("X", "SGD's momentum, in [0, 1).", _RECIPE)] = None
    weight_decay: Annotated[float | None, option("X", "Weight decay, from 0.", _RECIPE)] = None
    seed: Annotated[int, option("N", "Seed of weights and of the samples' order.", _RUN)] = 0
    shards: Annotated[str, option("contiguous|shuffled", _SHARDS, _RUN)] = "shuffled"
    bucket_bytes: Annotated[int, option("N", "Largest group of gradients.", _RUN)] = 4 << 20
    timeout_s: Annotated[float, option("X", "Seconds after which a silent worker is lost.", _RUN)] = 300.0
    threads: Annotated[int | None, option("N", _THREADS, _RUN)] = None
    device: Annotated[str, option("cpu|cuda", "Where models and batches live.", _RUN)] = "cpu"


def with_options(command: Callable[..., int]) -> Callable[..., int]:
    """Let a command take every option of `Options` besides its own; it gets them as its first argument.

    Example:
        >>> @with_options
        ... def evaluate(options: Options, often: int = 1) -> int:
        ...     return options.seed * often
        >>> evaluate(seed=3, often=2)
        6
    """
    own = list(inspect.signature(command, eval_str=True).parameters.values())[1:]
    kinds = get_type_hints(Options, include_extras=True)
    shared = [
        inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=kinds[f.name])
        for f in fields(Options)
    ]
    both = [*shared, *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own)]

    def run(**given: Any) -> int:
        options = Options(**{f.name: given.pop(f.name) for f in fields(Options) if f.name in given})
        return command(options, **given)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__signature__ = inspect.Signature(both)  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in both}
    return run
