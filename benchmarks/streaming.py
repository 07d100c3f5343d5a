"""Whether training feels the rounds of streaming DiLoCo: step times on two emulated hosts with a slow link.

The rivals take turns; a turn is a whole period of rounds, begun where nothing is under way, so that every
exchange lies inside it. Needs root and iproute2. Writes NAME.json and NAME.md into --out:

    python benchmarks/streaming.py                 # about ten minutes, on a machine that does nothing else
    python benchmarks/streaming.py --models cnn --rounds 1    # a try
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from harness import Place, command_line, main, number, publish, ratio, table, turns
from rivals import FLOOR, Rival
from scenarios import STREAMING


def train(rank: int, model: str, rounds: int) -> dict[str, list[list[float]]]:
    """Be one rank; return its milliseconds, by rival and turn."""
    plan = STREAMING[model]
    rivals = {name: Rival.on(model, name, rank) for name in plan.rivals}
    taken: dict[str, list[list[float]]] = {name: [] for name in rivals}
    for rival in rivals.values():  # past the first fragment: then nothing is under way, until the next is due
        rival.steps(max(plan.delays) + 2)
    for name in turns(plan.rivals, rounds):
        dist.barrier()
        taken[name].append(rivals[name].steps(plan.every // 2 if name == FLOOR else plan.every))
        if rank == 0:
            print(f"{model}: {name}", flush=True)
    for rival in rivals.values():
        rival.attached.close()
    return taken


def rows(ranks: Sequence[Mapping[str, Sequence[Sequence[float]]]]) -> list[list[str]]:
    """Summarise every rival: mean against the floor of the same round, and the 99th percentile.

    The mean is that of the slower rank. Percentiles are those of all steps of both.

    Example:
        >>> both = {"none": [[10.0, 10.0]], "diloco": [[10.0, 12.0]]}
        >>> rows([both, both])[1]
        ['diloco', '11.0', '1.100', '11.0', '12.0', '1.091']
    """
    means: dict[str, list[float]] = {}
    lines = []
    for rival in ranks[0]:
        by_turn = zip(*(rank[rival] for rank in ranks), strict=True)
        mine = means[rival] = [max(map(statistics.mean, turn)) for turn in by_turn]
        steps = sorted(ms for rank in ranks for turn in rank[rival] for ms in turn)
        middle, late = statistics.median(steps), steps[min(int(0.99 * len(steps)), len(steps) - 1)]
        told = [number(statistics.median(mine)), number(ratio(mine, means[FLOOR]), 3), number(middle)]
        lines.append([rival, *told, number(late), number(late / middle, 3)])
    return lines


def streaming() -> None:
    """Measure, print and write."""
    parser = command_line(__doc__, "streaming")
    parser.add_argument("--models", nargs="+", choices=list(STREAMING), default=["mlp", "gpt"])
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each rival")
    parser.add_argument("--timeout-s", type=float, default=1200.0, help="for each model")
    args = parser.parse_args()
    runs: list[dict[str, Any]] = []
    for model in args.models:
        before = os.getloadavg()[0]
        ranks = Place(2, rate=args.rate).run(train, model, args.rounds, timeout_s=args.timeout_s)
        after = os.getloadavg()[0]
        runs.append({"model": model, "load before": before, "load after": after, "ranks": ranks})
    publish(args, "Step times under streaming DiLoCo", runs, summary(runs, args.rate))


def summary(runs: Sequence[Mapping[str, Any]], rate: str) -> str:
    """Format a table for each model."""
    head = ["rival", "mean ms", "x floor", "median ms", "p99 ms", "p99 / median"]
    parts = []
    for run in runs:
        loads = f"load average {run['load before']:.1f} before, {run['load after']:.1f} after"
        parts += [f"### {run['model']} at {rate}, {loads}", table(head, rows(run["ranks"]))]
    return "\n\n".join(parts)


if __name__ == "__main__":
    main(streaming)
