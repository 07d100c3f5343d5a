"""Many steps of random trainings with faults, then the fuzzer: what must hold whatever is combined.

    python drills/soak.py [--steps 5000] [--seed 0] [--minutes 0] [--cases 10000]

Each round draws a method, a model's shapes, a dtype, bucket sizes and 2 to 4 ranks, and trains some steps.
Among them are steps in which a rank has NaN gradients, accumulates without exchange, is slow, or all is
saved and loaded into a fresh synchronisation; now and then a rank is killed in the middle. Checked on every
rank: parameters equal bit for bit over the ranks and finite, exactly the bad steps skipped, and the survivors
of a killed rank raise PeerLost. Then every decoder gets damaged input (see fuzz.py). Prints a table; the exit
status is 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import stenograd
from stenograd.cli.table import show
from stenograd.testing.methods import suite
from stenograd.testing.pool import RankPool, RanksFailed

__all__ = ["METHODS", "Plan", "draw_plan", "train"]

METHODS = suite()
_EVENTS = ("nan", "no_sync", "reload", "slow")
_TIMEOUT_S = 120.0  # generous: a busy machine is no fault here
_KILLED_TIMEOUT_S = 20.0
_IN = 12


@dataclass(frozen=True)
class Plan:
    """One round, equal on all ranks.

    Attributes:
        method: text.
        widths: of the layers.
        dtype: of the parameters, a name in torch.
        bucket_bytes: of `stenograd.distribute`.
        ranks: world size.
        steps: how many.
        events: what happens at which step, and to which rank.
        killed: step at which the last rank kills itself; -1 for never.
        seed: of weights and batches.
    """

    method: str
    widths: tuple[int, ...]
    dtype: str
    bucket_bytes: int
    ranks: int
    steps: int
    events: dict[int, tuple[str, int]]
    killed: int
    seed: int


def draw_plan(draw: random.Random, most_steps: int) -> Plan:
    """Draw a round of at most so many steps."""
    ranks = draw.choice([2, 3, 4])
    steps = min(draw.randrange(20, 60), most_steps)
    events = {
        step: (draw.choice(_EVENTS), draw.randrange(ranks))
        for step in range(1, steps)
        if draw.random() < 0.15
    }
    return Plan(
        method=draw.choice(METHODS),
        widths=tuple(draw.choice([1, 3, 16, 33, 64]) for _ in range(draw.randrange(1, 5))),
        dtype=draw.choice(["float32", "float32", "float64", "bfloat16"]),
        bucket_bytes=draw.choice([64, 1000, 8192, 4 << 20]),
        ranks=ranks,
        steps=steps,
        events=events,
        killed=draw.randrange(2, steps) if draw.random() < 0.1 and steps > 2 else -1,
        seed=draw.getrandbits(30),
    )


def train(rank: int, values: dict[str, Any]) -> dict[str, Any]:
    """Train one round on a rank, and return what it saw."""
    plan = Plan(**values)
    warnings.simplefilter("ignore")
    model = _model(plan, rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    sync = _attach(plan, model, optimizer)
    bad = 0
    for step in range(plan.steps):
        event, whom = plan.events.get(step, ("", 0))
        if step == plan.killed and rank == plan.ranks - 1:
            os._exit(9)
        if event == "slow" and rank == whom:
            time.sleep(0.05)
        if event == "reload":
            state = {"sync": sync.state_dict(), "optimizer": optimizer.state_dict()}
            sync.close()
            sync = _attach(plan, model, optimizer)
            sync.load_state_dict(state["sync"])
            optimizer.load_state_dict(state["optimizer"])
        if event == "no_sync":
            with sync.no_sync():
                _backward(model, plan, step, rank + 100)
        else:
            optimizer.zero_grad()
        _backward(model, plan, step, rank, poison=event == "nan" and rank == whom)
        finite = all(bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None)
        bad += event == "nan"
        if finite == (event == "nan"):
            raise AssertionError(f"step {step}: finite {finite} after {event or 'nothing'}")
        if finite:
            optimizer.step()
        else:
            optimizer.zero_grad()
    flat = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
    out = {
        "bits": flat.numpy().tobytes(),
        "finite": bool(flat.isfinite().all()),
        "bad": bad,
        "step": sync.step,
    }
    sync.close()
    return out


def _model(plan: Plan, rank: int) -> nn.Module:
    torch.manual_seed(plan.seed + rank)  # rank 0's weights must win
    layers: list[nn.Module] = []
    sizes = [_IN, *plan.widths, 1]
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers).to(getattr(torch, plan.dtype))


def _attach(plan: Plan, model: nn.Module, optimizer: torch.optim.Optimizer) -> stenograd.Sync:
    timeout_s = _TIMEOUT_S if plan.killed < 0 else _KILLED_TIMEOUT_S
    return stenograd.distribute(
        model, optimizer, plan.method, bucket_bytes=plan.bucket_bytes, timeout_s=timeout_s
    )


def _backward(model: nn.Module, plan: Plan, step: int, salt: int, *, poison: bool = False) -> None:
    generator = torch.Generator().manual_seed(plan.seed + 1000 * step + salt)
    x = torch.randn(8, _IN, generator=generator, dtype=torch.float64).to(getattr(torch, plan.dtype))
    loss = (model(x) - x.sum(1, keepdim=True).sign()).square().mean()
    (loss * float("nan") if poison else loss).backward()


def run_round(pool: RankPool, plan: Plan) -> str:
    """Run a round; return what was wrong, or nothing."""
    try:
        ranks = pool.run(plan.ranks, train, asdict(plan), timeout_s=_TIMEOUT_S + 60)
    except RanksFailed as failed:
        if plan.killed < 0:
            return str(failed)[-2000:]
        victim = plan.ranks - 1
        wrong = [
            text
            for rank, text in failed.errors.items()
            if rank != victim and f"rank(s) {victim} " not in text
        ]
        missing = set(range(plan.ranks)) - set(failed.errors)
        return f"survivors without PeerLost: {sorted(missing)}, {wrong}"[-2000:] if wrong or missing else ""
    if plan.killed >= 0:
        return "nobody noticed the killed rank"
    if any(r["bits"] != ranks[0]["bits"] for r in ranks):
        return "the replicas differ"
    if not ranks[0]["finite"]:
        return "parameters are not finite"
    applied = plan.steps - ranks[0]["bad"]
    return (
        "" if all(r["step"] == applied for r in ranks) else f"applied {ranks[0]['step']} steps, not {applied}"
    )


def soak(steps: int, seed: int, minutes: float) -> bool:
    """Run rounds until so many steps were made, or the minutes are over; print the table."""
    draw, start = random.Random(seed), time.monotonic()
    done: Counter[str] = Counter()
    happened: Counter[str] = Counter()
    wrong: list[str] = []
    with RankPool(4) as pool:
        while sum(done.values()) < steps and not 0 < minutes * 60 < time.monotonic() - start:
            plan = draw_plan(draw, max(steps - sum(done.values()), 3))
            reason = run_round(pool, plan)
            if reason:
                wrong.append(plan.method)
                print(f"WRONG: {reason}\n  {plan}", flush=True)
            done[plan.method] += plan.steps if plan.killed < 0 else plan.killed
            happened.update(event for event, _ in plan.events.values())
            happened["killed"] += plan.killed >= 0
            happened["rounds"] += 1
    show(["method", "steps", "wrong rounds"], [[how, done[how], wrong.count(how)] for how in METHODS])
    told = ", ".join(f"{count} {what}" for what, count in sorted(happened.items()))
    print(f"\n{sum(done.values()):,} steps in {time.monotonic() - start:.0f} s: {told}", flush=True)
    return not wrong


def main() -> int:
    """Soak, then fuzz, and return the exit status."""
    from fuzz import fuzz_all
    from fuzz_cases import CASES

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=0.0, help="end the training earlier; 0 for never")
    parser.add_argument("--cases", type=int, default=10_000, help="of each decoder; 0 for none")
    args = parser.parse_args()
    good = soak(args.steps, args.seed, args.minutes)
    if args.cases:
        good &= fuzz_all(list(CASES), args.cases, args.seed)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
