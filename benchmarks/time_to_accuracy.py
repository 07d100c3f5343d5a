"""Time and bytes to an accuracy, or to a loss, on emulated hosts, from the same weights each.

MNIST with SINGA's recipe to an accuracy; a text (`--task text --target 1.9`) with nanoGPT's to a loss.

The rivals take turns of a part of an epoch, so that they share whatever else the machine does; the clock of a
rival runs only while it trains. Needs root and iproute2. Writes NAME.json, NAME.md and NAME.png into --out:

    python benchmarks/time_to_accuracy.py --data DIR
    python benchmarks/time_to_accuracy.py --data DIR --rivals ddp sign --epochs 1 --steps 8    # a try
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import torch.distributed as dist
from harness import Place, command_line, main, number, publish, table
from pictures import curves
from rivals import Trainee

from stenograd import tasks

Points = Sequence[Mapping[str, Any]]  # one rival's epoch, seconds, host_bytes, counted_bytes, loss, accuracy


def options(doc: str | None, name: str, rivals: Sequence[str]) -> argparse.ArgumentParser:
    """Return the options of trainings on emulated hosts."""
    parser = command_line(doc, name)
    data = "folder with MNIST's files, or a text file"
    parser.add_argument("--data", required=True, metavar="PATH", help=data)
    parser.add_argument("--rivals", nargs="+", metavar="RIVAL", default=rivals)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    parser.add_argument("--rate", default="100mbit", help="of the link between hosts")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--parts", type=int, default=4, help="evaluations an epoch")
    parser.add_argument("--steps", type=int, help="of an epoch; by default all samples once")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=7200.0)
    parser.set_defaults(task="mnist")
    return parser


def measure(
    args: argparse.Namespace, train: Callable[[int, argparse.Namespace], dict[str, Any]]
) -> dict[str, Any]:
    """Let the ranks train, and return what the first one saw."""
    place = Place(args.hosts, args.ranks_per_host, args.rate)
    return place.run(train, args, timeout_s=args.timeout_s)[0]


def train(rank: int, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Be one rank; print a line a part and return every rival's points."""
    task = tasks.load(args.task, args.data)
    trainees = [Trainee(name, task, args.seed, args.steps, args.epochs) for name in args.rivals]
    return in_parts(trainees, args)


def in_parts(
    trainees: Sequence[Trainee],
    args: argparse.Namespace,
    after: Callable[[Trainee, int], dict[str, Any]] = lambda trainee, epoch: {},
) -> dict[str, list[dict[str, Any]]]:
    """Let trainees take turns; what `after` returns for a trainee and an epoch goes into its point."""
    points: dict[str, list[dict[str, Any]]] = {trainee.name: [] for trainee in trainees}
    for epoch in range(args.epochs):
        batches = [_parts(list(trainee.batches(epoch)), args.parts) for trainee in trainees]
        for part in range(args.parts):
            for trainee, mine in zip(trainees, batches, strict=True):
                trainee.learn(mine[part])
                more = after(trainee, epoch)
                loss, accuracy = trainee.scores()
                where = {"epoch": epoch + (part + 1) / args.parts, "accuracy": accuracy, "eval_loss": loss}
                points[trainee.name].append(where | asdict(trainee.spent) | more)
            if dist.get_rank() == 0:
                print(_progress(points), flush=True)
    for trainee in trainees:
        trainee.attached.close()
    return points


def _parts(batches: list[Any], count: int) -> list[list[Any]]:
    """Cut an epoch's batches in nearly equal parts."""
    cuts = [len(batches) * part // count for part in range(count + 1)]
    return [batches[start:end] for start, end in pairwise(cuts)]


def _progress(points: Mapping[str, Points]) -> str:
    told = [
        f"{n} {100 * p[-1]['accuracy']:.2f} %, {p[-1]['eval_loss']:.4f} after {p[-1]['seconds']:.1f} s"
        for n, p in points.items()
    ]
    return f"epoch {next(iter(points.values()))[-1]['epoch']:.2f}: {', '.join(told)}"


def reached(points: Points, target: float, task: str = "mnist") -> Mapping[str, Any] | None:
    """Return the first point at the target or better: an accuracy at least, a loss at most so large."""
    if task == "text":
        return next((point for point in points if point["eval_loss"] <= target), None)
    return next((point for point in points if point["accuracy"] >= target), None)


def summary(
    points: Mapping[str, Points], target: float, parts: int, base: str = "ddp", task: str = "mnist"
) -> str:
    """Format a line a rival: when it reached the target, for how many bytes, and where it ended."""
    wanted = f"{target:g}" if task == "text" else f"{100 * target:g} %"
    head = ["rival", f"s to {wanted}", f"x faster than {base}", "MB to it", "s in all", "MB in all"]
    first = {name: reached(mine, target, task) for name, mine in points.items()}
    lines = []
    for name, mine in points.items():
        hit, other = first[name], first.get(base)
        cells = ["", "", ""]
        if hit is not None:
            speed = other["seconds"] / hit["seconds"] if other is not None else None
            cells = [number(hit["seconds"]), number(speed, 2), number(hit["host_bytes"] / 1e6)]
        last = mine[-1]
        cells += [number(last["seconds"]), number(last["host_bytes"] / 1e6)]
        if task == "text":
            lines.append([name, *cells, number(last["eval_loss"], 4)])
            continue
        final = [100 * point["accuracy"] for point in mine[-parts:]]
        lines.append([name, *cells, number(final[-1], 2), number(statistics.mean(final), 2)])
    ends = ["final loss"] if task == "text" else ["final accuracy, %", "mean of last epoch, %"]
    return table([*head, *ends], lines)


def body(told: Mapping[str, Any]) -> str:
    """Format the table of a record."""
    settings = told["settings"]
    task = settings.get("task", "mnist")
    return summary(told["results"], settings["target"], settings["parts"], task=task)


def time_to_accuracy() -> None:
    """Train everywhere, then print and write."""
    rivals = ["ddp", "topk:ratio=0.01", "powersgd:rank=4", "sign"]
    parser = options(__doc__, "time_to_accuracy", rivals)
    parser.add_argument("--task", choices=["mnist", "text"], default="mnist")
    parser.add_argument("--target", type=float, default=0.985)
    args = parser.parse_args()
    points = measure(args, train)
    what = "a validation loss on a text" if args.task == "text" else "an accuracy on MNIST"
    text = body({"settings": vars(args), "results": points})
    publish(args, f"Time and bytes to {what}", points, text)
    print(curves(args.out / f"{args.name}.png", points, args.target, args.task == "text"))


if __name__ == "__main__":
    main(time_to_accuracy)
