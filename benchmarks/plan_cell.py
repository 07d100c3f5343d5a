"""What a rank does in the validation of `stenograd plan`: predict, write that down, then measure.

Started by plan_validation.py on emulated hosts.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import WORKS, loss
from paced import Pace, Paced, pace_of
from plan import rounds_order
from torch import Tensor, nn

import stenograd
from stenograd.comm.driver import Driver
from stenograd.planning.link import Link
from stenograd.planning.measure_link import measure_link
from stenograd.planning.plan import Plan, plan, with_ranks

FLOOR = "none"
_PERIOD = 4  # steps after which every schedule here begins again


class Rival:
    """A model trained under one method, or by itself; with a pace, one that sleeps instead of computing."""

    def __init__(self, text: str, name: str, rank: int, pace: Pace | None = None) -> None:
        self.model, self._inputs, self._targets = WORKS[name].make(rank)
        self._paced = pace is not None
        if pace is not None:
            self.model = Paced(self.model, self._loss_of(self.model), pace, rank)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.sync: Any = None
        if text != FLOOR:
            self.sync = stenograd.distribute(self.model, self._optimizer, text)

    def trial(self) -> stenograd.Trial:
        """Return it for the planner."""
        batches = [(self._inputs, self._targets)]
        return stenograd.Trial(self.model, self._optimizer, batches, lambda m, b: loss(m(b[0]), b[1]))

    def pace(self, spread: Sequence[float]) -> Pace:
        """Measure the model's own pace."""
        return pace_of(self.model, self._loss_of(self.model), spread)

    def _loss_of(self, model: nn.Module) -> Callable[[], Tensor]:
        return lambda: loss(model(self._inputs), self._targets)

    def turn_s(self, steps: int) -> float:
        """Train, and return the mean seconds per step of the slowest rank.

        A period before is not counted: caches and freed memory are those of the rival before, and ranks leave
        a barrier one after another.
        """
        self._train(_PERIOD)
        dist.barrier()
        start = time.perf_counter()
        self._train(steps)
        taken = torch.tensor((time.perf_counter() - start) / steps, dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return taken.item()

    def _train(self, steps: int) -> None:
        for _ in range(steps):
            self._optimizer.zero_grad()
            (self.model() if self._paced else loss(self.model(self._inputs), self._targets)).backward()
            self._optimizer.step()


def predictions(args: argparse.Namespace, world: stenograd.World) -> tuple[dict[str, Any], Pace | None]:
    """Plan; rank 0 writes it down and prints its digest before anything is measured."""
    link = measure_link(Driver.own(), args.seconds / 3)
    pace: Pace | None = None
    if args.paced:
        # As if each rank had a host: the others rest while one computes, and in training all sleep.
        costs = {op: replace(cost, busy_hop_s=cost.hop_s) for op, cost in link.costs.items()}
        found = _planned(args, world, replace(link, costs=costs), 2.0) if world.rank == 0 else None
        if found is not None:
            spread = [s / found.profile.floor_s for s in found.profile.step_s]
            pace = Rival(FLOOR, args.model, world.rank).pace(spread)
        both: list[Any] = [found, pace]
        dist.broadcast_object_list(both)
        found, pace = both
    else:
        cores = (os.cpu_count() or 1) / world.world_size  # all emulated hosts share this machine
        trial = Rival(FLOOR, args.model, world.rank).trial()
        found = with_ranks(_planned(args, world, link, cores), trial, Driver.own(), args.seconds / 10)
    assert found is not None
    told = {
        "floor_s": found.profile.floor_s,
        "link_bps": link.bps,
        "up_bps": link.up_bps,
        "down_bps": link.down_bps,
        "hop_s": {op: cost.hop_s for op, cost in link.costs.items()},
        "link_seconds": link.seconds,
        "method": found.method,
        "seconds": {p.method: p.seconds for p in found.predictions},
        "moved_bytes": {p.method: p.moved_bytes for p in found.predictions},
        "limit": {p.method: p.limit for p in found.predictions},
    }
    if world.rank == 0:
        found.save(args.out.with_suffix(".plan.json"))
        text = json.dumps(told, sort_keys=True)
        args.out.with_suffix(".predicted.json").write_text(text)
        print(f"predicted {args.model}: sha256 {hashlib.sha256(text.encode()).hexdigest()}", flush=True)
    return told, pace


def _planned(args: argparse.Namespace, world: stenograd.World, link: Link, cores: float) -> Plan:
    return plan(
        Rival(FLOOR, args.model, world.rank).trial(),
        workers=world.world_size,
        ranks_per_host=world.local_world_size,
        link=link,
        methods=args.methods,
        cores=cores,
        seconds=args.seconds * 2 / 3,
        name=args.model,
    )


def measured(args: argparse.Namespace, rank: int, pace: Pace | None) -> dict[str, Any]:
    """Let all methods take turns, and return each turn's seconds per step and the bytes per step.

    Each turn attaches anew: the idle threads of ten other rivals cost 3 % of a small step.
    """
    texts = [FLOOR, *dict.fromkeys(stenograd.method(m).text for m in ("dense", *args.methods))]
    turns: dict[str, list[float]] = {text: [] for text in texts}
    sent: dict[str, float] = {}
    warm: dict[str, float] = {}
    for order in [range(len(texts)), *rounds_order(len(texts), args.rounds)]:
        for text in (texts[index] for index in order):
            rival = Rival(text, args.model, rank, pace)
            if text not in warm:
                warm[text] = rival.turn_s(_PERIOD)
                count = 0
            else:
                count = _PERIOD * max(1, min(10, round(args.turn_s / warm[text] / _PERIOD)))
                turns[text].append(rival.turn_s(count))
            if rival.sync:
                # The first turn of each tells what loading kernels and meeting took, and is not counted.
                sent[text] = rival.sync.traffic.moved_bytes / (_PERIOD + max(count, _PERIOD))
                rival.sync.close()
    return {
        "turns_s": turns,
        "moved_bytes": sent,
        "median_s": {t: statistics.median(v) for t, v in turns.items()},
    }


def main() -> None:
    """Predict and measure one model on the link at hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(WORKS), required=True)
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--turn-s", type=float, default=0.8)
    parser.add_argument("--seconds", type=float, default=18.0)
    parser.add_argument("--paced", action="store_true", help="sleep as long as a rank alone computes")
    parser.add_argument("--unshaped", action="store_true", help="only measure")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = stenograd.init(timeout_s=120)
    told, pace = {}, None
    if not args.unshaped:
        told["predicted"], pace = predictions(args, world)
    told["measured"] = measured(args, world.rank, pace)
    if world.rank == 0:
        args.out.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
