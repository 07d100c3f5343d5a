"""The options of each command, once: their names, values, defaults and help."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from stenograd.errors import ConfigError

__all__ = [
    "Accuracy",
    "AsJson",
    "CompareOptions",
    "LinkOptions",
    "MethodName",
    "Options",
    "PlanOptions",
    "Shards",
    "Task",
    "TrainOptions",
    "option",
    "taking",
]

WORK, FILES = "What to train", "Files"  # titles under which options are listed
_RECIPE, _RUN, _WHERE = "Recipe (default: the task's own)", "How to run", "Where it will run"
_PATHS = ("DIR", "FILE", "PATH")  # metavars of what becomes a `Path`
T = TypeVar("T")


class _Choice(str, Enum):
    """One of some words, which prints as itself; the shell completes them, and others are refused."""

    __str__ = str.__str__


class Task(_Choice):
    """The names of `stenograd.tasks`, which is not imported here: help shall answer at once."""

    DIGITS = "digits"
    GLYPHS = "glyphs"
    MNIST = "mnist"
    TEXT = "text"


class Shards(_Choice):
    """Whether a worker's samples are a stretch of the data or drawn from all of it."""

    CONTIGUOUS = "contiguous"
    SHUFFLED = "shuffled"


class Device(_Choice):
    """Where models and batches live."""

    CPU = "cpu"
    CUDA = "cuda"


class Accuracy(_Choice):
    """The words of `stenograd.planning.advice.ACCURACIES`."""

    EXACT = "exact"
    ROUNDED = "rounded"
    LOSSY = "lossy"


def _path(text: str) -> Path:
    """Refuse the empty text that `--out "$UNSET"` gives: as a path it would be the current folder."""
    if not text:
        raise typer.BadParameter("it is empty; give a path")
    return Path(text)


def _completed(incomplete: str) -> list[str]:
    """Return the methods' names that begin so, for the shell."""
    from stenograd.catalog.method import method_names

    return [name for name in method_names() if name.startswith(incomplete)]


def option(metavar: str | None, what: str, panel: str | None = None, *flag: str, **more: Any) -> Any:
    """Describe an option.

    Args:
        metavar: stands for its value in the help; empty for a flag, None for the words of a choice.
        what: the help text.
        panel: title under which the help lists it.
        flag: its name; left out, it is called as its parameter is.
        more: as for `typer.Option`.

    Example:
        >>> option("N", "Seed.", WORK).help
        'Seed.'
    """
    if metavar in _PATHS:
        more["parser"] = _path
    return typer.Option(*flag, metavar=metavar, help=what, rich_help_panel=panel, **more)


_DATA = "mnist: the folder with its four files. text: a UTF-8 file (default: Python's help pages)."
_WORKERS = "Start N processes on this machine. Leave it out under torchrun, mpiexec or srun."
_SHARDS = "Whether a worker's samples are a stretch of the data or drawn from all of it."
_THREADS = "Threads per worker (default: OMP_NUM_THREADS, or the cores divided by the workers)."
_METHOD = "How gradients travel, such as topk:ratio=0.01; see stenograd methods."
_METHODS = "How gradients travel, such as topk:ratio=0.01. Repeat it for each method; see stenograd methods."
_KEEP = "Start workers again that fail; for methods with a quorum."
_RESUME = "Continue the run in --out, with its options."
_TRACE = "File for what each worker did when; open it with ui.perfetto.dev."
_TRIAL = "Your own training: a function that returns a stenograd.Trial."
_LINK = "RATE[/DOWN][,LATENCY], such as 1gbit,0.2ms, or a file of stenograd link --out."
_SIZES = "How many will train. Several, such as 2,64,1024, are worked out on paper."
_PER_HOST = "Workers on each host (default: 1, or as launched)."
_CORES = "Cores per worker (default: a share of this machine's)."
_CHECK = "A run of stenograd train --out to compare with."
_FILE = "Show or check this plan.json, also for another link; measure nothing."

Out = Annotated[Path | None, option("DIR", "Folder for the results.", FILES)]
AsJson = Annotated[bool, option("", "Print JSON instead of tables.", None, "--json")]
Methods = Annotated[list[str] | None, option("TEXT", _METHODS, WORK, "--method", autocompletion=_completed)]
MethodName = Annotated[
    str | None, typer.Argument(metavar="NAME", help="One to explain.", autocompletion=_completed)
]
Timeout = Annotated[float, option("X", "Seconds after which a silent worker is lost.", _RUN)]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says about a training; None where the task or the machine decides.

    `epochs` may be 0, which only evaluates. Each attribute but the last is the option of the same name.

    Attributes:
        given: the flags on the command line, by their parameters' names.
    """

    task: Annotated[Task, option(None, "Data set and model.", WORK)] = Task.GLYPHS
    data: Annotated[Path | None, option("PATH", _DATA, WORK)] = None
    workers: Annotated[int | None, option("N", _WORKERS, _RUN)] = None
    epochs: Annotated[int | None, option("N", "Passes over the data.", _RECIPE)] = None
    batch_size: Annotated[int | None, option("N", "Samples per worker and step.", _RECIPE)] = None
    lr: Annotated[float | None, option("X", "Peak learning rate.", _RECIPE)] = None
    momentum: Annotated[float | None, option("X", "SGD's momentum, in [0, 1).", _RECIPE)] = None
    weight_decay: Annotated[float | None, option("X", "Weight decay, from 0.", _RECIPE)] = None
    seed: Annotated[int, option("N", "Seed of weights and of the samples' order.", _RUN)] = 0
    shards: Annotated[Shards, option(None, _SHARDS, _RUN)] = Shards.SHUFFLED
    bucket_bytes: Annotated[int, option("N", "Largest group of gradients.", _RUN)] = 4 << 20
    timeout_s: Timeout = 300.0
    threads: Annotated[int | None, option("N", _THREADS, _RUN)] = None
    device: Annotated[Device, option(None, "Where models and batches live.", _RUN)] = Device.CPU
    given: Mapping[str, str] = field(default_factory=dict)

    def refuse(self, names: Iterable[str], why: str) -> None:
        """Refuse options that would do nothing.

        Args:
            names: of their parameters.
            why: they would not, such as "without --out".

        Raises:
            ConfigError: one of them is on the command line.
        """
        for name in names:
            if name in self.given:
                raise ConfigError(f"{self.given[name]} does nothing {why}: leave it out")


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Options):
    """What `stenograd train` was asked for, each attribute by the option of the same name.

    Under `torchrun --max-restarts` a run in `out` resumes by itself. The last epoch is always saved.
    """

    method: Annotated[str, option("TEXT", _METHOD, WORK, autocompletion=_completed)] = "dense"
    out: Out = None
    resume: Annotated[bool, option("", _RESUME, FILES, "--resume")] = False
    save_every: Annotated[int | None, option("N", "Epochs per checkpoint (default: 1).", FILES)] = None
    save_steps: Annotated[int | None, option("N", "Steps per checkpoint, besides.", FILES)] = None
    trace: Annotated[Path | None, option("FILE", _TRACE, FILES)] = None
    keep: Annotated[bool, option("", _KEEP, WORK, "--keep")] = False


@dataclass(frozen=True, kw_only=True)
class CompareOptions(Options):
    """What `stenograd compare` was asked for, each attribute by the option of the same name.

    Attributes:
        methods: by --method; None for all that suit the task.
    """

    methods: Methods = None
    out: Out = None
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class LinkOptions(Options):
    """What `stenograd link` was asked for, each attribute by the option of the same name."""

    seconds: Annotated[float, option("X", "About how long to measure, from 2.")] = 10.0
    out: Annotated[Path | None, option("FILE", "File for what was measured, for stenograd plan.")] = None
    as_json: AsJson = False


@dataclass(frozen=True, kw_only=True)
class PlanOptions(Options):
    """What `stenograd plan` was asked for, each attribute by the option of the same name.

    Attributes:
        sizes: by --workers: numbers of workers, such as "8" or "2,64,1024"; None for those of the launcher or
            the link.
        methods: by --method; None for all.
        link: None to measure it between the ranks of a launcher.
        plan: a plan's file to show or check, instead of a new one.
    """

    trial: Annotated[str | None, option("FILE.py:FUNCTION", _TRIAL, WORK)] = None
    methods: Methods = None
    accuracy: Annotated[
        Accuracy | None, option(None, "What a recommended method may do to gradients.", WORK)
    ] = None
    sizes: Annotated[str | None, option("N,...", _SIZES, _WHERE, "--workers")] = None
    link: Annotated[str | None, option("LINK", _LINK, _WHERE)] = None
    ranks_per_host: Annotated[int | None, option("N", _PER_HOST, _WHERE)] = None
    cores: Annotated[float | None, option("X", _CORES, _WHERE)] = None
    seconds: Annotated[float, option("X", "About how long to measure and rehearse.")] = 30.0
    out: Out = None
    as_json: AsJson = False
    check: Annotated[Path | None, option("DIR", _CHECK, FILES)] = None
    plan: Annotated[Path | None, option("FILE", _FILE, FILES)] = None
    tolerance: Annotated[float, option("X", "By how much a checked run may differ, as a share.")] = 0.25


def taking(
    options: type[T], *, only: Sequence[str] = (), without: Sequence[str] = ()
) -> Callable[[Callable[[T], int]], Callable[..., int]]:
    """Let a command take the fields of a dataclass as its options; it gets them as its only argument.

    Args:
        options: the dataclass; each field is annotated with what `option` returns.
        only: names of the fields of `Options` that are taken; none for all.
        without: names of those that would do nothing for this command.

    Example:
        >>> @taking(CompareOptions, without=["epochs"])
        ... def evaluate(asked: CompareOptions) -> int:
        ...     return asked.seed
        >>> evaluate(seed=3)
        3
    """
    shared = {f.name for f in fields(Options)}
    left_out = {*without, *(shared - {*only} if only else ()), "given"}
    # `options` is a dataclass, which type[T] does not say; the other ignore below is for the same.
    chosen = [f for f in fields(options) if f.name not in left_out]  # type: ignore[arg-type]
    kinds = get_type_hints(options, include_extras=True)
    only_by_name = inspect.Parameter.KEYWORD_ONLY
    parameters = [
        inspect.Parameter("context", only_by_name, annotation=typer.Context),
        *(
            inspect.Parameter(f.name, only_by_name, default=f.default, annotation=kinds[f.name])
            for f in chosen
        ),
    ]

    def wrap(command: Callable[[T], int]) -> Callable[..., int]:
        def run(context: typer.Context | None = None, **values: Any) -> int:
            return command(options(**values, given=_given(context)))  # type: ignore[call-arg]

        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return wrap


def _given(context: typer.Context | None) -> dict[str, str]:
    """Return the flags that stand on the command line, by parameters' names."""
    if context is None:
        return {}
    flags = {p.name: p.opts[0] for p in context.command.params if p.name is not None}
    sources = {name: context.get_parameter_source(name) for name in flags}
    return {name: flags[name] for name, by in sources.items() if by is not None and by.name == "COMMANDLINE"}
