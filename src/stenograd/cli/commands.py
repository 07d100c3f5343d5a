"""The commands' names, options and help texts."""

from __future__ import annotations

from pathlib import Path
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
_TRIAL = "Your own training: a function that returns a stenograd.Trial."
_LINK = "RATE[/DOWN][,LATENCY], such as 1gbit,0.2ms, or a file of stenograd link --out."
_ACCURACY = "What a recommended method may do to gradients."
_WHERE = "Where it will run"
_PER_HOST = "Workers on each host (default: 1, or as launched)."
_CORES = "Cores per worker (default: a share of this machine's)."
_CHECK = "A run of stenograd train --out to compare with."
_TRIED = "What it does to learning"
_LEARN = "Train virtual workers here under the recommended method, or those of --methods, against dense."
_LEARN_FROM = "Weights to begin with: a file of model.state_dict(), or the folder of a run."
_FILE = "Show or check this plan.json, and measure nothing."

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
def link(
    seconds: Annotated[float, opt.option("X", "About how long to measure, from 2.")] = 10.0,
    workers: Annotated[int | None, opt.option("N", opt.WORKERS)] = None,
    out: Annotated[Path | None, opt.option("FILE", "File for what was measured, for stenograd plan.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    timeout_s: Annotated[float, opt.option("X", "Seconds after which a silent worker is lost.")] = 300.0,
) -> int:
    """Measure the network between workers through the collectives that training uses.

    It needs two workers or more: start it under torchrun, mpiexec or srun as you start a training, or give
    --workers for processes on this machine. Rates count packet headers. Latency is that of one message
    between two workers, with all workers idle and with all of them computing.

    Example: torchrun --nnodes 2 --nproc-per-node 1 ... -m stenograd link --out link.json
    """
    from stenograd.cli.link import run

    return run(opt.Options(workers=workers, timeout_s=timeout_s), seconds, out, as_json)


@app.command()
@opt.with_options
def plan(
    options: opt.Options,
    trial: Annotated[str | None, opt.option("FILE.py:FUNCTION", _TRIAL, opt.WORK)] = None,
    methods: Annotated[list[str] | None, opt.option("TEXT", _METHODS, opt.WORK)] = None,
    link: Annotated[str | None, opt.option("LINK", _LINK, _WHERE)] = None,
    ranks_per_host: Annotated[int | None, opt.option("N", _PER_HOST, _WHERE)] = None,
    cores: Annotated[float | None, opt.option("X", _CORES, _WHERE)] = None,
    accuracy: Annotated[str | None, opt.option("exact|rounded|lossy", _ACCURACY, opt.WORK)] = None,
    seconds: Annotated[float, opt.option("X", "About how long to measure and rehearse.")] = 30.0,
    out: opt.Out = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    check: Annotated[Path | None, opt.option("DIR", _CHECK, opt.FILES)] = None,
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Show or check this plan.json; measure nothing."),
    ] = None,
    tolerance: Annotated[float, opt.option("X", "By how much a checked run may differ, as a share.")] = 0.25,
    learn: Annotated[bool, typer.Option("--learn", help=_LEARN, rich_help_panel=_TRIED)] = False,
    learn_steps: Annotated[int, opt.option("N", "Steps of each training.", _TRIED)] = 300,
    learn_seeds: Annotated[int, opt.option("N", "Orders of the batches.", _TRIED)] = 3,
    learn_workers: Annotated[int, opt.option("N", "Most virtual workers.", _TRIED)] = 8,
    learn_from: Annotated[Path | None, opt.option("FILE|DIR", _LEARN_FROM, _TRIED)] = None,
) -> int:
    """Predict before training what a step takes under each method, and which method to use.

    It trains a copy of the model for some steps without a network, notes everything that each method would
    send, and replays that on the link. Alone it needs --workers and --link; under torchrun, mpiexec or srun
    it measures the link between the ranks.

    Example: stenograd plan --task digits --workers 4 --link 100mbit,0.2ms
    """
    from stenograd.cli.plan import Asked, run

    asked = Asked(
        options=options,
        trial=trial,
        methods=methods,
        link=link,
        accuracy=accuracy,
        ranks_per_host=ranks_per_host,
        cores=cores,
        seconds=seconds,
        out=out,
        as_json=as_json,
        check=check,
        plan=plan_file,
        tolerance=tolerance,
        learn=learn,
        learn_steps=learn_steps,
        learn_seeds=learn_seeds,
        learn_workers=learn_workers,
        learn_from=learn_from,
    )
    return run(asked)


@app.command()
def simulate(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="A plan.json of stenograd plan --out.")],
    workers: Annotated[str, opt.option("N..M", "Numbers of workers, such as 2..1024 or 8,16.")] = "2..1024",
    hosts: Annotated[str | None, opt.option("HxW", "Hosts and workers on each (default: 1 each).")] = None,
    inside: Annotated[str | None, opt.option("LINK", "Between workers of a host.")] = None,
    between: Annotated[str | None, opt.option("LINK", "Between hosts (default: the plan's).")] = None,
    slow: Annotated[str | None, opt.option("P%:Fx", "Workers that are slow in a step, and how much.")] = None,
    site: Annotated[
        str | None, opt.option("N:LINK", "Sites, and the link that a site's hosts share.")
    ] = None,
    methods: Annotated[list[str] | None, opt.option("TEXT", _METHODS)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> int:
    """Extrapolate a plan to other numbers of workers, hosts and links.

    It says from where on a ring of all workers is limited by latency, and what one bucket, two levels or
    rarer rounds would give. Nothing is measured: beyond the workers that were compared with real runs, it is
    arithmetic.

    Example: stenograd simulate plan/plan.json --workers 2..1024 --hosts 128x8 --between 1gbit,0.1ms
    """
    from stenograd.cli.simulate import run

    return run(plan_file, workers, hosts, inside, between, slow, site, methods, as_json)


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

    Started by a launcher, such as torchrun --no-python or srun, its ranks try it between them, time every
    network interface that all hosts have, and say which one to export.

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
    delay: Annotated[str, opt.option("TIME", "One way between two hosts: 20ms, 500us, or none.")] = "none",
    ranks_per_host: Annotated[int, opt.option("N", "Copies of the command on each host.")] = 1,
    cores_per_host: Annotated[
        int, opt.option("N", "Cores that each host has for itself; 0: all share all.")
    ] = 0,
    timeout_s: Annotated[float, opt.option("X", "Seconds after which all are killed.")] = 3600.0,
) -> int:
    """Run a command once per rank on emulated hosts with slow links, with torchrun's variables.

    Each host is a network namespace behind a token bucket on this machine; the machine's own network is not
    touched. Needs Linux, root, and the commands ip and tc. Shows rank 0's output, then what each host sent.

    Example: sudo stenograd emulate --hosts 2 --rate 100mbit -- python train.py
    """
    from stenograd.cli.emulate import run

    return run(command, hosts, rate, delay, ranks_per_host, cores_per_host, timeout_s)
