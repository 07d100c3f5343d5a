"""Time to a loss on slow links, put together from loss curves and from step times.

A loss curve does not depend on the link, so it comes from one training without a limit (`reproductions.py
--only curves`); the time of a step comes from a short training on emulated hosts, for every
rate two of `time_to_accuracy.py`. Writes NAME.json, NAME.md and NAME.png into --out:

    for rate in 100mbit 20mbit; do
        on="--task text --data FILE --hosts 2 --rate $rate --epochs 1 --parts 1"
        python benchmarks/time_to_accuracy.py $on --steps 60 --name text2_$rate --rivals none ...
        python benchmarks/time_to_accuracy.py $on --steps 16 --name text2_ddp_$rate --rivals ddp
    done
    python benchmarks/slow_links.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import RESULTS, command_line, main, number, publish, table
from pictures import curves
from reproduction_table import GROUPS

from stenograd import method

DDP, FLOOR = "ddp", "none"
_SPARSE = "sparseloco:every=30"
Curve = Sequence[Sequence[float]]  # steps, validation loss and accuracy


def slow_links() -> None:
    """Put together, print and write."""
    parser = command_line(__doc__, "slow_links")
    parser.add_argument("--hosts", type=int, choices=[2, 4], default=2)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "20mbit"])
    parser.add_argument("--target", type=float, default=1.9)
    args = parser.parse_args()
    found = loss_curves(RESULTS, args.hosts)
    links = {rate: steps_of(RESULTS, args.hosts, rate) for rate in args.rates}
    title = f"Time to a validation loss on {args.hosts} hosts"
    told = {"curves": found, "steps": links}
    publish(args, title, told, body({"settings": {"target": args.target}, "results": told}))
    slowest = links[args.rates[-1]]
    drawn = {rival: points(curve, slowest[rival]) for rival, curve in found.items() if rival in slowest}
    print(curves(args.out / f"{args.name}.png", drawn, args.target, losses=True))


def body(told: Mapping[str, Any]) -> str:
    """Format a table for each link of a record."""
    found, links = told["results"]["curves"], told["results"]["steps"]
    targets = sorted({common(found), 2.0, told["settings"]["target"]}, reverse=True)
    return "\n\n".join(f"### {rate}\n\n{summary(found, steps, targets)}" for rate, steps in links.items())


def loss_curves(folder: Path, hosts: int) -> dict[str, Curve]:
    """Return the loss curves of trainings of so many ranks by rival; DDP's is that of `dense`.

    Where a rival was trained for different numbers of steps, the last of the table counts.
    """
    results = json.loads((folder / "reproductions.json").read_text())["results"]
    runs = [family.run for family in GROUPS["curves"].families.values() if family.run.ranks == hosts]
    done = {_written(run.method): results[run.key] for run in runs if "curve" in results.get(run.key, {})}
    return {(DDP if text == "dense" else text): r["curve"] for text, r in done.items()}


def steps_of(folder: Path, hosts: int, rate: str) -> dict[str, dict[str, float]]:
    """Return seconds and bytes of a host's interface per step on a link, by rival."""
    per_step = {}
    for name in (f"text{hosts}_{rate}", f"text{hosts}_ddp_{rate}"):
        told = json.loads((folder / f"{name}.json").read_text())
        taken = told["settings"]["steps"] * told["settings"]["epochs"]
        for rival, seen in told["results"].items():
            text = rival if rival in (DDP, FLOOR) else _written(rival)
            last = seen[-1]
            per_step[text] = {"seconds": last["seconds"] / taken, "host_bytes": last["host_bytes"] / taken}
    return per_step


def _written(text: str) -> str:
    """Return a method's text without the outer learning rate that DiLoCo has anyway, or a preset's name.

    Example:
        >>> _written("diloco:every=30,outer_lr=0.7")
        'diloco:every=30'
    """
    whole = method(text.replace(",outer_lr=0.7", "")).text
    return _SPARSE if whole == method(_SPARSE).text else whole


def points(curve: Curve, step: Mapping[str, float]) -> list[dict[str, float]]:
    """Return a curve's evaluations with the time and the bytes that they take on a link.

    Example:
        >>> points([[100, 2.5, 0.3]], {"seconds": 0.5, "host_bytes": 10.0})
        [{'seconds': 50.0, 'host_bytes': 1000.0, 'eval_loss': 2.5, 'accuracy': 0.3}]
    """
    made = []
    for taken, loss, accuracy in curve:
        spent = {name: taken * value for name, value in step.items()}
        made.append({**spent, "eval_loss": loss, "accuracy": accuracy})
    return made


def common(found: Mapping[str, Curve]) -> float:
    """Return the lowest loss that every rival has reached, rounded up to hundredths.

    Example:
        >>> common({"ddp": [[100, 2.5, 0], [200, 2.0, 0]], "topk": [[100, 2.6, 0], [200, 2.333, 0]]})
        2.34
    """
    return math.ceil(100 * max(min(loss for _, loss, _ in curve) for curve in found.values())) / 100


def summary(
    found: Mapping[str, Curve], steps: Mapping[str, Mapping[str, float]], targets: Sequence[float]
) -> str:
    """Format a line per rival: time per step, seconds to every target, and DDP's divided by those."""
    head = ["rival", "ms per step", "kB per step", "steps"]
    for target in targets:
        head += [f"s to {target:g}", "x faster"]
    lines = []
    if FLOOR in steps:
        lines.append([FLOOR, number(1e3 * steps[FLOOR]["seconds"], 0), *[""] * (2 + 2 * len(targets))])
    for rival in (name for name in found if name in steps):
        step = steps[rival]
        line = [f"`{rival}`", number(1e3 * step["seconds"], 0), number(step["host_bytes"] / 1e3, 1)]
        line.append(number(found[rival][-1][0], 0))
        for target in targets:
            mine, base = (_seconds(found[name], steps[name], target) for name in (rival, DDP))
            line += [number(mine, 0), number(base / mine if mine and base else None, 1)]
        lines.append(line)
    return table(head, lines)


def _seconds(curve: Curve, step: Mapping[str, float], target: float) -> float | None:
    """Return the time of the first evaluation at a loss, or None where there is none."""
    hit: dict[str, Any] | None = next((p for p in points(curve, step) if p["eval_loss"] <= target), None)
    return None if hit is None else hit["seconds"]


if __name__ == "__main__":
    main(slow_links)
