"""What a rank of the benchmark does: the rivals take turns, round after round; rank 0 writes what they took.

Started by bench.py on emulated hosts.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from models import WORKS, Work, loss
from plan import WARM_UP_STEPS, rounds_order, turn_steps
from rivals import DDP_HOOKS, Attached, host_bytes

import stenograd

_SETTLE_S = 0.05  # until the last packets and acknowledgements of a turn are counted


@dataclass
class Log:
    """What a rival took: one entry a turn, the slowest rank's milliseconds, rank 0's bytes."""

    steps: int
    turns_ms: list[float] = field(default_factory=list)
    counted_bytes: list[float | None] = field(default_factory=list)
    interface_bytes: list[float] = field(default_factory=list)


class Rival:
    """One way to train, with a model and an optimizer of its own."""

    def __init__(self, name: str, work: Work, rank: int) -> None:
        self.name = name
        model, self.inputs, self.targets = work.make(rank)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        self.attached = Attached(name, model, self.optimizer)
        self.parameters = sum(p.numel() for p in model.parameters())

    def steps(self, count: int) -> list[float]:
        """Train and return the milliseconds of each step."""
        taken_ms = []
        for _ in range(count):
            start = time.perf_counter()
            self.optimizer.zero_grad()
            loss(self.attached.module(self.inputs), self.targets).backward()
            self.optimizer.step()
            taken_ms.append((time.perf_counter() - start) * 1e3)
        self.optimizer.zero_grad()  # gradients of thirteen rivals would fill the memory
        return taken_ms


def settled_bytes() -> int:
    """Wait until every rank is here and what they sent has arrived; return this host's counter."""
    dist.barrier()
    time.sleep(_SETTLE_S)
    return host_bytes()


def slowest(milliseconds: float) -> float:
    """Return the largest of all ranks' values, on every rank."""
    value = torch.tensor(milliseconds, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


def take_turn(rival: Rival, log: Log, idle_bytes: int) -> None:
    """Let a rival train for a turn; its first step, with cold caches, is not timed."""
    before, counted_before = settled_bytes(), rival.attached.moved_bytes
    taken_ms = rival.steps(1 + log.steps)
    interface = settled_bytes() - before - idle_bytes
    counted = rival.attached.moved_bytes
    log.turns_ms.append(slowest(statistics.median(taken_ms[1:])))
    log.interface_bytes.append(interface / len(taken_ms))
    if counted is None or counted_before is None:
        log.counted_bytes.append(None)
    else:
        log.counted_bytes.append((counted - counted_before) / len(taken_ms))


def idle_turn_bytes() -> int:
    """Return what a turn without steps sends: the barriers around it."""
    counts = [settled_bytes() for _ in range(4)]
    return round(statistics.median(b - a for a, b in pairwise(counts)))


def enter(names: list[str], work: Work, rank: int) -> tuple[list[Rival], dict[str, str]]:
    """Return the rivals, and for those of DDP's that it refuses here the reason."""
    rivals, refused = [], {}
    for name in names:
        try:
            rivals.append(Rival(name, work, rank))
        except (RuntimeError, TypeError, ValueError) as error:
            if name not in DDP_HOOKS:
                raise
            refused[name] = str(error).strip().splitlines()[0]
    return rivals, refused


def warm_up(rivals: list[Rival], turn_s: float, max_steps: int) -> dict[str, Log]:
    """Run every rival for some steps and decide from the last how many make a turn."""
    return {
        rival.name: Log(turn_steps(slowest(rival.steps(WARM_UP_STEPS)[-1]) / 1e3, turn_s, max_steps))
        for rival in rivals
    }


def main() -> None:
    """Measure one model on the link at hand."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=list(WORKS), required=True)
    parser.add_argument("--rivals", nargs="+", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--turn-s", type=float, required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    world = stenograd.init(timeout_s=120)
    rivals, refused = enter(args.rivals, WORKS[args.model], world.rank)
    logs = warm_up(rivals, args.turn_s, args.max_steps)
    idle_bytes = idle_turn_bytes()
    for order in rounds_order(len(rivals), args.rounds):
        for index in order:
            take_turn(rivals[index], logs[rivals[index].name], idle_bytes)
    if world.rank == 0:
        rows = {name: vars(log) for name, log in logs.items()}
        told = {"parameters": rivals[0].parameters, "refused": refused, "rivals": rows}
        args.out.write_text(json.dumps(told))
    for rival in rivals:
        rival.attached.close()


if __name__ == "__main__":
    main()
