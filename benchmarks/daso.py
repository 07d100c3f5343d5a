"""DASO against averaging every gradient: MNIST on two emulated hosts of two ranks, a slow link between them.

The rivals take turns of an epoch, on the same batches and from the same weights. DASO's cycling phase, in
which it skips most exchanges between hosts, lies between its warm-up and cool-down epochs, where it
averages after every batch. Needs root and iproute2. Writes NAME.json and NAME.md into --out:

    python benchmarks/daso.py --data DIR
    python benchmarks/daso.py --data DIR --epochs 3 --steps 8    # a try
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from harness import Place, command_line, main, number, publish, ratio, table
from rivals import FLOOR, Points, Trainee, in_parts

from stenograd import tasks

DASO = "daso"


def phase(epoch: int, args: argparse.Namespace) -> str:
    """Return DASO's phase in an epoch, counted from 0."""
    if epoch < args.warmup_epochs:
        return "warm-up"
    return "cool-down" if epoch >= args.epochs - args.cooldown_epochs else "cycling"


def enter(name: str, task: tasks.Task, args: argparse.Namespace) -> Trainee:
    """Return a trainee; DASO's exchanges by its optimizer, not by its gradients."""
    if name != DASO:
        return Trainee(name, task, args.seed, args.steps)
    from stenograd import heat

    trainee = Trainee(FLOOR, task, args.seed, args.steps)
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
    trainee.optimizer.last_batch = trainee.per_epoch - 1
    return trainee


def train(rank: int, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Be one rank; print a line an epoch and return every rival's epochs."""
    task = tasks.load("mnist", args.data)

    def after(trainee: Trainee, epoch: int) -> dict[str, Any]:
        if trainee.name == DASO:
            trainee.optimizer.epoch_loss_logic(trainee.spent.loss)
        return {"phase": phase(epoch, args), "equal": trainee.replicas_equal()}

    return in_parts([enter(name, task, args) for name in args.rivals], args, after)


def cycling(epochs: Points, name: str = "cycling") -> tuple[list[float], list[float]]:
    """Return seconds and megabytes of every epoch of a phase."""
    pairs = list(pairwise([{"seconds": 0.0, "host_bytes": 0}, *epochs]))
    inside = [(a, b) for a, b in pairs if b["phase"] == name]
    seconds = [b["seconds"] - a["seconds"] for a, b in inside]
    return seconds, [(b["host_bytes"] - a["host_bytes"]) / 1e6 for a, b in inside]


def summary(told: Mapping[str, Points]) -> str:
    """Format a line a rival: medians over the epochs of the cycling phase, and the end."""
    lines = []
    for name, epochs in told.items():
        seconds, mb = cycling(epochs)
        slower = ratio(seconds, cycling(told[DASO])[0]) if DASO in told else None
        cells = [number(statistics.median(seconds), 2), number(slower, 2), number(statistics.median(mb), 2)]
        cells += [number(epochs[-1]["seconds"], 1), number(100 * epochs[-1]["accuracy"], 2)]
        lines.append([name, *cells, "yes" if epochs[-1]["equal"] else "NO"])
    head = ["rival", "s/epoch, cycling", "x DASO's", "MB/epoch sent by host 0, cycling", "s in all"]
    return table([*head, "final accuracy, %", "ranks equal at the end"], lines)


def daso() -> None:
    """Train everywhere, then print and write."""
    parser = command_line(__doc__, "daso")
    parser.add_argument("--data", required=True, metavar="DIR", help="folder with MNIST's files")
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
    parser.set_defaults(parts=1)
    args = parser.parse_args()
    if args.epochs <= args.warmup_epochs + args.cooldown_epochs:
        parser.error("--epochs must leave some between --warmup-epochs and --cooldown-epochs")
    place = Place(args.hosts, args.ranks_per_host, args.rate)
    told = place.run(train, args, timeout_s=args.timeout_s)[0]
    publish(args, "DASO against averaging every gradient, MNIST", told, summary(told))


if __name__ == "__main__":
    main(daso)
