"""Time and bytes to an accuracy, or to a loss, on emulated hosts, from the same weights each.

MNIST with SINGA's recipe to an accuracy; a text (`--task text --target 1.9`) with nanoGPT's to a loss.

The rivals take turns of a part of an epoch, so that they share whatever else the machine does; the clock of a
rival runs only while it trains. Needs root and iproute2. Writes NAME.json, NAME.md and NAME.png into --out:

    python benchmarks/time_to_accuracy.py --data DIR
    python benchmarks/time_to_accuracy.py --data DIR --rivals ddp sign --epochs 1 --steps 8    # a try
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
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from pictures import curves
from report import document, number, table, write

from stenograd.emulate.hosts import Hosts, HostsError

HERE = Path(__file__).parent
RIVALS = ["ddp", "topk:ratio=0.01", "powersgd:rank=4", "sign"]
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # else torch warns that a host on 10.77.0.x has no name
Points = Sequence[Mapping[str, Any]]  # one rival's epoch, seconds, host_bytes, counted_bytes, loss, accuracy


def options() -> argparse.Namespace:
    """Read the command line, which the ranks get as well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--data", required=True, metavar="PATH", help="folder with MNIST's files, or a text file"
    )
    parser.add_argument("--task", choices=["mnist", "text"], default="mnist")
    parser.add_argument("--rivals", nargs="+", metavar="RIVAL", default=RIVALS)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--parts", type=int, default=4, help="evaluations an epoch")
    parser.add_argument("--steps", type=int, help="of an epoch; by default all samples once")
    parser.add_argument("--target", type=float, default=0.985)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--timeout-s", type=float, default=7200.0)
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--name", default="time_to_accuracy", help="name of the files, without an ending")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    """Be one rank; rank 0 prints a line a part and writes every rival's points."""
    import torch
    from trainee import Trainee

    import stenograd
    from stenograd import tasks

    torch.set_num_threads(1)
    world = stenograd.init(timeout_s=120)
    task = tasks.load(args.task, args.data)
    of = task, world, args.seed, args.steps, args.epochs
    trainees = [Trainee(name, *of) for name in args.rivals]
    points: dict[str, list[dict[str, Any]]] = {name: [] for name in args.rivals}
    for epoch in range(args.epochs):
        parts = [_parts(list(trainee.batches(epoch)), args.parts) for trainee in trainees]
        for part in range(args.parts):
            for trainee, mine in zip(trainees, parts, strict=True):
                trainee.train(mine[part])
                loss, accuracy = trainee.scores()
                where = {"epoch": epoch + (part + 1) / args.parts, "accuracy": accuracy, "eval_loss": loss}
                points[trainee.name].append(where | asdict(trainee.spent))
            if world.rank == 0:
                print(_progress(points), flush=True)
                args.out.write_text(json.dumps(points))
    for trainee in trainees:
        trainee.attached.close()


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


def main() -> None:
    """Train everywhere, then print and write."""
    args = options()
    if "RANK" in os.environ:
        train(args)
        return
    try:
        with tempfile.TemporaryDirectory() as folder, Hosts(args.hosts, args.rate) as hosts:
            out = Path(folder) / "points.json"
            command = [sys.executable, __file__, *sys.argv[1:], "--out", str(out)]
            hosts.run(command, env=QUIET, timeout_s=args.timeout_s, echo=True)
            points = json.loads(out.read_text())
    except (HostsError, ValueError) as error:
        raise SystemExit(f"time_to_accuracy: {error}") from None
    body = summary(points, args.target, args.parts, task=args.task)
    print(f"\n{body}\n")
    settings = {key: value for key, value in vars(args).items() if key not in ("data", "out", "name", "date")}
    what = "a validation loss on a text" if args.task == "text" else "an accuracy on MNIST"
    text = document(f"Time and bytes to {what}", args.date, sys.argv, body)
    write(args.out / args.name, args.date, settings, points, text)
    print(curves(args.out / f"{args.name}.png", points, args.target, args.task == "text"))


if __name__ == "__main__":
    main()
