"""The commands' names, options and help texts."""

from __future__ import annotations

import math
import os
import sys
from functools import cache, partial
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

import stenograd
from stenograd.cli import options as opt
from stenograd.errors import ConfigError, LaunchError, bad_value, check_count
from stenograd.launch.detect import OPEN_VARIABLE, STORE_VARIABLE

__all__ = ["app"]

app = typer.Typer(
    help="Data-parallel PyTorch training that sends less.",
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
)


class _Once(TyperCommand):
    """A command whose options come once each, but for those that make a list: the last would win unsaid."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse what stands twice, and then parse as typer does.

        Raises:
            ConfigError: an option that means one value is given more than once.
        """
        *_, order = self.make_parser(ctx).parse_args(args=[*args])
        values = [one for one in order if not (one.multiple or getattr(one, "is_flag", True))]
        for one in values:
            if values.count(one) > 1 and not ctx.resilient_parsing:
                several = "; stenograd compare takes several" if one.name == "method" else ""
                raise ConfigError(f"{one.opts[0]} is given more than once: give it once{several}")
        return super().parse_args(ctx, args)


_command = partial(app.command, cls=_Once)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"stenograd {stenograd.__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[
        bool,
        opt.option("", "Show the version and exit.", None, "--version", callback=_version, is_eager=True),
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
    elif context.invoked_subcommand not in ("train", "emulate"):
        os.environ.pop(OPEN_VARIABLE, None)  # the others have ranks of their own, whatever run was exported


@cache  # asked for every word that begins with --, and the note shall come once
def _spelled(word: str) -> str:
    """Take `--methods`, the name of `--method` in `compare` and `plan` before, and say what to write."""
    if word != "methods":
        return word
    if {STORE_VARIABLE, "RANK"}.isdisjoint(os.environ):  # not from every rank
        print(
            "stenograd: --methods is deprecated and goes in 0.3: write --method, once for each method",
            file=sys.stderr,
        )
    return "method"


_BEFORE = {"token_normalize_func": _spelled}


@_command()
def demo(as_json: opt.AsJson = False) -> int:
    """Train two workers on digits: dense, with top-k, and with PowerSGD. Takes about a minute.

    It needs nothing but this package. The digits are scikit-learn's if that is installed; otherwise the
    program draws some. Three lines under the table say what is to be seen in it.
    """
    from stenograd.cli.compare import demo

    return demo(as_json)


@_command()
@opt.taking(opt.TrainOptions)
def train(asked: opt.TrainOptions) -> int:
    """Train a model on N workers, with the gradients compressed by one method.

    Without --workers it takes the ranks of torchrun, mpiexec or srun, or trains alone. Prints one line per
    epoch: losses and accuracies over all workers, seconds, megabytes that each worker sent, and how many
    times less that is than dense training sends. --epochs 0 only evaluates. --resume takes the options that
    are not given from run.json, and may be given more or fewer workers than before; under torchrun with
    --max-restarts a run in --out resumes by itself.

    Example: stenograd train --task digits --method topk:ratio=0.05 --workers 2 --out run
    """
    from stenograd.cli.train import run

    return run(asked)


@_command(context_settings=_BEFORE)
@opt.taking(opt.CompareOptions)
def compare(asked: opt.CompareOptions) -> int:
    """Train the same model under several methods in turn, and show what each costs and reaches.

    Every method starts from the same weights and sees the same batches. --out DIR gets compare.json and,
    with matplotlib, compare.png.

    Example: stenograd compare --workers 2 --method dense --method topk:ratio=0.05
    """
    from stenograd.cli.compare import run

    return run(asked, asked.methods, asked.out, as_json=asked.as_json)


@_command()
@opt.taking(opt.LinkOptions, only=["workers", "timeout_s"])
def link(asked: opt.LinkOptions) -> int:
    """Measure the network between workers, by the messages that training uses.

    It needs two workers or more: start it under torchrun, mpiexec or srun as you start a training, or give
    --workers for processes on this machine. A ping tells the latency; one flow at a time, and then all flows
    at once, tell what each host sends. Rates count packet headers.

    Example: torchrun --nnodes 2 --nproc-per-node 1 ... -m stenograd link --out link.json
    """
    from stenograd.cli.link import run

    return run(asked)


@_command(context_settings=_BEFORE)
@opt.taking(opt.PlanOptions, without=["epochs", "shards", "workers"])
def plan(asked: opt.PlanOptions) -> int:
    """Predict before training what a step takes under each method, and which method to use.

    It trains a copy of the model for some steps without a network and notes everything that each method
    would send; a step then takes its computing, and what of the bytes at the link's rate is not hidden by it.
    Values of every, ratio and fragments that --method leaves open are chosen for the link. Alone it needs
    --link and, unless that was measured, --workers; under torchrun, mpiexec or srun it measures the link.

    Example: stenograd plan --task digits --workers 4 --link 100mbit,0.2ms
    """
    from stenograd.cli.plan import run

    return run(asked)


@_command()
def methods(
    name: opt.MethodName = None,
    size: Annotated[int, opt.option("N", "Elements of the tensor.")] = 1_000_000,
    workers: Annotated[int, opt.option("N", "Simulated workers.")] = 2,
    as_json: opt.AsJson = False,
) -> int:
    """List the methods, with what each sends per step for a float32 tensor of N elements, and its keys.

    With a NAME it explains that method, schedule or preset: what it sends, every key with its default and
    range, the paper, and a line to try it with.

    Example: stenograd methods topk
    """
    from stenograd.cli.methods import explain, run

    return run(size, workers, as_json) if name is None else explain(name, size, workers, as_json)


@_command()
def rendezvous(
    port: Annotated[int, opt.option("N", "Where to listen; 0 for a free port.")] = 29400,
) -> int:
    """Hold the store in which the workers of an open run meet, until Ctrl-C or SIGTERM.

    It prints what to export to them. Workers of a method with a quorum may then come, leave and return; the
    store must outlive them, and takes no part in training. Anybody who reaches the port can disturb the run.

    Example: stenograd rendezvous --port 29400
    """
    from stenograd.cli.open import host

    if not 0 <= port <= 65535:
        raise bad_value("--port", "must be from 0 to 65535", port, "use 29400")
    return host(port)


@_command()
def doctor(as_json: opt.AsJson = False) -> int:
    """Show versions, devices and launcher, and try an all-reduce between two processes.

    Started by a launcher, such as torchrun --no-python or srun, its ranks try it between them, time every
    network interface that all hosts have, and say which one to export.

    The exit status is 0 if training with several workers can work here, else 1.
    """
    from stenograd.cli.doctor import run

    return run(as_json)


@_command(context_settings={"allow_interspersed_args": False})  # the command's options are its own
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
    from stenograd.emulate.hosts import MAX_HOSTS, Hosts, HostsError

    check_count("--hosts", hosts, "use 2", most=MAX_HOSTS)
    check_count("--ranks-per-host", ranks_per_host, "use 1")
    if not 0 < timeout_s < math.inf:
        raise bad_value("--timeout-s", "must be above 0 and finite", timeout_s, "leave it at 3600")
    try:
        with Hosts(hosts, rate, delay=delay, cores_per_host=cores_per_host) as emulated:
            emulated.run(command, ranks_per_host, timeout_s=timeout_s, echo=True)
            for index, sent_bytes in enumerate(emulated.sent_bytes()):
                print(f"host {index} sent {sent_bytes / 1e6:.3f} MB", file=sys.stderr)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    except HostsError as error:
        raise LaunchError(str(error)) from None
    return 0
