"""One rank of four is five times as slow: rounds of equally many steps against rounds by time.

    python benchmarks/unequal.py                   # about five minutes

The slow rank is emulated: each rank sleeps until its step has taken as long as the table says. Tokens are
samples, of all ranks together; both ways of training see about equally many. Losses are of held-out digits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from harness import Place, command_line, main, number, publish, table

import stenograd
from stenograd.tasks import load

_STEP_S = (0.02, 0.02, 0.02, 0.1)  # of each rank
_EVERY = 30  # steps of a round; by time, those of a fast rank
_SEEDS = (0, 1, 2)
# Rounds, in which all ranks make about equally many steps: 4 x 30 in each, or 3 x 30 + 6.
WAYS = {f"local:every={_EVERY}": 24, f"local:every={_EVERY * _STEP_S[0]:g}s": 30}


def train(rank: int, method: str, rounds: int, seed: int) -> tuple[float, int, float]:
    """Be a rank; return the seconds, this rank's steps, and the loss of what all have in common."""
    task = load("digits")
    model, samples = task.model(seed), torch.Generator().manual_seed(100 * seed + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    with stenograd.distribute(model, optimizer, method, timeout_s=60) as sync:
        start, steps = time.monotonic(), 0
        while sync.round < rounds:
            began = time.monotonic()
            picked = torch.randint(task.train_size, (16,), generator=samples)
            optimizer.zero_grad()
            task.loss(model, *task.train_batch(picked))[0].backward()
            time.sleep(max(0.0, _STEP_S[rank] - (time.monotonic() - began)))
            optimizer.step()
            steps += 1
        taken_s = time.monotonic() - start
        with sync.consensus(), torch.no_grad():
            loss = float(task.loss(model.eval(), *task.eval_batch(torch.arange(task.eval_size)))[0])
    return taken_s, steps, loss


def unequal() -> None:
    """Measure and print."""
    args = command_line(__doc__, "unequal").parse_args()
    told: dict[str, list[Any]] = {method: [] for method in WAYS}
    for seed in _SEEDS:
        for method, rounds in WAYS.items():
            told[method].append(Place(ranks=len(_STEP_S)).run(train, method, rounds, seed))
    publish(args, "One rank of four is five times as slow", told, summary(told))


def summary(told: Mapping[str, Sequence[Any]]) -> str:
    """Format a line for each way to train: medians over the seeds."""
    lines, base = [], None
    for method, rounds in WAYS.items():
        runs = told[method]
        hourly = statistics.median(3600 * rounds / ranks[0][0] for ranks in runs)
        base = base or hourly
        low, middle, high = sorted(ranks[0][2] for ranks in runs)
        steps = statistics.median(sum(taken for _, taken, _ in ranks) for ranks in runs)
        row = [number(hourly, 0), number(hourly / base, 2), number(steps, 0)]
        lines.append([method, *row, f"{middle:.4f} ({low:.4f} to {high:.4f})"])
    head = ["", "rounds an hour", "x", "steps of all ranks", "loss, median of three seeds (range)"]
    return table(head, lines)


if __name__ == "__main__":
    main(unequal)
