"""1,000 steps of every synchronous method on 3 ranks: are replicas equal bit for bit, is a flipped bit found?

python drills/replicas.py [--steps 1000] [--methods "dense;topk"]
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from common import BUCKET_BYTES, METHODS, data, flat, mlp
from torch import nn

from stenograd.cli.table import show
from stenograd.errors import ReplicaDivergence
from stenograd.kernels.hash import hash_tensor
from stenograd.sync.gradients import GradientSync
from stenograd.testing.pool import RankPool

WORLD = 3
EVERY = 100
FLIPPED = ("4.weight", 1)  # the tensor and the rank
BIT = 20  # of a float32, so that no rounding of later updates can make it equal again


def drill(rank: int, method: str, steps: int) -> dict[str, Any]:
    """Train with the guard on, then flip a bit and train on until it is found; return what was seen."""
    model = mlp(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    sync = GradientSync(model, optimizer, method, bucket_bytes=BUCKET_BYTES, timeout_s=60, check_every=EVERY)
    for step in range(steps):
        take_step(model, optimizer, rank, step)
    seen: dict[str, Any] = {
        "buckets": len(sync._exchange.buckets),
        "applied": sync.step,
        "checks": sync._guard.checks,
        "hash": int(hash_tensor(flat(model))),
        "finite": bool(torch.isfinite(flat(model)).all()),
    }
    if rank == FLIPPED[1]:
        dict(model.named_parameters())[FLIPPED[0]].data.view(torch.int32).view(-1)[3] ^= 1 << BIT
    try:
        for step in range(steps, steps + EVERY):
            take_step(model, optimizer, rank, step)
            seen["missed_until"] = sync.step
    except ReplicaDivergence as error:
        seen |= {"found": error.step, "tensors": error.tensors, "message": str(error)}
    sync.close()
    return seen


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, step: int) -> None:
    """Train on one batch."""
    x, y = data(rank, step)
    optimizer.zero_grad()
    nn.functional.mse_loss(model(x), y).backward()
    optimizer.step()


def judge(ranks: list[dict[str, Any]], steps: int) -> tuple[bool, list[object]]:
    """Return whether a method passed, and its row of the table."""
    first = ranks[0]
    equal = len({row["hash"] for row in ranks}) == 1 and first["finite"]
    whole = all(row["applied"] == steps and row["checks"] == steps // EVERY for row in ranks)
    due = (steps // EVERY + 1) * EVERY
    named = all(row.get("found") == due and row.get("tensors") == {FLIPPED[0]: (1,)} for row in ranks)
    passed = equal and whole and named and first["buckets"] >= 5
    found = f"step {first.get('found')}: {first.get('tensors')}"
    return passed, [first["buckets"], first["applied"], first["checks"], "yes" if equal else "NO", found]


def main() -> int:
    """Run the drill for every method; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=1000, help=f"a multiple of {EVERY}")
    parser.add_argument("--methods", default="", help="parts of texts, separated by semicolons; none for all")
    args = parser.parse_args()
    start, rows, failed = time.perf_counter(), [], []
    with RankPool(WORLD) as pool:
        for name in (n for n in METHODS if any(part in n for part in args.methods.split(";"))):
            ranks = pool.run(WORLD, drill, name, args.steps, timeout_s=600)
            passed, row = judge(ranks, args.steps)
            rows.append([name, *row, "pass" if passed else "FAIL"])
            print(*rows[-1], sep=", ", flush=True)
            failed += [] if passed else [(name, ranks)]
    header = ["method", "buckets", "steps", "checks", "replicas equal", "flipped bit found at", "result"]
    show(header, rows)
    print(
        f"flipped: bit {BIT} of an element of {FLIPPED[0]} on rank {FLIPPED[1]} after step {args.steps}; "
        f"checked every {EVERY}"
    )
    for name, ranks in failed:
        print(f"{name}: {ranks}")
    print(f"{len(rows) - len(failed)} of {len(rows)} methods in {time.perf_counter() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
