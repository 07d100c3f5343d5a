"""Small reproductions of what papers say about the methods, with a verdict for each claim.

Runs that are in the results file already are skipped, so this can be stopped and continued. Writes
NAME.json and NAME.md into --out:

    python benchmarks/reproductions.py --mnist DIR --text FILE                     # all, for hours
    python benchmarks/reproductions.py --mnist DIR --text FILE --only R1,R7
    python benchmarks/reproductions.py --only none                                 # the tables again
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from harness import command_line, document, write
from reproduction_runs import Run, measure
from reproduction_table import GROUPS

from stenograd.testing.pool import RankPool


def options() -> argparse.Namespace:
    """Read the command line."""
    parser = command_line(__doc__, "reproductions")
    parser.add_argument("--mnist", type=Path, metavar="DIR", help="folder with MNIST's four IDX files")
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text file, such as tiny Shakespeare")
    parser.add_argument("--only", metavar="R1,R2", default=",".join(GROUPS), help="none for the tables alone")
    parser.add_argument("--match", default="", help="only runs whose key has this in it")
    return parser.parse_args()


def wanted(only: str, match: str) -> list[Run]:
    """Return the runs of the named reproductions, each once, all with the first seed before the second.

    Raises:
        SystemExit: a name is unknown.
    """
    names = [] if only == "none" else only.split(",")
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        raise SystemExit(f"--only must name some of {', '.join(GROUPS)}, got {unknown[0]}")
    runs = [run for name in names for family in GROUPS[name].families.values() for run in family.runs]
    return sorted((run for run in dict.fromkeys(runs) if match in run.key), key=lambda run: run.seed)


def told(results: dict[str, Any]) -> str:
    """Return all reproductions' tables and verdicts, and the commands of their runs."""
    parts = [group.told(name, results) for name, group in GROUPS.items()]
    runs = dict.fromkeys(wanted(",".join(GROUPS), ""))
    commands = [run.command for run in runs if run.command and run.key in results and not run.seed]
    note = "A run's figures are those of a command like these (seed 0 of each; the others are made by this"
    shown = "\n".join(commands)
    return "\n\n".join([*parts, f"## Commands\n\n{note} script alone):\n\n```\n{shown}\n```"])


def main() -> None:
    """Run what is missing, then write tables and verdicts."""
    args = options()
    stem = args.out / args.name
    file = stem.with_suffix(".json")
    results = json.loads(file.read_text())["results"] if file.exists() else {}
    data = {task: path for task, path in (("mnist", args.mnist), ("text", args.text)) if path is not None}
    missing = [run for run in wanted(args.only, args.match) if run.key not in results]
    settings = {"runs": len(results), "threads per rank": 1}
    if missing:
        with RankPool(max(run.ranks for run in missing)) as pool:
            for place, run in enumerate(missing, 1):
                start = time.monotonic()
                results[run.key] = measure(pool, run, data)
                took = f"{time.monotonic() - start:.0f} s"
                figures = {k: v for k, v in results[run.key].items() if k != "curve"}
                print(f"{place}/{len(missing)} {run.key}: {took}, {figures}", flush=True)
                write(stem, args.date, settings, results, _page(args.date, results))
    write(stem, args.date, settings, results, _page(args.date, results))


def _page(date: str, results: dict[str, Any]) -> str:
    return document("Reproductions", date, [sys.argv[0]], told(results))


if __name__ == "__main__":
    main()
