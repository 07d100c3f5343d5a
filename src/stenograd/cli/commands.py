"""The commands' names, options and help texts."""

from __future__ import annotations

from typing import Annotated

import typer

import stenograd
from stenograd.cli import options as opt

__all__ = ["app"]

_METHOD = "How gradients travel, such as topk:ratio=0.01; see stenograd methods."
_METHODS = (
    "Methods, separated by commas or semicolons; may be repeated. A comma followed by KEY=VALUE "
    "continues a method: topk:ratio=0.05,dense_below=64,sign are two."
)

app = typer.Typer(
    help="Data-parallel PyTorch training that sends less.",
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stenograd {stenograd.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo() -> int:
    """Train two workers on digits: dense, with top-k, and with PowerSGD. Takes about a minute.

    It needs nothing but this package. The digits are scikit-learn's if that is installed; otherwise the
    program draws some. Three lines under the table say what is to be seen in it.
    """
    from stenograd.cli.demo import run

    return run()


@app.command()
@opt.with_options
def train(
    options: opt.Options,
    method: Annotated[str, opt.option("TEXT", _METHOD, opt.WORK)] = "dense",
    out: opt.Out = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue from the checkpoint in --out.", rich_help_panel=opt.FILES),
    ] = False,
    save_every: Annotated[int, opt.option("N", "Epochs per checkpoint.", opt.FILES)] = 1,
    save_steps: Annotated[int | None, opt.option("N", "Steps per checkpoint, besides.", opt.FILES)] = None,
    trace: opt.Trace = None,
) -> int:
    """Train a model on N workers, with the gradients compressed by one method.

    Without --workers it takes the ranks of torchrun, mpiexec or srun, or trains alone. Prints one line per
    epoch: losses and accuracies over all workers, seconds, megabytes that each worker sent, and how many
    times less that is than dense training sends. --epochs 0 only evaluates. --resume may be given more or
    fewer workers than before; under torchrun with --max-restarts a run in --out resumes by itself.

    Example: stenograd train --task digits --method topk:ratio=0.05 --workers 2 --out run
    """
    from stenograd.cli.train import Job, run

    job = Job(
        options=options,
        method=method,
        out=out,
        resume=resume,
        save_every=save_every,
        save_steps=save_steps,
        trace=trace,
    )
    return run(job)


@app.command()
@opt.with_options
def compare(
    options: opt.Options,
    methods: Annotated[list[str] | None, opt.option("TEXT", _METHODS, opt.WORK)] = None,
    out: opt.Out = None,
) -> int:
    """Train the same model under several methods in turn, and show what each costs and reaches.

    Every method starts from the same weights and sees the same batches. --out DIR gets compare.json and,
    with matplotlib, compare.png.

    Example: stenograd compare --task digits --workers 2 --methods dense,topk:ratio=0.05,powersgd
    """
    from stenograd.cli.compare import run

    return run(options, methods, out)


@app.command()
def methods(
    size: Annotated[int, opt.option("N", "Elements of the tensor.")] = 1_000_000,
    workers: Annotated[int, opt.option("N", "Simulated workers.")] = 2,
) -> int:
    """List the methods, with what each sends per step for a float32 tensor of N elements, and its keys."""
    from stenograd.cli.methods import run

    return run(size, workers)


@app.command()
def doctor() -> int:
    """Show versions, devices and launcher, and try an all-reduce between two processes.

    The exit status is 0 if training with several workers can work here, else 1.
    """
    from stenograd.cli.doctor import run

    return run()


@app.command(context_settings={"ignore_unknown_options": True})
def emulate(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND...", help="Program and arguments.")],
    hosts: Annotated[int, opt.option("N", "Number of emulated hosts.")] = 2,
    rate: Annotated[
        str, opt.option("RATE", "Of each host's link: 100mbit, 1gbit, UP/DOWN, or none.")
    ] = "100mbit",
    ranks_per_host: Annotated[int, opt.option("N", "Copies of the command on each host.")] = 1,
    timeout_s: Annotated[float, opt.option("X", "Seconds after which all are killed.")] = 3600.0,
) -> int:
    """Run a command once per rank on emulated hosts with slow links, with torchrun's variables.

    Each host is a network namespace behind a token bucket on this machine; the machine's own network is not
    touched. Needs Linux, root, and the commands ip and tc. Shows rank 0's output, then what each host sent.

    Example: sudo stenograd emulate --hosts 2 --rate 100mbit -- python train.py
    """
    from stenograd.cli.emulate import run

    return run(command, hosts, rate, ranks_per_host, timeout_s)
