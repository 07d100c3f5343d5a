"""DASO against averaging every gradient: MNIST on two emulated hosts of two ranks, a slow link between them.

The rivals take turns of an epoch, on the same batches and from the same weights. DASO's cycling phase, in
which it skips most exchanges between hosts, lies between its warm-up and cool-down epochs, where it
averages after every batch. Needs root and iproute2. Writes NAME.json and NAME.md into --out:

    python benchmarks/daso.py --data DIR
    python benchmarks/daso.py --data DIR --epochs 3 --steps 8    # a try
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report import document, number, table, write

from stenograd.emulate.hosts import Hosts, HostsError

HERE = Path(__file__).parent
DASO = "daso"
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # else torch warns that a host on 10.77.0.x has no name
Epochs = Sequence[Mapping[str, Any]]  # one rival's phase, seconds, host_bytes, loss, accuracy, equal


def options() -> argparse.Namespace:
    """Read the command line, which the ranks get as well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", required=True, metavar="DIR", help="folder with MNIST's four IDX files")
    parser.add_argument("--rivals", nargs="+", metavar="RIVAL", default=["ddp", "dense", DASO])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--rate", default="100mbit", help="of the link between hosts")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--warmup-epochs", type=int, default=1)
    parser.add_argument("--cooldown-epochs", type=int, default=1)
    parser.add_argument("--max-global-skips", type=int, default=8)
    parser.add_argument("--steps", type=int, help="of an epoch; by default all samples once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=7200.0)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--name", default="daso", help="name of the files, without an ending")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    args = parser.parse_args()
    if args.epochs <= args.warmup_epochs + args.cooldown_epochs:
        parser.error("--epochs must leave some between --warmup-epochs and --cooldown-epochs")
    return args


def phase(epoch: int, args: argparse.Namespace) -> str:
    """Return DASO's phase in an epoch, counted from 0."""
    if epoch < args.warmup_epochs:
        return "warm-up"
    return "cool-down" if epoch >= args.epochs - args.cooldown_epochs else "cycling"


def enter(name: str, task: Any, world: Any, args: argparse.Namespace) -> Any:
    """Return a trainee; DASO's exchanges by its optimizer, not by its gradients."""
    from rivals import FLOOR
    from trainee import Trainee

    if name != DASO:
        return Trainee(name, task, world, args.seed, args.steps)
    from stenograd import heat

    trainee = Trainee(FLOOR, task, world, args.seed, args.steps)
    trainee.name = DASO
    trainee.optimizer = heat.DASO(
        trainee.optimizer,
        args.epochs,
        warmup_epochs=args.warmup_epochs,
        cooldown_epochs=args.cooldown_epochs,
        max_global_skips=args.max_global_skips,
        node_size=args.ranks_per_host,
    )
    trainee.optimizer.set_model(trainee.model)
    trainee.optimizer.last_batch = trainee.steps - 1
    return trainee


def train(args: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints a line an epoch and writes every rival's epochs."""
    import torch

    import stenograd
    from stenograd import tasks

    torch.set_num_threads(1)
    world = stenograd.init(timeout_s=120)
    task = tasks.load("mnist", args.data)
    trainees = [enter(name, task, world, args) for name in args.rivals]
    told: dict[str, list[dict[str, Any]]] = {name: [] for name in args.rivals}
    for epoch in range(args.epochs):
        for trainee in trainees:
            told[trainee.name].append({"phase": phase(epoch, args)} | run_epoch(trainee, epoch))
        if world.rank == 0:
            print(_progress(epoch, told), flush=True)
            args.out.write_text(json.dumps(told))
    for trainee in trainees:
        trainee.attached.close()


def run_epoch(trainee: Any, epoch: int) -> dict[str, Any]:
    """Train for an epoch and judge the model."""
    seconds, host_bytes = trainee.spent.seconds, trainee.spent.host_bytes
    trainee.train(trainee.batches(epoch))
    if trainee.name == DASO:
        trainee.optimizer.epoch_loss_logic(trainee.spent.loss)
    return {
        "seconds": trainee.spent.seconds - seconds,
        "host_bytes": trainee.spent.host_bytes - host_bytes,
        "loss": trainee.spent.loss,
        "accuracy": trainee.scores()[1],
        "equal": trainee.replicas_equal(),
    }


def _progress(epoch: int, told: Mapping[str, Epochs]) -> str:
    parts = [f"{n} {e[-1]['seconds']:.1f} s, {100 * e[-1]['accuracy']:.2f} %" for n, e in told.items()]
    return f"epoch {epoch + 1}: {'; '.join(parts)}"


def summary(told: Mapping[str, Epochs]) -> str:
    """Format a line a rival: medians over the epochs of the cycling phase, and the end."""
    cycling = {name: [e for e in epochs if e["phase"] == "cycling"] for name, epochs in told.items()}
    daso_s = [epoch["seconds"] for epoch in cycling.get(DASO, [])]
    lines = []
    for name, epochs in told.items():
        seconds = [epoch["seconds"] for epoch in cycling[name]]
        mb = [epoch["host_bytes"] / 1e6 for epoch in cycling[name]]
        # epoch by epoch: what slows the machine for a while slows both
        ratio = statistics.median(a / b for a, b in zip(seconds, daso_s, strict=True)) if daso_s else None
        cells = [number(statistics.median(seconds), 2), number(ratio, 2), number(statistics.median(mb), 2)]
        cells += [number(sum(epoch["seconds"] for epoch in epochs), 1)]
        cells += [number(100 * epochs[-1]["accuracy"], 2), "yes" if epochs[-1]["equal"] else "NO"]
        lines.append([name, *cells])
    head = ["rival", "s/epoch, cycling", "x DASO's", "MB/epoch sent by host 0, cycling", "s in all"]
    return table([*head, "final accuracy, %", "ranks equal at the end"], lines)


def main() -> None:
    """Train everywhere, then print and write."""
    args = options()
    if "RANK" in os.environ:
        train(args)
        return
    try:
        with tempfile.TemporaryDirectory() as folder, Hosts(args.hosts, args.rate) as hosts:
            out = Path(folder) / "epochs.json"
            command = [sys.executable, __file__, *sys.argv[1:], "--out", str(out)]
            hosts.run(command, args.ranks_per_host, env=QUIET, timeout_s=args.timeout_s, echo=True)
            told = json.loads(out.read_text())
    except HostsError as error:
        raise SystemExit(f"daso: {error}") from None
    body = summary(told)
    print(f"\n{body}\n")
    settings = {key: value for key, value in vars(args).items() if key not in ("data", "out", "name", "date")}
    title = "DASO against averaging every gradient, MNIST"
    write(args.out / args.name, args.date, settings, told, document(title, args.date, sys.argv, body))
    print(f"wrote {args.out / args.name}.json and .md")


if __name__ == "__main__":
    main()
