"""The options that several commands share, and the values they take."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

__all__ = [
    "BatchSize",
    "BucketBytes",
    "Data",
    "Device",
    "Epochs",
    "LearningRate",
    "Momentum",
    "Options",
    "Out",
    "Seed",
    "Shards",
    "TaskName",
    "Threads",
    "TimeoutS",
    "Trace",
    "WeightDecay",
    "Workers",
]

_WORK, _RECIPE, _RUN = "What to train", "Recipe (default: the task's own)", "How to run"


def _path(text: str) -> Path:
    """Refuse the empty text that `--out "$UNSET"` gives: as a path it would be the current folder."""
    if not text:
        raise typer.BadParameter("it is empty; give a path")
    return Path(text)


TaskName = Annotated[
    str,
    typer.Option("--task", metavar="digits|mnist|text", help="Data set and model.", rich_help_panel=_WORK),
]
Data = Annotated[
    Path | None,
    typer.Option(
        "--data",
        parser=_path,
        metavar="PATH",
        help="mnist: the folder with its four files. text: a UTF-8 file (default: Python's help pages).",
        rich_help_panel=_WORK,
    ),
]
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers",
        metavar="N",
        help="Start N processes on this machine. Leave it out under torchrun, mpiexec or srun.",
        rich_help_panel=_RUN,
    ),
]
Epochs = Annotated[
    int | None,
    typer.Option("--epochs", metavar="N", help="Passes over the data.", rich_help_panel=_RECIPE),
]
BatchSize = Annotated[
    int | None,
    typer.Option("--batch-size", metavar="N", help="Samples per worker and step.", rich_help_panel=_RECIPE),
]
LearningRate = Annotated[
    float | None,
    typer.Option("--lr", metavar="X", help="Peak learning rate.", rich_help_panel=_RECIPE),
]
Momentum = Annotated[
    float | None,
    typer.Option("--momentum", metavar="X", help="SGD's momentum, in [0, 1).", rich_help_panel=_RECIPE),
]
WeightDecay = Annotated[
    float | None,
    typer.Option("--weight-decay", metavar="X", help="Weight decay, from 0.", rich_help_panel=_RECIPE),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed", metavar="N", help="Seed of weights and of the samples' order.", rich_help_panel=_RUN
    ),
]
Shards = Annotated[
    str,
    typer.Option(
        "--shards",
        metavar="contiguous|shuffled",
        help="Whether a worker's samples are a stretch of the data or drawn from all of it.",
        rich_help_panel=_RUN,
    ),
]
BucketBytes = Annotated[
    int,
    typer.Option("--bucket-bytes", metavar="N", help="Largest group of gradients.", rich_help_panel=_RUN),
]
TimeoutS = Annotated[
    float,
    typer.Option(
        "--timeout-s", metavar="X", help="Seconds after which a silent worker is lost.", rich_help_panel=_RUN
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        metavar="N",
        help="Threads per worker (default: OMP_NUM_THREADS, or the cores divided by the workers).",
        rich_help_panel=_RUN,
    ),
]
Device = Annotated[
    str,
    typer.Option("--device", metavar="cpu|cuda", help="Where models and batches live.", rich_help_panel=_RUN),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", parser=_path, metavar="DIR", help="Folder for the results.", rich_help_panel="Files"
    ),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        parser=_path,
        metavar="FILE",
        help="File for what each worker did when; open it with ui.perfetto.dev.",
        rich_help_panel="Files",
    ),
]


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the command line says about a training; None where the task or the machine decides.

    `epochs` may be 0, which only evaluates. The attributes are described by the options of the same names.
    """

    task: str = "digits"
    data: Path | None = None
    workers: int | None = None
    epochs: int | None = None
    batch_size: int | None = None
    lr: float | None = None
    momentum: float | None = None
    weight_decay: float | None = None
    seed: int = 0
    shards: str = "shuffled"
    bucket_bytes: int = 4 << 20
    timeout_s: float = 300.0
    threads: int | None = None
    device: str = "cpu"
