"""One rank of four is five times as slow: rounds that wait for it, rounds by time, and rounds with a quorum.

    python benchmarks/unequal.py                   # about seven minutes

The slow rank is emulated: each rank sleeps until its step has taken as long as the table says. All ways see
about equally many samples of all ranks together. One label in five is drawn at random, so that the loss has
a floor, as that of a language has; the loss is the expected one on held-out digits.
"""

from __future__ import annotations

import math
import os
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from harness import Place, command_line, main, number, publish, table
from torch import nn

import stenograd
from stenograd.tasks import load

_STEP_S = (0.02, 0.02, 0.02, 0.1)  # of each rank
_EVERY, _CLASSES, _NOISE = 30, 10, 0.2
_SEEDS = (0, 1, 2)
# Rounds, in which all ranks make about equally many steps: 4 x 30 in each, or 3 x 30 + 6.
WAYS = {
    f"local:every={_EVERY}": 24,
    f"local:every={_EVERY * _STEP_S[0]:g}s": 30,
    f"local:every={_EVERY},quorum=0.75,grace=0.1": 30,
}


def train(rank: int, method: str, rounds: int, seed: int, store: str) -> tuple[float, float, float]:
    """Be a rank; return the seconds, the steps that count here, and the loss of what all have in common."""
    if "quorum" in method:
        stenograd.shutdown()  # the group that all ranks are in
        os.environ["STENOGRAD_OPEN"] = store
    task = load("digits")
    model, samples = task.model(seed), torch.Generator().manual_seed(100 * seed + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with stenograd.distribute(model, optimizer, method, timeout_s=60) as sync:
        start, steps = time.monotonic(), 0
        while sync.round < rounds:
            began = time.monotonic()
            inputs, labels = task.train_batch(torch.randint(task.train_size, (16,), generator=samples))
            drawn = torch.randint(_CLASSES, labels.shape, generator=samples)
            noisy = torch.where(torch.rand(labels.shape, generator=samples) < _NOISE, drawn, labels)
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), noisy).backward()
            time.sleep(max(0.0, _STEP_S[rank] - (time.monotonic() - began)))
            optimizer.step()
            steps += 1
        taken_s = time.monotonic() - start
        with sync.consensus(), torch.no_grad():
            inputs, labels = task.eval_batch(torch.arange(task.eval_size))
            scores = model.eval()(inputs).log_softmax(1)
            loss = -(1 - _NOISE) * scores.gather(1, labels[:, None]).mean() - _NOISE * scores.mean()
        return taken_s, sum(sync.tokens.values()) or float(steps), float(loss)


def unequal() -> None:
    """Measure and print."""
    args = command_line(__doc__, "unequal").parse_args()
    found: dict[str, list[Any]] = {method: [] for method in WAYS}
    for seed in _SEEDS:
        for method, rounds in WAYS.items():
            with tempfile.TemporaryDirectory() as folder:
                place, store = Place(ranks=len(_STEP_S)), str(Path(folder, "store"))
                found[method].append(place.run(train, method, rounds, seed, store))
    publish(args, "One rank of four is five times as slow", found, summary(found))


def summary(found: Mapping[str, Sequence[Any]]) -> str:
    """Format a line for each way to train, over the seeds."""
    lines, base = [], (0.0, math.nan)
    for method in found:
        hourly, steps, losses = middle(found, method)
        mean, spread = statistics.fmean(losses), statistics.stdev(losses)
        base = base if base[0] else (hourly, mean)
        row = [number(hourly, 0), number(hourly / base[0], 2), number(steps, 0), f"{mean:.4f} ({spread:.4f})"]
        lines.append([method, *row, f"{100 * (mean / base[1] - 1):+.2f} %"])
    head = ["", "rounds an hour", "x", "steps of all ranks", "loss (deviation of seeds)", ""]
    return table(head, lines)


def middle(found: Mapping[str, Sequence[Any]], method: str) -> tuple[float, float, list[float]]:
    """Return the medians of rounds an hour and of all ranks' steps, and the losses, of a way to train."""
    runs = found[method]
    hourly = statistics.median(3600 * WAYS[method] / ranks[0][0] for ranks in runs)
    own = "quorum" in method  # rank 0 knows what all have brought to rounds
    steps = statistics.median(ranks[0][1] if own else sum(taken for _, taken, _ in ranks) for ranks in runs)
    return hourly, steps, [ranks[0][2] for ranks in runs]


if __name__ == "__main__":
    main(unequal)
