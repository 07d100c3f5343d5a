"""Whether training feels the rounds of streaming DiLoCo: step times on two emulated hosts with a slow link.

The rivals take turns; a turn is a whole period of rounds, begun where nothing is under way, so that every
exchange lies inside it. Needs root and iproute2. Writes NAME.json and NAME.md into --out:

    python benchmarks/streaming.py                 # about ten minutes, on a machine that does nothing else
    python benchmarks/streaming.py --models cnn --rounds 1    # a try
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import document, number, table, write

from stenograd.emulate.hosts import Hosts, HostsError

HERE = Path(__file__).parent
FLOOR = "none"
_CODEC = "/lowbit:format=e3m0"


@dataclass(frozen=True)
class Plan:
    """What a model is trained with.

    Attributes:
        every: steps from round to round, and of a turn.
        floor_steps: of a turn without exchange.
        delays: steps that a fragment may take, densely and in 4 bits; below every / 4.
    """

    every: int
    floor_steps: int
    delays: tuple[int, int]

    @property
    def rivals(self) -> list[str]:
        """No exchange, DiLoCo, and its streaming form in 4 fragments, dense and in 4 bits."""
        dense, few = (
            f"diloco:every={self.every},fragments=4,delay={d},mix=0.5{codec}"
            for d, codec in zip(self.delays, ("", _CODEC), strict=True)
        )
        return [FLOOR, f"diloco:every={self.every}", dense, few]


# The largest fragment of the MLP takes 1.4 s at 100 Mbit/s, eleven of its steps; the GPT's two of its own.
PLANS = {"cnn": Plan(16, 8, (2, 1)), "mlp": Plan(96, 48, (18, 4)), "gpt": Plan(32, 16, (5, 2))}


def options() -> argparse.Namespace:
    """Read the command line, which the ranks get as well."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", choices=list(PLANS), default=["mlp", "gpt"])
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each rival")
    parser.add_argument("--timeout-s", type=float, default=1200.0, help="for each model")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--name", default="streaming", help="name of the files, without an ending")
    parser.add_argument("--date", default=datetime.date.today().isoformat())
    return parser.parse_args()


def train(args: argparse.Namespace) -> None:
    """Be one rank; after each round rank 0 writes all ranks' milliseconds, by rival and turn."""
    import torch
    import torch.distributed as dist
    from models import WORKS
    from plan import rounds_order
    from turns import Rival

    import stenograd

    torch.set_num_threads(1)
    world = stenograd.init(timeout_s=120)
    (name,) = args.models
    plan = PLANS[name]
    rivals = [Rival(rival, WORKS[name], world.rank) for rival in plan.rivals]
    turns: dict[str, list[list[float]]] = {rival.name: [] for rival in rivals}
    for rival in rivals:  # past the first fragment: then nothing is under way, until the next is due
        rival.steps(max(plan.delays) + 2)
    for order in rounds_order(len(rivals), args.rounds):
        for index in order:
            rival = rivals[index]
            dist.barrier()
            turns[rival.name].append(rival.steps(plan.floor_steps if rival.name == FLOOR else plan.every))
        everyone: list[Any] = [None] * world.world_size
        dist.all_gather_object(everyone, turns)
        if world.rank == 0:
            args.out.write_text(json.dumps(everyone))
            print(f"{name}: round {len(turns[FLOOR])} of {args.rounds}", flush=True)
    for rival in rivals:
        rival.attached.close()


def measure(args: argparse.Namespace, model: str) -> dict[str, Any]:
    """Run a model's rivals on two hosts."""
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder, Hosts(2, args.rate) as hosts:
        out = Path(folder) / "turns.json"
        command = [sys.executable, __file__, "--models", model, "--rate", args.rate]
        command += ["--rounds", str(args.rounds), "--out", str(out)]
        try:
            hosts.run(command, env={"TORCH_CPP_LOG_LEVEL": "ERROR"}, timeout_s=args.timeout_s, echo=True)
        except HostsError as error:
            if not out.exists():
                raise
            print(f"streaming: ended early: {error}", file=sys.stderr)  # the rounds so far still count
        told = json.loads(out.read_text())
    return {"model": model, "load before": before, "load after": os.getloadavg()[0], "ranks": told}


def rows(ranks: Sequence[Mapping[str, Sequence[Sequence[float]]]]) -> list[list[str]]:
    """Summarise every rival: mean against the floor of the same round, and the 99th percentile.

    The mean is that of the slower rank. Percentiles are those of all steps of both.

    Example:
        >>> both = {"none": [[10.0, 10.0]], "diloco": [[10.0, 12.0]]}
        >>> rows([both, both])[1]
        ['diloco', '11.0', '1.100', '11.0', '12.0', '1.091']
    """
    lines = []
    means = {}
    for rival in ranks[0]:
        turns = zip(*(rank[rival] for rank in ranks), strict=True)  # each a turn of every rank
        means[rival] = [max(map(statistics.mean, turn)) for turn in turns]
    for rival, mine in means.items():
        ratio = statistics.median(own / base for own, base in zip(mine, means[FLOOR], strict=True))
        steps = sorted(ms for rank in ranks for turn in rank[rival] for ms in turn)
        middle, late = statistics.median(steps), steps[min(int(0.99 * len(steps)), len(steps) - 1)]
        told = [number(statistics.median(mine)), number(ratio, 3), number(middle), number(late)]
        lines.append([rival, *told, number(late / middle, 3)])
    return lines


def main() -> None:
    """Measure, print and write."""
    args = options()
    if "RANK" in os.environ:
        train(args)
        return
    try:
        runs = [measure(args, model) for model in args.models]
    except (HostsError, ValueError) as error:
        raise SystemExit(f"streaming: {error}") from None
    head = ["rival", "mean ms", "x floor", "median ms", "p99 ms", "p99 / median"]
    parts = []
    for run in runs:
        loads = f"load average {run['load before']:.1f} before, {run['load after']:.1f} after"
        parts += [f"### {run['model']} at {args.rate}, {loads}", table(head, rows(run["ranks"]))]
    body = "\n\n".join(parts)
    print(body)
    text = document("Step times under streaming DiLoCo", args.date, sys.argv, body)
    write(args.out / args.name, args.date, {"rate": args.rate, "rounds": args.rounds}, runs, text)


if __name__ == "__main__":
    main()
