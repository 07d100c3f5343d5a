"""Time and bytes per step: DistributedDataParallel against Stenograd's methods, on emulated hosts and links.

For every link and model one run, in which the rivals take turns, round after round. Needs root and iproute2,
but for `--hosts 0`: that takes two processes of this machine and no link. Writes NAME.json, NAME.md and
NAME.png into --out:

    python benchmarks/bench.py                                         # all, for half an hour or more
    python benchmarks/bench.py --quick
    python benchmarks/bench.py --models mlp --rates 100mbit --rivals none ddp dense topk:ratio=0.01 sign
    python benchmarks/bench.py --hosts 0 --models mlp --rounds 5
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from harness import Place, command_line, main, number, publish, ratio, settled_bytes, slowest, table, turns
from pictures import step_times
from rivals import DDP_HOOKS, FLOOR, RIVALS, Rival, check_names
from scenarios import WORKS

from stenograd.emulate.hosts import parse_rate

_WARM_UP_STEPS = 4  # DDP settles its buckets after one, its PowerSGD hook sends all for two
Log = dict[str, list[Any]]  # turns_ms (slowest rank), counted_bytes and interface_bytes (rank 0): one a turn


def options() -> argparse.Namespace:
    """Read the command line; --quick only changes what is not given."""
    parser = command_line(__doc__, "steps")
    parser.add_argument("--rates", nargs="+", metavar="RATE", help="none, or like 100mbit or 1gbit")
    parser.add_argument("--models", nargs="+", choices=list(WORKS))
    parser.add_argument("--rivals", nargs="+", metavar="RIVAL", default=RIVALS)
    parser.add_argument("--hosts", type=int, default=2, help="0: two processes of this machine")
    cores = "that each host has for itself, by default all there are for it; 0: all share all"
    parser.add_argument("--cores-per-host", type=int, metavar="N", help=cores)
    parser.add_argument("--rounds", type=int, help="turns of each rival")
    parser.add_argument("--turn-s", type=float, help="seconds of a turn, for steps shorter than that")
    parser.add_argument("--max-steps", type=int, default=40, help="most timed steps of a turn")
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="of one model on one link")
    parser.add_argument("--quick", action="store_true", help="the smallest model, two links, two rounds")
    args = parser.parse_args()
    args.rates = args.rates or (["none", "100mbit"] if args.quick else ["none", "1gbit", "100mbit"])
    if not args.hosts:
        args.rates = ["none"]
    args.models = args.models or (["cnn"] if args.quick else ["cnn", "mlp", "gpt-small", "gpt"])
    if args.cores_per_host is None:
        args.cores_per_host = len(os.sched_getaffinity(0)) // args.hosts if args.hosts else 0
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.turn_s = args.turn_s or (0.3 if args.quick else 1.5)
    return args


def take_turns(rank: int, model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Be a rank: let the rivals take turns."""
    rivals, refused = enter(args.rivals, model, rank)
    logs: dict[str, Log] = {
        name: {"turns_ms": [], "counted_bytes": [], "interface_bytes": []} for name in rivals
    }
    steps = {}
    for name, rival in rivals.items():
        step_s = slowest(rival.steps(_WARM_UP_STEPS)[-1]) / 1e3
        steps[name] = turn_steps(step_s, args.turn_s, args.max_steps)
    counts = [settled_bytes() for _ in range(4)]
    idle_bytes = round(statistics.median(b - a for a, b in pairwise(counts)))  # of the barriers around a turn
    for name in turns(list(rivals), args.rounds):
        take_turn(rivals[name], logs[name], steps[name], idle_bytes)
    for rival in rivals.values():
        rival.attached.close()
    parameters = sum(p.numel() for p in next(iter(rivals.values())).model.parameters())
    return {"parameters": parameters, "refused": refused, "rivals": logs}


def enter(names: Sequence[str], model: str, rank: int) -> tuple[dict[str, Rival], dict[str, str]]:
    """Return the rivals, and for those of DDP's that it refuses here the reason."""
    rivals, refused = {}, {}
    for name in names:
        try:
            rivals[name] = Rival.on(model, name, rank)
        except (RuntimeError, TypeError, ValueError) as error:
            if name not in DDP_HOOKS:
                raise
            refused[name] = str(error).strip().splitlines()[0]
    return rivals, refused


def turn_steps(step_s: float, turn_s: float, max_steps: int) -> int:
    """Return how many steps of a turn are timed: what fills it, at least one.

    Example:
        >>> turn_steps(0.03, 1.5, 40), turn_steps(0.1, 1.5, 40), turn_steps(3.6, 1.5, 40)
        (40, 15, 1)
    """
    return max(1, min(max_steps, round(turn_s / step_s)))


def take_turn(rival: Rival, log: Log, steps: int, idle_bytes: int) -> None:
    """Let a rival train for a turn; its first step, with cold caches, is not timed."""
    before, counted_before = settled_bytes(), rival.attached.moved_bytes
    taken_ms = rival.steps(1 + steps)
    interface, counted = settled_bytes() - before - idle_bytes, rival.attached.moved_bytes
    log["turns_ms"].append(slowest(statistics.median(taken_ms[1:])))
    log["interface_bytes"].append(interface / len(taken_ms))
    per_step = None if counted is None else (counted - (counted_before or 0)) / len(taken_ms)
    log["counted_bytes"].append(per_step)


def measure(args: argparse.Namespace, model: str, rate: str) -> dict[str, Any]:
    """Run all rivals on one model and link."""
    start = time.monotonic()
    place = Place(args.hosts, 1 if args.hosts else 2, rate, cores_per_host=args.cores_per_host)
    told = place.run(take_turns, model, args, timeout_s=args.timeout_s)[0]
    print(f"{model} at {rate}: {time.monotonic() - start:.0f} s", flush=True)
    link = {"model": model, "rate": rate, "hosts": args.hosts, "cores_per_host": args.cores_per_host}
    link["parameters"] = told["parameters"]
    return link | {"rows": rows(told, args.rivals), "turns": told["rivals"]}


def rows(told: Mapping[str, Any], names: Sequence[str], base: str = "ddp") -> list[dict[str, Any]]:
    """Summarise one model on one link, in the order of the names.

    A row has ms (median over the turns), its ratio to DDP's and to training without communication (medians
    over the rounds of the ratio in the same round), and bytes per step by both counts; or why it was refused.
    """
    logs, refused = told["rivals"], told["refused"]
    made = []
    for name in names:
        if name in refused:
            made.append({"rival": name, "refused": refused[name]})
            continue
        mine = logs[name]
        counted = [value for value in mine["counted_bytes"] if value is not None]
        to = {
            other: ratio(mine["turns_ms"], logs[other]["turns_ms"]) if other in logs else None
            for other in (base, FLOOR)
        }
        row = {"rival": name, "ms": statistics.median(mine["turns_ms"])}
        row |= {"ddp_ratio": to[base], "floor_ratio": to[FLOOR]}
        row |= {"counted_bytes": statistics.median(counted) if counted else None}
        made.append(row | {"interface_bytes": statistics.median(mine["interface_bytes"])})
    return made


def step_tables(runs: Sequence[Mapping[str, Any]]) -> str:
    """Format one table a model: a line a rival, and per link ms, with the turns' range, and ratio to DDP."""
    parts = []
    for model in dict.fromkeys(run["model"] for run in runs):
        mine = [run for run in runs if run["model"] == model]
        heads = [f"{run['rate']}: {what}" for run in mine for what in ("ms", "x DDP")]
        by_run = [{row["rival"]: _with_turns(row, run) for row in run["rows"]} for run in mine]
        lines = [_cells([rows[name] for rows in by_run]) for name in by_run[0]]
        cores = mine[0].get("cores_per_host", 0)
        where = f"{mine[0]['hosts']} hosts" if mine[0]["hosts"] else "2 processes"
        own = f" of {cores} core{'s' * (cores > 1)}" if cores else ""
        title = f"### {model}, {mine[0]['parameters'] / 1e6:.2f} M parameters, {where}{own}"
        head = ["rival", *heads, "kB/step counted", "kB/step interface"]
        parts += [title, table(head, lines)]
        parts += [f"{row['rival']}: {row['refused']}" for row in mine[0]["rows"] if row.get("refused")]
    return "\n\n".join(parts)


def _with_turns(row: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row beside its rival's turns; bytes, which both have, are the row's."""
    return {**run["turns"].get(row["rival"], {}), **row}


def _cells(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Format one rival on all links.

    Of its bytes the largest are told: an unshaped link takes bundles of packets, which count as one header.
    """
    cells = [rows[0]["rival"]]
    for row in rows:
        if row.get("refused"):
            cells += ["not supported", ""]
        else:
            least, most = (number(of(row["turns_ms"]), 0) for of in (min, max))
            cells += [f"{number(row['ms'])} ({least} to {most})", number(row["ddp_ratio"], 3)]
    for kind in ("counted_bytes", "interface_bytes"):
        seen = [row[kind] for row in rows if row.get(kind) is not None]
        cells.append(number(max(0.0, *seen) / 1e3) if seen else "")
    return cells


def bench() -> None:
    """Measure, print and write."""
    args = options()
    check_names(args.rivals)
    for rate in args.rates:
        parse_rate(rate)
    runs = [measure(args, model, rate) for model in args.models for rate in args.rates]
    publish(args, "Time and bytes per training step", runs, step_tables(runs))
    print(step_times(args.out / f"{args.name}.png", runs))


if __name__ == "__main__":
    main(bench)
