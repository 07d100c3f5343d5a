"""Compares predictions of `stenograd plan` with real training on emulated hosts.

    python benchmarks/plan_validation.py --cells cnn:2:100mbit gpt-small:2:300mbit cnn:3:100mbit --out DIR

For every cell MODEL:HOSTS[xRANKS]:RATE[/DOWN][,DELAY][:paced], such as cnn:2x2:100mbit/20mbit,5ms, the ranks
measure the link, plan, and write the predictions down; their digest is printed; only then do the methods
train, in turns, in as many blocks as --rounds. Paced ranks sleep for as long as one alone computes, so that
this machine's cores suffice for eight of them. With --unshaped they also
train without a limit on the link, for a baseline that needs it. Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from stenograd.emulate.hosts import Hosts, parse_delay, parse_rate
from stenograd.planning.advice import ACCURACIES, accuracy_of, advised
from stenograd.planning.link import Link
from stenograd.planning.plan import load_plan, predicted

HERE = Path(__file__).parent
METHODS = [
    "fp16",
    "topk:ratio=0.01",
    "topk:ratio=0.03",
    "sign",
    "qsgd",
    "powersgd:rank=3",
    "local:every=4",
    "diloco:every=4",
    "gossip",
]
# Ranks keep the memory that they free: fetching it from the kernel again takes a model up to 4 ms of a step,
# or nothing, by chance of what else lives at the end of the heap.
KEEPS = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(1 << 32)}
QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR", **KEEPS}
BASELINE = "unshaped + bytes / rate"
ERRORS = (
    "error",
    "error with the run's floor",
    "floor + bytes / rate",
    "run's floor + bytes / rate",
    BASELINE,
    "repeat",
)


def out_of(cell: str, args: argparse.Namespace) -> Path:
    """Return the file of a cell."""
    return args.out / f"{cell.replace(':', '-').replace('/', '_')}.json"


class Cell(NamedTuple):
    """A model on some emulated hosts.

    Args:
        model: name of the work.
        hosts, ranks: number of hosts, and of ranks on each.
        rate: of each host's link, see `Hosts`.
        delay: of what a host sends, see `Hosts`.
        paced: whether ranks sleep for as long as one alone computes.
    """

    model: str
    hosts: int
    ranks: int
    rate: str
    delay: str
    paced: bool

    @classmethod
    def of(cls, text: str) -> Cell:
        """Read MODEL:HOSTS[xRANKS]:RATE[/DOWN][,DELAY][:paced].

        Example:
            >>> Cell.of("cnn:2x2:100mbit/20mbit,5ms")
            Cell(model='cnn', hosts=2, ranks=2, rate='100mbit/20mbit', delay='5ms', paced=False)
        """
        model, size, link, *rest = text.split(":")
        hosts, _, ranks = size.partition("x")
        rate, _, delay = link.partition(",")
        return cls(model, int(hosts), int(ranks or 1), rate, delay or "none", rest == ["paced"])

    def __str__(self) -> str:
        hosts = f"{self.hosts} hosts" + (f" of {self.ranks} ranks" if self.ranks > 1 else "")
        up, _, down = (re.sub("([kmg])bit", lambda m: f" {m[1].upper()}bit/s", self.rate)).partition("/s/")
        rate = f"{up}/s up and {down} down" if down else up
        parts = [self.model, hosts, rate, "" if self.delay == "none" else self.delay, "paced" * self.paced]
        return ", ".join(part for part in parts if part)


def run(cell: str, args: argparse.Namespace, *, unshaped: bool = False) -> dict[str, Any]:
    """Predict and measure one cell, or measure it without a limit on the link."""
    about = Cell.of(cell)
    out = out_of(f"{cell}:unshaped" if unshaped else cell, args)
    if out.exists():
        return json.loads(out.read_text())
    command = [sys.executable, str(HERE / "plan_cell.py"), "--model", about.model, "--methods", *METHODS]
    command += ["--rounds", str(args.rounds), "--turn-s", str(args.turn_s), "--out", str(out)]
    command += ["--seconds", str(args.seconds), *(["--unshaped"] if unshaped else [])]
    command += ["--paced"] if about.paced else []
    rate, delay = ("none", "none") if unshaped else (about.rate, about.delay)
    with Hosts(about.hosts, rate, delay=delay) as emulated:
        lines = emulated.run(command, about.ranks, env=QUIET, timeout_s=900)[0].splitlines()
    print(
        f"{cell}{' unshaped' if unshaped else ''}:",
        *(s for s in lines if s.startswith("predicted")),
        flush=True,
    )
    return json.loads(out.read_text())


def with_floor(path: Path, floor_s: float) -> dict[str, float]:
    """Replay a plan with the step that ranks took by themselves while the methods were measured.

    So what is left of an error is the model's, without what changed on the machine in between.
    """
    plan = load_plan(path)
    slower = floor_s / plan.profile.floor_s
    profile = replace(plan.profile, step_s=tuple(slower * s for s in plan.profile.step_s))
    return {p.method: p.seconds[1] for p in predicted(replace(plan, profile=profile)).predictions}


def rows(
    cell: str, found: dict[str, Any], free: dict[str, Any] | None, again: dict[str, float]
) -> list[dict[str, Any]]:
    """Return one row for each method of a cell."""
    told, real = found["predicted"], found["measured"]
    rate = _slowest(cell)
    out = []
    for text, (low, middle, high) in told["seconds"].items():
        took, turns = real["median_s"][text], real["turns_s"][text]
        wire_s = 8 * told["moved_bytes"][text] / rate
        halves = statistics.median(turns[::2]), statistics.median(turns[1::2])
        out.append(
            {
                "cell": cell,
                "method": text,
                "predicted_ms": 1e3 * middle,
                "low_ms": 1e3 * low,
                "high_ms": 1e3 * high,
                "measured_ms": 1e3 * took,
                "error": middle / took - 1,
                "inside": low <= took <= high,
                "repeat": abs(halves[0] / halves[1] - 1),
                "error with the run's floor": again[text] / took - 1,
                "floor + bytes / rate": (told["floor_s"] + wire_s) / took - 1,
                "run's floor + bytes / rate": (real["median_s"]["none"] + wire_s) / took - 1,
                **({} if free is None else {BASELINE: (free["median_s"][text] + wire_s) / took - 1}),
                "bytes": told["moved_bytes"][text] / real["moved_bytes"][text] - 1,
                "chosen": text == told["method"],
            }
        )
    return out


def _slowest(cell: str) -> float:
    """Return the bits per second of the slower direction."""
    rates = [parse_rate(text) for text in Cell.of(cell).rate.split("/")]
    return min(rate for rate in rates if rate is not None)


def link_errors(cell: str, link: Link) -> list[float]:
    """Return by how much each host's rates differ from those that were set, and then the latency.

    A host sends no more than the others receive, and receives no more than they send.
    """
    about = Cell.of(cell)
    up_bps, _, down_bps = about.rate.partition("/")
    up, down = parse_rate(up_bps), parse_rate(down_bps or up_bps)
    assert up is not None
    assert down is not None
    others = about.hosts - 1
    errors = [found / min(up, others * down) - 1 for found in link.up_bps]
    errors += [found / min(down, others * up) - 1 for found in link.down_bps]
    delay_s = parse_delay(about.delay)
    return errors + ([link.latency_s / delay_s - 1] if delay_s else [])


def summary(table: list[dict[str, Any]]) -> dict[str, Any]:
    """Return errors of predictions and baselines, and the regret of what was recommended."""
    found: dict[str, Any] = {"rows": len(table)}
    for name in ERRORS:
        errors = sorted(abs(row[name]) for row in table if name in row)
        if not errors:
            continue
        found[name] = [statistics.median(errors), errors[int(0.9 * (len(errors) - 1) + 0.5)], errors[-1]]
    found["inside the interval"] = statistics.mean(row["inside"] for row in table)
    found["bytes differ by at most"] = max(abs(row["bytes"]) for row in table)
    cells = {row["cell"] for row in table}
    by_cell = {cell: [row for row in table if row["cell"] == cell] for cell in sorted(cells)}
    best = {cell: min(row["measured_ms"] for row in own) for cell, own in by_cell.items()}
    regrets = [next(r["measured_ms"] for r in own if r["chosen"]) / best[c] - 1 for c, own in by_cell.items()]
    found["regret"] = [statistics.mean(regrets), max(regrets)]
    constant = {}
    for text in {row["method"] for row in table}:
        own = [r["measured_ms"] / best[r["cell"]] - 1 for r in table if r["method"] == text]
        constant[text] = statistics.mean(own)
    answer = min(constant, key=lambda text: constant[text])
    found["best constant answer"] = [answer, constant[answer]]
    return found


def questions(cell: str, own: list[dict[str, Any]], plan_file: Path) -> list[dict[str, Any]]:
    """Return what is recommended in a cell for each demand on accuracy, and by how much it is not the best.

    Args:
        cell: its name.
        own: its rows.
        plan_file: the plan made before anything was measured.
    """
    predictions = load_plan(plan_file).predictions
    asked = []
    for accuracy in ("rounded", "lossy"):
        index = ACCURACIES.index(accuracy)
        took = {
            r["method"]: r["measured_ms"] for r in own if ACCURACIES.index(accuracy_of(r["method"])) <= index
        }
        answer, best = advised(predictions, accuracy)[0], min(took, key=lambda text: took[text])
        slower = {text: ms / took[best] - 1 for text, ms in took.items()}
        # The two best are nearer to each other than a method is to itself, measured twice.
        repeat = statistics.median(r["repeat"] for r in own if r["method"] in took)
        asked.append(
            {"cell": cell, "accuracy": accuracy, "answer": answer, "best": best, "slower": slower}
            | {"regret": slower[answer], "dense is best": slower["dense"] <= 0.05}
            | {"tie": sorted(slower.values())[1] <= repeat}
        )
    return asked


def answers(asked: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the regret over all questions, the best constant answers, and how often the best changes.

    Of regrets the mean, the worst, and the worst where there was no tie.
    """
    found: dict[str, Any] = {"questions": len(asked), "ties": sum(q["tie"] for q in asked)}
    found["regret"] = _regret(asked)
    for accuracy in ("rounded", "lossy"):
        own = [question for question in asked if question["accuracy"] == accuracy]
        everywhere = set.intersection(*(set(q["slower"]) for q in own))
        constant = {text: [q["slower"][text] for q in own] for text in sorted(everywhere)}
        answer = min(constant, key=lambda text: statistics.mean(constant[text]))
        found[f"regret, {accuracy}"] = _regret(own)
        found[f"best constant answer, {accuracy}"] = [
            answer,
            statistics.mean(constant[answer]),
            max(constant[answer]),
        ]
    winners = [question["best"] for question in asked]
    found["other winner than the most frequent"] = 1 - max(map(winners.count, winners)) / len(winners)
    dense = [question["answer"] == "dense" for question in asked if question["dense is best"]]
    found["dense recognised"] = [sum(dense), len(dense)]
    return found


def _regret(asked: list[dict[str, Any]]) -> list[float]:
    regrets = [q["regret"] for q in asked]
    clear = [q["regret"] for q in asked if not q["tie"]]
    return [statistics.mean(regrets), max(regrets), max(clear, default=0.0)]


def markdown(table: list[dict[str, Any]]) -> str:
    """Return a table of all cells; recommended methods are marked with a star."""
    names = ("error", "floor + bytes / rate", BASELINE, "repeat")
    lines = [
        f"| cell | method | predicted ms (80 %) | measured ms | {' | '.join(names)} |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    before = None
    for row in table:
        cell = "" if row["cell"] == before else str(Cell.of(row["cell"]))
        before = row["cell"]
        predicted = f"{row['predicted_ms']:.0f} ({row['low_ms']:.0f} to {row['high_ms']:.0f})"
        if not row["inside"]:
            predicted += " outside"
        errors = " | ".join(f"{100 * row[name]:+.0f} %" if name in row else "" for name in names)
        star = " *" if row["chosen"] else ""
        lines.append(
            f"| {cell} | {row['method']}{star} | {predicted} | {row['measured_ms']:.0f} | {errors} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    """Run all cells and write table and summary."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", nargs="+", required=True, metavar="CELL")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--turn-s", type=float, default=0.8)
    parser.add_argument("--seconds", type=float, default=18.0, help="of each plan")
    parser.add_argument("--unshaped", action="store_true", help="also without a limit, but for paced cells")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    table: list[dict[str, Any]] = []
    asked: list[dict[str, Any]] = []
    for cell in args.cells:
        found = run(cell, args)
        # Paced ranks need the pace that was measured for the plan.
        free_too = args.unshaped and not Cell.of(cell).paced
        free = run(cell, args, unshaped=True)["measured"] if free_too else None
        floor_s = found["measured"]["median_s"]["none"]
        plan_file = out_of(cell, args).with_suffix(".plan.json")
        own = rows(cell, found, free, with_floor(plan_file, floor_s))
        table += own
        asked += questions(cell, own, plan_file)
    links = {}
    for cell in args.cells:
        link = load_plan(out_of(cell, args).with_suffix(".plan.json")).link
        links[cell] = {"seconds": link.seconds, "errors": link_errors(cell, link)}
    told = {"summary": summary(table) | answers(asked), "links": links, "rows": table, "questions": asked}
    (args.out / "validation.json").write_text(json.dumps(told, indent=1) + "\n")
    (args.out / "validation.md").write_text(markdown(table))
    print(json.dumps(told["summary"], indent=1))


if __name__ == "__main__":
    main()
