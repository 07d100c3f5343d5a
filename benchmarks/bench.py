"""Time and bytes per step: DistributedDataParallel against Stenograd's methods, on emulated hosts and links.

For every link and model one run, in which the rivals take turns, round after round. Needs root and iproute2.
Writes NAME.json, NAME.md and NAME.png into --out:

    python benchmarks/bench.py                                         # all, for half an hour or more
    python benchmarks/bench.py --quick
    python benchmarks/bench.py --models mlp --rates 100mbit --rivals none ddp dense topk:ratio=0.01 sign
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from pictures import step_times
from plan import expected_s
from report import document, rows, step_tables, write

from stenograd.catalog.method import for_any_optimizer
from stenograd.emulate.hosts import Hosts, HostsError, parse_rate

HERE = Path(__file__).parent
RIVALS = ["none", "ddp", "ddp-fp16", "ddp-bf16", "ddp-powersgd", *for_any_optimizer()]
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # else torch warns that a host on 10.77.0.x has no name
_RUN_LIMIT_FACTOR, _RUN_LIMIT_S = 10, 300  # the forecast is rough; a hanging run must still end


def options() -> argparse.Namespace:
    """Read the command line; --quick only changes what is not given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", nargs="+", metavar="RATE", help="none, or like 100mbit or 1gbit")
    parser.add_argument("--models", nargs="+", metavar="MODEL", help="cnn, mlp, mlp-64, gpt-small, gpt")
    parser.add_argument("--rivals", nargs="+", metavar="RIVAL", default=RIVALS)
    parser.add_argument("--hosts", type=int, default=2)
    cores = "that each host has for itself, by default all there are for it; 0: all share all"
    parser.add_argument("--cores-per-host", type=int, metavar="N", help=cores)
    parser.add_argument("--rounds", type=int, help="turns of each rival")
    parser.add_argument("--turn-s", type=float, help="seconds of a turn, for steps shorter than that")
    parser.add_argument("--max-steps", type=int, default=40, help="most timed steps of a turn")
    parser.add_argument("--quick", action="store_true", help="the smallest model, two links, two rounds")
    parser.add_argument("--out", type=Path, default=HERE / "results", metavar="DIR")
    parser.add_argument("--name", default="steps", help="name of the files, without an ending")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    args = parser.parse_args()
    args.rates = args.rates or (["none", "100mbit"] if args.quick else ["none", "1gbit", "100mbit"])
    args.models = args.models or (["cnn"] if args.quick else ["cnn", "mlp", "gpt-small", "gpt"])
    if args.cores_per_host is None:
        args.cores_per_host = len(os.sched_getaffinity(0)) // max(args.hosts, 1)
    args.rounds = args.rounds or (2 if args.quick else 5)
    args.turn_s = args.turn_s or (0.3 if args.quick else 1.5)
    return args


def forecast_s(args: argparse.Namespace, model: str, rate: str) -> float:
    """Estimate the seconds of one run."""
    return expected_s(model, rate, args.rivals, args.hosts, args.rounds, args.turn_s, args.max_steps)


def show_plan(args: argparse.Namespace) -> None:
    """Print what will be run, and how long it may take."""
    own = f"{args.cores_per_host} core(s) each" if args.cores_per_host else "which share all cores"
    print(f"{args.hosts} hosts, {own}, {args.rounds} rounds of {len(args.rivals)} rivals:", *args.rivals)
    total_s = 0.0
    for model in args.models:
        times = [forecast_s(args, model, rate) for rate in args.rates]
        total_s += sum(times)
        print(
            f"  {model:10s}", *(f"{r}: {s:.0f} s" for r, s in zip(args.rates, times, strict=True)), sep="  "
        )
    print(f"expected: about {total_s / 60:.1f} minutes, by rough estimate", flush=True)


def measure(args: argparse.Namespace, model: str, rate: str) -> dict[str, Any]:
    """Run all rivals on one model and link."""
    start = time.monotonic()
    hosts = Hosts(args.hosts, rate, cores_per_host=args.cores_per_host)
    with tempfile.TemporaryDirectory() as folder, hosts:
        out = Path(folder) / "turns.json"
        command = [sys.executable, str(HERE / "turns.py"), "--model", model, "--rivals", *args.rivals]
        command += ["--rounds", str(args.rounds), "--turn-s", str(args.turn_s)]
        command += ["--max-steps", str(args.max_steps), "--out", str(out)]
        limit_s = _RUN_LIMIT_S + _RUN_LIMIT_FACTOR * forecast_s(args, model, rate)
        hosts.run(command, env=QUIET, timeout_s=limit_s)
        told = json.loads(out.read_text())
    print(f"{model} at {rate}: {time.monotonic() - start:.0f} s", flush=True)
    link = {"model": model, "rate": rate, "hosts": args.hosts, "cores_per_host": args.cores_per_host}
    link["parameters"] = told["parameters"]
    return link | {"rows": rows(told, args.rivals), "turns": told["rivals"]}


def check(args: argparse.Namespace) -> None:
    """Refuse wrong names before hours of measuring."""
    from models import WORKS  # imports torch: not before the command line is understood
    from rivals import check_names

    check_names(args.rivals)
    for rate in args.rates:
        parse_rate(rate)
    unknown = [model for model in args.models if model not in WORKS]
    if unknown:
        raise ValueError(f"model must be one of {', '.join(WORKS)}, got {unknown[0]!r}")


def main() -> None:
    """Measure, print and write."""
    args = options()
    try:
        check(args)
        show_plan(args)
        runs = [measure(args, model, rate) for model in args.models for rate in args.rates]
    except (HostsError, ValueError) as error:
        raise SystemExit(f"bench: {error}") from None
    tables = step_tables(runs)
    print(f"\n{tables}\n")
    settings = {key: value for key, value in vars(args).items() if key not in ("out", "date", "name")}
    text = document("Time and bytes per training step", args.date, sys.argv, tables)
    write(args.out / args.name, args.date, settings, runs, text)
    print(step_times(args.out / f"{args.name}.png", runs))


if __name__ == "__main__":
    main()
