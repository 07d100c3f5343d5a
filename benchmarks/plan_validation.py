"""Compares predictions of `stenograd plan` with real training on emulated hosts.

    python benchmarks/plan_validation.py --cells cnn:2:150mbit gpt-small:3:80mbit mlp:2:400mbit --out DIR

For every cell MODEL:HOSTS[xRANKS]:RATE[,DELAY] the ranks measure the link, plan, and write the predictions
down; their digest is printed; only then do the methods train, in turns. Besides methods whose keys are given
there are grids of `every` and `ratio`, which tell how far the values that the plan chose are from the best.
Needs root and iproute2.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import Place, main, slowest, turns
from scenarios import WORKS, loss

import stenograd
from stenograd.planning.link import measure_link
from stenograd.planning.plan import plan, with_ranks
from stenograd.wire.driver import Driver

METHODS = [
    "fp16",
    "topk:ratio=0.03",
    "sign",
    "qsgd",
    "powersgd:rank=3",
    "local:every=4",
    "diloco:every=4",
    "gossip",
]
OPEN = ["local", "topk"]  # whose keys the plan chooses
GRIDS = {
    "local": [f"local:every={every}" for every in (4, 16, 64, 128)],
    "topk": [f"topk:ratio={ratio}" for ratio in (0.3, 0.1, 0.03, 0.01, 0.001)],
}
FLOOR = "none"
# Ranks keep the memory that they free: fetching it from the kernel again takes a model up to 4 ms of a step,
# or nothing, by chance of what else lives at the end of the heap.
KEEPS = {"MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_MMAP_THRESHOLD_": str(1 << 32)}
QUIET = {"PYTHONWARNINGS": "ignore"}


def trial_of(name: str, rank: int) -> stenograd.Trial:
    """Return a benchmark's model as the planner takes it."""
    model, inputs, targets = WORKS[name].make(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    return stenograd.Trial(model, optimizer, [(inputs, targets)], lambda m, b: loss(m(b[0]), b[1]))


def turn_s(name: str, text: str, turn_s: float) -> float:
    """Train under a method for whole periods, and return the mean seconds per step of the slowest rank."""
    trial = trial_of(name, dist.get_rank())
    sync = None if text == FLOOR else stenograd.distribute(trial.model, trial.optimizer, text)
    period = max(4, int(getattr(stenograd.method("dense" if sync is None else text).schedule, "every", 1)))

    def train(steps: int) -> float:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            trial.optimizer.zero_grad()
            trial.loss(trial.model, trial.batches[0]).backward()
            trial.optimizer.step()
        return slowest((time.perf_counter() - start) / steps)

    warm_s = train(4)
    found = train(period * max(1, round(turn_s / warm_s / period)))
    if sync is not None:
        sync.close()
    return found


def predict_and_measure(rank: int, cell: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Be a rank: predict, write that down, then measure."""
    name, own = cell.split(":")[0], Driver.own()
    world, per_host = dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"])
    began = time.perf_counter()
    link = measure_link(Driver.own(), args.seconds / 3)
    found = plan(
        trial_of(name, rank),
        workers=world,
        ranks_per_host=per_host,
        link=link,
        methods=[*METHODS, *OPEN],
        cores=(os.cpu_count() or 1) / world,  # all emulated hosts share this machine
        seconds=args.seconds / 2,
    )
    found = with_ranks(found, trial_of(name, rank), own, args.seconds / 10)
    told: dict[str, Any] = {
        "plan_s": time.perf_counter() - began,
        "link": link.as_json(),
        "floor_s": found.profile.floor_s,
        "method": found.method,
        "chosen": {text: found.chosen.get(text, text) for text in OPEN},
        "seconds": {p.method: p.seconds for p in found.predictions},
        "moved_bytes": {p.method: p.moved_bytes for p in found.predictions},
    }
    if rank == 0:
        digest = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()
        print(f"predicted {cell}: sha256 {digest}", flush=True)
        found.save(folder / "plan.json")
    listed = [told]
    dist.broadcast_object_list(listed)  # chance may have let ranks choose differently
    told = listed[0]
    open_ones = [text for key, grid in GRIDS.items() for text in [*grid, told["chosen"][key]]]
    texts = [FLOOR, *dict.fromkeys(stenograd.method(t).text for t in ["dense", *METHODS, *open_ones])]
    taken: dict[str, list[float]] = {text: [] for text in texts}
    for text in turns(texts, args.rounds):
        taken[text].append(turn_s(name, text, args.turn_s))
    return {**told, "turns_s": taken}


def rows_of(cell: str, told: dict[str, Any]) -> list[dict[str, Any]]:
    """Return one row for each method of a cell that was predicted and trained."""
    rows = []
    for text, (low, middle, high) in told["seconds"].items():
        if text in told["turns_s"]:
            took = statistics.median(told["turns_s"][text])
            error, inside = middle / took - 1, low <= took <= high
            rows.append(
                {"cell": cell, "method": text, "predicted_ms": 1e3 * middle, "measured_ms": 1e3 * took}
            )
            rows[-1] |= {"error": error, "inside": inside, "chosen": text == told["method"]}
    return rows


def summary(cells: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return errors, the regret of what was recommended, and how far chosen keys are from their grids' best.

    Example:
        >>> took = {"dense": [2.0], "topk": [1.0], "local": [1.1], "local:every=4": [1.0]}
        >>> told = {"seconds": {"dense": (1, 1.8, 3), "topk": (1, 1.1, 3)}, "turns_s": took, "method": "topk"}
        >>> told |= {"chosen": {"local": "local", "topk": "topk"}, "plan_s": 9.0}
        >>> found = summary({"cnn:2:1gbit": told})
        >>> [round(found[key], 3) for key in ("median error", "90 % within", "regret")]
        [0.1, 0.1, 0.0]
    """
    rows = [row for cell, told in cells.items() for row in rows_of(cell, told)]
    errors = sorted(abs(row["error"]) for row in rows)
    regrets, keys = [], {}
    for cell, told in cells.items():
        took = {text: statistics.median(turns) for text, turns in told["turns_s"].items() if text != FLOOR}
        regrets.append(took[told["method"]] / min(took[t] for t in told["seconds"] if t in took) - 1)
        for text, grid in GRIDS.items():
            near = [took[m.text] for m in map(stenograd.method, grid) if m.text in took]
            mine = told["chosen"][text]
            if near and mine in took:
                keys[f"{cell} {mine}"] = took[mine] / min(near) - 1
    return {
        "rows": len(rows),
        "median error": statistics.median(errors),
        "90 % within": errors[int(0.9 * (len(errors) - 1) + 0.5)],
        "inside the interval": statistics.mean(row["inside"] for row in rows),
        "regret": statistics.mean(regrets),
        "chosen keys, beyond the best of the grid": keys,
        "seconds of planning": {cell: told["plan_s"] for cell, told in cells.items()},
    }


def plan_validation() -> None:
    """Run all cells; write and print table and summary."""
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    parser.add_argument("--cells", nargs="+", required=True, metavar="CELL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--turn-s", type=float, default=0.8)
    parser.add_argument("--seconds", type=float, default=14.0, help="of each plan")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    cells = {}
    for cell in args.cells:
        _, size, link = cell.split(":")
        hosts, _, ranks = size.partition("x")
        rate, _, delay = link.partition(",")
        folder = (args.out / cell.replace(":", "-").replace("/", "_")).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        done = folder / "cell.json"
        if not done.exists():
            place = Place(int(hosts), int(ranks or 1), rate, delay or "none")
            seen = place.run(predict_and_measure, cell, folder, args, timeout_s=900, env=KEEPS | QUIET)[0]
            done.write_text(json.dumps(seen))
        cells[cell] = json.loads(done.read_text())
    told = {"summary": summary(cells), "rows": [row for c, told in cells.items() for row in rows_of(c, told)]}
    (args.out / "validation.json").write_text(json.dumps(told, indent=1) + "\n")
    for row in told["rows"]:
        star = " *" if row["chosen"] else ""
        print(
            f"{row['cell']:22} {row['method'] + star:24} {row['predicted_ms']:8.1f} ms, took "
            f"{row['measured_ms']:8.1f} ({row['error']:+.0%})"
        )
    print(json.dumps(told["summary"], indent=1))


if __name__ == "__main__":
    main(plan_validation)
