"""Loss or accuracy against wall seconds on an emulated link: a cell is a workload, a number of hosts, a link.

    python benchmarks/evidence.py --list                                   # the cells, with hours of each
    python benchmarks/evidence.py gpt:4:100mbit --text FILE                # continues where it stopped
    python benchmarks/evidence.py mnist:2:1gbit resnet:2:1gbit --mnist DIR
    python benchmarks/evidence.py gpt:4:100mbit --picture curves.png

First a learning rate is chosen for each rival, from the same grid and with a seed of its own, without a limit
of the link: a loss curve does not depend on it. Then come three seeds on the link. All rivals of a seed train
in one run, in turns of a part of the steps; the clock of a rival runs only while it trains, on that link.
Before each run the link is measured, and the run refused if it is not as asked; after it, if computing took
other seconds than in the seeds before, as on another machine. Needs root and iproute2.
Writes one small record per cell, results/evidence/CELL.json, and its table, after every seed.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from harness import MEASURED_LINKS, RESULTS, Place, command_line, document, main, number, table, write
from rivals import FLOOR, Trainee, in_parts, is_here
from scenarios import EVIDENCE
from torch import nn

from stenograd.emulate.hosts import parse_rate
from stenograd.tasks.images import Mnist
from stenograd.tasks.models import CharGPT
from stenograd.tasks.text import Text

FOLDER = RESULTS / "evidence"
_LINKS, _HOSTS, _SEEDS, _TUNING_SEED = ("20mbit", "100mbit", "1gbit", "none"), (2, 4, 8), (0, 1, 2), 1000
_RANK, _FIRST_STEPS = 8, 600  # of the adapters, and of the training before they are put in
_ROW = ("steps", "seconds", "host_bytes", "eval_loss", "accuracy")


class _Gpt(Text):
    context = 256
    recipe = replace(Text.recipe, batch_size=2)

    def build(self) -> nn.Module:
        return CharGPT(len(self.vocabulary), self.context, layers=6, heads=6, width=384)


class _Resnet(Mnist):
    recipe = replace(Mnist.recipe, lr=0.05, weight_decay=1e-4)

    def build(self) -> nn.Module:
        blocks = [_Block(a, b) for a, b in ((16, 16), (16, 32), (32, 64), (64, 64))]
        ends = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)
        return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), *blocks, *ends)


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        stride = 1 + (inputs != outputs)
        self.first = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(outputs) for _ in range(2))
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[1](self.second(torch.relu(self.norms[0](self.first(x)))))
        return torch.relu(y + self.short(x))


class _Lora(Text):
    """The text with its case swapped, for a GPT whose own weights are those of `_first_trained`, and stay."""

    recipe = replace(Text.recipe, weight_decay=0.0, warmup_steps=20)

    def __init__(self, swapped: Path) -> None:
        super().__init__(swapped)
        self._weights = torch.load(swapped.with_suffix(".pt"))

    def build(self) -> nn.Module:
        model = super().build()
        model.load_state_dict(self._weights)
        model.requires_grad_(False)
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, _Adapted(child))
        return model


class _Adapted(nn.Module):
    """W x + B A x, where A and B are trained, of rank 8 (Hu et al., "LoRA", 2021)."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.A = nn.Parameter(torch.randn(_RANK, base.in_features) / base.in_features**0.5)
        self.B = nn.Parameter(torch.zeros(base.out_features, _RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.base(x) + nn.functional.linear(nn.functional.linear(x, self.A), self.B)
        return y


def _first_trained(text: Path, folder: Path) -> Path:
    """Train the GPT of the text task, once, and write its weights beside the text with its case swapped."""
    swapped = folder / "swapped.txt"
    if not swapped.with_suffix(".pt").exists():
        folder.mkdir(parents=True, exist_ok=True)
        task, samples = Text(text), torch.Generator().manual_seed(0)
        model, optimizer = task.model(0), None
        optimizer = task.recipe.make_optimizer(model)
        for _ in range(_FIRST_STEPS):
            optimizer.zero_grad()
            picked = torch.randint(task.train_size, (task.recipe.batch_size,), generator=samples)
            task.loss(model, *task.train_batch(picked))[0].backward()
            optimizer.step()
        swapped.write_text(text.read_text(encoding="utf-8").swapcase(), encoding="utf-8")
        torch.save(model.state_dict(), swapped.with_suffix(".pt"))
    return swapped


_TASKS = {"gpt": _Gpt, "gpt-small": Text, "mnist": Mnist, "resnet": _Resnet, "lora": _Lora, "try": Text}


def train(rank: int, work: str, data: str, rates: Mapping[str, float], seed: int, parts: int) -> Any:
    """Be one rank; train every rival of `rates`, at a multiple of the recipe's learning rate each."""
    plan, task, trainees = EVIDENCE[work], _TASKS[work](Path(data)), []
    for name, factor in rates.items():
        own, recipe = copy.copy(task), task.recipe
        low = recipe.min_lr if recipe.min_lr is None else factor * recipe.min_lr
        own.recipe = replace(recipe, lr=factor * recipe.lr, min_lr=low)
        own.eval_size = min(task.eval_size, plan.judged or task.eval_size)
        trainees.append(Trainee(name, own, seed, plan.steps, 1))
    return in_parts(trainees, argparse.Namespace(epochs=1, parts=parts))


def run(cell: str, data: str, seeds: Sequence[int], date: str) -> None:
    """Do what is missing of a cell, and write its record after each seed."""
    work, hosts, rate = _parsed(cell)
    plan = EVIDENCE[work]
    tuned = _tuned(work, hosts, data)
    path = _path(cell)
    told = json.loads(path.read_text()) if path.exists() else {}
    results = told.get("results", {"rates": tuned, "seeds": {}})
    gates = told.get("links", [])
    if results["rates"] != tuned:
        raise ValueError(f"{path} has other learning rates than were tuned: remove it")
    for seed in (seed for seed in seeds if str(seed) not in results["seeds"]):
        place = Place(hosts, rate=rate, cores_per_host=_own_cores(hosts))
        points = place.run(train, work, data, tuned, seed, plan.parts, timeout_s=86_400)[0]
        rows = {name: _rows(mine, work) for name, mine in points.items()}
        _check_machine(path, rows, results["seeds"])
        results["seeds"][str(seed)] = rows
        MEASURED_LINKS[:] = gates = [*gates, MEASURED_LINKS[-1]]
        settings = {"cell": cell, "steps": plan.steps, "grid": plan.grid}
        settings |= {"cores_per_host": _own_cores(hosts)}
        page = document(cell, date, ["evidence.py", cell], summary(results, work, hosts))
        write(path.with_suffix(""), date, settings, results, page)


def _check_machine(path: Path, rows: Mapping[str, Any], seeds: Mapping[str, Mapping[str, Any]]) -> None:
    """Refuse a seed next to others where computing took other seconds: processors of one name differ, too."""
    at = _ROW.index("seconds")
    taken, others = rows[FLOOR][-1][at], [seed[FLOOR][-1][at] for seed in seeds.values()]
    if others and not 0.8 < taken / (known := statistics.median(others)) < 1.25:
        raise ValueError(
            f"computing alone took {taken:.1f} s, and {known:.1f} s for the seeds in {path}: another machine "
            "measured them; remove the file, and measure all seeds on this one"
        )


def _rows(points: Sequence[Mapping[str, Any]], work: str) -> list[list[float]]:
    """Return steps, seconds, bytes of a host, loss and accuracy at every evaluation."""
    steps = EVIDENCE[work].steps
    return [
        [
            round(p["epoch"] * steps),
            round(p["seconds"], 3),
            p["host_bytes"],
            round(p["eval_loss"], 5),
            p["accuracy"],
        ]
        for p in points
    ]


def _own_cores(hosts: int) -> int:
    return len(os.sched_getaffinity(0)) // hosts


def _parsed(cell: str) -> tuple[str, int, str]:
    work, hosts, rate = [*cell.split(":"), "", ""][:3]
    if work not in EVIDENCE or not hosts.isdigit():
        raise ValueError(f"a cell is WORKLOAD:HOSTS:RATE of {', '.join(EVIDENCE)}, got {cell!r}: see --list")
    parse_rate(rate)
    return work, int(hosts), rate


def _path(cell: str) -> Path:
    return FOLDER / f"{cell.replace(':', '_')}.json"


def _tuned(work: str, hosts: int, data: str) -> dict[str, float]:
    """Return the best multiple of the learning rate for each rival, from one training with each."""
    plan, file = EVIDENCE[work], FOLDER / f"tuned_{work}_{hosts}.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    rivals = [name for name in plan.rivals[1:] if is_here(name)]
    for factor in plan.grid:
        known = found.setdefault(str(factor), {})
        if missing := [name for name in rivals if name not in known]:
            args = (work, data, dict.fromkeys(missing, factor), _TUNING_SEED, 1)
            points = Place(ranks=hosts).run(train, *args, timeout_s=86_400)[0]
            known |= {name: round(mine[-1]["eval_loss"], 5) for name, mine in points.items()}
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found, indent=1) + "\n")
    best = {n: min(plan.grid, key=lambda factor: found[str(factor)][n]) for n in rivals}
    return {FLOOR: 1.0} | best


def standings(results: Mapping[str, Any], work: str, hosts: int) -> dict[str, dict[str, Any]]:
    """Return for each rival what the seeds say of it, in their order.

    `scores` and `seconds` at the end, seconds `to` the target (None where a seed did not reach it), how many
    times `faster` than DDP, and the same for the score at which it `ended` itself (at least, by all seconds
    of DDP, where DDP ended worse); `used`, the share of its seconds that computing alone takes in the same
    run, samples or characters that all ranks have learnt from `per_s`, and `megabytes` sent by a host.
    """
    plan, seeds = EVIDENCE[work], list(results["seeds"].values())
    curves = [
        {n: [dict(zip(_ROW, p, strict=True)) for p in mine] for n, mine in run.items()} for run in seeds
    ]
    goal = target(results, work)
    score = "accuracy" if plan.target else "eval_loss"
    samples = hosts * plan.batch * plan.context * plan.steps
    found: dict[str, dict[str, Any]] = {}
    for name in results["rates"]:
        ends = [run[name][-1] for run in curves]
        to, ddp = ([when(run[one], score, goal) for run in curves] for one in (name, "ddp"))
        own = [when(run["ddp"], score, end[score]) for run, end in zip(curves, ends, strict=True)]
        dense = [run["ddp"][-1]["seconds"] for run in curves]
        found[name] = {
            "scores": [end[score] for end in ends],
            "seconds": [end["seconds"] for end in ends],
            "ended": [(at or d) / end["seconds"] for at, d, end in zip(own, dense, ends, strict=True)],
            "to": to,
            "faster": [b / a if a and b else None for a, b in zip(to, ddp, strict=True)],
            "used": [
                run[FLOOR][-1]["seconds"] / end["seconds"] for run, end in zip(curves, ends, strict=True)
            ],
            "per_s": [samples / end["seconds"] for end in ends],
            "megabytes": [end["host_bytes"] / 1e6 for end in ends],
        }
    return found


def when(points: Sequence[Mapping[str, float]], score: str, goal: float) -> float | None:
    """Return the seconds at which a score was reached, on the line between two evaluations; None if never.

    Example:
        >>> when([{"seconds": 10, "eval_loss": 3.0}, {"seconds": 20, "eval_loss": 2.0}], "eval_loss", 2.25)
        17.5
    """
    sign = -1 if score == "eval_loss" else 1
    before: Mapping[str, float] | None = None
    for point in points:
        if sign * point[score] >= sign * goal:
            if before is None:
                return point["seconds"]
            share = (goal - before[score]) / (point[score] - before[score])
            return before["seconds"] + share * (point["seconds"] - before["seconds"])
        before = point
    return None


def target(results: Mapping[str, Any], work: str) -> float:
    """Return the accuracy or the loss that rivals run for."""
    named = EVIDENCE[work].target
    return named or max(run["ddp"][-1][_ROW.index("eval_loss")] for run in results["seeds"].values())


def summary(results: Mapping[str, Any], work: str, hosts: int) -> str:
    """Format a line a rival: medians over the seeds, with their range; speeds of the worst seed."""
    plan, lines = EVIDENCE[work], []
    for name, of in standings(results, work, hosts).items():
        whole = None not in of["faster"]
        line = [f"`{name}`", f"{results['rates'][name]:g}", _spread(of["scores"], 3)]
        line += [_spread(of["to"], 1) if whole else "", number(min(of["faster"]), 2) if whole else ""]
        line += [number(min(of["ended"]), 2), _spread(of["seconds"], 1)]
        line += [_spread([100 * share for share in of["used"]], 0), number(statistics.median(of["per_s"]), 0)]
        lines.append([*line, number(statistics.median(of["megabytes"]))])
    unit = "samples" if plan.context == 1 else "characters"
    head = ["rival", "lr, x recipe's", f"final {'accuracy' if plan.target else 'loss'}"]
    head += [f"s to {target(results, work):.4g}", "x faster than ddp, worst seed"]
    head += ["the same to its own end", "s in all", "utilisation, %"]
    seeds = len(results["seeds"])
    rest = table([*head, f"{unit} per s", "MB sent by a host"], lines)
    return f"{seeds} seed{'s' * (seeds > 1)}, {plan.steps} steps.\n\n{rest}"


def _spread(values: Sequence[float], digits: int) -> str:
    middle, low, high = statistics.median(values), min(values), max(values)
    return f"{number(middle, digits)} ({number(low, digits)} to {number(high, digits)})"


def body(told: Mapping[str, Any]) -> str:
    """Format the table of a record."""
    work, hosts, _ = _parsed(told["settings"]["cell"])
    return summary(told["results"], work, hosts)


def _where(cell: str) -> str:
    _, hosts, rate = _parsed(cell)
    link = "no limit" if rate == "none" else rate.replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")
    return f"{hosts} emulated hosts, {link}"


def hours(cell: str) -> tuple[float, float]:
    """Estimate hours of three seeds, and of tuning: computing, and the exchanges of DDP and its casts."""
    work, hosts, rate = _parsed(cell)
    plan = EVIDENCE[work]
    share = max(1.0, hosts / len(os.sched_getaffinity(0)))  # of what a core does while others wait
    bps = min(parse_rate(rate) or 5e9, 5e9)
    dense_s = 2 * (hosts - 1) / hosts * 32 * 1.05 * plan.parameters / bps
    compute_s = plan.step_s * share * len(plan.rivals)
    batches = plan.parts * (plan.judged or 10_000) / plan.batch / hosts  # looked at by a rank, for each rival
    judged_s = batches * compute_s / 3  # a forward pass alone
    # DDP, two casts to 16 bits, and a tenth for all that sends little
    once = (plan.steps * (compute_s + 2.1 * dense_s) * 1.1 + judged_s) / 3600
    return len(_SEEDS) * once, len(plan.grid) * plan.steps * compute_s * 1.1 / 3600


def evidence() -> None:
    """Do what the command line says."""
    parser = command_line(__doc__)
    parser.add_argument("cells", nargs="*", metavar="WORKLOAD:HOSTS:RATE")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--mnist", metavar="DIR", help="folder with MNIST's four IDX files")
    parser.add_argument("--text", type=Path, metavar="FILE", help="a text file, such as tiny Shakespeare")
    parser.add_argument("--seeds", type=int, nargs="+", default=_SEEDS)
    parser.add_argument("--picture", type=Path, metavar="PNG", help="draw the record of one cell, and end")
    args = parser.parse_args()
    if args.list:
        cells = [f"{work}:{hosts}:{rate}" for work in EVIDENCE for hosts in _HOSTS for rate in _LINKS]
        print(table(["cell", "hours", "and of tuning, once"], [[c, *map(number, hours(c))] for c in cells]))
        return
    for cell in args.cells:
        work = _parsed(cell)[0]
        data = args.mnist if EVIDENCE[work].target else args.text
        if args.picture:
            from pictures import bands

            told = json.loads(_path(cell).read_text())["results"]
            print(bands(args.picture, told["seeds"], _where(cell)))
            continue
        if data is None:
            raise ValueError(f"{cell} needs --{'mnist DIR' if EVIDENCE[work].target else 'text FILE'}")
        if work == "lora":
            data = _first_trained(data, RESULTS.parents[1] / "build" / "evidence")
        run(cell, str(Path(data).resolve()), args.seeds, args.date)
        print(_path(cell).with_suffix(".md").read_text())


if __name__ == "__main__":
    main(evidence)
